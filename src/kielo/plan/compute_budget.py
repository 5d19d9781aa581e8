"""Scaling laws for a text and a compute budget: parameters, tokens, epochs, expected loss. Torch-free."""

import math
from dataclasses import dataclass

from kielo.plan.idea import parameters_asked
from kielo.plan.scaling_laws import (
    CHINCHILLA,
    FLOPS_PER_PARAMETER_AND_TOKEN,
    USEFUL_EPOCHS,
    Choice,
    best_repeated,
    of_size,
    repeated,
)
from kielo.recipe.amounts import short_amount
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import Recipe
from kielo.resolve.budget import has_budget
from kielo.resolve.complete_model import model_of_weights_here


@dataclass(frozen=True)
class Row:
    """One choice of size and tokens. law: by whose law its loss is; losses of two laws do not compare."""

    what: str
    law: str
    choice: Choice


@dataclass(frozen=True)
class Advice:
    """rows: from the law's own best to what the recipe asks for. complaints: what training would refuse."""

    rows: tuple[Row, ...]
    sentences: tuple[str, ...]
    complaints: tuple[str, ...]


def advise(flops: float, unique_tokens: int, max_epochs: float, recipe: Recipe | None = None) -> Advice:
    """Returns the advice for so many FLOPs and different tokens.

    max_epochs: how often training may read the text. recipe: one whose size, and tokens where it has a
    budget, are looked at too.
    """
    endless, best = CHINCHILLA.optimum(flops), best_repeated(flops, unique_tokens)
    rows = [Row("unlimited text", "Chinchilla", endless), Row("this text", "repetition", best)]
    for epochs in sorted({max_epochs, USEFUL_EPOCHS}):
        if best.epochs > epochs:
            rows.append(Row(f"{epochs:g} epochs", "repetition", _capped(flops, unique_tokens, epochs)))
    parameters = parameters_of(recipe) if recipe else None
    if parameters:
        rows.append(Row("this size", "repetition", of_size(flops, parameters, unique_tokens)))
    tokens = sum(phase.tokens for phase in full_phases(recipe)) if recipe and has_budget(recipe) else 0
    if parameters and tokens:
        rows.append(Row("the recipe", "repetition", repeated(parameters, tokens, unique_tokens)))
    complaints = []
    if tokens > max_epochs * unique_tokens:
        complaints.append(
            f"the recipe's {tokens:,} tokens read a text of {unique_tokens:,} tokens "
            f"{tokens / unique_tokens:.2f} times, more than dataset.max_epochs = {max_epochs:g}; what would "
            f"work: at most {int(max_epochs * unique_tokens):,} tokens, dataset.max_epochs = "
            f"{math.ceil(tokens / unique_tokens)}, or more text"
        )
    return Advice(tuple(rows), tuple(_sentences(rows, flops, unique_tokens, max_epochs)), tuple(complaints))


def parameters_of(recipe: Recipe) -> int | None:
    """Returns the parameters that the recipe asks for; None of weights that are not on this machine."""
    if recipe.model.weights is None:
        return parameters_asked(recipe)
    model = model_of_weights_here(recipe.model)
    return parameters_asked(recipe.model_copy(update={"model": model})) if model else None


def _capped(flops: float, unique_tokens: int, max_epochs: float) -> Choice:
    """Returns the best choice that reads the text `max_epochs` times at most, where the best reads more."""
    tokens = max_epochs * unique_tokens
    return repeated(flops / FLOPS_PER_PARAMETER_AND_TOKEN / tokens, tokens, unique_tokens)


def _sentences(rows: list[Row], flops: float, unique_tokens: int, max_epochs: float) -> list[str]:
    by_name = {row.what: row.choice for row in rows}
    best, said = by_name["this text"], []
    capped = by_name.get(f"{max_epochs:g} epochs")
    if capped is not None:
        said.append(
            f"The best length reads the text {best.epochs:.3g} times, and dataset.max_epochs = "
            f"{max_epochs:g} refuses that before the first step; what would work: "
            f"{short_amount(round(capped.parameters))} parameters and {short_amount(round(capped.tokens))} "
            f"tokens, for {capped.loss - best.loss:.3f} more loss, or dataset.max_epochs = "
            f"{min(math.ceil(best.epochs), max(USEFUL_EPOCHS, math.ceil(max_epochs)))}."
        )
    if best.epochs > USEFUL_EPOCHS:
        said.append(
            f"Beyond {USEFUL_EPOCHS} epochs a text teaches next to nothing. A tenth of this budget would "
            f"cost {best_repeated(flops / 10, unique_tokens).loss - best.loss:.3f} of loss, and ten times "
            f"the text would gain {best.loss - best_repeated(flops, 10 * unique_tokens).loss:.3f}."
        )
    mine = by_name.get("the recipe")
    if mine is not None:
        said.append(f"The recipe takes {mine.flops / flops:.0%} of this budget.")
    return said

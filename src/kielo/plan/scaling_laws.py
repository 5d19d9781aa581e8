"""Expected loss of a model trained from scratch: parameters, tokens, unique tokens → nats a token; no torch.

Two laws, both fitted to English web text. Chinchilla's, for text that is read once: L = E + A/N^α + B/D^β
(Hoffmann et al. 2022, arXiv:2203.15556), with the constants of Besiroglu et al. 2024 (arXiv:2404.10102). And
Muennighoff et al. 2023 (arXiv:2305.16264), in which repeated text, and parameters beyond what the unique text
can teach, count less and less; constants of the authors' code (huggingface/datablations).
"""

import math
from dataclasses import dataclass

from kielo.plan.idea import FLOPS_PER_PARAMETER_AND_TOKEN, parameters_asked
from kielo.recipe.amounts import short_amount
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import Recipe
from kielo.resolve.complete_model import is_shape_of_absent_weights, model_of_weights_here
from kielo.resolve.mixture_table import WORTH_OF_REPEATS
from kielo.resolve.text import has_budget

USEFUL_EPOCHS = 16  # after which repetition gains next to nothing (Muennighoff et al. 2023, section 6)
_WORTH_OF_EXCESS = 5.309743  # R_N*: like WORTH_OF_REPEATS, of parameters
_SMALLEST = 1e4  # parameters that an optimum may have
_GRID = 400  # sizes in the search for an optimum's bracket


@dataclass(frozen=True)
class Law:
    """Constants of L = floor + a/N^alpha + b/D^beta."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> "Choice":
        """Return the parameters and unique tokens with the least loss for a compute budget."""
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = self._ratio * product ** (self.beta / (self.alpha + self.beta))
        tokens = product / parameters
        return Choice(parameters, tokens, tokens, self.loss(parameters, tokens))

    def parameters_of(self, tokens: float) -> float:
        """Return the best number of parameters for this many unique tokens."""
        return (tokens * self._ratio) ** (self.beta / self.alpha) * self._ratio

    @property
    def _ratio(self) -> float:
        return (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))


CHINCHILLA = Law(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
REPETITION = Law(math.exp(0.6254804), math.exp(6.255414), 0.3526596, math.exp(7.3049974), 0.3526596)


@dataclass(frozen=True)
class Choice:
    """A size and a length of training, with the expected loss. unique_tokens: tokens without repeats."""

    parameters: float
    tokens: float
    unique_tokens: float
    loss: float

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique_tokens

    @property
    def flops(self) -> float:
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


def repeated(parameters: float, tokens: float, unique_tokens: float) -> Choice:
    """Return the choice with its expected loss, by equation 6 of Muennighoff et al. 2023."""
    unique = min(unique_tokens, tokens)
    fitting = min(parameters, REPETITION.parameters_of(unique))
    worth = _worth(fitting, parameters, _WORTH_OF_EXCESS)
    loss = REPETITION.loss(worth, _worth(unique, tokens, WORTH_OF_REPEATS))
    return Choice(parameters, tokens, unique, loss)


def of_size(flops: float, parameters: float, unique_tokens: float) -> Choice:
    """Return the training of a model of this size that takes the whole compute budget."""
    return repeated(parameters, flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters, unique_tokens)


def best_repeated(flops: float, unique_tokens: float) -> Choice:
    """Return the size with the least expected loss for a compute budget and a text."""

    def loss(log_parameters: float) -> float:
        return of_size(flops, math.exp(log_parameters), unique_tokens).loss

    low, high = math.log(_SMALLEST), math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
    # the best of a grid, refined by golden sections around it
    width, golden = (high - low) / _GRID, (math.sqrt(5) - 1) / 2
    best = min((low + width * place for place in range(_GRID + 1)), key=loss)
    low, high = best - width, best + width
    while high - low > 1e-9:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return of_size(flops, math.exp((low + high) / 2), unique_tokens)


def _worth(unique: float, whole: float, worth_of_repeats: float) -> float:
    """Return how many unique items are worth as much as `whole` items of which `unique` differ."""
    repeats = max(0.0, whole / unique - 1)
    return unique * (1 + worth_of_repeats * (1 - math.exp(-repeats / worth_of_repeats)))


@dataclass(frozen=True)
class Row:
    """One choice of size and tokens. law: the law of its loss. Losses of two laws do not compare."""

    what: str
    law: str
    choice: Choice


@dataclass(frozen=True)
class Advice:
    """Rows from the law's own best to the recipe, sentences, and complaints for which training refuses."""

    rows: tuple[Row, ...]
    sentences: tuple[str, ...]
    complaints: tuple[str, ...]


def advise(flops: float, unique_tokens: int, max_epochs: float, recipe: Recipe | None = None) -> Advice:
    """Return the advice for a budget of FLOPs and a text that training may read `max_epochs` times."""
    endless, best = CHINCHILLA.optimum(flops), best_repeated(flops, unique_tokens)
    rows = [Row("unlimited text", "Chinchilla", endless), Row("this text", "repetition", best)]
    for epochs in sorted({max_epochs, USEFUL_EPOCHS}):
        if best.epochs > epochs:
            size = flops / FLOPS_PER_PARAMETER_AND_TOKEN / (epochs * unique_tokens)
            capped = repeated(size, epochs * unique_tokens, unique_tokens)
            rows.append(Row(f"{epochs:g} epochs", "repetition", capped))
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
            f"{tokens / unique_tokens:.2f} times, more than dataset.max_epochs = {max_epochs:g}. "
            f"Fix: at most {int(max_epochs * unique_tokens):,} tokens, dataset.max_epochs = "
            f"{math.ceil(tokens / unique_tokens)}, or more text"
        )
    return Advice(tuple(rows), tuple(_sentences(rows, flops, unique_tokens, max_epochs)), tuple(complaints))


def parameters_of(recipe: Recipe) -> int | None:
    """Return the parameters that the recipe asks for, or None for weights that are not on this machine."""
    if recipe.model.weights is None or is_shape_of_absent_weights(recipe.model):
        return parameters_asked(recipe)
    model = model_of_weights_here(recipe.model)
    return parameters_asked(recipe.model_copy(update={"model": model})) if model else None


def _sentences(rows: list[Row], flops: float, unique_tokens: int, max_epochs: float) -> list[str]:
    by_name = {row.what: row.choice for row in rows}
    best, said = by_name["this text"], []
    capped = by_name.get(f"{max_epochs:g} epochs")
    if capped is not None:
        said.append(
            f"The best length reads the text {best.epochs:.3g} times, and dataset.max_epochs = "
            f"{max_epochs:g} refuses this before the first step. Fix: "
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

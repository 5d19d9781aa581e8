"""The token budget of a run: train.tokens, or where that is not set, what the text gives in max_epochs."""

import math
from fractions import Fraction

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.mixture import allowed_epochs, asked_weights, weights_by_tokens
from kielo.resolve.text import Text, ready_tokens

# Tokens of no tokenizer are shorter on average, but for text of single bytes; used before there is one.
_LEAST_BYTES_PER_TOKEN = 2


def has_budget(recipe: Recipe) -> bool:
    """Returns False where train.tokens follows from the text."""
    return recipe.train.tokens is not None or bool(recipe.phases)


def check_budget(recipe: Recipe) -> None:
    """Raises KieloError where a plan cannot know the tokens of the run."""
    if not has_budget(recipe):
        raise KieloError(
            "train.tokens is not set, so it follows from the text once that is packed; what would work for a "
            "plan: --set train.tokens=1000000000"
        )


def with_budget_of_ready_tokens(recipe: Recipe) -> Recipe:
    """Returns the recipe with train.tokens set where all its sources are ready tokens on this machine."""
    if has_budget(recipe) or recipe.corpus.of_raw_text.sources:
        return recipe
    tokens = ready_tokens(recipe)
    # Only the budget looks at these facts: a hash that is not empty says that the text is not imagined.
    return with_budget(recipe, Text(tokens, 0, "ready tokens", 0, 0))


def with_budget(recipe: Recipe, text: Text) -> Recipe:
    """Returns the recipe with train.tokens set: whole steps that read no source too often.

    "Too often" is over dataset.max_epochs times, or the source's own. Raises KieloError for
    imagined text, and for text that is too short for one step or for the batch ramp.
    """
    if has_budget(recipe):
        return recipe
    if not text.tokens_hash:
        check_budget(recipe)
    length = recipe.dataset.sequence_length
    sequences = {name: max(0, math.ceil(text.epoch_tokens(name, length) / length)) for name in text.tokens}
    mixture = asked_weights(recipe.dataset.mixture, recipe.dataset, text)
    mixture = mixture or weights_by_tokens(text.tokens, recipe.dataset.temperature)
    weights = {name: Fraction(weight) for name, weight in mixture.items() if sequences.get(name)}
    most = min(
        (
            Fraction(allowed_epochs(recipe, name)) * sequences[name] * length * sum(weights.values()) / weight
            for name, weight in weights.items()
        ),
        default=Fraction(),
    )
    step = recipe.train.tokens_per_step
    steps = math.floor(most / step)
    if weights and not steps:
        raise KieloError(
            f"the text has {sum(text.tokens.values()):,} tokens, and {recipe.dataset.max_epochs:g} times "
            f"that is less than one step of train.tokens_per_step = {step:,}; what would work: more text, or "
            f"train.tokens_per_step = {max(length, int(most) // length * length)} or less"
        )
    tokens, ramp = max(1, steps) * step, recipe.train.batch_ramp
    if ramp is not None and ramp.tokens >= tokens:
        raise KieloError(
            f"train.batch_ramp.tokens = {ramp.tokens} does not end before the {tokens:,} tokens do that the "
            "text gives; what would work: fewer tokens of the ramp, or more text"
        )
    train = recipe.train.model_copy(update={"tokens": tokens})
    return recipe.model_copy(update={"train": train})


def check_text_suffices(recipe: Recipe, text_bytes: int, what: str) -> None:
    """Raises KieloError where so many bytes of text cannot give train.tokens in dataset.max_epochs.

    An estimate, for text that has no tokens yet: a token has 2 bytes or more. `what` names the text.
    """
    asked = sum(phase.tokens for phase in recipe.phases) or recipe.train.tokens
    epochs = max([recipe.dataset.max_epochs, *recipe.dataset.source_max_epochs.values()])
    most = int(text_bytes / _LEAST_BYTES_PER_TOKEN * epochs)
    if asked is not None and asked > most:
        raise KieloError(
            f"train.tokens = {asked:,}, but {what} has {text_bytes:,} bytes, which are at most "
            f"{text_bytes // _LEAST_BYTES_PER_TOKEN:,} tokens, and dataset.max_epochs = "
            f"{epochs:g}; what would work: leave train.tokens out, so that it follows "
            "from the text, or give more text"
        )

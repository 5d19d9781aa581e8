"""Resolves the mixture of a phase: which source has which weight, and how often each source is read.

`dataset/mixture.py` shares the samples out by these weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import Recipe
from kielo.resolve.phases import epochs
from kielo.resolve.resolved import Phase


def num_sequences(tokens: int, sequence_length: int) -> int:
    """Returns the sequences in a stream: each predicts sequence_length tokens, the last may be padded."""
    return max(0, math.ceil((tokens - 1) / sequence_length))


def mixture_of(
    phase: FullPhase, tokens: Mapping[str, int], folder: Path, complaints: list[str]
) -> dict[str, float]:
    """Returns source → weight, by tokens if the recipe says nothing; sources without text are left out."""
    filled = [name for name, number in tokens.items() if num_sequences(number, phase.sequence_length)]
    if not filled:
        complaints.append(f"{folder}: no source has any text left to train on")
    if not phase.mixture:
        return {name: float(tokens[name]) for name in filled}
    for name in phase.mixture:
        if name not in filled:
            key = phase.key("mixture")
            complaints.append(f"{key}.{name}: {folder} has no such text; the sources are {', '.join(filled)}")
    return {name: weight for name, weight in phase.mixture.items() if name in filled}


def repeated_too_often(
    recipe: Recipe, asked: Sequence[FullPhase], phases: Sequence[Phase], num_tokens: Mapping[str, int]
) -> Iterator[str]:
    """Yields sources read more often than dataset.max_epochs (Muennighoff et al. 2023, arXiv:2305.16264)."""
    allowed, tokens = recipe.dataset.max_epochs, sum(phase.tokens for phase in asked)
    for name, (read, grace) in epochs(phases, num_tokens).items():
        if read <= Fraction(allowed) + grace:
            continue
        what, fewer = f"the phases' tokens = {tokens}", f"fewer tokens in a phase with {name} in its mixture"
        if len(asked) == 1:
            key, size = asked[0].key("tokens"), asked[0].tokens_per_step
            what, fewer = (
                f"{key} = {tokens}",
                f"{key} of at most {int(tokens * allowed / read) // size * size}",
            )
        yield (
            f"{what} would read the source {name} {float(read):.2f} times, more than dataset.max_epochs = "
            f"{allowed:g}; what would work: {fewer}, max_epochs of {math.ceil(read)}, a smaller weight of "
            f"{name} in the mixture, or more text"
        )

"""Resolves the mixture of a phase: which source has which weight, and how often each source is read.

Weights come from the recipe, or from tokens and a temperature (Devlin et al. 2018, multilingual BERT; Conneau
et al. 2020, arXiv:1911.02116). `dataset/mixture.py` shares the samples out by these weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import Recipe
from kielo.resolve.phases import EpochTokens, epochs
from kielo.resolve.resolved import Phase


def num_sequences(tokens: int, sequence_length: int) -> int:
    """Returns the sequences in a stream: each predicts sequence_length tokens, the last may be padded."""
    return max(0, math.ceil((tokens - 1) / sequence_length))


def weights_by_tokens(tokens: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Returns source → tokens^(1/temperature).

    Rounded to nine digits, because the last digit of a power differs between mathematical libraries, and the
    weights are part of a run's identity.
    """
    if temperature == 1:
        return {name: float(number) for name, number in tokens.items()}
    return {name: float(f"{number ** (1 / temperature):.9g}") for name, number in tokens.items()}


def allowed_epochs(recipe: Recipe, source: str) -> float:
    """Returns how often the run may read `source`."""
    return recipe.dataset.source_max_epochs.get(source, recipe.dataset.max_epochs)


def mixture_of(
    phase: FullPhase, tokens: Mapping[str, int], temperature: float, folder: Path, complaints: list[str]
) -> dict[str, float]:
    """Returns source → weight, by tokens if the recipe says nothing; sources without text are left out."""
    filled = [name for name, number in tokens.items() if num_sequences(number, phase.sequence_length)]
    if not filled:
        complaints.append(f"{folder}: no source has any text left to train on")
    if not phase.mixture:
        return weights_by_tokens({name: tokens[name] for name in filled}, temperature)
    for name in phase.mixture:
        if name not in filled:
            key = phase.key("mixture")
            complaints.append(f"{key}.{name}: {folder} has no such text; the sources are {', '.join(filled)}")
    return {name: weight for name, weight in phase.mixture.items() if name in filled}


def repeated_too_often(
    recipe: Recipe, asked: Sequence[FullPhase], phases: Sequence[Phase], epoch_tokens: EpochTokens
) -> Iterator[str]:
    """Yields sources read more often than the recipe allows (Muennighoff et al. 2023, arXiv:2305.16264)."""
    tokens = sum(phase.tokens for phase in asked)
    for name, (read, grace) in epochs(phases, epoch_tokens).items():
        allowed = allowed_epochs(recipe, name)
        if read <= Fraction(allowed) + grace:
            continue
        limit = "dataset.max_epochs"
        if name in recipe.dataset.source_max_epochs:
            limit = f"dataset.source_max_epochs.{name}"
        what, fewer = f"the phases' tokens = {tokens}", f"fewer tokens in a phase with {name} in its mixture"
        weight = f"a smaller weight of {name} in the mixture"
        if len(asked) == 1:
            key, size = asked[0].key("tokens"), asked[0].tokens_per_step
            what, fewer = (
                f"{key} = {tokens}",
                f"{key} of at most {int(tokens * allowed / read) // size * size}",
            )
            weight = _smaller_weight(phases[0].mixture, name, allowed / float(read)) or weight
        yield (
            f"{what} would read the source {name} {float(read):.2f} times, more than {limit} = "
            f"{allowed:g}; what would work: {fewer}, {limit.partition('.')[2]} of {math.ceil(read)}, "
            f"{weight}, or more text"
        )


def _smaller_weight(mixture: Mapping[str, float], name: str, factor: float) -> str:
    """Returns the weight of `name` that makes its share `factor` times as large; "" for a source alone."""
    others = sum(weight for source, weight in mixture.items() if source != name)
    if not others:
        return ""
    share = factor * mixture[name] / (others + mixture[name])
    weight = others * share / (1 - share)
    digits = 3 - math.floor(math.log10(weight))  # four digits, rounded down
    return f"mixture.{name} of at most {math.floor(weight * 10**digits) / 10**digits:.6g}"

"""The phases of a recipe, completed from [train] and [dataset]: `Recipe` → `FullPhase`s."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kielo.recipe.sections import MixtureOrder, Packing, Phase, Recipe

# of the keys that a phase shares; all others: train
_SECTION = {"sequence_length": "dataset", "mixture": "dataset"}


@dataclass(frozen=True)
class LearningRate:
    """One segment of the learning rate as the recipe has it; the shares are of its own tokens."""

    peak: float
    final_ratio: float
    schedule: str
    warmup_share: float
    decay_share: float


@dataclass(frozen=True)
class FullPhase:
    """One phase, complete. `number` counts from 1.

    `micro_batch_sequences`: None where Kielo chooses. `learning_rate`: the segment that begins with the
    phase; None where the one before goes on. `trainable`: none for all modules.
    """

    number: int
    tokens: int
    tokens_per_step: int
    sequence_length: int
    mixture: Mapping[str, float]
    mixture_order: MixtureOrder
    packing: Packing
    micro_batch_sequences: int | None
    trainable: tuple[str, ...]
    learning_rate: LearningRate | None
    given: frozenset[str]

    def key(self, name: str) -> str:
        """Returns the key that has the value: "phases.2.sequence_length", or "dataset.…" if left out."""
        return (
            f"phases.{self.number}.{name}" if name in self.given else f"{_SECTION.get(name, 'train')}.{name}"
        )


def full_phases(recipe: Recipe) -> tuple[FullPhase, ...]:
    """Returns all phases in order; the whole run is one where the recipe lists none."""
    train, dataset = recipe.train, recipe.dataset
    if not recipe.phases:
        rate = LearningRate(
            train.learning_rate,
            train.final_learning_rate_ratio,
            train.schedule,
            train.warmup_share,
            train.decay_share,
        )
        # Tokens that follow from the text count as one step until `resolve` knows the text.
        tokens = train.tokens or train.tokens_per_step
        return (FullPhase(
            1, tokens, train.tokens_per_step, dataset.sequence_length, dataset.mixture,
            dataset.mixture_order, dataset.packing, train.micro_batch_sequences, train.trainable, rate,
            frozenset(),
        ),)  # fmt: skip
    return tuple(_full(recipe, number, phase) for number, phase in enumerate(recipe.phases, start=1))


def longest_sequence_length(recipe: Recipe) -> int:
    """Returns the longest length: text is shuffled in blocks of it, and the model has positions for it."""
    return max(phase.sequence_length for phase in full_phases(recipe))


def _full(recipe: Recipe, number: int, phase: Phase) -> FullPhase:
    train, dataset = recipe.train, recipe.dataset
    rate = None
    if number == 1 or phase.learning_rate is not None:
        rate = LearningRate(
            _or(phase.learning_rate, train.learning_rate),
            _or(phase.final_learning_rate_ratio, train.final_learning_rate_ratio),
            _or(phase.schedule, train.schedule),
            _or(phase.warmup_share, train.warmup_share),
            _or(phase.decay_share, train.decay_share),
        )
    return FullPhase(
        number,
        phase.tokens,
        _or(phase.tokens_per_step, train.tokens_per_step),
        _or(phase.sequence_length, dataset.sequence_length),
        _or(phase.mixture, dataset.mixture),
        dataset.mixture_order,
        dataset.packing,
        _or(phase.micro_batch_sequences, train.micro_batch_sequences),
        _or(phase.trainable, train.trainable),
        rate,
        frozenset(name for name in Phase.model_fields if getattr(phase, name) is not None),
    )


def _or(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given

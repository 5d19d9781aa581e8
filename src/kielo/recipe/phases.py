"""The phases of a recipe, completed from [train] and [dataset]: `Recipe` → `FullPhase`s."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kielo.recipe.sections import BatchRamp, Packing, Phase, Recipe

# Keys of a segment of the learning rate. A phase reads them only if it begins one.
OF_A_SEGMENT = ("final_learning_rate_ratio", "schedule", "warmup_share", "decay_share")
# Sections of the keys that phases share; all others: train.
_SECTION = {"sequence_length": "dataset", "mixture": "dataset"}


@dataclass(frozen=True)
class LearningRate:
    """A segment of the learning rate as the recipe has it. The shares are of its own tokens."""

    peak: float
    final_ratio: float
    schedule: str
    warmup_share: float
    decay_share: float


@dataclass(frozen=True)
class FullPhase:
    """A complete phase. `number` counts from 1.

    `micro_batch_sequences` is None if Kielo chooses. `learning_rate`: the segment that begins with the phase,
    None if the segment before continues. `max_gradient_norm` is None for [train]'s, `trainable` () for all
    modules.
    """

    number: int
    tokens: int
    tokens_per_step: int
    sequence_length: int
    mixture: Mapping[str, float]
    packing: Packing
    micro_batch_sequences: int | None
    trainable: tuple[str, ...]
    learning_rate: LearningRate | None
    given: frozenset[str]
    max_gradient_norm: float | None = None

    def key(self, name: str) -> str:
        """Return the key that has the value: "phases.2.sequence_length", or "dataset.…" if left out."""
        return f"phases.{self.number}.{name}" if name in self.given else key_of_all_phases(name)


def key_of_all_phases(name: str) -> str:
    """Return the key whose value a phase has if it leaves `name` out."""
    return f"{_SECTION.get(name, 'train')}.{name}"


def full_phases(recipe: Recipe) -> tuple[FullPhase, ...]:
    """Return all phases in order. A recipe without phases is one phase."""
    if recipe.phases:
        return tuple(_full(recipe, number, phase) for number, phase in enumerate(recipe.phases, start=1))
    # Tokens that follow from the text count as one step until `resolve` knows the text.
    tokens = recipe.train.tokens or recipe.train.tokens_per_step
    return (_full(recipe, 1, Phase(tokens=tokens), given=frozenset()),)


def longest_sequence_length(recipe: Recipe) -> int:
    """Return the longest length: the block in which text is shuffled, and the model's number of positions."""
    return max(phase.sequence_length for phase in full_phases(recipe))


def ramp_steps(ramp: BatchRamp, tokens_per_step: int) -> list[tuple[int, int]]:
    """Return (tokens per step, number of such steps) of a batch ramp, in order, below `tokens_per_step`.

    Megatron-LM's rule (`RampupBatchsizeNumMicroBatchesCalculator`): ramp.tokens are shared evenly among the
    sizes below the full size, and a step has the size in whose share the tokens before it end. A size whose
    share the steps before it pass has no steps.
    """
    sizes = range(ramp.first_tokens_per_step, tokens_per_step, ramp.step_tokens)
    levels, done = [], 0
    for number, size in enumerate(sizes, start=1):
        # The smallest n such that done + n * size reaches the share's end, ramp.tokens * number / len(sizes).
        steps = -((done * len(sizes) - ramp.tokens * number) // (len(sizes) * size))
        if steps > 0:
            levels.append((size, steps))
            done += steps * size
    return levels


def steps_of_phase(phase: FullPhase, ramp: BatchRamp | None) -> list[tuple[int, int]]:
    """Return (tokens per step, number of such steps) of a phase, in order, the ramp's first.

    They have at most the phase's tokens: a ramp's last step can pass the ramp's end, but not the phase's. A
    phase of fewer tokens than a step, which recipes cannot have, has one step.
    """
    found, left = [], phase.tokens
    levels = ramp_steps(ramp, phase.tokens_per_step) if ramp else []
    for size, most in [*levels, (phase.tokens_per_step, left)]:
        if steps := min(most, left // size):
            found.append((size, steps))
            left -= size * steps
    return found or [(phase.tokens_per_step, 1)]


def steps_of_run(recipe: Recipe) -> int | None:
    """Return the number of steps, or None if it follows from the text."""
    if recipe.train.tokens is None and not recipe.phases:
        return None
    ramp = recipe.train.batch_ramp
    return sum(
        steps
        for phase in full_phases(recipe)
        for _, steps in steps_of_phase(phase, ramp if phase.number == 1 else None)
    )


def skip_complaints(skip_steps: Sequence[tuple[int, int]], total_steps: int) -> Iterator[str]:
    """Yield the reasons why a run of `total_steps` cannot skip these steps."""
    first_left = 1
    for first, last in sorted(skip_steps):
        if first <= first_left:
            first_left = max(first_left, last + 1)
    if first_left > total_steps:
        yield (
            f"train.skip_steps: skips all {total_steps} steps of the run, so nothing is trained. Fix: ranges "
            "that leave a step"
        )
        return
    for first, last in skip_steps:
        if last > total_steps:
            yield (
                f"train.skip_steps: [{first}, {last}] goes beyond the run's last step. Fix: "
                f"steps up to {total_steps}"
            )


def _full(recipe: Recipe, number: int, phase: Phase, given: frozenset[str] | None = None) -> FullPhase:
    train, dataset = recipe.train, recipe.dataset
    if given is None:
        given = frozenset(name for name in Phase.model_fields if getattr(phase, name) is not None)
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
        dataset.packing,
        _or(phase.micro_batch_sequences, train.micro_batch_sequences),
        _or(phase.trainable, train.trainable),
        rate,
        given,
        None if phase.max_gradient_norm == train.max_gradient_norm else phase.max_gradient_norm,
    )


def _or(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given

"""Phases in numbers: steps, samples, text drawn before each, and the segments of the learning rate.

In: the phases of a recipe, and the tokens that each source has to predict. Out: `PlannedPhase`s and
`LearningRateSegment`s, and how often each source is read. `resolve` complains of impossible numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod

from kielo.dataset.order import Order, OrderSource
from kielo.dataset.order import Phase as OrderPhase
from kielo.models.parameter_shapes import parameter_shapes, token_flops
from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.recipe.phases import FullPhase, steps_of_phase
from kielo.recipe.sections import BatchRamp, CompleteModel
from kielo.resolve.fp8_matrices import is_kept, layer_matrices
from kielo.resolve.resolved import LearningRateSegment, PlannedPhase

_VOCABULARY = {"embed.weight", "head.weight"}


def trains(model: CompleteModel, patterns: Sequence[str], name: str) -> bool:
    """Return True if the parameter is trained. `patterns` are `train.trainable`'s, none for all.

    Frozen parameters have no gradients and no moments. A tied head is the embedding, and either name means
    both.
    """
    if not patterns:
        return True
    names = _VOCABULARY if model.tie_word_embeddings and name in _VOCABULARY else {name}
    return any(is_kept(module_name.rpartition(".")[0], patterns) for module_name in names)


def frozen_share(model: CompleteModel, patterns: Sequence[str]) -> float:
    """Return the share of the layers' matrices that are frozen, by elements, for a complete `model`."""
    if not patterns:
        return 0.0
    shapes = parameter_shapes(model)
    sizes = {name: prod(shapes[name]) for name in (f"{matrix}.weight" for matrix in layer_matrices(model))}
    frozen = sum(size for name, size in sizes.items() if not trains(model, patterns, name))
    return frozen / sum(sizes.values())


def flops_per_token(model: CompleteModel, sequence_length: int, patterns: Sequence[str]) -> int:
    """Return the model FLOPs of a token of a phase, without the gradients of frozen weights.

    The products for the gradients of inputs count, even if nothing before them is trained. Two FLOPs for each
    frozen parameter that multiplies a token are left out.
    """
    looked_up = {"position_table.weight"} | ({"embed.weight"} if not model.tie_word_embeddings else set())
    frozen = sum(
        prod(shape)
        for name, shape in parameter_shapes(model).items()
        if name not in looked_up and not trains(model, patterns, name)
    )
    return token_flops(model, sequence_length) - 2 * frozen


# (source, sequence length) → the tokens that an epoch of it has to predict (`Text.epoch_tokens`).
EpochTokens = Callable[[str, int], int]


def plan_phases(
    asked: Sequence[FullPhase],
    mixtures: Sequence[Mapping[str, float]],
    ramp: BatchRamp | None,
    seed: int,
    epoch_tokens: EpochTokens,
) -> tuple[PlannedPhase, ...]:
    """Compute the phases. `mixtures` has the mixture of each phase of `asked`.

    Tokens of a phase that do not fill a step are not trained. Mixtures can be empty if the recipe will be
    refused. Offsets are then left out. Best-fit packed documents are packed again if the length changes: a
    source with a new length continues with its next epoch.
    """
    phases: list[PlannedPhase] = []
    step, sample = 1, 0
    offsets: dict[str, int] = {}
    read: dict[str, tuple[int, int]] = {}  # source → (length at which it was last read, tokens drawn by then)
    longest = max(phase.sequence_length for phase in asked)
    for phase, mixture in zip(asked, mixtures, strict=True):
        order_first_sample = sample
        for tokens_per_step, steps in steps_of_phase(phase, ramp if phase.number == 1 else None):
            sequences = max(1, tokens_per_step // phase.sequence_length)
            phases.append(
                PlannedPhase(
                    number=phase.number,
                    first_step=step,
                    steps=steps,
                    first_sample=sample,
                    sequence_length=phase.sequence_length,
                    sequences_per_step=sequences,
                    tokens_per_step=sequences * phase.sequence_length,
                    mixture=dict(mixture),
                    packing=phase.packing,
                    order_first_sample=order_first_sample,
                    offsets=offsets,
                    max_gradient_norm=phase.max_gradient_norm,
                    trainable=phase.trainable,
                )
            )
            step, sample = step + steps, sample + steps * sequences
        if phase is not asked[-1] and mixture:
            length, is_packed = phase.sequence_length, phase.packing != "one_stream"
            names = sorted(mixture)
            sources = [OrderSource(name, epoch_tokens(name, length), mixture[name]) for name in names]
            block = length if is_packed else longest
            order = OrderPhase(phase.number, order_first_sample, length, block, offsets)
            drawn = Order(seed, order, sources).offsets_at(sample)
            read |= {name: (length, drawn[name]) for name in drawn if drawn[name] != offsets.get(name)}
            next_length = asked[phase.number].sequence_length
            offsets = {
                name: _at_length(next_length, name, *of, epoch_tokens) if is_packed else of[1]
                for name, of in read.items()
            }
    return tuple(phases)


def _at_length(next_length: int, name: str, length: int, drawn: int, epoch_tokens: EpochTokens) -> int:
    """Return the offset of a source, read up to `drawn` tokens at `length`, in sequences of `next_length`.

    At another length it is the end of the epoch.
    """
    if next_length == length:
        return drawn
    return -(-drawn // epoch_tokens(name, length)) * epoch_tokens(name, next_length)


def plan_learning_rates(
    asked: Sequence[FullPhase], phases: Sequence[PlannedPhase]
) -> tuple[LearningRateSegment, ...]:
    """Compute the segments. Warm-up and decay are multiples of a number that divides all their steps."""
    begins = [(phase.number, phase.learning_rate) for phase in asked if phase.learning_rate is not None]
    ends = [number for number, _ in begins[1:]] + [len(asked) + 1]
    segments, first_token = [], 0
    for (begin, rate), end in zip(begins, ends, strict=True):
        inside = [phase for phase in phases if begin <= phase.number < end]
        tokens = sum(phase.steps * phase.tokens_per_step for phase in inside)
        unit = math.gcd(*(phase.tokens_per_step for phase in inside))
        warmup = round(rate.warmup_share * (tokens // unit)) * unit
        decay = LEARNING_RATE_SCHEDULES[rate.schedule].decay_tokens(rate.decay_share, tokens, warmup, unit)
        segments.append(
            LearningRateSegment(
                first_token=first_token,
                tokens=tokens,
                peak=rate.peak,
                final=rate.peak * rate.final_ratio,
                schedule=rate.schedule,
                warmup_tokens=warmup,
                decay_tokens=decay,
            )
        )
        first_token += tokens
    return tuple(segments)


def epochs(phases: Sequence[PlannedPhase], epoch_tokens: EpochTokens) -> dict[str, tuple[Fraction, Fraction]]:
    """Return source → (how often all phases read it, the part that whole-number quotas can cause)."""
    found: dict[str, tuple[Fraction, Fraction]] = {}
    numbers_seen: set[int] = set()
    for phase in phases:
        weights = {name: Fraction(weight) for name, weight in phase.mixture.items()}
        for name, weight in weights.items():
            available = -(-epoch_tokens(name, phase.sequence_length) // phase.sequence_length)
            read, grace = found.get(name, (Fraction(), Fraction()))
            read += phase.steps * phase.sequences_per_step * weight / sum(weights.values()) / available
            found[name] = read, grace + (Fraction(1, available) if phase.number not in numbers_seen else 0)
        numbers_seen.add(phase.number)
    return found


def merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return [first, last] ranges in order, joined if they overlap or touch."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def first_difference(
    ranges: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]], last_step: int
) -> int | None:
    """Return the first step, up to `last_step`, that is in only one of two lists of ranges, or None."""
    # The lists differ from a step on at which only one of them has a border.
    borders = [{border for first, last in some for border in (first, last + 1)} for some in (ranges, others)]
    different = [step for step in borders[0] ^ borders[1] if step <= last_step]
    return min(different, default=None)

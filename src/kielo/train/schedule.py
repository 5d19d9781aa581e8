"""Learning rate as a pure function of the tokens of a run.

In: the stretches of a run (peak, final rate, warm-up, decay, in tokens). Out: a function from the tokens at
the end of a step to the learning rate of that step. It keeps no state, so there is nothing to save or to
restore.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kielo.recipe.errors import KieloError
from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES


class Stretch(Protocol):
    """One stretch of learning rates; `resolve.resolved.RateStretch` has all of it."""

    first_token: int
    tokens: int
    peak: float
    final: float
    schedule: str
    warmup_tokens: int
    decay_tokens: int


class Steps(Protocol):
    tokens_per_step: int


class ScheduleSettings(Protocol):
    """What a schedule reads; `resolve.resolved.Identity` has all of it."""

    learning_rates: Sequence[Stretch]
    phases: Sequence[Steps]


def learning_rate(settings: ScheduleSettings) -> Callable[[int], float]:
    """The rate of each step, by the tokens at its end: smaller steps change nothing. Beyond the last stretch
    its final one.

    Warm-up climbs linearly and arrives at the peak after `warmup_tokens`: in the first stretch from zero,
    which no step has, and in a later one from where the stretch before ended (Ibrahim et al. 2024,
    arXiv:2403.08763). After it the rate goes down as `LEARNING_RATE_SCHEDULES` says.
    """
    stretches = settings.learning_rates
    tokens_per_step = {phase.tokens_per_step for phase in settings.phases}
    rates: list[Callable[[int], float]] = []
    start = 0.0
    for stretch in stretches:
        rates.append(_rate(stretch, start, tokens_per_step))
        start = rates[-1](stretch.first_token + stretch.tokens)

    def rate(tokens: int) -> float:
        # a step is of the stretch that it ends in
        number = sum(tokens > stretch.first_token for stretch in stretches)
        return rates[max(0, number - 1)](tokens)

    return rate


def _rate(stretch: Stretch, start: float, tokens_per_step: Iterable[int]) -> Callable[[int], float]:
    if stretch.schedule not in LEARNING_RATE_SCHEDULES:
        known = ", ".join(LEARNING_RATE_SCHEDULES)
        raise KieloError(f"train.schedule = {stretch.schedule!r} is not known; choose one of {known}")
    height = LEARNING_RATE_SCHEDULES[stretch.schedule].height
    peak, final = stretch.peak, stretch.final
    # In the largest unit that all of it is made of: where steps have one size, rates are those of counting
    # steps.
    unit = math.gcd(stretch.tokens, stretch.warmup_tokens, stretch.decay_tokens, *tokens_per_step)
    warmup, total, decay = (n // unit for n in (stretch.warmup_tokens, stretch.tokens, stretch.decay_tokens))

    def rate(tokens: int) -> float:
        done = min((tokens - stretch.first_token) // unit, total)
        if done < warmup:
            return start + (peak - start) * done / warmup
        return final + (peak - final) * height(done - warmup, max(total - warmup, 1), decay)

    return rate

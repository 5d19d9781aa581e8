"""Learning rate as a pure function of the tokens of a run.

In: the stretches of a run (peak, final rate, warm-up, decay, in tokens). Out: a function from the tokens at the end of
a step to the learning rate of that step. It keeps no state, so there is nothing to save or to restore.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kielo.recipe.errors import KieloError


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
    """The rate of each step, by the tokens at its end: smaller steps change nothing. Beyond the last stretch its final one.

    Warm-up climbs linearly and arrives at the peak after `warmup_tokens`: in the first stretch from zero, which no step
    has, and in a later one from where the stretch before ended (Ibrahim et al. 2024, arXiv:2403.08763). After it:

    - cosine: half a cosine from the peak to the final rate at the end (Loshchilov and Hutter 2017).
    - linear: a straight line from the peak to the final rate at the end.
    - wsd: the peak, then a straight line to the final rate over the last `decay_tokens` (warm-up, stable, decay; Hu et
      al. 2024). Warm-up has precedence where the two would overlap.
    """
    stretches = settings.learning_rates
    tokens_per_step = {phase.tokens_per_step for phase in settings.phases}
    rates: list[Callable[[int], float]] = []
    start = 0.0
    for stretch in stretches:
        rates.append(_rate(stretch, start, tokens_per_step))
        start = rates[-1](stretch.first_token + stretch.tokens)

    def rate(tokens: int) -> float:
        number = sum(tokens > stretch.first_token for stretch in stretches)  # a step is of the stretch that it ends in
        return rates[max(0, number - 1)](tokens)

    return rate


def _rate(stretch: Stretch, start: float, tokens_per_step: Iterable[int]) -> Callable[[int], float]:
    decays = {"cosine": _cosine, "linear": _linear, "wsd": _stable_then_linear}
    if stretch.schedule not in decays:
        raise KieloError(f"train.schedule = {stretch.schedule!r} is not known; choose one of {', '.join(decays)}")
    share_of_way = decays[stretch.schedule]
    peak, final = stretch.peak, stretch.final
    # In the largest unit that all of it is made of: where steps have one size, rates are those of counting steps.
    unit = math.gcd(stretch.tokens, stretch.warmup_tokens, stretch.decay_tokens, *tokens_per_step)
    warmup, total, decay = (n // unit for n in (stretch.warmup_tokens, stretch.tokens, stretch.decay_tokens))

    def rate(tokens: int) -> float:
        done = min((tokens - stretch.first_token) // unit, total)
        if done < warmup:
            return start + (peak - start) * done / warmup
        kept = share_of_way(done - warmup, max(total - warmup, 1), decay)
        return final + (peak - final) * kept

    return rate


def _cosine(after_warmup: int, rest: int, decay: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * after_warmup / rest))


def _linear(after_warmup: int, rest: int, decay: int) -> float:
    return 1.0 - after_warmup / rest


def _stable_then_linear(after_warmup: int, rest: int, decay: int) -> float:
    decay = min(decay, rest)
    if decay == 0:
        return 1.0
    return min(1.0, (rest - after_warmup) / decay)

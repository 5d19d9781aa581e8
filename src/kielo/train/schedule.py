"""The learning rate as a pure function of the tokens of a run, so there is no state to save or restore."""

import math
from collections.abc import Callable, Iterable

from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.resolve.resolved import Identity, LearningRateSegment


def learning_rate(identity: Identity) -> Callable[[int], float]:
    """Return the rate as a function of the tokens at a step's end, whatever the size of steps.

    Warm-up climbs linearly and arrives at the peak after `warmup_tokens`, in the first segment from zero,
    which no step has, and later from the end of the segment before (Ibrahim et al. 2024, arXiv:2403.08763).
    Then the rate falls as `LEARNING_RATE_SCHEDULES` says.
    """
    segments = identity.learning_rates
    tokens_per_step = {phase.tokens_per_step for phase in identity.phases}
    rates: list[Callable[[int], float]] = []
    start = 0.0
    for segment in segments:
        rates.append(_rate(segment, start, tokens_per_step))
        start = rates[-1](segment.first_token + segment.tokens)

    def rate(tokens: int) -> float:
        # a step belongs to the segment of its end
        number = sum(tokens > segment.first_token for segment in segments)
        return rates[max(0, number - 1)](tokens)

    return rate


def _rate(
    segment: LearningRateSegment, start: float, tokens_per_step: Iterable[int]
) -> Callable[[int], float]:
    height = LEARNING_RATE_SCHEDULES[segment.schedule].height
    peak, final = segment.peak, segment.final
    # In the largest common unit, so that rates equal rates counted in steps if all steps have one size.
    unit = math.gcd(segment.tokens, segment.warmup_tokens, segment.decay_tokens, *tokens_per_step)
    warmup, total, decay = (n // unit for n in (segment.warmup_tokens, segment.tokens, segment.decay_tokens))

    def rate(tokens: int) -> float:
        done = min((tokens - segment.first_token) // unit, total)
        if done < warmup:
            return start + (peak - start) * done / warmup
        return final + (peak - final) * height(done - warmup, max(total - warmup, 1), decay)

    return rate

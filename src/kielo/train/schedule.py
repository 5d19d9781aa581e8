"""Learning rate as a pure function of the step number.

In: the identity of a run (peak, final rate, warm-up, decay, total steps). Out: a function from step (1-based) to
the learning rate of that step. It keeps no state, so there is nothing to save or to restore.
"""

import math
from collections.abc import Callable
from typing import Protocol

from kielo.recipe.errors import KieloError


class ScheduleSettings(Protocol):
    """What a schedule reads; `plan.resolved.Identity` has all of it."""

    schedule: str
    learning_rate: float
    final_learning_rate: float
    total_steps: int
    warmup_steps: int
    decay_steps: int


def learning_rate(settings: ScheduleSettings) -> Callable[[int], float]:
    """The rate of each step, 1 .. total_steps; later steps keep the final rate.

    Warm-up climbs linearly and arrives at the peak at step `warmup_steps`; the first step is never at zero, so no
    step is lost. After it:

    - cosine: half a cosine from the peak to the final rate at the last step (Loshchilov and Hutter 2017).
    - linear: a straight line from the peak to the final rate at the last step.
    - wsd: the peak, then a straight line to the final rate over the last `decay_steps` (warm-up, stable, decay; Hu et
      al. 2024). Warm-up has precedence where the two would overlap.
    """
    decays = {"cosine": _cosine, "linear": _linear, "wsd": _stable_then_linear}
    if settings.schedule not in decays:
        raise KieloError(f"train.schedule = {settings.schedule!r} is not known; choose one of {', '.join(decays)}")
    share_of_way = decays[settings.schedule]
    peak, final = settings.learning_rate, settings.final_learning_rate
    warmup, total = settings.warmup_steps, settings.total_steps

    def rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        kept = share_of_way(min(step, total) - warmup, max(total - warmup, 1), settings.decay_steps)
        return final + (peak - final) * kept

    return rate


def _cosine(steps_after_warmup: int, steps: int, decay_steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * steps_after_warmup / steps))


def _linear(steps_after_warmup: int, steps: int, decay_steps: int) -> float:
    return 1.0 - steps_after_warmup / steps


def _stable_then_linear(steps_after_warmup: int, steps: int, decay_steps: int) -> float:
    decay = min(decay_steps, steps)
    if decay == 0:
        return 1.0
    return min(1.0, (steps - steps_after_warmup) / decay)

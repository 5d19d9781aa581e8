"""The schedules of the learning rate in one table: shape after the warm-up, and use of `decay_share`."""

import math
from collections.abc import Callable
from typing import NamedTuple


class LearningRateSchedule(NamedTuple):
    """A schedule.

    height: (tokens since the warm-up, tokens from there to the end, tokens of the decay), in any unit → (rate
    - final rate) / (peak - final rate), from 1 to 0. has_decay_share: True if the decay takes only
    `decay_share` of the tokens, at the end. Otherwise the decay begins after the warm-up.
    """

    height: Callable[[int, int, int], float]
    has_decay_share: bool

    def decay_tokens(self, decay_share: float, tokens: int, warmup_tokens: int, unit: int) -> int:
        """Return the tokens of the decay in a segment, all multiples of `unit`. Warm-up has precedence."""
        decay = round(decay_share * (tokens // unit)) * unit if self.has_decay_share else tokens
        return min(decay, tokens - warmup_tokens)


def _stable_then_linear(after_warmup: int, rest: int, decay: int) -> float:
    decay = min(decay, rest)
    if decay == 0:
        return 1.0
    return min(1.0, (rest - after_warmup) / decay)


LEARNING_RATE_SCHEDULES = {
    # Half a cosine from the peak to the final rate at the end (Loshchilov and Hutter 2017).
    "cosine": LearningRateSchedule(
        lambda after, rest, _: 0.5 * (1.0 + math.cos(math.pi * after / rest)), has_decay_share=False
    ),
    # A straight line from the peak to the final rate at the end.
    "linear": LearningRateSchedule(lambda after, rest, _: 1.0 - after / rest, has_decay_share=False),
    # Warm-up, stable, decay (Hu et al. 2024): the peak, then a straight line to the final rate in the decay.
    "wsd": LearningRateSchedule(_stable_then_linear, has_decay_share=True),
}

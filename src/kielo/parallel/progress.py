"""The progress of this rank: its step, what it does, and how long that may take without a sign of progress.

The thread that trains notes it, the thread of `heartbeat.py` reads it. A step may take as long as
`stuck_seconds` says. Heartbeats come from another thread than the steps, so the limit of silence does not
depend on them. Work that is long on purpose (building and compiling, held-out text, saves) has limits of its
own.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

STEPS = "steps"
_TIMES_P99 = 3.0
_REMEMBERED_STEPS = 512


class Progress:
    """The progress of one rank.

    floor_seconds: the shortest limit of a step, and that of silence in it. first_seconds: the limit of long
    work that has not been done before. later_seconds: the shortest limit of long work that has, and of
    silence during it. has_changed: is set when the limits may have changed, so that the others are told at
    once.
    """

    def __init__(self, floor_seconds: float, first_seconds: float, later_seconds: float):
        self._floor, self._first, self._later = floor_seconds, first_seconds, later_seconds
        self.has_changed = threading.Event()
        self.step = 0
        self.doing = "the start"
        self._since = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest: dict[str, float] = {}

    def begin(self, doing: str) -> None:
        """Notes that long work begins, or (`STEPS`) that ordinary steps do."""
        self.doing, self._since = doing, time.monotonic()
        self.has_changed.set()

    def step_done(self, step: int) -> None:
        """Notes that `step` is done."""
        now = time.monotonic()
        if self.doing == STEPS:
            self._step_seconds.append(now - self._since)
        self.step, self._since = step, now

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Notes long work between steps."""
        before = self.doing
        self.begin(doing)
        yield
        self._longest[doing] = max(self._longest.get(doing, 0.0), time.monotonic() - self._since)
        self.begin(before)

    @property
    def p99_seconds(self) -> float:
        """The 99th percentile of the steps' seconds (nearest rank); 0 before the first."""
        seconds = sorted(self._step_seconds)  # a copy, as the other thread may add to it
        return seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))] if seconds else 0.0

    def limits(self) -> tuple[float, float]:
        """Returns (still, silent): seconds without a sign of progress, and without a heartbeat."""
        doing = self.doing
        if doing == STEPS:
            return stuck_seconds(self.p99_seconds, self._floor), self._floor
        longest = self._longest.get(doing)
        still = self._first if longest is None else max(self._later, _TIMES_P99 * longest)
        return still, min(max(self._floor, self._later), still)


def stuck_seconds(p99_seconds: float, floor_seconds: float) -> float:
    """Returns how long steps may show no progress: `floor_seconds` longer than the 99th percentile of a step.

    At most three times that percentile, and at least the floor.
    """
    return max(floor_seconds, min(_TIMES_P99 * p99_seconds, p99_seconds + floor_seconds))

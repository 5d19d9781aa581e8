"""The progress of this rank: its step, what it does, and how long that may take without a sign of progress.

The thread that trains notes it, the thread of `heartbeat.py` reads it. A step may take three times the 99th
percentile of the steps before it. Work that is long on purpose (building and compiling, held-out text, saves)
has limits of its own.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

STEPS = "steps"
_TIMES_P99 = 3.0
_REMEMBERED_STEPS = 512


class Progress:
    """The progress of one rank.

    floor_seconds: the shortest limit of a step. first_seconds: the limit of long work that has not been done
    before. later_seconds: the shortest limit of long work that has, and of silence during it.
    """

    def __init__(self, floor_seconds: float, first_seconds: float, later_seconds: float):
        self._floor, self._first, self._later = floor_seconds, first_seconds, later_seconds
        self.step = 0
        self.doing = "the start"
        self._since = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest: dict[str, float] = {}

    def begin(self, doing: str) -> None:
        """Notes that long work begins, or (`STEPS`) that ordinary steps do."""
        self.doing, self._since = doing, time.monotonic()

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
            limit = max(self._floor, _TIMES_P99 * self.p99_seconds)
            return limit, limit
        longest = self._longest.get(doing)
        still = self._first if longest is None else max(self._later, _TIMES_P99 * longest)
        return still, min(max(self._floor, self._later), still)

"""The progress of this rank: its step, what it does, and how long that may take without a sign of progress.

The thread that trains notes it, the thread of `heartbeat.py` reads it. Inside a step layers are marks of
progress (`layer_marks.py`); the longest pause between two of them in each step is remembered, and steps may
stand still as long as `stuck_seconds` says. Heartbeats come from another thread than the steps, so the limit
of silence does not depend on them. Work that is long on purpose (building and compiling, held-out text,
saves) has limits of its own.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

STEPS = "steps"
_TIMES_P99 = 3.0
_REMEMBERED_STEPS, _FEWEST_STEPS = 512, 10
_MOST_EVENTS = 4096  # that the device has not come to


class Event(Protocol):
    """An event in the stream of a device. query: True once the device has passed it."""

    def query(self) -> bool: ...


class Progress:
    """The progress of one rank.

    floor_seconds: the shortest limit of a step. silent_seconds: that of silence in it. first_seconds: the
    limit of long work that has not been done before. later_seconds: the shortest limit of long work that has,
    and of silence during it. has_changed: is set when the limits may have changed, so that the others are
    told at once.
    """

    def __init__(
        self, floor_seconds: float, silent_seconds: float, first_seconds: float, later_seconds: float
    ):
        self._floor, self._silent = floor_seconds, silent_seconds
        self._first, self._later = first_seconds, later_seconds
        self.has_changed = threading.Event()
        self.step = 0
        self.doing = "the start"
        self._since = self._marked = time.monotonic()
        self._marks, self._events = 0, deque[Event]()
        self._pause = 0.0  # the longest of this step
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest: dict[str, float] = {}

    def begin(self, doing: str) -> None:
        """Notes that long work begins, or (`STEPS`) that ordinary steps do."""
        self.doing, self._since = doing, time.monotonic()
        self._marked, self._pause = self._since, 0.0
        self.has_changed.set()

    def mark(self) -> None:
        """Notes progress inside a step."""
        now = time.monotonic()
        self._pause = max(self._pause, now - self._marked)
        self._marked, self._marks = now, self._marks + 1

    @property
    def takes_events(self) -> bool:
        """False while the device is far behind: more marks would tell nothing."""
        return len(self._events) < _MOST_EVENTS

    def mark_after(self, event: Event) -> None:
        """Notes progress that counts once the device has passed `event`."""
        self._events.append(event)

    def marks(self) -> int:
        """Returns how many marks were passed; the heartbeat calls it, which is when the device is asked."""
        has_passed = False
        with suppress(RuntimeError):  # of a device that has failed, as the thread that trains will learn
            while self._events and self._events[0].query():
                self._events.popleft()
                has_passed = True
        if has_passed:
            self.mark()
        return self._marks

    def step_done(self, step: int) -> None:
        """Notes that `step` is done."""
        self.mark()
        if self.doing == STEPS:
            self._pauses.append(self._pause)
        self.step, self._pause = step, 0.0

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
        """The 99th percentile of the steps' longest pauses (nearest rank); 0 before the first."""
        seconds = sorted(self._pauses)  # a copy, as the other thread may add to it
        return seconds[int(0.99 * len(seconds))] if seconds else 0.0

    @property
    def stall_seconds(self) -> float:
        """How long a pause of a step is worth a line: 3 × `p99_seconds`.

        Infinite in long work, and before ten steps have shown what is usual.
        """
        if self.doing != STEPS or len(self._pauses) < _FEWEST_STEPS:
            return math.inf
        return _TIMES_P99 * self.p99_seconds

    def limits(self) -> tuple[float, float]:
        """Returns (still, silent): seconds without a sign of progress, and without a heartbeat."""
        doing = self.doing
        if doing == STEPS:
            return stuck_seconds(self.p99_seconds, self._floor), self._silent
        longest = self._longest.get(doing)
        still = self._first if longest is None else max(self._later, _TIMES_P99 * longest)
        return still, min(max(self._floor, self._later), still)


def stuck_seconds(p99_seconds: float, floor_seconds: float) -> float:
    """Returns how long steps may show no progress: `floor_seconds` longer than they usually do at most.

    p99_seconds: the 99th percentile of the longest pause of a step. At most three times that, and at least
    the floor.
    """
    return max(floor_seconds, min(_TIMES_P99 * p99_seconds, p99_seconds + floor_seconds))

"""The progress that ranks note, and the judgement from their heartbeats: who hangs, and where.

Each layer of a step is a mark of progress (`slow_ranks.py`), and the limit follows from the longest pauses
between marks. Only seconds of the rank that looks count, and its own pauses little: clocks of two machines
are never compared, and a job that was stopped and continued as a whole does not look hung.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from operator import attrgetter

STEPS = "steps"
_TIMES_P99 = 3.0
_REMEMBERED_STEPS, _FEWEST_STEPS = 512, 10
_MOST_EVENTS = 4096  # that the device has not reached
_OWN_SHARE = 0.9  # of the limit of a wait for files, after which the rank itself names the file
# A rank that missed this many beats is frozen, and not waiting, if the job stands still.
_MISSED_BEATS = 4
_STALL_BEATS = 5  # later, to tell a frozen rank from the ranks that wait for it
_MOST_NAMED = 8
_BEAT_SECONDS = 0.5
_BEATS_PER_SECOND = 1000  # of all ranks together: what one store takes beside other work
_SILENT_SECONDS, _SILENT_BEATS = 15.0, 15
_place = attrgetter("step", "doing", "moves")  # of a beat


class Progress:
    """The progress of one rank: its step, what it does, and how long that may take.

    Limits in seconds. floor: the shortest limit of a step. silent: the limit of silence in a step. first: the
    limit of long work the first time. later: the shortest limit of later long work, and of silence in it.
    file: the limit of waits for files. `has_changed`: limits may have changed.
    """

    def __init__(
        self,
        floor_seconds: float,
        silent_seconds: float,
        first_seconds: float,
        later_seconds: float,
        file_seconds: float = 0.0,
    ):
        self._floor, self._silent = floor_seconds, silent_seconds
        self._first, self._later = first_seconds, later_seconds
        self._files, self._is_at_files = file_seconds / _OWN_SHARE, False
        self.has_changed = threading.Event()
        self.step = 0
        self.doing = "the start"
        self._since = self._marked = time.monotonic()
        self._marks, self._events = 0, deque[Callable[[], bool]]()
        self._pause = 0.0  # the longest pause of this step
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest: dict[str, float] = {}

    def begin(self, doing: str) -> None:
        self.doing, self._since = doing, time.monotonic()
        self._marked, self._pause = self._since, 0.0
        self.has_changed.set()

    def mark(self) -> None:
        now = time.monotonic()
        self._pause = max(self._pause, now - self._marked)
        self._marked, self._marks = now, self._marks + 1

    @property
    def takes_events(self) -> bool:
        return len(self._events) < _MOST_EVENTS

    def mark_after(self, has_passed: Callable[[], bool]) -> None:
        self._events.append(has_passed)

    def marks(self) -> int:
        """Return how many marks were passed. The device is asked when the heartbeat calls this."""
        has_passed = False
        with suppress(RuntimeError):  # the training thread will learn of a failed device by itself
            while self._events and self._events[0]():
                self._events.popleft()
                has_passed = True
        if has_passed:
            self.mark()
        return self._marks

    def step_done(self, step: int) -> None:
        self.mark()
        if self.doing == STEPS:
            self._pauses.append(self._pause)
        self.step, self._pause = step, 0.0

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        before = self.doing
        self.begin(doing)
        yield
        self._longest[doing] = max(self._longest.get(doing, 0.0), time.monotonic() - self._since)
        self.begin(before)

    @contextmanager
    def at_files(self) -> Iterator[float]:
        """Note a wait for files inside a step. Yield its limit, after which other ranks end this rank."""
        self._is_at_files = True
        try:
            yield _OWN_SHARE * self.limits()[0]
        finally:
            self.mark()  # before the limit becomes short, because the wait was no standstill
            self._is_at_files = False

    @property
    def p99_seconds(self) -> float:
        """The 99th percentile of the steps' longest pauses (nearest rank), 0 before the first step."""
        seconds = sorted(self._pauses)  # a copy, because the other thread may add to it
        return seconds[int(0.99 * len(seconds))] if seconds else 0.0

    @property
    def stall_seconds(self) -> float:
        """The pause worth a line in the log: 3 × p99, or infinite in long work and the first ten steps."""
        if self.doing != STEPS or len(self._pauses) < _FEWEST_STEPS:
            return math.inf
        return _TIMES_P99 * self.p99_seconds

    def limits(self) -> tuple[float, float]:
        """Return (still, silent): the limits in seconds without progress, and without a heartbeat."""
        doing = self.doing
        if doing == STEPS:
            still, silent = stuck_seconds(self.p99_seconds, self._floor), self._silent
            files = self._files if self._is_at_files else 0.0
            return max(still, files), max(silent, files)
        longest = self._longest.get(doing)
        still = self._first if longest is None else max(self._later, _TIMES_P99 * longest)
        return still, min(max(self._floor, self._later), still)


def stuck_seconds(p99_seconds: float, floor_seconds: float) -> float:
    """Return the limit of a pause: p99 + floor, at most 3 × p99, at least the floor."""
    return max(floor_seconds, min(_TIMES_P99 * p99_seconds, p99_seconds + floor_seconds))


@dataclass(frozen=True)
class Beat:
    """The newest sign of life of one rank.

    moves: collectives and messages begun, and layers that its device has reached. entered: `group_key` →
    collectives begun, if all ranks of the group begin the same. at: the innermost line of its main thread
    outside of torch. is_inside: that thread is inside torch.distributed. still_seconds, silent_seconds:
    `Progress.limits`.
    """

    number: int
    step: int
    doing: str
    moves: int
    entered: dict[str, int]
    at: str
    is_inside: bool
    still_seconds: float
    silent_seconds: float
    stall_seconds: float
    p99_seconds: float

    @classmethod
    def last(cls, number: int) -> "Beat":
        """Return the last beat of a rank. It has no limits, so the job is no longer judged."""
        return cls(number, 0, "", 0, {}, "", False, math.inf, math.inf, math.inf, 0.0)

    def text(self) -> str:
        """Return the beat as JSON: under 1 KB for any number of ranks (benchmarks/faults/heartbeats.py)."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, text: str | bytes) -> "Beat":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Hang:
    """A job that stands still. is_silent: the ranks send no heartbeat. `reason` ends a sentence.

    ranks: the cause, or empty if all wait for each other.
    """

    ranks: tuple[int, ...]
    is_silent: bool
    seconds: float
    reason: str


def group_key(ranks: Sequence[int]) -> str:
    """Return a hash of 64 bits, equal on each rank: a list of 6,144 ranks takes 30 KB in each beat."""
    return blake2b(",".join(map(str, ranks)).encode(), digest_size=8).hexdigest()


class HangWatch:
    def __init__(self, num_ranks: int, beat_seconds: float):
        self._beat_seconds = beat_seconds
        self._seen: list[Beat | None] = [None] * num_ranks
        self._silent = [0.0] * num_ranks
        self._still = 0.0

    def look(self, beats: Sequence[Beat], elapsed_seconds: float) -> Hang | None:
        """Return the hang that these beats show, or None. elapsed_seconds: since the last look."""
        counted = min(elapsed_seconds, 2 * self._beat_seconds)
        has_moved = False
        for rank, beat in enumerate(beats):
            before = self._seen[rank]
            is_new = before is None or before.number != beat.number
            self._silent[rank] = 0.0 if is_new else self._silent[rank] + counted
            has_moved |= before is None or _place(before) != _place(beat)
            self._seen[rank] = beat
        self._still = 0.0 if has_moved else self._still + counted
        silent_limit = max(beat.silent_seconds for beat in beats)
        still_limit = max(*(beat.still_seconds for beat in beats), _STALL_BEATS * self._beat_seconds)
        if max(self._silent) <= silent_limit and self._still <= still_limit:
            return None
        silent = self._silent_ranks(silent_limit)
        if silent:
            seconds = max(self._silent)
            return Hang(silent, True, seconds, "without a heartbeat" + _limit(beats, silent_limit))
        return Hang(_cause(beats), False, self._still, "without progress" + _limit(beats, still_limit))

    def stall(self, beats: Sequence[Beat]) -> Hang | None:
        """Return an unusual pause of the steps, while it lasts, or None if the limit of a hang is not later.

        Call it after `look`, with the same beats.
        """
        limit = stall_limit(self._beat_seconds, max(beat.stall_seconds for beat in beats))
        if self._still <= limit or limit >= max(beat.still_seconds for beat in beats):
            return None
        silent = self._silent_ranks(max(beat.silent_seconds for beat in beats))
        return Hang(silent or _cause(beats), bool(silent), self._still, f"without progress ({_usual(beats)})")

    def _silent_ranks(self, silent_limit: float) -> tuple[int, ...]:
        frozen_seconds = min(_MISSED_BEATS * self._beat_seconds, silent_limit)
        return tuple(rank for rank, seconds in enumerate(self._silent) if seconds > frozen_seconds)


def beat_seconds(num_ranks: int) -> float:
    return max(_BEAT_SECONDS, num_ranks / _BEATS_PER_SECOND)


def silent_seconds(hang_seconds: float, num_ranks: int) -> float:
    """Return how long a rank may send no heartbeat in a step.

    15 beats if they take more than 15 s, else 15 s, or `hang_seconds` if that is shorter. After a link was
    interrupted, TCP tries for the sixth time at most 12.6 s after the first loss.
    """
    beats_seconds = _SILENT_BEATS * beat_seconds(num_ranks)
    return beats_seconds if beats_seconds > _SILENT_SECONDS else min(hang_seconds, _SILENT_SECONDS)


def stall_limit(beat_seconds: float, stall_seconds: float) -> float:
    """Return after how long a pause its cause is named: `stall_seconds`, at least five beats."""
    return max(stall_seconds, _STALL_BEATS * beat_seconds)


def describe(hang: Hang, beats: Sequence[Beat], places: Mapping[int, str], states: Mapping[int, str]) -> str:
    """Return a message that names the cause of a hang, its place, and the places of the waiting ranks.

    `beats` has each rank's newest beat, or is empty. `places` has each rank's node and process, `states` the
    kernel's state of it, if known.
    """
    stands = f"the job hangs, {hang.seconds:.0f} s {hang.reason}"
    if not hang.ranks:
        why = "Mismatched collectives are a bug of the program: a restart will hang again"
        if len({beat.at for beat in beats}) == 1:
            why = "The network probably lost a message. Fix: start again"
        return f"{stands}: all ranks wait for each other: {_waiting(beats)}. {why}"
    first = beats[hang.ranks[0]] if beats else None
    during = f" after step {first.step}, during {first.doing}" if first else ""
    return (
        f"{stands}{during}. The cause: {_named(hang, beats, places, states)}. Fix: start again from the "
        "newest checkpoint. If it recurs on the same node, leave that node out"
    )


def describe_stall(stall: Hang, beats: Sequence[Beat], places: Mapping[int, str]) -> str:
    limit = max(beat.still_seconds for beat in beats)
    cause = _named(stall, beats, places, {}) if stall.ranks else f"all ranks wait: {_waiting(beats)}"
    stands = f"{stall.seconds:.1f} s {stall.reason}"
    return f"{stands}. The cause: {cause}. The ranks end if it lasts {limit:.3g} s"


def _named(hang: Hang, beats: Sequence[Beat], places: Mapping[int, str], states: Mapping[int, str]) -> str:
    named = []
    for rank in hang.ranks:
        state = f" ({states[rank]})" if rank in states else ""
        at = f" at {beats[rank].at}" if beats else ""
        place = f" on {places[rank]}" if rank in places else ""
        named.append(f"rank {rank}{place}{state}{at}")
    others = [rank for rank in range(len(beats)) if rank not in hang.ranks]
    verb = "waits" if len(others) == 1 else "wait, the first"
    waiting = f", while {_ranks(others)} {verb} at {beats[others[0]].at}" if others else ""
    return f"{some(named, _MOST_NAMED)}{waiting}"


def _waiting(beats: Sequence[Beat]) -> str:
    lines: dict[str, list[int]] = {}
    for rank, beat in enumerate(beats):
        lines.setdefault(beat.at, []).append(rank)
    return "; ".join(f"{_ranks(ranks)} at {line}" for line, ranks in lines.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {some(ranks, _MOST_NAMED)}"


def some(names: Sequence[object], most: int) -> str:
    """Return e.g. "a, b and 3 more"."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def _limit(beats: Sequence[Beat], seconds: float) -> str:
    return f" (the limit is {seconds:.3g} s, and {_usual(beats)})"


def _usual(beats: Sequence[Beat]) -> str:
    return f"steps usually pause for at most {max(beat.p99_seconds for beat in beats):.3g} s"


def _cause(beats: Sequence[Beat]) -> tuple[int, ...]:
    """Return the ranks that others wait for: behind in a group, ahead in none. Else those outside torch."""
    groups: dict[str, dict[int, int]] = {}
    for rank, beat in enumerate(beats):
        for group, count in beat.entered.items():
            groups.setdefault(group, {})[rank] = count
    behind = {rank for counts in groups.values() for rank in counts if counts[rank] < max(counts.values())}
    ahead = {rank for counts in groups.values() for rank in counts if counts[rank] > min(counts.values())}
    if behind:
        return tuple(sorted(behind - ahead or behind))
    outside = tuple(rank for rank, beat in enumerate(beats) if not beat.is_inside)
    return outside if len(outside) < len(beats) else ()

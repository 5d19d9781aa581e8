"""Judges from the heartbeats of all ranks whether the job hangs, and which rank is the cause.

In: the newest heartbeat of every rank, at every look. Out: a `Hang`, once. Only seconds of the one who looks
are counted, and a pause of its own counts little: clocks of two machines are never compared, and a job that
was stopped as a whole and continued is not taken for one that hangs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

# A rank that has missed so many beats when the job stands still is frozen, and not waiting.
_MISSED_BEATS = 4
_MOST_NAMED = 8
_BEAT_SECONDS = 0.5
_BEATS_PER_SECOND = 1000  # of all ranks together: what one store takes beside other work
_SILENT_SECONDS, _SILENT_BEATS = 15.0, 15


@dataclass(frozen=True)
class Beat:
    """The newest sign of life of one rank.

    number: counts its beats. moves: counts collectives and messages that it has begun, and layers that its
    device has come to. entered: of groups in which all ranks begin the same collectives, by their ranks, how
    many it has begun. at: the innermost line of its main thread outside of torch. is_inside: that thread is
    inside torch.distributed. still_seconds, silent_seconds: its limits now (`Progress.limits`). p99_seconds:
    the 99th percentile of the longest pause of a step.
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
    p99_seconds: float

    @classmethod
    def last(cls, number: int) -> "Beat":
        """Returns the beat of a rank that sends no more. It has no limits, so the job is no longer judged."""
        return cls(number, 0, "", 0, {}, "", False, math.inf, math.inf, 0.0)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> "Beat":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Hang:
    """A job that stands still. ranks: the cause; empty: all wait for each other. reason: ends a sentence."""

    ranks: tuple[int, ...]
    is_silent: bool
    seconds: float
    reason: str


class HangWatch:
    """Counts for how long each rank was silent and the job stood still; each beats every `beat_seconds`."""

    def __init__(self, num_ranks: int, beat_seconds: float):
        self._beat_seconds = beat_seconds
        self._seen: list[Beat | None] = [None] * num_ranks
        self._silent = [0.0] * num_ranks
        self._still = 0.0

    def look(self, beats: Sequence[Beat], elapsed_seconds: float) -> Hang | None:
        """Returns the hang that these beats show; None while there is none.

        elapsed_seconds: since the look before, by the clock of the one who looks.
        """
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
        still_limit = max(beat.still_seconds for beat in beats)
        if max(self._silent) <= silent_limit and self._still <= still_limit:
            return None
        frozen_seconds = min(_MISSED_BEATS * self._beat_seconds, silent_limit)
        silent = [rank for rank, seconds in enumerate(self._silent) if seconds > frozen_seconds]
        if silent:
            seconds = max(self._silent)
            return Hang(tuple(silent), True, seconds, "without a heartbeat" + _limit(beats, silent_limit))
        causes = _behind(beats) or _outside(beats)
        return Hang(tuple(causes), False, self._still, "without progress" + _limit(beats, still_limit))


def beat_seconds(num_ranks: int) -> float:
    """Returns the seconds from one heartbeat of a rank to its next."""
    return max(_BEAT_SECONDS, num_ranks / _BEATS_PER_SECOND)


def silent_seconds(hang_seconds: float, num_ranks: int) -> float:
    """Returns how long a rank may send no heartbeat while others take steps: 15 s or beats, the longer one.

    At most `hang_seconds`. After a link was interrupted, TCP tries 12.6 s after the first loss at the latest
    for the sixth time. A step may wait for slow files and devices; heartbeats wait for nothing else.
    """
    return min(hang_seconds, max(_SILENT_SECONDS, _SILENT_BEATS * beat_seconds(num_ranks)))


def describe(hang: Hang, beats: Sequence[Beat], places: Mapping[int, str], states: Mapping[int, str]) -> str:
    """Returns a message that names the cause of a hang, where it is, and where the others wait.

    beats: the last of all ranks; empty: not known. places: rank → node and process; states: rank → what the
    kernel says of it, as far as they are known.
    """
    stands = f"the job hangs, {hang.seconds:.0f} s {hang.reason}"
    if not hang.ranks:
        return f"{stands}: all ranks wait for each other: {_lines(beats)}"
    named = []
    for rank in hang.ranks[:_MOST_NAMED]:
        state = f" ({states[rank]})" if rank in states else ""
        at = f" at {beats[rank].at}" if beats else ""
        named.append(f"rank {rank}" + f" on {places[rank]}" * (rank in places) + state + at)
    if len(hang.ranks) > _MOST_NAMED:
        named.append(f"{len(hang.ranks) - _MOST_NAMED} more")
    others = [rank for rank in range(len(beats)) if rank not in hang.ranks]
    verb = "waits" if len(others) == 1 else "wait, the first"
    waiting = f"; {_ranks(others)} {verb} at {beats[others[0]].at}" if others else ""
    first = beats[hang.ranks[0]] if beats else None
    during = f" after step {first.step}, during {first.doing}" if first else ""
    return (
        f"{stands}{during}. The cause: {', '.join(named)}{waiting}. Start again from the newest checkpoint; "
        "where it comes again on the same node, leave that node out"
    )


def _lines(beats: Sequence[Beat]) -> str:
    """Returns where all ranks wait, and what that may mean."""
    lines: dict[str, list[int]] = {}
    for rank, beat in enumerate(beats):
        lines.setdefault(beat.at, []).append(rank)
    waiting = "; ".join(f"{_ranks(ranks)} at {line}" for line, ranks in lines.items())
    if len(lines) == 1:
        return f"{waiting}. A network that lost a message is the likely cause: start again"
    return f"{waiting}. Collectives that do not match are a fault of the program, which comes again"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _place(beat: Beat) -> tuple[int, str, int]:
    return beat.step, beat.doing, beat.moves


def _limit(beats: Sequence[Beat], seconds: float) -> str:
    p99 = max(beat.p99_seconds for beat in beats)
    return f" (the limit is {seconds:.3g} s; steps usually pause for {p99:.3g} s at most)"


def _behind(beats: Sequence[Beat]) -> list[int]:
    """Returns the ranks that others wait for: behind in a group, and ahead of others in none."""
    groups: dict[str, dict[int, int]] = {}
    for rank, beat in enumerate(beats):
        for group, count in beat.entered.items():
            groups.setdefault(group, {})[rank] = count
    behind = {rank for counts in groups.values() for rank in counts if counts[rank] < max(counts.values())}
    ahead = {rank for counts in groups.values() for rank in counts if counts[rank] > min(counts.values())}
    return sorted(behind - ahead or behind)


def _outside(beats: Sequence[Beat]) -> list[int]:
    """Returns the ranks that are not inside torch.distributed, where others are; else none."""
    outside = [rank for rank, beat in enumerate(beats) if not beat.is_inside]
    return outside if len(outside) < len(beats) else []

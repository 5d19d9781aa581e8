"""The thread that guards the store: when it ends a rank, what it names, and how long an end may take."""

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kielo.parallel import heartbeat
from kielo.parallel.hang_watch import Hang
from kielo.parallel.heartbeat import Heartbeat
from kielo.parallel.progress import STEPS, Progress

FOUND = Hang((1,), False, 3.5, "without progress")


class Guarded:
    """The guard of rank 1 of two, which looks every 0.5 s of a clock that a test moves.

    each: called before each look, with the seconds. ends: (seconds, hang) by which it ended the rank.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: Callable[[float], None] = lambda seconds: None):
        self.now, self.each, self.ends, self.pause = 100.0, each, [], 0.5
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))
        progress = Progress(floor_seconds=20.0, silent_seconds=10.0, first_seconds=90.0, later_seconds=60.0)
        progress.begin(STEPS)
        world = SimpleNamespace(rank=1, size=2, store=None)
        self.beats = Heartbeat(world, progress, None, None)
        monkeypatch.setattr(self.beats, "_over", SimpleNamespace(wait=self.wait, is_set=lambda: False))
        monkeypatch.setattr(self.beats, "_end", self.end)

    def look(self, seconds: float) -> list[tuple[float, Hang]]:
        self.until = self.now + seconds
        self.beats._guard()
        return self.ends

    def wait(self, seconds: float) -> bool:
        assert seconds == 0.5
        self.now += self.pause
        self.each(self.now - 100.0)
        return self.now > self.until or bool(self.ends)

    def end(self, hang: Hang, store: object) -> None:
        assert store is None
        self.ends.append((self.now - 100.0, hang))


def test_a_store_that_does_not_answer_ends_the_rank_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may serve it. A pause of this process counts for two beats; an answer begins the count again."""
    named = Hang((0,), True, 10.5, "without an answer of its store (the limit is 10 s)")
    assert Guarded(monkeypatch).look(30.0) == [(10.5, named)]
    paused = Guarded(monkeypatch)
    paused.pause = 1000.0
    assert paused.look(10_500.0) == []

    def answer(seconds: float) -> None:
        answering.beats._number += seconds <= 10.0

    answering = Guarded(monkeypatch, answer)
    assert answering.look(30.0) == [(20.5, named)]


def test_ranks_that_end_together_have_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their heartbeats stop, and slow files are no other cause: the hang that was found stays."""

    def find(seconds: float) -> None:
        if seconds == 3.0:
            guarded.beats._number, guarded.beats._found = 7, FOUND

    guarded = Guarded(monkeypatch, find)
    assert guarded.look(200.0) == [(63.5, FOUND)]


def test_a_rank_that_finds_a_hang_ends_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard knows of it before the end begins."""
    beats, ends = Guarded(monkeypatch).beats, []
    looks = iter([None, None, FOUND])
    monkeypatch.setattr(beats, "_is_over", lambda: bool(ends))
    monkeypatch.setattr(beats, "_exchange", lambda store, elapsed: next(looks))
    monkeypatch.setattr(beats, "_end", lambda hang, store: ends.append((hang, store, beats._found)))
    beats._store = "store"
    beats._run()
    assert ends == [(FOUND, "store", FOUND)] and beats._number == 3


def test_a_late_answer_of_the_store_is_told_before_it_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After three times the usual pause, once, and when it answers; not while the ranks end together."""
    caplog.set_level(logging.WARNING)

    def answer(seconds: float) -> None:
        guarded.beats._number += seconds == 6.0

    guarded = Guarded(monkeypatch, answer)
    for _ in range(10):
        guarded.beats._progress._pauses.append(1.0)
    guarded.beats._first = "nid0 (process 9)"
    assert guarded.look(7.0) == []
    assert [record.getMessage() for record in caplog.records] == [
        "the store has not answered for 3.5 s; rank 0 on nid0 (process 9) may serve it. The ranks end if it "
        "lasts 10 s",
        "the store answers after 5.5 s",
    ]
    caplog.clear()
    guarded.beats._found = FOUND
    assert guarded.look(7.0) == [] and caplog.records == []

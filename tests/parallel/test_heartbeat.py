"""Heartbeats of one rank with a store in memory: what it sends and tells, and in which order it ends."""

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.parallel import heartbeat
from kielo.parallel.hang_watch import Beat, Hang
from kielo.parallel.heartbeat import Heartbeat, _line_of
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


BEAT = Beat(
    number=5, step=7, doing=STEPS, moves=10, entered={"0,1": 5}, at="kielo/train/loop.py:20 in fit",
    is_inside=True, still_seconds=3.0, silent_seconds=3.0, stall_seconds=2.0, p99_seconds=0.5,
)  # fmt: skip


class Store:
    """torch's store, in memory. done: what was set, waited for and noted, in its order."""

    def __init__(self, beats: list[Beat], **values: str):
        self.values: dict[str, Any] = {f"beat/{rank}": beat.text() for rank, beat in enumerate(beats)}
        self.values |= {"hang": "none"} | values
        self.done: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.values[key] = value
        self.done.append(f"{key} = {value}" if len(value) < 40 else key)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        self.values[key] = self.values.get(key, 0) + number
        if number:
            self.done.append(key)
        return self.values[key]

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        if self.values[key] == expected:
            self.values[key] = wanted
        return self.get(key)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.done.append(f"wait for {', '.join(keys)}")
        assert limit == timedelta(seconds={"hang/named": 17, "hang/over": 32}[keys[0]])


class Process:
    """Another rank's process; a note of what is done to it goes to the store's."""

    def __init__(self, store: Store, rank: int, is_here: bool = True):
        self.store, self.rank, self.pid, self.here = store, rank, 1000 + rank, is_here

    def __str__(self) -> str:
        return f"nid{self.rank}"

    def is_here(self) -> bool:
        return self.here

    def state(self) -> str:
        return "it was stopped"

    def stacks(self) -> str:
        self.store.done.append(f"stacks of {self.rank}")
        return ""


class Ranks:
    """One rank of some, and what it does: `done` of the store, with what it tells and whom it kills."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, size: int, store: Store):
        self.store, self.now, self.here = store, 100.0, True
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(heartbeat, "_process_of", lambda _, rank: Process(store, rank, self.here))
        monkeypatch.setattr(heartbeat, "os", SimpleNamespace(
            _exit=lambda code: store.done.append(f"exit {code}"),
            kill=lambda pid, number: store.done.append(f"kill {pid} {number}"), sep=os.sep, path=os.path,
        ))  # fmt: skip
        progress = Progress(floor_seconds=3.0, silent_seconds=2.0, first_seconds=90.0, later_seconds=60.0)
        progress.begin(STEPS)
        self.beats = Heartbeat(
            SimpleNamespace(rank=rank, size=size, store=None), progress, folder / "stacks", self.tell
        )
        self.beats._beats = [Beat.read(store.get(f"beat/{number}")) for number in range(size)]
        monkeypatch.setattr(self.beats, "_write_stacks", lambda: store.done.append("own stacks"))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def tell(self, message: str, comes_again: bool) -> None:
        self.message, self.comes_again = message, comes_again
        self.store.done.append("tell")


ELSEWHERE = replace(BEAT, at="my_loss.py:3 in loss")
NO_CAUSE, STUCK = Hang((), False, 3.5, "without progress"), Hang((1,), True, 3.5, "without a heartbeat")


def test_ranks_that_wait_for_each_other_end_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stacks first, then the cause, once all have written theirs; rank 0 leaves last. A hang whose
    lines differ comes again.
    """
    for other in (ELSEWHERE, BEAT):
        store = Store([BEAT, other], **{"hang/written": 1, "hang/ended": 1, "hang/left": 1})
        ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
        ranks.beats._end(NO_CAUSE, store)
        assert store.done == [
            "own stacks", "hang/written", "hang/told", "tell", "hang/named = ", "hang/ended", "hang/over = ",
            "wait for hang/over", "hang/left", "exit 76",
        ]  # fmt: skip
        assert ranks.comes_again == (other is ELSEWHERE) and ranks.now == 100.0
        assert ranks.message.startswith("the job hangs, 4 s without progress: all ranks wait for each other")
        assert ranks.message.endswith(f". Stacks of the ranks are in {tmp_path / 'stacks'}")


def test_ranks_that_do_not_come_are_waited_for_15_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Twice, and a second at the store; a rank that does not look at the beats tells nothing."""
    store = Store([BEAT] * 4)
    ranks = Ranks(monkeypatch, tmp_path, 0, 4, store)
    ranks.beats._end(NO_CAUSE, store)
    assert ranks.now == pytest.approx(100.0 + 15 + 15 + 1, abs=0.3)
    for rank in (1, 3):
        store = Store([BEAT] * 4)
        ranks = Ranks(monkeypatch, tmp_path, rank, 4, store)
        ranks.beats._end(NO_CAUSE, store)
        assert store.done == [
            "own stacks", "hang/written", "hang/ended", "wait for hang/over", "hang/left", "exit 76",
        ] and ranks.now == 100.0  # fmt: skip
    store = Store([BEAT] * 4, **{"hang/told": 1})
    ranks = Ranks(monkeypatch, tmp_path, 2, 4, store)
    ranks.beats._end(NO_CAUSE, store)
    assert "tell" not in store.done


def test_a_frozen_rank_is_asked_for_its_stacks_once_the_cause_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By one rank of its node, which then kills it; its words are in the message. Nobody waits for it."""
    store = Store([BEAT] * 2)
    ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
    ranks.beats._end(STUCK, store)
    assert store.done == [
        "own stacks", "hang/asked/1", "hang/state/1 = it was stopped", "hang/written", "hang/told", "tell",
        "hang/named = ", "wait for hang/named", "stacks of 1", "kill 1001 9", "hang/ended", "hang/over = ",
        "wait for hang/over", "hang/left", "exit 76",
    ]  # fmt: skip
    assert ranks.now == 100.0 and not ranks.comes_again
    assert "The cause: rank 1 on nid1 (it was stopped) at kielo/train/loop.py:20 in fit" in ranks.message
    assert (tmp_path / "stacks" / "rank_00001.txt").read_text() == "it wrote no stacks\n"
    for asked, is_here in ((1, True), (0, False)):  # by another rank, or on another node
        store = Store([BEAT] * 2, **{"hang/asked/1": asked})
        ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
        ranks.here = is_here
        ranks.beats._end(STUCK, store)
        assert "stacks of 1" not in store.done and "kill 1001 9" not in store.done


def test_a_rank_that_failed_is_named_with_its_error_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store([BEAT] * 2, **{"failed/1": "ValueError: odd"})
    ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
    ranks.beats._end(STUCK, store)
    assert "rank 1 on nid1 (it failed: ValueError: odd)" in ranks.message
    assert not [done for done in store.done if done.startswith(("stacks", "kill", "hang/asked"))]


def test_a_rank_that_was_silent_and_wakes_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranks that name it write its stacks; it does not count as one that has ended."""
    store = Store([BEAT] * 2)
    Ranks(monkeypatch, tmp_path, 1, 2, store).beats._end(STUCK, store)
    assert store.done == ["hang/written", "wait for hang/over", "hang/left", "exit 76"]
    assert store.values["hang/ended"] == 0


def test_rank_0_is_named_where_its_store_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank tells it, and the first of its node kills it; of all others each ends by itself."""
    hang = Hang((0,), True, 3.5, "without an answer of its store")
    told = {}
    for rank in (1, 2, 3):
        store = Store([BEAT] * 4)
        ranks = Ranks(monkeypatch, tmp_path, rank, 4, store)
        ranks.beats._first = Process(store, 0)
        ranks.beats._end(hang, None)
        told[rank] = store.done
        if rank == 2:
            assert "The cause: rank 0 on nid0 (it was stopped)" in ranks.message
            assert ranks.beats._beats[2].at != BEAT.at  # its own newest
    assert told == {
        1: ["own stacks", "stacks of 0", "kill 1000 9", "exit 76"],
        2: ["own stacks", "tell", "stacks of 0", "kill 1000 9", "exit 76"],
        3: ["own stacks", "exit 76"],
    }
    for first in (None, Process(store, 0, is_here=False)):
        store.done.clear()
        ranks = Ranks(monkeypatch, tmp_path, 2, 4, store)
        ranks.beats._first = first
        ranks.beats._end(hang, None)
        assert store.done == ["own stacks", "tell", "exit 76"]


def test_whatever_fails_at_the_end_the_process_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store([BEAT] * 2)
    ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
    monkeypatch.setattr(ranks.beats, "_write_stacks", lambda: 1 / 0)
    ranks.beats._end(NO_CAUSE, store)
    assert store.done == ["exit 76"]


def test_what_a_rank_sends_and_who_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its step and limits, counted from 1; ranks 0 and size / 2 look at all beats, once all are there."""
    store = Store([BEAT] * 4)
    for rank in range(4):
        ranks = Ranks(monkeypatch, tmp_path, rank, 4, store)
        ranks.beats._beats = []
        progress = ranks.beats._progress
        progress.step, ranks.beats._number = 9, 6
        progress.mark()
        assert ranks.beats._exchange(store, 0.5) is None
        sent = Beat.read(store.get(f"beat/{rank}"))
        assert (sent.number, sent.step, sent.doing, sent.moves, sent.entered) == (7, 9, STEPS, 1, {})
        assert (sent.still_seconds, sent.silent_seconds, sent.p99_seconds) == (3.0, 2.0, 0.0)
        assert len(ranks.beats._beats) == (4 if rank in (0, 2) else 0)
        assert ranks.beats._first is None
    store.values["process/0"] = "there"
    assert ranks.beats._exchange(store, 0.5) is None and str(ranks.beats._first) == "nid0"
    store.values["hang"] = json.dumps(asdict(STUCK))
    assert ranks.beats._exchange(store, 0.5) == STUCK
    store = Store([BEAT] * 3)  # of four
    ranks = Ranks(monkeypatch, tmp_path, 0, 3, store)
    ranks.beats._world.size, ranks.beats._beats = 4, []
    assert ranks.beats._look(store, 0.5) is None and ranks.beats._beats == []


def test_the_first_watcher_to_find_a_hang_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store([BEAT] * 2)
    ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
    ranks.beats._watch = SimpleNamespace(look=lambda beats, elapsed: STUCK)
    assert ranks.beats._look(store, 0.5) == STUCK and json.loads(store.values["hang"]) == {
        "ranks": [1], "is_silent": True, "seconds": 3.5, "reason": "without a heartbeat",
    }  # fmt: skip
    ranks.beats._watch = SimpleNamespace(look=lambda beats, elapsed: NO_CAUSE)
    assert ranks.beats._look(store, 0.5) == STUCK


def test_a_pause_is_told_once_by_one_rank_and_its_end_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = Store([BEAT] * 2)
    ranks = Ranks(monkeypatch, tmp_path, 0, 2, store)
    stall = Hang((1,), False, 2.5, "without progress")
    for seen in (None, stall, replace(stall, seconds=3.0), None, None):
        ranks.beats._note_stall(seen, store)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[1] == "step 7: goes on after 3.0 s"
    assert told[0].startswith(
        "after step 7: 2.5 s without progress. The cause: rank 1 on nid1 at kielo/train"
    )
    caplog.clear()
    other = Ranks(monkeypatch, tmp_path, 1, 2, store)
    for seen in (stall, None):
        other.beats._note_stall(seen, store)
    assert caplog.records == []


def test_the_line_of_a_rank_is_the_innermost_outside_of_libraries() -> None:
    """Kielo's own, wherever it lies; three parts of its path."""

    def frame(*files: str) -> Any:
        outer = None
        for number, file in enumerate(files, start=1):
            code = SimpleNamespace(co_filename=file, co_name=f"f{number}")
            outer = SimpleNamespace(f_code=code, f_lineno=10 * number, f_back=outer)
        return outer

    torch_file, python_file = heartbeat._TORCH + "/nn.py", heartbeat._PYTHON + "/threading.py"
    assert (
        _line_of(frame("/home/me/run/mine.py", torch_file, python_file, "<frozen>"))
        == "me/run/mine.py:10 in f1"
    )
    inside = heartbeat._PYTHON + "/site-packages/kielo/train/loop.py"
    assert _line_of(frame("/a/b.py", inside, torch_file)) == "kielo/train/loop.py:20 in f2"
    assert _line_of(frame(torch_file)) == _line_of(None) == "an unknown line"
    assert "in test_the_line_of_a_rank" in _line_of(sys._getframe())

"""Heartbeats of a rank with store, threads and clock in memory: what it sends, tells, and how it ends."""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kielo
from kielo.ranks import hang_watch as progress_module
from kielo.ranks import heartbeat
from kielo.ranks.hang_watch import STEPS, Beat, Hang, Progress
from kielo.ranks.heartbeat import Heartbeat
from kielo.ranks.local_ranks import RankProcess

BEAT = Beat(
    number=5, step=7, doing=STEPS, moves=10, entered={"0,1": 5}, at="kielo/train/loop.py:20 in fit",
    is_inside=True, still_seconds=3.0, silent_seconds=3.0, stall_seconds=2.0, p99_seconds=0.5,
)  # fmt: skip
ELSEWHERE = replace(BEAT, at="my_loss.py:3 in loss")
NO_CAUSE, STUCK = Hang((), False, 3.5, "without progress"), Hang((1,), True, 3.5, "without a heartbeat")
END_SECONDS = 60.0  # of ranks that end together, at the longest


class Ended(BaseException):
    """The end of a process, in place of `os._exit`."""


class Store:
    """torch's store, in memory. done: what was set, waited for and noted from the hang on, in its order.

    hang: what the ranks are told, after `looks` looks.
    """

    def __init__(self, beats: list[Beat], hang: Hang | None = None, looks: int = 1, **values: Any):
        self.values: dict[str, Any] = {f"beat/{rank}": beat.text() for rank, beat in enumerate(beats)}
        self.values |= values
        self.hang, self.looks, self.done = hang, looks, []

    def clone(self) -> "Store":
        return self

    def set(self, key: str, value: str) -> None:
        if not key.startswith("beat/") or key not in self.values:
            self.values[key] = value
        else:  # what a rank sends is not what its watch sees here
            self.sent = Beat.read(value)
        if not key.startswith(("beat/", "process/")):
            self.done.append(f"{key} = {value}")

    def get(self, key: str) -> bytes:
        if key == "hang" and self.hang is not None:
            self.looks -= 1
            if self.looks < 0:
                self.values["hang"] = json.dumps(asdict(self.hang))
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
        if self.values.get(key, "") == expected:
            self.values[key] = wanted
        return self.values[key].encode()

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.done.append(f"wait for {', '.join(keys)}")
        assert limit == timedelta(seconds={"hang/named": 17, "hang/over": 32}[keys[0]])


class Rank:
    """One rank of some, whose two threads a test runs: `run`, which sends its beats, and `guard`.

    done: that of its store, with what it tells and whom it kills. here: are other ranks of its node.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, size: int, store: Store):
        self.store, self.now, self.here, self.turns, self.each = store, 100.0, True, 0, lambda seconds: None
        self.targets: list[Callable[[], None]] = []
        self.slept: list[float] = []
        self.pace: float | None = None  # of a sleep, whatever is asked for
        ident = threading.main_thread().ident
        self.frame = SimpleNamespace(
            f_code=SimpleNamespace(co_filename="/home/me/run/mine.py", co_name="step"),
            f_lineno=10,
            f_back=None,
        )
        for name, module in {
            "threading": SimpleNamespace(
                Thread=self.thread, Event=lambda: SimpleNamespace(wait=self.wait, is_set=self.is_over),
                main_thread=threading.main_thread, current_thread=lambda: None,
            ),
            "time": SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep),
            "os": SimpleNamespace(_exit=self.exit, kill=self.kill, sep=os.sep, path=os.path),
            "sys": SimpleNamespace(_current_frames=lambda: {ident: self.frame}),
            "faulthandler": SimpleNamespace(dump_traceback=lambda file: store.done.append("own stacks")),
            "write_flight_record": lambda folder, rank: None,
            "RankProcess": self.process_type(),
        }.items():  # fmt: skip
            monkeypatch.setattr(heartbeat, name, module)
        self.progress = Progress(
            floor_seconds=3.0, silent_seconds=10.0, first_seconds=90.0, later_seconds=60.0
        )
        self.progress.begin(STEPS)
        self.progress.has_changed = SimpleNamespace(wait=self.turn, clear=str, set=str)
        for other in range(size):
            process = {"host": f"nid{other}", "pid": 1000 + other, "stacks_file": 5}
            store.values.setdefault(f"process/{other}", json.dumps(process))
        world = SimpleNamespace(rank=rank, size=size, store=store)
        self.stacks = folder / "stacks"
        self.beats = Heartbeat(world, self.progress, self.stacks, self.tell).__enter__()
        self.run, self.guard = self.targets

    def process_type(self) -> type:
        of_rank, done = self, self.store.done

        class Process(RankProcess):
            """Another rank's process."""

            def is_here(self) -> bool:
                return of_rank.here

            def state(self) -> str:
                return "it was stopped"

            def stacks(self) -> str:
                done.append(f"stacks of {self.pid}")
                return ""

        return Process

    def thread(self, target: Callable[[], None], name: str, daemon: bool) -> Any:
        assert name == "heartbeat" and daemon
        self.targets.append(target)
        return SimpleNamespace(start=lambda: None)

    def beat(self, times: int = 1) -> None:
        """Sends so many beats; returns at the end of the process, if it ends."""
        self.turns = times
        try:
            self.run()
        except Ended:
            self.store.done.append("end")

    def turn(self, seconds: float) -> None:
        self.turns -= 1

    def is_over(self) -> bool:
        return self.turns < 0

    def guard_for(self, seconds: float) -> float | None:
        """The seconds after which the guard ends the process; None if it has not after so many."""
        self.turns, self.until, begun = 0, self.now + seconds, self.now
        try:
            self.guard()
        except Ended:
            self.store.done.append("end")
            return self.now - begun
        return None

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.each(self.now - 100.0)
        return self.now > self.until

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += self.pace or seconds

    def kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.store.done.append(f"kill {pid}")

    def exit(self, code: int) -> None:
        assert code == 76
        raise Ended

    def tell(self, message: str, comes_again: bool, nodes: list[str]) -> None:
        self.message, self.comes_again, self.blamed = message, comes_again, list(nodes)
        self.store.done.append("tell")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Rank]:
    return lambda rank, size, store: Rank(monkeypatch, tmp_path, rank, size, store)


def test_a_store_that_does_not_answer_ends_the_rank_after_the_limit(make: Callable[..., Rank]) -> None:
    """Rank 0 may serve it, and is named by one rank. An answer begins the count again."""
    rank = make(1, 2, Store([BEAT] * 2))
    assert rank.guard_for(30.0) == 10.5
    reason = "without an answer of its store (the limit is 10 s)"
    assert rank.message.startswith(f"the job hangs, 10 s {reason}") and not rank.comes_again
    assert rank.store.done == ["own stacks", "tell", "end"]
    rank = make(1, 2, Store([BEAT] * 2))

    def answer(seconds: float) -> None:
        if seconds <= 9.0:
            rank.beat()
            rank.turns = 0

    rank.each = answer
    assert rank.guard_for(30.0) == 19.5
    assert rank.store.done == ["own stacks", "tell", "stacks of 1000", "kill 1000", "end"]


def test_a_pause_of_the_whole_rank_counts_for_two_beats(make: Callable[..., Rank]) -> None:
    rank = make(1, 2, Store([BEAT] * 2))

    def pause(seconds: float) -> None:
        rank.now += 999.5

    rank.each = pause
    assert rank.guard_for(100_000.0) == 11_000.0


def test_ranks_that_end_together_have_longer(make: Callable[..., Rank]) -> None:
    """Their heartbeats stop, and slow files are no other cause: nobody is told of another one. Where the end
    does not come, it is that of the hang that was found.
    """
    rank = make(1, 2, Store([BEAT] * 2, NO_CAUSE))
    rank.beat(3)
    assert rank.store.done[-1] == "end"
    rank.store.done.clear()
    assert rank.guard_for(200.0) == END_SECONDS + 1.0  # the last beat was an answer
    assert rank.store.done == ["own stacks", "tell", "stacks of 1000", "kill 1000", "end"]
    assert rank.message.startswith("the job hangs, 4 s without progress: all ranks wait for each other")


def test_a_late_answer_of_the_store_is_told_before_it_ends_the_rank(
    make: Callable[..., Rank], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three times the usual pause, once, and when it answers; not while the ranks end together."""
    caplog.set_level(logging.WARNING)
    clock = [0.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for hang in (None, NO_CAUSE):
        rank = make(1, 2, Store([BEAT] * 2, hang))
        for step in range(10):  # with pauses of 1 s
            clock[0] += 1.0
            rank.progress.step_done(step)
        rank.beat(3)

        def answer(seconds: float, rank: Rank = rank) -> None:
            if seconds == 6.5:
                rank.beat()
                rank.turns = 0

        rank.each = (lambda seconds: None) if hang else answer
        assert rank.guard_for(11.0) is None
        told = [record.getMessage() for record in caplog.records]
        caplog.clear()
        if hang:
            assert told == []
            continue
        assert told == [
            "the store has not answered for 3.5 s. Rank 0 on nid0 (process 1000) may serve it. The ranks end "
            "if it lasts 10 s",
            "the store answers after 5.5 s",
            told[0],  # it is late once more
        ]


def test_ranks_that_wait_for_each_other_end_together(make: Callable[..., Rank]) -> None:
    """Stacks first, then the cause, once all have written theirs; rank 0 leaves last. A hang whose lines
    differ recurs.
    """
    for other in (ELSEWHERE, BEAT):
        store = Store([BEAT, other], NO_CAUSE, **{"hang/written": 1, "hang/ended": 1, "hang/left": 1})
        rank = make(0, 2, store)
        rank.beat(3)
        assert store.done == [
            "own stacks", "hang/written", "hang/told", "tell", "hang/named = ", "hang/ended", "hang/over = ",
            "wait for hang/over", "hang/left", "end",
        ]  # fmt: skip
        assert rank.comes_again == (other is ELSEWHERE) and rank.now == 100.0
        assert rank.message.startswith("the job hangs, 4 s without progress: all ranks wait for each other")
        assert rank.message.endswith(f". Stacks of the ranks are in {rank.stacks}")


def test_ranks_that_do_not_come_are_waited_for_15_s(make: Callable[..., Rank]) -> None:
    """Twice, and a second at the store; a rank that does not look at the beats tells nothing."""
    rank = make(0, 4, Store([BEAT] * 4, NO_CAUSE))
    rank.beat(3)
    assert rank.now == pytest.approx(100.0 + 15 + 15 + 1, abs=0.3)
    assert set(rank.slept) == {0.05}
    assert [rank.store.values[f"hang/{key}"] for key in ("written", "told", "ended", "left")] == [1, 1, 1, 1]
    rank = make(0, 4, Store([BEAT] * 4, NO_CAUSE))
    rank.pace = 1.0  # so that the clock comes to each limit, and not beyond
    rank.beat(3)
    assert rank.now == 100.0 + 15 + 15 + 1
    for hang, others, seconds in ((NO_CAUSE, 2, 31), (NO_CAUSE, 3, 0), (STUCK, 1, 31), (STUCK, 2, 0)):
        there = {f"hang/{key}": others for key in ("written", "ended", "left")}
        rank = make(0, 4, Store([BEAT] * 4, hang, **there))  # of a hang with a frozen rank three end
        rank.pace = 1.0
        rank.beat(3)
        assert rank.now == 100.0 + seconds
    for number in (1, 3):
        rank = make(number, 4, Store([BEAT] * 4, NO_CAUSE))
        rank.beat(3)
        assert rank.store.done == [
            "own stacks", "hang/written", "hang/ended", "wait for hang/over", "hang/left", "end",
        ] and rank.now == 100.0  # fmt: skip
    told = make(2, 4, Store([BEAT] * 4, NO_CAUSE, **{"hang/told": 1}))
    told.beat(3)
    assert told.store.done[-1] == "end" and "tell" not in told.store.done


def test_a_frozen_rank_is_asked_for_its_stacks_once_the_cause_is_told(make: Callable[..., Rank]) -> None:
    """By one rank of its node, which then kills it; its words are in the message. Nobody waits for it."""
    rank = make(0, 2, Store([BEAT] * 2, STUCK))
    rank.beat(3)
    assert rank.store.done == [
        "own stacks", "hang/asked/1", "hang/state/1 = it was stopped", "hang/written", "hang/told", "tell",
        "hang/named = ", "wait for hang/named", "stacks of 1001", "kill 1001", "hang/ended", "hang/over = ",
        "wait for hang/over", "hang/left", "end",
    ]  # fmt: skip
    assert rank.now == 100.0 and not rank.comes_again and rank.blamed == ["nid1"]
    assert (
        "The cause: rank 1 on nid1 (process 1001) (it was stopped) at kielo/train/loop.py:20" in rank.message
    )
    assert (rank.stacks / "rank_00001.txt").read_text() == "it wrote no stacks\n"
    for asked, is_here in ((1, True), (0, False)):  # by another rank, or on another node
        rank = make(0, 2, Store([BEAT] * 2, STUCK, **{"hang/asked/1": asked}))
        rank.here = is_here
        rank.beat(3)
        assert rank.store.done[-1] == "end"
        assert "stacks of 1001" not in rank.store.done and "kill 1001" not in rank.store.done


def test_a_rank_that_failed_is_named_with_its_error_and_left_alone(make: Callable[..., Rank]) -> None:
    rank = make(0, 2, Store([BEAT] * 2, STUCK, **{"failed/1": "ValueError: odd"}))
    rank.beat(3)
    assert "rank 1 on nid1 (process 1001) (it failed: ValueError: odd)" in rank.message
    assert not [done for done in rank.store.done if done.startswith(("stacks", "kill", "hang/asked"))]


def test_a_rank_that_was_silent_and_wakes_tells_nothing(make: Callable[..., Rank]) -> None:
    """The ranks that name it write its stacks; it does not count as one that has ended."""
    rank = make(1, 2, Store([BEAT] * 2, STUCK))
    rank.beat(3)
    assert rank.store.done == ["hang/written", "wait for hang/over", "hang/left", "end"]
    assert rank.store.values["hang/ended"] == 0


def test_rank_0_is_named_where_its_store_is_silent(make: Callable[..., Rank]) -> None:
    """One rank tells it, and that and the first of its node kill it; each ends by itself."""
    told = {}
    for number in (1, 2, 3):
        rank = make(number, 4, Store([BEAT] * 4))
        rank.beat()
        assert rank.guard_for(20.0) == 11.0
        told[number] = rank.store.done
        assert (rank.stacks / "rank_00000.txt").exists() == (number in (1, 2))
        (rank.stacks / "rank_00000.txt").unlink(missing_ok=True)
        if number == 2:
            assert "The cause: rank 0 on nid0 (process 1000) (it was stopped)" in rank.message
    assert told == {
        1: ["own stacks", "stacks of 1000", "kill 1000", "end"],
        2: ["own stacks", "tell", "stacks of 1000", "kill 1000", "end"],
        3: ["own stacks", "end"],
    }


def test_a_store_that_is_silent_to_rank_0_itself_is_no_reason_for_its_stacks(
    make: Callable[..., Rank],
) -> None:
    """Others name it, and write them."""
    rank = make(0, 4, Store([BEAT] * 4))
    assert rank.guard_for(20.0) == 10.5 and rank.store.done == ["end"]


def test_rank_0_is_named_where_its_process_is_not_known_or_not_here(make: Callable[..., Rank]) -> None:
    for is_known in (False, True):
        rank = make(2, 4, Store([BEAT] * 4))
        rank.here = False
        if is_known:
            rank.beat()
        rank.guard_for(20.0)
        assert rank.store.done == ["own stacks", "tell", "end"]
        assert f". The cause: rank 0{' on nid0 (process 1000)' * is_known}" in rank.message


def test_whatever_fails_at_the_end_the_process_ends(make: Callable[..., Rank]) -> None:
    rank = make(0, 2, Store([BEAT] * 2, STUCK))
    del rank.store.values["process/1"]
    rank.beat(3)
    assert rank.store.done == ["own stacks", "end"]


def test_a_rank_beats_before_rank_0_has_told_its_process(make: Callable[..., Rank]) -> None:
    """Who serves the store is asked for once it is known."""
    rank = make(3, 4, Store([BEAT] * 4))
    told = rank.store.values.pop("process/0")
    rank.beat(2)
    assert rank.store.sent.number == 2
    rank.store.values["process/0"] = told
    rank.beat()
    del rank.store.values["process/0"]
    rank.beat()
    assert rank.store.sent.number == 4 and rank.store.done == []


def test_what_a_rank_sends(make: Callable[..., Rank]) -> None:
    """Its step, marks, limits and line; beats are counted from 1."""
    rank = make(1, 4, Store([BEAT] * 4))
    rank.progress.mark()
    rank.progress.step_done(9)
    rank.beat(3)
    sent = rank.store.sent
    assert (sent.number, sent.step, sent.doing, sent.moves, sent.entered) == (3, 9, STEPS, 2, {})
    assert (sent.still_seconds, sent.silent_seconds) == (3.0, 10.0) and not sent.is_inside
    assert sent.at == "me/run/mine.py:10 in step"


def test_two_ranks_look_at_the_beats_once_all_are_there(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and size / 2; the hang that one finds first is that of all."""
    for number, is_first in ((0, True), (0, False), (1, True), (2, True), (2, False), (3, True)):
        looks: list[tuple[int, float]] = []

        def look(beats: list[Beat], elapsed: float, looks: list[tuple[int, float]] = looks) -> Hang:
            looks.append((len(beats), elapsed))
            return STUCK

        seen = SimpleNamespace(look=look)
        monkeypatch.setattr(heartbeat, "HangWatch", lambda size, seconds, seen=seen: seen)
        rank = make(number, 4, Store([BEAT] * 4, **{} if is_first else {"beat/3": None}))
        if not is_first:
            del rank.store.values["beat/3"]
        rank.beat()
        if number in (0, 2) and is_first:
            assert looks == [(4, 0.0)] and rank.store.done[-1] == "end"
            assert json.loads(rank.store.values["hang"]) == asdict(STUCK) | {"ranks": [1]}
        else:
            assert looks == [] and rank.store.done == []
    other = Store([BEAT] * 4)
    rank = make(2, 4, other)
    other.get = lambda key: b"none" if key == "hang" else other.values[key].encode()
    other.values["hang"] = json.dumps(asdict(NO_CAUSE))  # which rank 0 has just found
    rank.beat()
    assert "all ranks wait for each other" in rank.message


def test_a_pause_is_told_once_by_one_rank_and_its_end_too(
    make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stall = Hang((1,), False, 2.5, "without progress")
    for is_other in (False, True):
        seen = iter([None, stall, replace(stall, seconds=3.0), None, None])
        watch = SimpleNamespace(look=lambda *_: None, stall=lambda beats, seen=seen: next(seen))
        monkeypatch.setattr(heartbeat, "HangWatch", lambda size, seconds, watch=watch: watch)
        make(0, 2, Store([BEAT] * 2, **{"stall/7": 1} if is_other else {})).beat(5)
        told = [record.getMessage() for record in caplog.records]
        caplog.clear()
        if is_other:
            assert told == []
        else:
            assert told[0].startswith(
                "after step 7: 2.5 s without progress. The cause: rank 1 on nid1 (process"
            )
            assert told[1:] == ["step 7: training continues after 3.0 s"]


def test_the_line_of_a_rank_is_the_innermost_outside_of_libraries(make: Callable[..., Rank]) -> None:
    """Kielo's own, wherever it lies; three parts of its path. Its file says if it is in torch."""

    def frame(*files: str) -> Any:
        outer = None
        for number, file in enumerate(files, start=1):
            code = SimpleNamespace(co_filename=file, co_name=f"f{number}")
            outer = SimpleNamespace(f_code=code, f_lineno=10 * number, f_back=outer)
        return outer

    in_torch, in_python = os.path.dirname(torch.__file__), os.path.dirname(os.__file__)
    ours = f"{os.path.dirname(kielo.__file__)}/train/loop.py"
    cases = {
        ("/home/me/run/mine.py", f"{in_torch}/nn.py", f"{in_python}/threading.py", "<frozen>"):
            ("me/run/mine.py:10 in f1", False),
        ("/a/b.py", ours, f"{in_torch}/nn.py"): ("kielo/train/loop.py:20 in f2", False),
        ("/a/b/c.py", f"{in_torch}/distributed/c10d.py"): ("a/b/c.py:10 in f1", True),
        (f"{in_torch}/nn.py",): ("an unknown line", False),
        (f"{in_python}/kielo/.venv/mine.py",): ("an unknown line", False),
        (): ("an unknown line", False),
    }  # fmt: skip
    rank = make(1, 2, Store([BEAT] * 2))
    for files, (line, is_inside) in cases.items():
        rank.frame = frame(*files)
        rank.beat()
        assert (rank.store.sent.at, rank.store.sent.is_inside) == (line, is_inside)


@pytest.mark.parametrize("error", (None, ValueError("x" * 3000)))
def test_the_end_of_a_rank_is_left_in_the_store(error: Exception | None, tmp_path: Path) -> None:
    """That it sends no more beats; or why it failed, in 2,000 characters at most. Its process is there."""
    store, progress = torch.distributed.HashStore(), Progress(3.0, 2.0, 50.0, 6.0)
    world = SimpleNamespace(rank=1, size=4, store=store)
    with suppress(ValueError), Heartbeat(world, progress, tmp_path, lambda *_: None):
        assert json.loads(store.get("process/1"))["pid"] == os.getpid() and store.get("hang") == b"none"
        if error is not None:
            raise error
    if error is None:
        assert Beat.read(store.get("beat/1")) == Beat.last(1) and not store.check(["failed/1"])
    else:
        assert store.get("failed/1").decode() == "ValueError: " + "x" * 1988
        assert not store.check(["beat/1"])


def test_a_signal_writes_the_stacks_of_a_rank_while_it_is_watched(monkeypatch, tmp_path: Path) -> None:
    """Into the file that its process names; a thread other than the main one takes no signal."""
    done: list[Any] = []
    handler = SimpleNamespace(register=lambda *given: done.append(given), unregister=done.append)
    monkeypatch.setattr(heartbeat, "faulthandler", handler)
    store = torch.distributed.HashStore()
    world = SimpleNamespace(rank=0, size=2, store=store)

    def enter() -> None:
        with Heartbeat(world, Progress(3.0, 2.0, 50.0, 6.0), tmp_path, lambda *_: None):
            done.append("inside")

    enter()
    (number, file), *rest = done
    assert number == signal.SIGUSR2 and rest == ["inside", signal.SIGUSR2]
    assert json.loads(store.get("process/0"))["stacks_file"] > 2 and file.closed
    done.clear()
    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert done[0] == "inside"

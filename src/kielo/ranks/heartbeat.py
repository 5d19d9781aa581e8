"""Heartbeats of the ranks of a job, beside the training: a stuck rank is named, and the job ends.

A thread of each rank writes a `Beat` into the store, and two ranks look at all beats (`hang_watch.py`). When
the job hangs, every rank that still can writes its stacks, one rank prints and records the cause, and all end
with exit code 76. A frozen rank writes nothing: another rank of its node asks it to (`local_ranks.py`).
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from kielo.artifact.attempt_files import EXIT_CODES
from kielo.ranks.communicator import own_connection
from kielo.ranks.flight_record import write_flight_record
from kielo.ranks.hang_watch import (
    Beat,
    Hang,
    HangWatch,
    Progress,
    beat_seconds,
    describe,
    describe_stall,
    group_key,
    stall_limit,
)
from kielo.ranks.local_ranks import RankProcess
from kielo.ranks.world import World

logger = logging.getLogger(__name__)

HUNG = EXIT_CODES["hung"]
_ANSWER_SECONDS = 5.0  # of the store, at the end
_ENDING_SECONDS = 15.0  # until all ranks have written their stacks
_LONGEST_END_SECONDS = 4 * _ENDING_SECONDS  # more than all waits of `_end_together`
_MOST_CHARACTERS = 2000  # of an error, in the store
_LONGEST_LINE = 200  # characters of a place in the code, in a beat
_MOST_BLAMED = 2  # hosts of one hang: more hosts have a network or a file system in common
_NO_HANG = "none"
_TORCH = os.path.dirname(torch.__file__)
_DISTRIBUTED = os.path.join(_TORCH, "distributed")
_PYTHON = os.path.dirname(os.__file__)
_KIELO = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Heartbeat:
    """The heartbeat of this rank, while it is entered.

    stacks_folder: takes each rank's stacks when the job hangs. One rank calls `on_hang` with the message,
    True if the program is the cause and the hang will recur, and the blamed hosts, at most `_MOST_BLAMED`.
    """

    def __init__(
        self,
        world: World,
        progress: Progress,
        stacks_folder: Path,
        on_hang: Callable[[str, bool, Sequence[str]], None],
    ):
        self._world, self._progress = world, progress
        self._stacks_folder, self._on_hang = stacks_folder, on_hang
        self._groups: Sequence[dist.ProcessGroup] = ()
        self._alike: dict[str, dist.ProcessGroup] = {}
        self._seconds = beat_seconds(world.size)
        is_watcher = world.rank in (0, world.size // 2)
        self._watch = HangWatch(world.size, self._seconds) if is_watcher else None
        self._beats: list[Beat] = []
        self._stall: Hang | None = None  # the reported pause
        self._first: RankProcess | None = None  # rank 0, which may serve the store
        self._number = 0
        self._found: Hang | None = None  # the hang that ends the ranks
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="heartbeat", daemon=True)
            for target in (self._run, self._guard)
        ]

    def use(self, groups: Sequence[dist.ProcessGroup], alike: Sequence[dist.ProcessGroup]) -> None:
        """Set the groups to count. alike: the groups in which all ranks begin the same collectives."""
        self._alike = {group_key(dist.get_process_group_ranks(group)): group for group in alike}
        self._groups = tuple(groups)

    def __enter__(self) -> "Heartbeat":
        self._stacks = tempfile.TemporaryFile("w+", encoding="utf-8", prefix="kielo_stacks_")
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(signal.SIGUSR2, self._stacks)
        self._store = own_connection(self._world.store)
        own = RankProcess.own(self._stacks.fileno())
        self._store.set(f"process/{self._world.rank}", json.dumps(asdict(own)))
        self._store.compare_set("hang", "", _NO_HANG)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._progress.has_changed.set()  # wakes the thread
        for thread in self._threads:
            thread.join(_ANSWER_SECONDS)
        if not self._threads[0].is_alive():
            if kind is None:  # the other ranks may still be at work
                self._leave()
            else:
                why = f"{kind.__name__}: {error}"[:_MOST_CHARACTERS]
                with suppress(RuntimeError):
                    self._store.set(f"failed/{self._world.rank}", why.encode(errors="replace").decode())
        faulthandler.unregister(signal.SIGUSR2)
        self._stacks.close()

    def _run(self) -> None:
        """Exchange heartbeats until the end. A frozen store blocks this thread, which `_guard` notices."""
        looked_at = time.monotonic()
        while True:
            self._progress.has_changed.wait(self._seconds)
            self._progress.has_changed.clear()
            if self._over.is_set():
                return
            now = time.monotonic()
            try:
                hang = self._exchange(self._store, now - looked_at)
            except dist.DistError:  # the store has ended
                return
            except Exception:  # must not end the training
                self._over.set()
                self._leave()
                raise
            looked_at, self._number = now, self._number + 1
            if hang is not None and not self._over.is_set():
                self._found = hang
                self._end(hang, self._store)

    def _leave(self) -> None:
        with suppress(RuntimeError):
            self._store.set(f"beat/{self._world.rank}", Beat.last(self._number + 1).text())

    def _guard(self) -> None:
        """End this process if the store, which rank 0 may serve, does not answer for too long.

        One rank warns before. Ranks that end together have longer: slow files are no reason to name another
        cause.
        """
        looked_at, number, unanswered, is_told = time.monotonic(), 0, 0.0, False
        while not self._over.wait(self._seconds):
            now = time.monotonic()
            is_answered, number = number != self._number, self._number
            if is_answered and is_told:
                logger.warning("the store answers after %.1f s", unanswered)
                is_told = False
            unanswered = 0.0 if is_answered else unanswered + min(now - looked_at, 2 * self._seconds)
            looked_at, limit = now, self._progress.limits()[1]
            if self._found is not None:
                if unanswered > _LONGEST_END_SECONDS:
                    self._end(self._found, None)
                continue
            if unanswered > limit and not self._over.is_set():
                why = f"without an answer of its store (the limit is {limit:.3g} s)"
                self._end(Hang((0,), True, unanswered, why), None)
            is_late = stall_limit(self._seconds, self._progress.stall_seconds) < unanswered
            if is_late and not is_told and self._watch is not None and self._first is not None:
                late = f"the store has not answered for {unanswered:.1f} s"
                where = f"Rank 0 on {self._first} may serve it"
                logger.warning("%s. %s. The ranks end if it lasts %.3g s", late, where, limit)
                is_told = True

    def _exchange(self, store: dist.Store, elapsed: float) -> Hang | None:
        store.set(f"beat/{self._world.rank}", self._beat().text())
        told = store.get("hang")
        if told.decode() != _NO_HANG:
            return _hang_of(told)
        if self._first is None and store.check(["process/0"]):
            self._first = _process_of(store, 0)
        return self._look(store, elapsed)

    def _beat(self) -> Beat:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        still, silent = self._progress.limits()
        return Beat(
            number=self._number + 1,
            step=self._progress.step,
            doing=self._progress.doing,
            moves=sum(map(_begun, self._groups)) + self._progress.marks(),
            entered={ranks: _begun(group) for ranks, group in self._alike.items()},
            at=_line_of(frame)[:_LONGEST_LINE],
            is_inside=frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED),
            still_seconds=still,
            silent_seconds=silent,
            stall_seconds=self._progress.stall_seconds,
            p99_seconds=self._progress.p99_seconds,
        )

    def _look(self, store: dist.Store, elapsed: float) -> Hang | None:
        if self._watch is None:
            return None
        keys = [f"beat/{rank}" for rank in range(self._world.size)]
        if not self._beats and not store.check(keys):
            return None  # some ranks have not arrived: the start of communicators names them
        self._beats = [Beat.read(text) for text in store.multi_get(keys)]
        hang = self._watch.look(self._beats, elapsed)
        if hang is None:
            self._note_stall(self._watch.stall(self._beats), store)
            return None
        return _hang_of(store.compare_set("hang", _NO_HANG, json.dumps(asdict(hang))))

    def _note_stall(self, stall: Hang | None, store: dist.Store) -> None:
        step = self._beats[0].step
        if stall is None and self._stall is not None:
            logger.warning("step %d: training continues after %.1f s", step, self._stall.seconds)
        elif stall is not None and self._stall is None:
            if store.add(f"stall/{step}", 1) > 1:
                return
            places = {rank: str(_process_of(store, rank)) for rank in stall.ranks}
            logger.warning("after step %d: %s", step, describe_stall(stall, self._beats, places))
        self._stall = stall

    def _end(self, hang: Hang, store: dist.Store | None) -> None:
        with suppress(Exception):  # whatever fails here, the process ends
            self._stacks_folder.mkdir(parents=True, exist_ok=True)
            if not self._was_silent(hang):
                self._write_stacks()
            if store is None:
                self._end_without_store(hang)
            else:
                self._end_together(hang, store)
        os._exit(HUNG)

    def _write_stacks(self) -> None:
        with open(self._file(self._world.rank), "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        with suppress(Exception):
            write_flight_record(self._stacks_folder.parent / "flight_record", self._world.rank)

    def _end_together(self, hang: Hang, store: dist.Store) -> None:
        asked = {}
        for rank in hang.ranks if hang.is_silent else ():
            if store.check([f"failed/{rank}"]):  # it ends by itself
                failure = store.get(f"failed/{rank}").decode(errors="replace")
                store.set(f"hang/state/{rank}", f"it failed: {failure}")
                continue
            process = _process_of(store, rank)
            if process.is_here() and rank != self._world.rank and store.add(f"hang/asked/{rank}", 1) == 1:
                asked[rank] = process
                store.set(f"hang/state/{rank}", process.state())
        written = store.add("hang/written", 1)
        is_telling = self._watch is not None and not self._was_silent(hang) and store.add("hang/told", 1) == 1
        if is_telling:
            self._wait_for_others(hang, store, "hang/written", written, _ENDING_SECONDS)
            known = [rank for rank in hang.ranks if store.check([f"hang/state/{rank}"])]
            states = {rank: store.get(f"hang/state/{rank}").decode() for rank in known}
            self._tell(hang, {rank: _process_of(store, rank) for rank in hang.ranks}, states)
            store.set("hang/named", "")
        if asked:  # after the report, because a rank that is woken for its stacks may end (SIGSEGV)
            store.wait(["hang/named"], timedelta(seconds=_ENDING_SECONDS + 2))
            for rank, process in asked.items():
                self._end_silent(rank, process)
        ended = store.add("hang/ended", 0 if self._was_silent(hang) else 1)
        if is_telling:
            self._wait_for_others(hang, store, "hang/ended", ended, _ENDING_SECONDS)
            store.set("hang/over", "")
        store.wait(["hang/over"], timedelta(seconds=2 * _ENDING_SECONDS + 2))
        left = store.add("hang/left", 1)
        if self._world.rank == 0:  # the last, because it may serve the store
            self._wait_for_others(hang, store, "hang/left", left, 2 * self._seconds)

    def _wait_for_others(
        self, hang: Hang, store: dist.Store, key: str, number: int, most_seconds: float
    ) -> None:
        until = time.monotonic() + most_seconds
        while number < self._heard(hang) and time.monotonic() < until:
            time.sleep(0.05)
            number = store.add(key, 0)

    def _heard(self, hang: Hang) -> int:
        return self._world.size - (len(hang.ranks) if hang.is_silent else 0)

    def _end_without_store(self, hang: Hang) -> None:
        states, is_telling = {}, self._world.rank == self._world.size // 2
        if self._beats:
            self._beats[self._world.rank] = self._beat()
        first = self._first
        asked = first if first is not None and first.is_here() else None
        if not is_telling and self._world.rank != 1:
            asked = None
        if asked is not None:
            states[0] = asked.state()
        if is_telling:
            self._tell(hang, {} if first is None else {0: first}, states)
        if asked is not None:
            self._end_silent(0, asked)

    def _was_silent(self, hang: Hang) -> bool:
        return hang.is_silent and self._world.rank in hang.ranks

    def _end_silent(self, rank: int, process: RankProcess) -> None:
        self._file(rank).write_text(process.stacks() or "it wrote no stacks\n", encoding="utf-8")
        with suppress(OSError):  # else it would continue, and record that it lost the other ranks
            os.kill(process.pid, signal.SIGKILL)

    def _file(self, rank: int) -> Path:
        return self._stacks_folder / f"rank_{rank:05d}.txt"

    def _tell(self, hang: Hang, processes: dict[int, RankProcess], states: dict[int, str]) -> None:
        places = {rank: str(process) for rank, process in processes.items()}
        message = describe(hang, self._beats, places, states)
        message += f". Stacks of the ranks are in {self._stacks_folder}"
        hosts = sorted({process.host.partition(".")[0] for process in processes.values()})
        recurs = not hang.ranks and len({beat.at for beat in self._beats}) > 1
        self._on_hang(message, recurs, hosts if len(hosts) <= _MOST_BLAMED else ())


def _begun(group: dist.ProcessGroup) -> int:
    """Return how many collectives and messages this rank has begun in `group` (torch 2.10 to 2.13)."""
    try:
        return group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stub lacks it
    except RuntimeError:  # a backend that does not count
        return 0


def _line_of(frame: FrameType | None) -> str:
    """Return the innermost line outside of torch and of Python's library, as `file:line in function`."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith((_TORCH, _PYTHON, "<")) and not file.startswith(_KIELO)
        if not is_library:
            shown = os.sep.join(file.split(os.sep)[-3:])
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def _hang_of(text: bytes) -> Hang:
    content = json.loads(text)
    return Hang(**content | {"ranks": tuple(content["ranks"])})


def _process_of(store: dist.Store, rank: int) -> RankProcess:
    return RankProcess(**json.loads(store.get(f"process/{rank}")))

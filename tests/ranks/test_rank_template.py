"""The process from which ranks are forked, with its calls of the system in memory: forks, signals, ends."""

import json
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.ranks import rank_template
from kielo.ranks.rank_template import RankTemplate

OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
CONTROL, REPORT = 7, 8
CLOSED = b""


class System:
    """Processes, signals and a clock. done: what was asked of them, in its order.

    forked: what `fork` returns. turns: bytes that come from the launcher, or processes that end, with their
    status; one a look.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forked: list[int], turns: list[Any]):
        self.done: list[Any] = []
        self.beats: list[Any] = []
        self.forked, self.turns, self.ends, self.now = forked, turns, {}, 50.0
        self.environ = {"HOME": "/home/me"}
        self.handlers: dict[int, Any] = {number: f"before {number.name}" for number in OURS}
        for name, module in {
            "os": SimpleNamespace(
                read=lambda file, size: self.turns.pop(0), write=self.write, fork=lambda: self.forked.pop(0),
                close=lambda file: self.done.append(("close", file)), waitpid=self.waitpid,
                kill=lambda process, number: self.done.append(("kill", process, number)),
                getpid=lambda: 100, WNOHANG=os.WNOHANG, waitstatus_to_exitcode=os.waitstatus_to_exitcode,
                environ=self.environ,
            ),
            "signal": SimpleNamespace(
                SIG_BLOCK="block", SIG_UNBLOCK="unblock", SIGTERM=signal.SIGTERM, SIGKILL=signal.SIGKILL,
                signal=self.handle, pthread_sigmask=lambda how, numbers: self.done.append((how, *numbers)),
            ),
            "sys": SimpleNamespace(
                stdout=SimpleNamespace(flush=lambda: self.done.append("out")),
                stderr=SimpleNamespace(flush=lambda: self.done.append("err")),
            ),
            "select": SimpleNamespace(select=self.select),
            "time": SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep),
            "ctypes": SimpleNamespace(CDLL=lambda _: SimpleNamespace(prctl=self.prctl)),
        }.items():  # fmt: skip
            monkeypatch.setattr(rank_template, name, module)
        self.template = RankTemplate(CONTROL, REPORT)

    def handle(self, number: signal.Signals, handler: Any) -> Any:
        before, self.handlers[number] = self.handlers[number], handler
        return before

    def select(self, readers: list[int], *others: Any) -> tuple[list[int], list[int], list[int]]:
        assert readers == [CONTROL]
        if isinstance(self.turns[0], bytes):
            return readers, [], []
        self.ends = dict(self.turns.pop(0))
        return [], [], []

    def write(self, file: int, text: bytes) -> None:
        assert file == REPORT and text.endswith(b"\n")
        content = json.loads(text)
        (self.beats if "alive" in content else self.done).append(content)

    def waitpid(self, process: int, how: int) -> tuple[int, int]:
        assert how == os.WNOHANG
        return (process, self.ends.pop(process)) if process in self.ends else (0, 0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.turns:
            self.ends = dict(self.turns.pop(0))

    def prctl(self, *numbers: int) -> None:
        self.done.append(("prctl", *numbers))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., System]:
    return lambda forked, *turns: System(monkeypatch, list(forked), list(turns))


def lines(*messages: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


START = {"start": [{"RANK": "0"}, {"RANK": "1"}, {"RANK": "2"}], "arguments": ["-m", "kielo"]}
A_FORK = ["out", "err", ("block", *OURS), ("unblock", *OURS)]


def test_ends_of_ranks_are_reported_and_signals_passed_on(make: Callable[..., System]) -> None:
    """An exit code, or minus a signal's number. Those that have ended get no signal; a message may come in
    pieces. What is left when the launcher has gone has eight seconds to save, and is killed.
    """
    first, second = lines(START)[:9], lines(START)[9:]
    system = make([101, 102, 103], first, second, {102: 9}, lines({"signal": 10}), {101: 7 << 8}, CLOSED)
    assert system.template.serve() is None
    assert system.done == [
        *3 * A_FORK, {"ended": 1, "code": -9}, ("kill", 101, 10), ("kill", 103, 10),
        {"ended": 0, "code": 7}, ("kill", 103, signal.SIGTERM), ("kill", 103, signal.SIGKILL),
    ]  # fmt: skip
    assert 58.0 <= system.now < 58.1
    assert system.beats == [{"alive": 100}]  # one a second, of a clock that stood still while it served


def test_ranks_that_save_in_time_are_not_killed(make: Callable[..., System]) -> None:
    system = make([101, 102], lines({"start": [{}, {}], "arguments": []}), CLOSED, {102: 0}, {101: 75 << 8})
    assert system.template.serve() is None
    assert system.done == [
        *2 * A_FORK, ("kill", 101, signal.SIGTERM), ("kill", 102, signal.SIGTERM),
        {"ended": 1, "code": 0}, {"ended": 0, "code": 75},
    ]  # fmt: skip
    assert system.now < 50.2


def test_ranks_that_are_stopped_before_they_begin_are_not_forked(make: Callable[..., System]) -> None:
    """Both messages are there at the first look; the end is that of the signal."""
    system = make([], lines(START, {"signal": 15}), CLOSED)
    assert system.template.serve() is None
    assert system.done == [{"ended": rank, "code": -15} for rank in range(3)] and system.beats == []


def test_a_forked_rank_has_its_variables_and_the_handlers_from_before(make: Callable[..., System]) -> None:
    """It ends with its parent, reads nothing of the launcher's, and gets what it is to run."""
    system = make([101, 0], lines(START))
    for number in OURS:
        assert system.handlers[number](number, None) is None  # the template ignores them
    assert system.template.serve() == ["-m", "kielo"]
    assert system.done == [
        *A_FORK, "out", "err", ("block", *OURS), ("prctl", 1, signal.SIGKILL), ("close", CONTROL),
        ("close", REPORT), ("unblock", *OURS),
    ]  # fmt: skip
    assert system.handlers == {number: f"before {number.name}" for number in OURS}
    assert system.environ == {"HOME": "/home/me", "RANK": "1"}

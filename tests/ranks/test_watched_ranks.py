"""Ranks of this machine, whose process and clock are in memory: what they are given, and whose end counts."""

import json
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.ranks import local_ranks
from kielo.ranks.local_ranks import Failure, Ranks

KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


class Template:
    """The process from which ranks are forked. A look takes a second, and finds what `ends` has for it.

    told: what it was told, with the second. ends: second → bytes of its report, b"" at its own end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: dict[int, bytes], code: int = 0):
        self.ends, self.code, self.now, self.told, self.begun = ends, code, 1000, [], []
        self.is_killed, self.has_ended, self.waits, self.closed = False, False, 0, []
        files = SimpleNamespace(
            pipe=iter([(3, 4), (5, 6), (13, 14), (15, 16)]).__next__, close=self.closed.append,
            write=self.write, read=lambda file, size: self.ends.pop(self.now), environ={"HOME": "/home/me"},
            cpu_count=lambda: 9,
        )  # fmt: skip
        for name, module in {
            "os": files,
            "subprocess": SimpleNamespace(Popen=self.begin),
            "select": SimpleNamespace(select=self.select),
            "time": SimpleNamespace(monotonic=lambda: float(self.now)),
            "free_port": lambda: 29_501,
        }.items():
            monkeypatch.setattr(local_ranks, name, module)

    def begin(self, command: list[str], **options: Any) -> "Template":
        self.begun.append((command[1:], options))
        return self

    def poll(self) -> int | None:
        return self.code if self.has_ended else None

    def wait(self) -> int:
        self.waits += 1
        return self.code

    def kill(self) -> None:
        self.is_killed = True

    def write(self, file: int, text: bytes) -> None:
        assert file in (4, 14) and text.endswith(b"\n")
        self.told.append((self.now - 1000, json.loads(text)))

    def select(self, readers: list[int], *others: Any) -> tuple[list[int], list[int], list[int]]:
        self.now += 1
        return (readers if self.now in self.ends else []), [], []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Template]:
    def made(ends: dict[int, bytes], code: int = 0) -> Template:
        return Template(monkeypatch, {1000 + second: text for second, text in ends.items()}, code)

    return made


def ended(*ranks: tuple[int, int]) -> bytes:
    return b"".join(json.dumps({"ended": rank, "code": code}).encode() + b"\n" for rank, code in ranks)


def started(number: int = 2, **options: Any) -> Ranks:
    ranks = Ranks(["-m", "kielo"], number, 75, **options)
    ranks.start()
    return ranks


def signals(template: Template) -> list[tuple[int, int]]:
    return [(second, told["signal"]) for second, told in template.told if "signal" in told]


def test_ranks_get_torchruns_variables_and_their_share_of_the_cores(make: Callable[..., Template]) -> None:
    """Nine cores for two ranks are four each; attempts are counted from 0."""
    template = make({1: ended((1, 0), (0, 75)), 2: ended((0, 0), (1, 0))})
    ranks = started(variables={"KIELO": "1"}, modules=("torch", "numpy"))
    assert ranks.wait(9) is None and not ranks.is_stopping
    ranks.start(is_quiet=True)
    everyone = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501",
    }  # fmt: skip
    for attempt, (_, told) in enumerate(template.told):
        count = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        places = [everyone | count | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        assert told == {"start": places, "arguments": ["-m", "kielo"]}
    assert len(template.told) == 2
    ((command, options),) = template.begun  # one for both attempts
    assert command == ["-P", "-m", "kielo.ranks.rank_template", "3", "6", "torch", "numpy"]
    assert options == {
        "env": {"HOME": "/home/me", "OMP_NUM_THREADS": "4", "KIELO": "1"}, "stdout": None,
        "pass_fds": (3, 6), "start_new_session": True,
    }  # fmt: skip
    template.has_ended = True
    ranks.start(is_quiet=True)  # from a new one
    assert len(template.begun) == 2 and template.begun[1][1]["stdout"] == 2


@pytest.mark.parametrize(
    ("cores", "number", "threads"), [(9, 20, "1"), (None, 2, "1"), (9, 9, "1"), (8, 3, "2")]
)
def test_a_rank_has_a_thread_at_the_least(make, monkeypatch, cores, number: int, threads: str) -> None:
    """Also where the number of cores is not known."""
    template = make({})
    monkeypatch.setattr(local_ranks.os, "cpu_count", lambda: cores)
    started(number)
    assert template.begun[0][1]["env"]["OMP_NUM_THREADS"] == threads


def test_the_others_have_five_seconds_after_a_failure(make: Callable[..., Template]) -> None:
    """Then they are killed, which is no failure of theirs. One more that fails before counts after."""
    template = make({2: ended((1, 3)), 9: ended((0, -KILL), (2, -KILL))})
    assert started(3).wait(60) == Failure(1, 3)
    assert signals(template) == [(8, KILL)]  # later than 2 + 5
    template = make({2: ended((1, 3)), 4: ended((0, 9)), 5: ended((2, 0))})
    assert started(3).wait(60) == Failure(1, 3) and signals(template) == []


def test_a_signal_is_the_cause_of_what_ends_beside_it(make: Callable[..., Template]) -> None:
    """Whatever comes first; and a report may come in pieces."""
    text = ended((0, 1), (1, -11))
    make({1: text[:5], 2: text[5:40], 3: text[40:]})
    assert started().wait(60) == Failure(1, -11)
    make({1: ended((0, 0), (1, 0))})
    assert started().wait(60) is None


def test_ranks_that_are_stopped_have_their_time(make: Callable[..., Template]) -> None:
    """The signal is sent once, and SIGKILL when the time is over; that end is a failure then."""
    template = make({4: ended((0, 75)), 20: ended((1, -KILL))})
    ranks = started()
    ranks.stop(TERM)
    assert ranks.is_stopping and ranks.wait(10) == Failure(1, -KILL)
    assert signals(template) == [(1, TERM), (12, KILL)]  # later than 1 + 10


def test_a_failure_before_the_time_of_a_stop_is_over_counts_too(make: Callable[..., Template]) -> None:
    """The sooner of both limits holds."""
    template = make({2: ended((0, 4)), 30: ended((1, -KILL))})
    ranks = started()
    ranks.stop(TERM)
    assert ranks.wait(20) == Failure(0, 4) and signals(template) == [(1, TERM), (8, KILL)]


@pytest.mark.parametrize(("code", "expected"), [(-15, -15), (3, 3), (0, -KILL)])
def test_where_the_process_that_forks_ends_so_have_all_ranks(make, code: int, expected: int) -> None:
    make({3: b""}, code)
    assert started(2).wait(60) == Failure(0, expected)


def test_a_failure_in_words() -> None:
    """Signals by name; the one that the kernel sends when memory is short says so."""
    texts = {code: str(Failure(6, code)) for code in (0, 1, 137, -KILL, -TERM, -60)}
    assert texts == {
        0: "rank 6 ended with exit code 0", 1: "rank 6 ended with exit code 1",
        137: "rank 6 ended with exit code 137", -KILL: "rank 6 ended with SIGKILL (out of memory?)",
        -TERM: "rank 6 ended with SIGTERM", -60: f"rank 6 ended with {name_of(60)}",
    }  # fmt: skip


def name_of(number: int) -> str:
    """Only some numbers have names."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def test_a_template_is_killed_or_waited_for_once(make: Callable[..., Template]) -> None:
    template = make({})
    ranks = started()
    ranks.kill()
    assert template.is_killed and template.waits == 1
    assert template.closed == [3, 6, 4, 5]  # its own ends at the start, ours now
    template.is_killed = False
    ranks.kill()
    ranks.close()
    assert not template.is_killed

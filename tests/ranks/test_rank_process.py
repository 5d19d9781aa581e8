"""A silent rank as another one of its node sees it, in a folder in place of /proc; torch's flight record."""

import os
import pickle
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.ranks import flight_record, local_ranks
from kielo.ranks.flight_record import keep_flight_record, write_flight_record
from kielo.ranks.local_ranks import RankProcess

RANK = RankProcess("nid7", 12, 5)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """/proc in a folder, a clock, and what was asked. on_sleep is called at each sleep; here: programs."""
    found = SimpleNamespace(
        root=tmp_path, now=100.0, slept=[], done=[], on_sleep=lambda: None, here=[], answer=""
    )

    def sleep(seconds: float) -> None:
        found.now += seconds
        found.slept.append(seconds)
        found.on_sleep()

    def run(command: list[str], **options: Any) -> Any:
        assert options.pop("capture_output") and options.pop("text") and not options.pop("check")
        found.done.append((*command, options.pop("timeout")))
        assert not options
        return SimpleNamespace(stdout=found.answer)

    for name, module in {
        "Path": lambda path: tmp_path / str(path).lstrip("/"),
        "time": SimpleNamespace(monotonic=lambda: found.now, sleep=sleep),
        "os": SimpleNamespace(
            kill=lambda *both: found.done.append(both), getpid=lambda: 77, environ=os.environ
        ),
        "shutil": SimpleNamespace(which=lambda program: program if program in found.here else None),
        "subprocess": SimpleNamespace(run=run, SubprocessError=ValueError),
    }.items():
        monkeypatch.setattr(local_ranks, name, module)
    (tmp_path / "proc/12/fd").mkdir(parents=True)
    (tmp_path / "proc/12/fd/5").touch()
    return found


@pytest.mark.parametrize(
    ("letter", "words"),
    [
        ("T", "it was stopped by a signal (SIGSTOP), a debugger or the scheduler"),
        ("t", "a debugger has stopped it"),
        ("D", "the kernel does not let it continue: a disk, a network file system or a driver"),
        ("Z", "it has ended"), (None, "it has ended"),
        ("S", "none of its Python threads runs: a library may hold Python's lock"),
    ],
)  # fmt: skip
def test_the_state_is_the_letter_after_the_name(system: Any, letter: str | None, words: str) -> None:
    """A name may have spaces and brackets of its own."""
    if letter is not None:
        (system.root / "proc/12/stat").write_text(f"12 (T Z) (D) {letter} 1 Z T D")
    assert RANK.state() == words


def test_a_silent_process_is_woken_for_its_stacks(system: Any) -> None:
    """Asked again each tenth of a second; py-spy is not asked where they come."""
    file, system.here = system.root / "proc/12/fd/5", ["py-spy"]
    (system.root / "proc/12/stat").write_text("12 (python) S 1")
    system.on_sleep = lambda: file.write_text("Thread 1" if system.now > 102.0 else "")
    assert RANK.stacks() == "Thread 1" and system.slept == [0.1] * len(system.slept)
    assert len(system.slept) in (20, 21)  # two seconds
    assert system.done == [(12, signal.SIGUSR2), (12, signal.SIGCONT)]


def test_py_spy_is_asked_after_three_seconds(system: Any) -> None:
    system.answer, signals = "by py-spy", [(12, signal.SIGUSR2), (12, signal.SIGCONT)]
    (system.root / "proc/12/stat").write_text("12 (python) T 1")
    assert RANK.stacks() == "" and system.done == signals and 103.0 <= system.now < 103.15
    system.here = ["py-spy"]
    assert RANK.stacks() == "by py-spy"
    assert system.done == [*2 * signals, ("py-spy", "dump", "--nonblocking", "--pid", "12", 3.0)]


@pytest.mark.parametrize("letter", ["Z", None])
def test_a_process_that_ends_when_it_is_woken_is_not_waited_for(system: Any, letter: str | None) -> None:
    """The others lose it then, and end soon. What it wrote before counts, though /proc has lost it."""
    file, stat = system.root / "proc/12/fd/5", system.root / "proc/12/stat"

    def end() -> None:
        file.write_text("Thread 1")
        file.unlink()
        stat.write_text(f"12 (python) {letter} 1") if letter else stat.unlink()

    stat.write_text("12 (python) T 1")
    system.on_sleep = lambda: stat.write_text(f"12 (python) {letter} 1") if letter else stat.unlink()
    assert RANK.stacks() == "" and system.slept == [0.1]
    system.on_sleep = end
    stat.write_text("12 (python) T 1")
    assert RANK.stacks() == "Thread 1" and system.slept == [0.1] * 2


def test_a_process_knows_its_host(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler's name of the node, which may differ from the host's: a job excludes nodes by it."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert str(RANK) == "nid7 (process 12)" and not RANK.is_here()
    assert RankProcess.own(4) == RankProcess(socket.gethostname(), 77, 4)
    assert RankProcess.own(4).is_here()
    monkeypatch.setenv("SLURMD_NODENAME", "nid7")
    assert RankProcess.own(4).host == "nid7" and RANK.is_here()


def test_a_record_is_written_where_torch_has_noted_something(monkeypatch, tmp_path: Path) -> None:
    """The first that has entries: all collectives, with stacks, also those that have ended."""
    asked: list[tuple[bool, ...]] = []
    texts = {"empty": pickle.dumps({"entries": []}), "full": pickle.dumps({"entries": [1]})}

    def answers(text: bytes) -> Any:
        return lambda *options: asked.append(options) or text

    monkeypatch.setattr(flight_record, "c10d", SimpleNamespace(_dump_nccl_trace=answers(texts["empty"])))
    write_flight_record(tmp_path / "none", 7)
    assert asked == [(True, True, False)] and not (tmp_path / "none").exists()
    both = {"_dump_nccl_trace": answers(texts["empty"]), "_dump_fr_trace": answers(texts["full"])}
    monkeypatch.setattr(flight_record, "c10d", SimpleNamespace(**both))
    write_flight_record(tmp_path / "deep/record", 7)
    assert (tmp_path / "deep/record/rank_00007").read_bytes() == texts["full"]
    write_flight_record(tmp_path / "deep/record", 12_345)
    assert (tmp_path / "deep/record/rank_12345").exists()


def test_torch_keeps_2000_collectives_unless_it_is_told_otherwise(monkeypatch) -> None:
    for given, kept in ((None, "2000"), ("50", "50")):
        environment = {} if given is None else {"TORCH_FR_BUFFER_SIZE": given}
        monkeypatch.setattr(flight_record, "os", SimpleNamespace(environ=environment))
        keep_flight_record()
        assert environment == {"TORCH_FR_BUFFER_SIZE": kept}

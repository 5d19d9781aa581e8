"""Ranks of one machine: how often they are started, what is said then, and whose outcome is returned."""

import io
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.attempt_files import EXIT_CODES, REFUSAL_FILE, Outcome
from kielo.ranks.local_ranks import Failure
from kielo.recipe.errors import KieloError
from kielo.train import start_ranks as module
from kielo.train.start_ranks import read_outcome, start_ranks

KILLED = Failure(1, -9)


def write(folder: Path, outcome: str, step: int = 3, message: str = "") -> None:
    found = Outcome(outcome=outcome, step=step, tokens=0, exit_code=EXIT_CODES[outcome], message=message)
    file = folder / "outcome.new"
    file.write_text(found.model_dump_json(), encoding="utf-8")
    file.replace(folder / Outcome.FILE_NAME)


class Ranks:
    """In place of the processes: each start takes the next of `attempts`, (what it leaves, how it ends)."""

    attempts: list[Any] = []
    made: "Ranks"

    def __init__(self, arguments, number, stop_code, variables, modules):
        self.given, self.refusal = (arguments, number, stop_code), Path(variables[REFUSAL_FILE])
        self.is_stopping, self.done, self.modules = False, [], modules
        Ranks.made = self

    def start(self, is_quiet: bool) -> None:
        assert self.refusal.read_text() == ""  # of the attempt before
        self.done.append(("start", is_quiet))
        self.leave, self.end = self.attempts.pop(0)
        self.leave(self)

    def wait(self, shutdown_seconds: int) -> Failure | None:
        self.done.append(("wait", shutdown_seconds))
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end

    def stop(self, number: int) -> None:
        self.is_stopping = True
        self.done.append(("stop", number))

    def kill(self) -> None:
        self.done.append("kill")

    def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The train folder of the run."""
    monkeypatch.setattr(module, "Ranks", Ranks)
    monkeypatch.setattr(module, "token_hex", lambda num_bytes: "")
    monkeypatch.setattr(module, "resolve", lambda *_, **__: None)
    monkeypatch.setattr(module, "run_folder", lambda recipe: tmp_path)
    (tmp_path / "train").mkdir()
    return tmp_path / "train"


def started(*attempts: Any, **options: Any) -> Outcome:
    Ranks.attempts = list(attempts)
    outcome = start_ranks(SimpleNamespace(), "tiny.toml", ["--profile"], 2, **options)
    assert Ranks.attempts == []
    return outcome


def test_another_jobs_outcome_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finishes while the ranks of this one are refused, or fall without a word."""
    monkeypatch.setattr(module, "token_hex", lambda num_bytes: "ours")
    for said in ("another job works here", ""):
        leaves = leaving(folder, "finished", said=said)
        outcome = started((leaves, Failure(0, 1)), restarts=0)
        assert (outcome.outcome, outcome.exit_code) == ("failed", 1)
        assert said in outcome.message


def leaving(folder: Path, *given: Any, said: str = "", checkpoint: str = ""):
    """What the ranks of an attempt leave: an outcome, a refusal, a checkpoint."""

    def leave(ranks: Ranks) -> None:
        if given:
            write(folder, *given)
        ranks.refusal.write_text(said)
        if checkpoint:  # with one before it, and one after it that is not whole
            for name in ("step_00000002", checkpoint, "step_00000006"):
                (folder / "checkpoints" / name).mkdir(parents=True)
                if name <= checkpoint:
                    (folder / "checkpoints" / name / "manifest.json").touch()

    return leave


def alerts(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "alerts.jsonl").read_text().splitlines() if (folder / "alerts.jsonl").exists() else []
    return [(found["step"], found["message"]) for found in map(json.loads, lines)]


def test_ranks_that_were_killed_are_started_again_and_it_is_said(folder: Path, capsys) -> None:
    """From the newest checkpoint, on stderr and in the alerts; what the ranks said themselves is not lost."""
    outcome = started(
        (leaving(folder, "failed", 3, "lost each other", said="rank 1 did not arrive"), KILLED),
        (leaving(folder, "hung", 4, "the job hangs"), Failure(0, 76)),
        (leaving(folder, "failed", 5, "ValueError: odd", checkpoint="step_00000004"), Failure(0, 1)),
        (leaving(folder, "finished", 20), None),
        shutdown_seconds=17, is_quiet=True,
    )  # fmt: skip
    assert (outcome.outcome, outcome.step) == ("finished", 20)
    start = ". The ranks are restarted from the start, because nothing was saved"
    told = [
        (3, "rank 1 ended with SIGKILL (out of memory?) (lost each other)" + start),
        (4, "the job hangs" + start),
        (
            5,
            "rank 0 ended with exit code 1 (ValueError: odd). The ranks are restarted from step_00000004",
        ),
    ]
    assert alerts(folder) == told
    assert capsys.readouterr().err == "".join(f"kielo: {message}\n" for _, message in told)
    assert Ranks.made.done == [("start", True), ("wait", 17)] * 4 + ["close"]
    assert Ranks.made.given == (["-m", "kielo", "train", "tiny.toml", "--profile"], 2, 75)


@pytest.mark.parametrize(
    ("outcome", "end"), [("finished", None), ("requeue", None), ("finished", KILLED), ("requeue", KILLED)]
)
def test_what_is_finished_or_stopped_is_not_started_again(folder: Path, outcome: str, end) -> None:
    assert started((leaving(folder, outcome), end)).outcome == outcome
    assert alerts(folder) == []


def test_ranks_that_a_person_stopped_are_not_started_again(folder: Path) -> None:
    """Whatever ended them; without an outcome of theirs it says that the same command starts it."""
    outcome = started((lambda ranks: ranks.stop(signal.SIGTERM), KILLED))
    assert (outcome.outcome, outcome.exit_code, outcome.step, outcome.tokens) == ("requeue", 75, None, None)
    assert outcome.message == (
        "stopped before training began (rank 1 ended with SIGKILL (out of memory?)); nothing was changed. "
        "Fix: the same command starts it"
    )

    def stopped(ranks: Ranks) -> None:
        write(folder, "failed", 3, "a full disk")
        ranks.stop(signal.SIGTERM)

    assert started((stopped, KILLED)).message == "a full disk" and alerts(folder) == []


def test_why_the_ranks_are_not_started_again_is_said_where_it_is_not_plain(folder: Path) -> None:
    """A refusal is its own reason."""
    failed = (leaving(folder, "failed", 3, "ValueError: odd"), Failure(0, 1))
    outcome = started(failed, failed)
    assert outcome.message == (
        "ValueError: odd. The ranks are not restarted: twice the same failure at the same step"
    )
    assert outcome.outcome == "failed" and len(alerts(folder)) == 1
    (folder / Outcome.FILE_NAME).unlink()
    refused = started((leaving(folder, said="the recipe is wrong"), Failure(0, 1)))
    assert (refused.outcome, refused.exit_code, refused.message) == ("failed", 1, "the recipe is wrong")
    once = started((leaving(folder, "failed", 3, "odd"), KILLED), restarts=0)
    assert once.message == "odd" and Ranks.made.done[-1] == "close"
    assert len(alerts(folder)) == 1


def test_an_outcome_of_an_earlier_attempt_is_not_theirs(folder: Path) -> None:
    """Ranks that were refused leave the file alone; the same text written again is theirs."""
    file = folder / Outcome.FILE_NAME
    write(folder, "finished", 9)
    before = file.stat().st_ino, file.stat().st_mtime_ns
    stale = read_outcome(folder, before, "rank 0 ended with exit code 1", is_stopping=False)
    assert (stale.outcome, stale.step, stale.tokens) == ("failed", None, None) and stale.exit_code == 1
    assert stale.message == (
        f"rank 0 ended with exit code 1, without {file}. The first error above is the cause"
    )
    assert read_outcome(folder, before, "", False).message.startswith("the ranks ended, without ")
    assert read_outcome(folder, before, "", True).outcome == "requeue"
    os.utime(file, ns=(1, before[1] + 1))
    assert read_outcome(folder, before, "", True).step == 9
    os.utime(file, ns=(1, before[1]))
    assert read_outcome(folder, before, "", False, "refused").message == "refused"
    write(folder, "finished", 9)
    os.utime(file, ns=(1, before[1]))
    assert read_outcome(folder, before, "", False).step == 9  # another file in its place
    assert read_outcome(folder, None, "", False).step == 9


def test_an_error_beside_the_ranks_ends_them(folder: Path) -> None:
    """And the signals are given back."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with pytest.raises(KieloError, match="the node has no memory left"):
        started((leaving(folder), KieloError("the node has no memory left")))
    assert Ranks.made.done[-1] == "kill"
    assert handlers == [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ]


def test_signals_are_passed_on_once_and_a_second_press_ends_the_ranks(folder: Path, monkeypatch) -> None:
    presses = iter((False, False, True))
    monkeypatch.setattr(module, "Presses", lambda: SimpleNamespace(is_second=lambda number: next(presses)))

    def signalled(times: int):
        def leave(ranks: Ranks) -> None:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

        return leave

    assert started((signalled(2), Failure(0, 130))).outcome == "requeue"
    assert Ranks.made.done == [("start", False), ("stop", signal.SIGINT), ("wait", 600), "close"]
    with pytest.raises(KeyboardInterrupt):
        started((signalled(1), None))
    assert Ranks.made.done[-1] == "kill"


def test_ranks_on_gpus_import_for_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of GPUs do not work in a process that was forked; on CPUs torch is imported once for all."""
    for present in ("nvidia0", "kfd", "dxg", "null"):
        monkeypatch.setattr(
            module, "Path", lambda *parts, present=present: Path(*parts) if parts[0] != "/dev" else
            SimpleNamespace(exists=lambda: parts[1] == present)
        )  # fmt: skip
        started((leaving(folder, "finished"), None))
        if present == "null":
            assert {"kielo.train.run", "torch.distributed.fsdp"} < set(Ranks.made.modules)
        else:
            assert Ranks.made.modules == ()


def test_ranks_are_started_again_three_times_without_a_new_checkpoint(folder: Path, monkeypatch) -> None:
    """What is said is on the screen at once; a step that nobody knows is 0 in the alerts."""
    screen = io.StringIO()
    flushed: list[str] = []
    screen.flush = lambda: flushed.append(screen.getvalue())
    monkeypatch.setattr("sys.stderr", screen)
    killed = [(leaving(folder, "failed", step, f"at {step}"), KILLED) for step in (3, 4, 5, 6)]
    outcome = started(*killed)
    assert outcome.message == (
        "at 6. The ranks are not restarted: 4 attempts in a row made no new checkpoint"
    )  # fmt: skip
    assert [step for step, _ in alerts(folder)] == [3, 4, 5]
    assert [text.count("\n") for text in flushed] == [1, 2, 3]
    (folder / Outcome.FILE_NAME).unlink()
    assert started((leaving(folder), KILLED), (leaving(folder, "finished"), None)).outcome == "finished"
    assert [step for step, _ in alerts(folder)] == [3, 4, 5, 0]

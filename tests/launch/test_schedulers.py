"""What a scheduler is asked, and what is read from its answer; it is a few lines of bash here."""

from pathlib import Path

import pytest

from kielo.launch import schedulers
from kielo.launch.schedulers import NoAnswer, end_jobs, hides_jobs, states, states_or_reason
from kielo.recipe.errors import KieloError


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(name, answer, code): a command that notes its arguments in tmp_path/told, and answers."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(name: str, answer: str = "", code: int = 0, more: str = "") -> None:
        lines = f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/told\n{more}\ncat {tmp_path}/{name}.answer\n'
        (tmp_path / f"{name}.answer").write_text(answer)
        (tmp_path / name).write_text(lines + f"exit {code}\n")
        (tmp_path / name).chmod(0o755)

    return write


def told(folder: Path) -> list[str]:
    file = folder / "told"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def test_slurm_is_asked_for_these_jobs(tmp_path, command) -> None:
    """Lines in another order, of an array, and empty; a job that it does not have is over."""
    queue = "13 PENDING Dependency\n\n12 RUNNING None\n13 RUNNING None\n14\n"
    command("squeue", queue, 1, "echo 'slurm_load_jobs error: Invalid job id specified' >&2")
    assert states("slurm", ["12", "13", "14", "15"]) == {"12": "RUNNING None", "13": "RUNNING None", "14": ""}
    assert told(tmp_path) == ["squeue --noheader --format=%F %T %r --jobs 12,13,14,15"]
    assert states("slurm", []) == {} and told(tmp_path) == []


QSTAT = {
    "pbs": "Job id  Name  User  Time Use  S Queue\n11.s a me 00:01 R q\n12.s b me 0 H q\n13.s c me\n",
    "grid_engine": "job-ID prior name user state at\n-----\n11 0.5 a me r 11/23\n12 0.5 b me hqw 11/23\n",
}


@pytest.mark.parametrize(("scheduler", "waiting"), (("pbs", "H"), ("grid_engine", "hqw")))
def test_the_others_list_all_jobs(scheduler, waiting, tmp_path, command) -> None:
    """Rows of five cells or more; the number is before the server's name."""
    command("qstat", QSTAT[scheduler])
    running = "R" if scheduler == "pbs" else "r"
    assert states(scheduler, ["12", "11", "13", "99"]) == {"12": waiting, "11": running}
    assert told(tmp_path) == ["qstat -u *" if scheduler == "grid_engine" else "qstat"]


@pytest.mark.parametrize(
    ("scheduler", "name", "answer", "hides"),
    (
        ("slurm", "scontrol", "MpiDefault = none\nPrivateData             = jobs\n", True),
        ("slurm", "scontrol", "PrivateData             = accounts,jobs,users\n", True),
        ("slurm", "scontrol", "PrivateData             = none\nPriorityType = jobs\n", False),
        ("slurm", "scontrol", "PrivateData             = usage,users\n", False),
        ("slurm", "scontrol", "", False),
        ("pbs", "qstat", "Server: a\n    query_other_jobs = False\n    scheduling = True\n", True),
        ("pbs", "qstat", "Server: a\n    query_other_jobs = True\n", False),
        ("grid_engine", "qconf", "", False),
    ),
)
def test_whether_jobs_of_others_are_hidden(scheduler, name, answer, hides, command) -> None:
    """By Slurm's PrivateData and PBS's query_other_jobs, as their manuals print them."""
    command(name, answer)
    assert hides_jobs(scheduler) is hides


def test_nothing_is_known_to_be_hidden_on_another_machine(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert [hides_jobs(scheduler) for scheduler in ("slurm", "pbs", "grid_engine")] == [False] * 3


def test_a_machine_without_the_scheduler(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert states("slurm", ["1"]) is None and states("slurm", []) == {}


ENDS = {
    "slurm": ("scancel", {"1": "RUNNING None", "2": "PENDING Priority"}, ["2", "--signal=USR1 1"]),
    "pbs": ("qdel", {"1": "R", "2": "Q", "3": "H"}, ["2 3"]),
    "grid_engine": ("qdel", {"1": "r", "2": "qw", "3": "Eqw"}, ["2 3"]),
}


@pytest.mark.parametrize("scheduler", ENDS)
def test_jobs_that_wait_are_cancelled_and_those_that_run_are_asked(scheduler, tmp_path, command) -> None:
    """At once: all are ended. Nothing is called for no jobs."""
    name, found, asked = ENDS[scheduler]
    command(name)
    end_jobs(scheduler, found, at_once=False)
    assert told(tmp_path) == [f"{name} {words}" for words in asked]
    end_jobs(scheduler, found, at_once=True)
    waiting = asked[0]
    assert told(tmp_path) == [f"{name} {waiting}", f"{name} 1"]
    end_jobs(scheduler, {}, at_once=True)
    assert told(tmp_path) == []


def test_a_refusal_is_told_as_the_scheduler_says_it(tmp_path, command) -> None:
    command("scancel", "", 1, "echo 'no  such' >&2; echo job >&2")
    with pytest.raises(KieloError, match="^scancel 2: no such job$"):
        end_jobs("slurm", {"2": "PENDING"}, at_once=False)


def test_a_scheduler_that_does_not_answer(tmp_path, command, monkeypatch) -> None:
    """One line after a minute; less here."""
    assert schedulers.LIMIT_SECONDS == 60
    monkeypatch.setattr(schedulers, "LIMIT_SECONDS", 0.05)
    command("squeue", more="exec sleep 20")
    with pytest.raises(KieloError, match="squeue did not answer within 0.05 s. Fix: try again"):
        states("slurm", ["1"])


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "grid_engine"])
def test_a_scheduler_that_fails_has_not_said_that_there_are_none(scheduler, command, tmp_path) -> None:
    """Neither to a screen nor to what cancels and launches; a screen goes on without it."""
    down = "slurm_load_jobs error: Unable to contact slurm controller"
    command("squeue" if scheduler == "slurm" else "qstat", "", 1, f"echo '{down}' >&2")
    with pytest.raises(NoAnswer, match="not known which jobs wait or run"):
        states(scheduler, ["12"])
    jobs, why = states_or_reason(scheduler, ["12"])
    assert jobs is None and down in why


def test_settings_that_are_not_told_are_not_guessed(command) -> None:
    command("scontrol", "", 1)
    with pytest.raises(NoAnswer):
        hides_jobs("slurm")

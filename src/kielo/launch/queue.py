"""Asks a scheduler for the states of a chain's jobs, and cancels them: ids → states; no torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kielo.recipe.errors import KieloError

LIMIT_SECONDS = 60
# Slurm has no job of these numbers any more: an error of the command, and an answer.
_OVER = re.compile(r"Invalid job id specified|Invalid job array")
_JOB = re.compile(r"[0-9]+(\[[0-9]*\])?(\.[\w.-]+)?")
# Scheduler → the command that lists jobs, and those that end one: asked to save first, and at once.
_LIST = {
    # %F: of each job of an array the id of the array, which --parsable told
    "slurm": ["squeue", "--noheader", "--format=%F %T %r", "--jobs"],
    "pbs": ["qstat"],
    "grid_engine": ["qstat", "-u", "*"],  # without -u only the own ones
}
# Scheduler → the command that prints its settings, and the line of the one that hides the jobs of others.
_SETTINGS = {
    "slurm": (["scontrol", "show", "config"], r"^PrivateData\s*=.*\bjobs\b"),
    "pbs": (["qstat", "-Bf"], r"^\s*query_other_jobs\s*=\s*False"),
}
# Jobs of the others look whether their chain was ended (scripts/mpirun.sh), and save then.
_ASK_TO_SAVE = {"slurm": ["scancel", "--signal=USR1"]}
_END = {"slurm": ["scancel"], "pbs": ["qdel"], "grid_engine": ["qdel"]}


def job_ids(file: Path) -> list[str]:
    """Returns the ids that a chain's file `jobs` lists, a line each; none where there is no file.

    Raises KieloError for a line that is no id: the scheduler's commands would take it for an option.
    """
    if not file.is_file():
        return []
    ids = file.read_text(encoding="utf-8", errors="replace").split()
    if odd := [word for word in ids if not _JOB.fullmatch(word)]:
        raise KieloError(
            f"{file}: {odd[0][:60]!r} is no id of a job; what would work: one id of the scheduler a line"
        )
    return ids


class NoAnswer(KieloError):
    """A scheduler that cannot be asked just now."""


def states(scheduler: str, ids: Sequence[str]) -> dict[str, str] | None:
    """Returns id → state of those jobs that the scheduler still has, in the order of `ids`.

    Of an array it is the state of one of its jobs. None where the scheduler's command is not here. Raises
    NoAnswer where the command fails: that is not an answer of no jobs.
    """
    command = _LIST[scheduler]
    if not ids:
        return {}
    if shutil.which(command[0]) is None:
        return None
    if scheduler == "slurm":
        told = _answer([*command, ",".join(ids)], _OVER)
        found = {line.split()[0]: " ".join(line.split()[1:]) for line in told.splitlines() if line.split()}
    else:
        rows = [line.split() for line in _answer(command).splitlines()]
        state = 4  # the column of both: job, (priority,) name, user, (time,) state, …
        found = {row[0].split(".")[0]: row[state] for row in rows if len(row) > state}
    return {job: found[job] for job in ids if job in found}


def states_or_reason(scheduler: str, ids: Sequence[str]) -> tuple[dict[str, str] | None, str]:
    """Returns the states, or None and why they are not known, for a screen that shows more than them."""
    try:
        found = states(scheduler, ids)
    except NoAnswer as error:
        return None, str(error)
    return found, "" if found is not None else f"{scheduler}'s commands are not on this machine"


def hides_jobs(scheduler: str) -> bool:
    """Returns True if the scheduler shows a person only their own jobs; False where its command is not here.

    Raises NoAnswer where the command fails.
    """
    command, line = _SETTINGS.get(scheduler, ([""], ""))
    if shutil.which(command[0]) is None:
        return False
    return re.search(line, _answer(command), re.MULTILINE) is not None


def ends(scheduler: str, ids: Sequence[str]) -> dict[str, str]:
    """Returns id → how the job ended, in the scheduler's words, of those of which it still knows.

    Slurm's accounting (sacct), or what its controller keeps for some minutes; empty for the others.
    """
    if scheduler != "slurm" or not ids:
        return {}
    found: dict[str, str] = {}
    if shutil.which("sacct"):
        fields = "JobID,State,ExitCode,Reason"
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={fields}", "--jobs"]
        rows = [line.split("|") for line in _run([*command, ",".join(ids)]).stdout.splitlines()]
        found = {
            row[0]: f"{row[1]}, exit code {row[2]}" + f", {row[3]}" * (row[3] not in ("", "None"))
            for row in rows
            if len(row) == 4
        }
    for job in ids:
        if job not in found and shutil.which("scontrol"):
            told = _run(["scontrol", "--oneliner", "show", "job", job]).stdout.split()
            facts = dict(word.split("=", 1) for word in told if "=" in word)
            if "JobState" in facts:
                found[job] = f"{facts['JobState']}, exit code {facts.get('ExitCode')}, {facts.get('Reason')}"
    return {job: found[job] for job in ids if job in found}


def end_jobs(scheduler: str, found: dict[str, str], at_once: bool) -> None:
    """Cancels jobs that wait, and asks those that run to save and stop, or ends them `at_once`.

    found: id → state. The chain's file `stopped` must be written. Raises KieloError with the scheduler's
    answer if it refuses.
    """
    waiting = [job for job, state in found.items() if _is_waiting(state.split()[0])]
    running = [job for job in found if job not in waiting]
    asking = _END[scheduler] if at_once else _ASK_TO_SAVE.get(scheduler)
    for command, ids in ((_END[scheduler], waiting), (asking, running)):
        done = _run([*command, *ids]) if command and ids else None
        if command and done is not None and done.returncode:
            raise KieloError(f"{' '.join([*command, *ids])}: {' '.join(done.stderr.split())}")


def _is_waiting(state: str) -> bool:
    """Slurm's word, PBS's letters, and Grid Engine's letters, among which q is: qw, hqw, Eqw, …"""
    return state in ("PENDING", "Q", "H") or "q" in state


def _answer(command: list[str], answers: re.Pattern[str] | None = None) -> str:
    """Returns what the command says; raises NoAnswer if it fails, but for errors that are `answers`."""
    done = _run(command)
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if done.returncode and not (answers and answers.search(said)):
        raise NoAnswer(
            f"{command[0]} failed, so it is not known which jobs wait or run ({said}); what would work: the "
            "same once more, when the scheduler answers"
        )
    return done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # SQUEUE_PARTITION and others would hide jobs; and answers are read, so they are not translated.
    own = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=own | {"LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {LIMIT_SECONDS} s; try again") from None

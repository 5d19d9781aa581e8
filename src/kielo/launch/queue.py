"""Asks a scheduler for the states of a chain's jobs, and cancels them: ids → states; no torch."""

import shutil
import subprocess
from collections.abc import Sequence

from kielo.recipe.errors import KieloError

_LIMIT_SECONDS = 60
# Scheduler → the command that lists jobs, and those that end one: asked to save first, and at once.
_LIST = {
    "slurm": ["squeue", "--noheader", "--format=%i %T %r", "--jobs"],
    "pbs": ["qstat"],
    "grid_engine": ["qstat"],
}
_ASK_TO_SAVE = {"slurm": ["scancel", "--signal=USR1"], "pbs": ["qsig", "-s", "SIGUSR1"]}
_END = {"slurm": ["scancel"], "pbs": ["qdel"], "grid_engine": ["qdel"]}
_PENDING = {"PENDING", "Q", "H", "qw", "hqw"}


def states(scheduler: str, ids: Sequence[str]) -> dict[str, str] | None:
    """Returns id → state of those jobs that the scheduler still has; None where its command is not here."""
    command = _LIST[scheduler]
    if not ids:
        return {}
    if shutil.which(command[0]) is None:
        return None
    if scheduler == "slurm":
        told = _run([*command, ",".join(ids)]).stdout  # ids that are over are an error, and leave no line
        return {line.split()[0]: " ".join(line.split()[1:]) for line in told.splitlines() if line.split()}
    rows = [line.split() for line in _run(command).stdout.splitlines()]
    state = 4  # the column of both: job, (priority,) name, user, (time,) state, …
    return {
        row[0].split(".")[0]: row[state]
        for row in rows
        if len(row) > state and row[0].split(".")[0] in set(ids)
    }


def end_jobs(scheduler: str, found: dict[str, str], at_once: bool) -> None:
    """Cancels jobs that wait, and asks those that run to save and stop, or ends them `at_once`.

    found: id → state. Raises KieloError with the scheduler's answer if it refuses.
    """
    waiting = [job for job, state in found.items() if state.split()[0] in _PENDING]
    running = [job for job in found if job not in waiting]
    asking = _END if at_once else _ASK_TO_SAVE | {"grid_engine": _END["grid_engine"]}
    for command, ids in ((_END[scheduler], waiting), (asking[scheduler], running)):
        done = _run([*command, *ids]) if ids else None
        if done is not None and done.returncode:
            raise KieloError(f"{' '.join([*command, *ids])}: {' '.join(done.stderr.split())}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise KieloError(f"{command[0]} did not answer within {_LIMIT_SECONDS} s; try again") from None

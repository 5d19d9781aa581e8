"""Decide what follows an attempt: `python -m kielo.launch.decide LAUNCH ATTEMPT CODE [REFUSAL]`.

From the training step's exit code, its ranks' `train/outcome.json` and `refusal.txt`, and the earlier
attempts, to `ATTEMPT/decision`, assignments of bash: job.sh runs outside of the container, where Python may
be missing.
"""

import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from kielo.artifact.attempt_files import EXIT_CODES, Outcome, Refusal, read_refusal
from kielo.artifact.checkpoint_folder import newest_written
from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.stage_json import read_json
from kielo.launch.bash import assign
from kielo.recipe.errors import KieloError

DECISION_NAME = "decision"
# Exit codes of a task that a signal ended, as shells, srun and mpirun pass them on.
_KILLED = {128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}
_BY_CODE = {code: outcome for outcome, code in EXIT_CODES.items() if outcome != "finished"}
_COUNT = re.compile(r"[0-9]{1,12}")
_TIMES_BLAMED = 2  # after which a node is left out


@dataclass(frozen=True)
class Decision:
    """The decision that job.sh carries out."""

    outcome: str  # as in `Outcome`
    reason: str  # one line for people
    ends: str = ""  # why the chain ends; empty if the next job trains
    again: str = "no"  # "yes" if another attempt in this job may help
    blamed_nodes: str = ""  # hosts, separated by commas, that this job uses last
    left_out_nodes: str = ""  # hosts that later jobs must not use

    def text(self) -> str:
        """Return assignments that bash reads back as they are."""
        return "".join(f"{assign(key, ' '.join(value.split()))}\n" for key, value in asdict(self).items())


@dataclass(frozen=True)
class Attempt:
    """A start of a job, by the chain's own list. `ended` is None while it runs, or if it was killed."""

    job: str
    nodes: int
    started: int
    ended: int | None = None
    outcome: str = ""
    message: str = ""
    newest: str = ""  # checkpoint at the start


def attempts(file: Path) -> list[Attempt]:
    """Read the starts and ends that job.sh noted, without the half line of a killed job."""
    found: list[Attempt] = []
    for line in lines_of(file):
        cells = line.split("\t")
        if len(cells) != 7 or not (_COUNT.fullmatch(cells[3]) and _COUNT.fullmatch(cells[4])):
            continue
        kind, job, _, nodes, seconds, outcome, message = cells
        if kind == "start":
            found.append(Attempt(job, int(nodes), int(seconds), newest=outcome))
        elif found and found[-1].job == job:
            found[-1] = replace(found[-1], ended=int(seconds), outcome=outcome, message=message)
    return found


def lines_of(file: Path) -> list[str]:
    """Return the lines that are not empty, or [] without the file."""
    try:
        return [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    except (FileNotFoundError, NotADirectoryError):
        return []


def decide(launch: Path, attempt: Path, code: int, refusal: str = "") -> Decision:
    """Return what follows the attempt, and record blamed nodes. refusal: why the job did not train, or ""."""
    run = launch.parents[1]
    outcome, said, is_usage = _ending(run, attempt, code, refusal)
    decision = Decision(outcome, said.message)
    if outcome == "finished":
        return replace(decision, ends="finished")
    if outcome == "requeue":
        trigger = run / "triggers" / "stop"
        return replace(decision, ends=f"stopped by {trigger}" if trigger.exists() else "")
    if is_usage:
        return replace(decision, ends=f"kielo did not understand its command: {said.message}")
    tried = attempts(launch / "chain" / "attempts")
    failures = [
        (one.message, following.newest)
        for one, following in pairwise(tried)
        if one.outcome in ("failed", "hung")
    ]
    is_killed = not refusal and code in _KILLED
    if not is_killed and not said.blamed_nodes:  # the cause is not a device or a node
        newest = newest_written(run / "train" / "checkpoints")
        if failures[-1:] == [(" ".join(said.message.split()), newest)]:
            return replace(decision, ends=f"twice the same: {said.message}")
    again = "yes" if is_killed or outcome == "hung" else "no"
    left_out = ",".join(_left_out(launch, said.blamed_nodes, tried[-1].job if tried else ""))
    return replace(decision, again=again, blamed_nodes=",".join(said.blamed_nodes), left_out_nodes=left_out)


def _ending(run: Path, attempt: Path, code: int, refusal: str) -> tuple[str, Refusal, bool]:
    """Return the outcome, its reason with the blamed nodes, and True for a command with wrong usage."""
    if refusal:
        return "failed", Refusal(message=refusal), False
    silent = attempt / "silent"
    if silent.exists():
        return "hung", Refusal(message=silent.read_text(encoding="utf-8").strip()), False
    is_new = _is_newer(run / "train" / Outcome.FILE_NAME, attempt / "meeting.sh")
    if is_new and (said := _read_outcome(run)):
        return said.outcome, Refusal(message=said.message, blamed_nodes=said.blamed_nodes), False
    refused = read_refusal(attempt / "refusal.txt")
    ended = f"the ranks ended with exit code {code}; the first error is in {attempt}"
    if code == EXIT_CODES["finished"]:  # Kielo did not start, or the run was finished before
        before = _read_outcome(run)
        outcome = "finished" if before is not None and before.outcome == "finished" else "failed"
        return outcome, refused or Refusal(message="" if outcome == "finished" else ended), False
    is_usage = refused is not None and refused.is_usage
    return _BY_CODE.get(code, "failed"), refused or Refusal(message=ended), is_usage


def _is_newer(file: Path, other: Path) -> bool:
    try:
        return file.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False


def _read_outcome(run: Path) -> Outcome | None:
    try:
        return read_json(run / "train", Outcome)
    except (KieloError, OSError):
        return None


def _left_out(launch: Path, blamed: list[str], job: str) -> list[str]:
    """Record the blamed nodes. Return the nodes that this chain has blamed twice, and leave them out."""
    noted = launch / "chain" / "failed_nodes"
    with open(noted, "a", encoding="utf-8") as file:
        file.writelines(f"{node}\n" for node in blamed)
    times = Counter(noted.read_text(encoding="utf-8").split())
    found = [node for node in blamed if times[node] >= _TIMES_BLAMED]
    if found:
        today = datetime.now(UTC).date().isoformat()
        with open(launch.parent / "left_out_nodes", "a", encoding="utf-8") as file:
            file.writelines(f"{node} {today} ranks hung there twice, last in job {job}\n" for node in found)
    return found


def write_decision(arguments: list[str], decide: Callable[..., Decision]) -> None:
    """Write the decision of `decide` about LAUNCH ATTEMPT CODE [REFUSAL] into the attempt's folder."""
    launch, attempt, code, *refusal = arguments
    decision = decide(Path(launch), Path(attempt), int(code), *refusal)
    write_text_atomically(Path(attempt) / DECISION_NAME, decision.text())


if __name__ == "__main__":
    write_decision(sys.argv[1:], decide)

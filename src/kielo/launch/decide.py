"""Decide what follows an attempt: `python -m kielo.launch.decide LAUNCH ATTEMPT CODE [REFUSAL]`.

In: the exit code of the training step, the files of its ranks (`train/outcome.json`, `refusal.txt`), and the
earlier attempts in the launch's `chain/`. Out: `ATTEMPT/decision`, assignments of bash. job.sh reads only
this file, because it runs outside of the container, where Python may be missing.
"""

import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
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
class _Chain:
    """The job of the last start in `chain/attempts`, and (reason, newest checkpoint) of the last failure."""

    job: str
    failure: tuple[str, str] | None

    @classmethod
    def read(cls, file: Path) -> "_Chain":
        job, reason, failure = "", None, None
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            kind, of_job, _, _, _, how, why = (line.split("\t") + [""] * 7)[:7]
            if kind == "start":  # at the newest checkpoint, which it notes as `how`
                failure = failure if reason is None else (reason, how)
                job, reason = of_job, None
            elif how in ("failed", "hung"):
                reason = why
        return cls(job, failure)


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
    chain = _Chain.read(launch / "chain" / "attempts")
    is_killed = not refusal and code in _KILLED
    if not is_killed and not said.blamed_nodes:  # the cause is not a device or a node
        newest = newest_written(run / "train" / "checkpoints")
        if chain.failure == (" ".join(said.message.split()), newest):
            return replace(decision, ends=f"twice the same: {said.message}")
    again = "yes" if is_killed or outcome == "hung" else "no"
    left_out = ",".join(_left_out(launch, said.blamed_nodes, chain.job))
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


def main(arguments: list[str]) -> None:
    launch, attempt, code, *refusal = arguments
    decision = decide(Path(launch), Path(attempt), int(code), *refusal)
    write_text_atomically(Path(attempt) / DECISION_NAME, decision.text())


if __name__ == "__main__":
    main(sys.argv[1:])

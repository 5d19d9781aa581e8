"""Decide what follows an attempt at an evaluation: `python -m kielo.launch.decide_evaluation`.

The arguments and the written file are as in `decide.py`. An evaluation is judged by its own result, not by
the outcome of the training.
"""

import signal
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from kielo.artifact.attempt_files import EXIT_CODES, read_refusal
from kielo.artifact.checkpoint_folder import newest_written
from kielo.artifact.launch_files import Launch
from kielo.artifact.manifest import MANIFEST_NAME, hash_manifest, read_manifest
from kielo.artifact.score_history import history_path, read_history
from kielo.artifact.scores import Scores
from kielo.artifact.stage_json import read_json, read_stage_json
from kielo.launch.decide import Decision, attempts, write_decision

# Exit code of a task that was asked to stop, and stops at once. SIGTERM says nothing, because srun and mpirun
# end all tasks with it after one of them failed.
_ASKED = 128 + signal.SIGUSR1
_ROUNDED_SECONDS = 90  # schedulers count minutes


def decide(launch: Path, attempt: Path, code: int, refusal: str = "") -> Decision:
    """Return what follows the attempt. refusal: why the job did not evaluate, or ""."""
    if refusal:
        return Decision("failed", refusal)
    if code == EXIT_CODES["finished"] and _has_result(launch, attempt):
        return Decision("finished", "", ends="finished")
    tried = attempts(launch / "chain" / "attempts")
    is_over = bool(tried) and _is_time_over(launch, tried[-1].started)
    if code == _ASKED or is_over or _is_stop_asked(launch, attempt):
        return Decision("requeue", "its time ended. What was scored stays, and the next job continues")
    refused = read_refusal(attempt / "refusal.txt")
    if refused is None and code == 1 and (without := _without_task(launch, attempt)):
        return Decision("finished", without, ends=f"finished, {without}")
    ended = f"the ranks ended with exit code {code} and without scores; the first error is in {attempt}"
    message = refused.message if refused else ended
    decision = Decision("failed", message)
    if refused is not None and refused.is_usage:
        return replace(decision, ends=f"kielo did not understand its command: {message}")
    failures = [
        one.message
        for one, following in pairwise(tried)
        if one.outcome == "failed" and one.newest == following.newest
    ]
    if failures[-1:] == [" ".join(message.split())]:
        return replace(decision, ends=f"twice the same: {message}")
    return decision


def _is_time_over(launch: Path, started: int) -> bool:
    asked = read_json(launch, Launch)
    return (
        asked is not None
        and time.time() >= started + asked.wall_seconds - asked.grace_seconds - _ROUNDED_SECONDS
    )


def _is_stop_asked(launch: Path, attempt: Path) -> bool:
    """Return True if job.sh was told to stop, or a person has ended the chain."""
    return (attempt / "asked").exists() or (launch / "chain" / "stopped").exists()


def _without_task(launch: Path, attempt: Path) -> str:
    """Return which tasks have no score if this attempt has written its result, else ""."""
    if not _is_of_attempt(_result_of(launch), attempt):
        return ""
    run = launch.parents[1]
    if _is_watch(launch):
        every = [row.scores for row in read_history(run)]
    else:
        every = [read_stage_json(run / "evaluate", Scores)]
    unscored = {name: why for scores in every if scores for name, why in scores.unscored_tasks.items()}
    return "; ".join(f"no score of {name}: {reason}" for name, reason in unscored.items())


def _has_result(launch: Path, attempt: Path) -> bool:
    """Return True if there is a result of this attempt, or one of the newest checkpoint from before."""
    run, result = launch.parents[1], _result_of(launch)
    if _is_watch(launch) or _is_of_attempt(result, attempt):
        return result.exists()
    found, newest = read_manifest(result.parent), newest_written(run / "train" / "checkpoints")
    if found is None or not newest:
        return False
    return found.inputs.get("checkpoint") == hash_manifest(run / "train" / "checkpoints" / newest)


def _is_watch(launch: Path) -> bool:
    asked = read_json(launch, Launch)
    return asked is not None and asked.work == "watch"


def _result_of(launch: Path) -> Path:
    """Return the file that is written last."""
    run = launch.parents[1]
    return history_path(run) if _is_watch(launch) else run / "evaluate" / MANIFEST_NAME


def _is_of_attempt(file: Path, attempt: Path) -> bool:
    try:
        return file.stat().st_mtime_ns > (attempt / "meeting.sh").stat().st_mtime_ns
    except OSError:
        return False


if __name__ == "__main__":
    write_decision(sys.argv[1:], decide)

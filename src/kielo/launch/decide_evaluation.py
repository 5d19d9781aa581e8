"""Decide what follows an attempt at an evaluation: `python -m kielo.launch.decide_evaluation`.

The arguments and the written file are as in `decide.py`. An evaluation is judged by its own result, not by
the outcome of the training.
"""

import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from kielo.artifact.attempt_files import EXIT_CODES, read_refusal
from kielo.artifact.checkpoint_folder import newest_written
from kielo.artifact.launch_files import Launch
from kielo.artifact.manifest import MANIFEST_NAME, hash_manifest, read_manifest
from kielo.artifact.score_history import ENDED_NAME, WATCH_FOLDER, history_path, read_history
from kielo.artifact.scores import Scores
from kielo.artifact.stage_json import read_json, read_stage_json
from kielo.launch.decide import Decision, attempts, lines_of, write_decision

# Exit code of a task that was asked to stop, and stops at once. SIGTERM says nothing, because srun and mpirun
# end all tasks with it after one of them failed.
_ASKED = 128 + signal.SIGUSR1
_ROUNDED_SECONDS = 90  # schedulers count minutes


def decide(launch: Path, attempt: Path, code: int, refusal: str = "") -> Decision:
    """Return what follows the attempt. refusal: why the job did not evaluate, or ""."""
    if refusal:
        return Decision("failed", refusal)
    refused = read_refusal(attempt / "refusal.txt")
    is_done, lacks = (_watched if _is_watch(launch) else _scored)(launch.parents[1], attempt, code)
    if is_done and not lacks:
        return Decision("finished", "", ends="finished")
    if is_done and refused is None:
        return Decision("finished", lacks, ends=f"finished, {lacks}")
    tried = attempts(launch / "chain" / "attempts")
    is_over = bool(tried) and _is_time_over(launch, tried[-1].started)
    if code == _ASKED or is_over or _is_stop_asked(launch, attempt):
        return Decision("requeue", "its time ended. What was scored stays, and the next job continues")
    ended = f"the ranks ended with exit code {code} and without scores; the first error is in {attempt}"
    message = refused.message if refused else lacks or ended
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
    """Return True if job.sh was asked to stop, or a person has ended the chain."""
    return (attempt / "asked").exists() or (launch / "chain" / "stopped").exists()


def _scored(run: Path, attempt: Path, code: int) -> tuple[bool, str]:
    """Return if the newest checkpoint is scored, now or before, and the tasks that have no score."""
    result = run / "evaluate" / MANIFEST_NAME
    is_of_attempt = _is_of_attempt(result, attempt)
    if code == EXIT_CODES["finished"]:
        return is_of_attempt or _is_of_newest(run), ""
    if code != 1 or not is_of_attempt:
        return False, ""
    without = _without_tasks([read_stage_json(run / "evaluate", Scores)])
    return bool(without), without


def _is_of_newest(run: Path) -> bool:
    found, newest = read_manifest(run / "evaluate"), newest_written(run / "train" / "checkpoints")
    if found is None or not newest:
        return False
    return found.inputs.get("checkpoint") == hash_manifest(run / "train" / "checkpoints" / newest)


def _watched(run: Path, attempt: Path, code: int) -> tuple[bool, str]:
    """Return if this attempt's watch came to its end with all scores, and what has no score."""
    ended = run / WATCH_FOLDER / ENDED_NAME
    if code not in (EXIT_CODES["finished"], 1) or not _is_of_attempt(ended, attempt):
        return False, ""
    if passed_over := lines_of(ended):
        return False, f"passed over: {'; '.join(passed_over)}"
    rows = {row.model: row for row in read_history(run)}
    newest = newest_written(run / "train" / "checkpoints")
    if newest not in rows:
        return False, f"{history_path(run)} has no scores of {newest or 'a checkpoint'}"
    began = int((attempt / "meeting.sh").stat().st_mtime)
    own = (row for row in rows.values() if datetime.fromisoformat(row.scored_at).timestamp() >= began)
    return True, _without_tasks([row.scores for row in own])


def _without_tasks(every: Iterable[Scores | None]) -> str:
    unscored = {name: why for scores in every if scores for name, why in scores.unscored_tasks.items()}
    return "; ".join(f"no score of {name}: {reason}" for name, reason in unscored.items())


def _is_watch(launch: Path) -> bool:
    asked = read_json(launch, Launch)
    return asked is not None and asked.work == "watch"


def _is_of_attempt(file: Path, attempt: Path) -> bool:
    try:
        return file.stat().st_mtime_ns > (attempt / "meeting.sh").stat().st_mtime_ns
    except OSError:
        return False


if __name__ == "__main__":
    write_decision(sys.argv[1:], decide)

"""The state of a launched run: its jobs, its log and its cost so far → `Status`; no torch."""

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kielo.artifact.launch_files import Launch
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.launch.decide import Attempt, attempts, lines_of
from kielo.launch.launch_folder import LAUNCH_FOLDER
from kielo.launch.schedulers import SCHEDULERS, NoAnswer, ends, job_ids, starts, states_or_reason
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import read as read_resolved

_GOOD = ("finished", "requeue")
_SHOWN_LINES = 20
_ERROR = re.compile(
    r"Error\b|\berror\b|^kielo[ a-z]*: |Traceback|[Nn]o such file|No module named|not found|denied|[Kk]illed"
)


@dataclass(frozen=True)
class Status:
    """The state of a launched run."""

    folder: Path
    launch: Launch
    ids: list[str]
    jobs: dict[str, str] | None  # id → state at the scheduler; None for the reason in `no_answer`
    attempts: list[Attempt]
    last_step: TrainingStep | None  # the last row of the log
    total_steps: int | None  # None before the first attempt
    stopped: str  # why the chain has ended
    left_out: list[str]
    ends: dict[str, str]  # id → the scheduler's words on each job that ended before it noted a start
    no_answer: str = ""
    starts: dict[str, str] = field(default_factory=dict)  # id of a waiting job → time of its start
    no_start: str = ""  # why `starts` are not known

    @property
    def last_words(self) -> tuple[Path, list[str]] | None:
        """(file, last lines) of a failed last attempt, or of a job that ended before any attempt, or None."""
        last = next((attempt for attempt in reversed(self.attempts) if attempt.outcome), None)
        if last is not None and last.outcome in _GOOD:
            return None
        job = last.job if last else next(iter(self.ends), None)
        return None if job is None else _last_words(self.folder / "logs", job)

    @property
    def is_running(self) -> bool:
        return any(state.startswith(("RUNNING", "R", "r")) for state in (self.jobs or {}).values())

    @property
    def device_hours(self) -> float:
        """Hours of all devices together so far. A killed attempt counts until the next attempt's start."""
        devices_per_node = self.launch.devices / self.launch.nodes
        hours = 0.0
        for number, attempt in enumerate(self.attempts):
            later = [other.started for other in self.attempts[number + 1 :]]
            end = attempt.ended or (later[0] if later else self._last_sign(attempt))
            hours += max(0, end - attempt.started) / 3600 * attempt.nodes * devices_per_node
        return hours

    def _last_sign(self, attempt: Attempt) -> int:
        log = self.folder.parents[1] / "train" / METRICS_NAME
        last = int(time.time()) if self.is_running else int(log.stat().st_mtime) if log.exists() else 0
        return max(last, attempt.started)


def status(run_folder: Path) -> Status:
    """Read the newest launch of the run that trains, or the launch whose folder is given.

    Raises KieloError if the run was never launched.
    """
    is_launch = (run_folder / Launch.FILE_NAME).is_file()
    folder = run_folder.absolute() if is_launch else newest_launch(run_folder)
    run_folder = folder.parents[1]
    launch = read_json(folder, Launch)
    if launch is None:
        raise KieloError(f"{folder}: has no {Launch.FILE_NAME}. Fix: launch the run again")
    ids = job_ids(folder / "chain" / "jobs")
    rows = of_kind(read_metrics(run_folder / "train" / METRICS_NAME), TrainingStep)
    total = None
    with suppress(KieloError):
        total = read_resolved(run_folder / "resolved.toml").identity.total_steps
    left_out = sorted({line.split()[0] for line in lines_of(run_folder / LAUNCH_FOLDER / "left_out_nodes")})
    made, last = attempts(folder / "chain" / "attempts"), rows[-1] if rows else None
    jobs, no_answer = states_or_reason(launch.scheduler, ids)
    begun = {attempt.job for attempt in made} | set(jobs or {})
    stopped = "\n".join(lines_of(folder / "chain" / "stopped"))
    over = [] if jobs is None or stopped else [job for job in ids if job not in begun]
    ended = ends(launch.scheduler, over)
    begin, no_start = _starts(launch.scheduler, jobs or {})
    shown = folder, launch, ids, jobs, made, last, total, stopped, left_out, ended
    return Status(*shown, no_answer, begin, no_start)


def _starts(scheduler: str, jobs: dict[str, str]) -> tuple[dict[str, str], str]:
    """Return when the waiting jobs start, and the reason if the scheduler does not say it."""
    waiting = SCHEDULERS[scheduler].waiting
    ids = [job for job, state in jobs.items() if re.fullmatch(waiting, state.split()[0])]
    if not ids or not SCHEDULERS[scheduler].starts:
        return {}, ""
    try:
        return starts(scheduler, ids), ""
    except NoAnswer as error:
        return {}, str(error).partition(". Fix: ")[0]


def evaluations_of(run_folder: Path) -> list[Path]:
    """Return the newest launch that scores the newest checkpoint, and the newest watch, if they exist."""
    above = run_folder / LAUNCH_FOLDER
    found = (sorted(above.glob(f"{work}_[0-9]*")) for work in ("evaluate", "watch"))
    return [folders[-1].absolute() for folders in found if folders]


def newest_launch(run_folder: Path) -> Path:
    """Return the folder of the run's last launch. Raises KieloError if there is none."""
    found = launches_of(run_folder)
    if not found:
        raise KieloError(f"{run_folder}: was never launched. Fix: kielo launch RECIPE --dry-run")
    return found[-1].absolute()


def launches_of(run_folder: Path) -> list[Path]:
    """Return the numbered launches of the run, which train. Other folders have a word before the number."""
    above = run_folder / LAUNCH_FOLDER
    return sorted(path for path in above.glob("*") if path.name.isdecimal()) if above.is_dir() else []


def _last_words(logs: Path, job: str) -> tuple[Path, list[str]] | None:
    """Return (file, last lines): of the first rank with an error, else of the step, else of the job."""
    folders = sorted(logs.glob(f"{job}.*"))
    ranks = sorted(folders[-1].glob("*.[0-9]*.log")) if folders else []
    named = [file for file in ranks if any(map(_ERROR.search, lines_of(file)[-_SHOWN_LINES:]))]
    others = [folders[-1] / "step.txt"] if folders else []
    others += [logs / f"job_{job}.log", *sorted(logs.glob(f"*{job}*"))]
    for file in (*named, *others):
        if file.is_file() and (lines := lines_of(file)):
            return file, lines[-_SHOWN_LINES:]
    return None

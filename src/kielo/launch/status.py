"""The state of a launched run: its jobs, its log and its cost so far → `Status`; no torch."""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.launch_files import Launch
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.launch.launch_folder import LAUNCH_FOLDER
from kielo.launch.schedulers import ends, job_ids, states_or_reason
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import read as read_resolved

_GOOD = ("finished", "requeue")
_SHOWN_LINES = 20
_COUNT = re.compile(r"[0-9]{1,12}")
_ERROR = re.compile(
    r"Error\b|\berror\b|^kielo[ a-z]*: |Traceback|[Nn]o such file|No module named|not found|denied|[Kk]illed"
)


@dataclass(frozen=True)
class Attempt:
    """A start of a job, by the chain's own list. `ended` is None while it runs, or if it was killed."""

    job: str
    nodes: int
    started: int
    ended: int | None = None
    outcome: str = ""
    message: str = ""


@dataclass(frozen=True)
class Status:
    """`jobs`: id → state at the scheduler; None where it does not answer, for the reason in `no_answer`.

    `last_step`: the last row of the log; `total_steps`: None before the first attempt. `stopped`: why the
    chain has ended; empty: it has not. `ends`: id → the scheduler's words on the end of each job that is over
    and noted no start.
    """

    folder: Path
    launch: Launch
    ids: list[str]
    jobs: dict[str, str] | None
    attempts: list[Attempt]
    last_step: TrainingStep | None
    total_steps: int | None
    stopped: str
    left_out: list[str]
    ends: dict[str, str]
    no_answer: str = ""

    @property
    def last_words(self) -> tuple[Path, list[str]] | None:
        """(file, its last 20 lines) of a last attempt that failed, or of a job that ended before any; None
        where nothing of the kind happened, or nothing was written.
        """
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
        """Hours of all devices together so far. A killed attempt counts up to the next one's start."""
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
    """Read the newest launch of the run. Raises KieloError where it was never launched."""
    folder = newest_launch(run_folder)
    launch = read_json(folder, Launch)
    if launch is None:
        raise KieloError(f"{folder}: has no {Launch.FILE_NAME}; launch the run again")
    ids = job_ids(folder / "chain" / "jobs")
    rows = of_kind(read_metrics(run_folder / "train" / METRICS_NAME), TrainingStep)
    total = None
    with suppress(KieloError):
        total = read_resolved(run_folder / "resolved.toml").identity.total_steps
    left_out = sorted({line.split()[0] for line in _lines(run_folder / LAUNCH_FOLDER / "left_out_nodes")})
    made = attempts(folder / "chain" / "attempts")
    jobs, no_answer = states_or_reason(launch.scheduler, ids)
    begun = {attempt.job for attempt in made} | set(jobs or {})
    stopped = "\n".join(_lines(folder / "chain" / "stopped"))
    over = [] if jobs is None or stopped else [job for job in ids if job not in begun]
    return Status(
        folder, launch, ids, jobs, made, rows[-1] if rows else None, total, stopped, left_out,
        ends(launch.scheduler, over), no_answer,
    )  # fmt: skip


def newest_launch(run_folder: Path) -> Path:
    """Return the folder of the run's last launch."""
    above = run_folder / LAUNCH_FOLDER
    found = sorted(path for path in above.glob("*") if path.name.isdecimal()) if above.is_dir() else []
    if not found:
        raise KieloError(f"{run_folder}: was never launched. Fix: kielo launch RECIPE --dry-run")
    return found[-1].absolute()


def attempts(file: Path) -> list[Attempt]:
    """Read the starts and ends that job.sh noted; half a line of a killed job is passed over."""
    found: list[Attempt] = []
    for line in _lines(file):
        cells = line.split("\t")
        if len(cells) != 7 or not (_COUNT.fullmatch(cells[3]) and _COUNT.fullmatch(cells[4])):
            continue
        kind, job, _, nodes, seconds, outcome, message = cells
        if kind == "start":
            found.append(Attempt(job, int(nodes), int(seconds)))
        elif found and found[-1].job == job:
            found[-1] = Attempt(job, int(nodes), found[-1].started, int(seconds), outcome, message)
    return found


def _last_words(logs: Path, job: str) -> tuple[Path, list[str]] | None:
    """Return (file, last lines) of where the first error of a job probably is, None where nothing is.

    That is the log of the first rank that names an error, else what the scheduler's step said, else the log
    of the job itself.
    """
    attempts = sorted(logs.glob(f"{job}.*"))
    ranks = sorted(attempts[-1].glob("*.[0-9]*.log")) if attempts else []
    named = [file for file in ranks if any(map(_ERROR.search, _lines(file)[-_SHOWN_LINES:]))]
    others = [attempts[-1] / "step.txt"] if attempts else []
    others += [logs / f"job_{job}.log", *sorted(logs.glob(f"*{job}*"))]
    for file in (*named, *others):
        if file.is_file() and (lines := _lines(file)):
            return file, lines[-_SHOWN_LINES:]
    return None


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    except (FileNotFoundError, NotADirectoryError):
        return []

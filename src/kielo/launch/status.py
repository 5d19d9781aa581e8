"""The state of a launched run: its jobs, its log and its cost so far → `Status`; no torch."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.launch import Launch
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.launch.launch_folder import LAUNCH_FOLDER
from kielo.launch.queue import states
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import read as read_resolved


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
    """`jobs`: id → state at the scheduler; None where its command is not on this machine.

    `last_step`: the last row of the log; `total_steps`: None before the first attempt. `stopped`: why the
    chain has ended; empty: it has not.
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
            hours += (end - attempt.started) / 3600 * attempt.nodes * devices_per_node
        return hours

    def _last_sign(self, attempt: Attempt) -> int:
        log = self.folder.parents[1] / "train" / METRICS_NAME
        last = int(time.time()) if self.is_running else int(log.stat().st_mtime) if log.exists() else 0
        return max(last, attempt.started)


def status(run_folder: Path) -> Status:
    """Reads the newest launch of the run. Raises KieloError where it was never launched."""
    folder = newest_launch(run_folder)
    launch = read_json(folder, Launch)
    if launch is None:
        raise KieloError(f"{folder}: has no {Launch.FILE_NAME}; launch the run again")
    ids = _lines(folder / "chain" / "jobs")
    rows = of_kind(read_metrics(run_folder / "train" / METRICS_NAME), TrainingStep)
    total = None
    with suppress(KieloError):
        total = read_resolved(run_folder / "resolved.toml").identity.total_steps
    left_out = sorted({line.split()[0] for line in _lines(run_folder / LAUNCH_FOLDER / "left_out_nodes")})
    return Status(
        folder, launch, ids, states(launch.scheduler, ids), attempts(folder / "chain" / "attempts"),
        rows[-1] if rows else None, total, "\n".join(_lines(folder / "chain" / "stopped")), left_out,
    )  # fmt: skip


def newest_launch(run_folder: Path) -> Path:
    """Returns the folder of the run's last launch."""
    above = run_folder / LAUNCH_FOLDER
    found = sorted(path for path in above.glob("*") if path.name.isdecimal()) if above.is_dir() else []
    if not found:
        raise KieloError(f"{run_folder}: was never launched; what would work: kielo launch RECIPE --dry-run")
    return found[-1].absolute()


def attempts(file: Path) -> list[Attempt]:
    """Reads the starts and ends that job.sh noted; half a line of a killed job is passed over."""
    found: list[Attempt] = []
    for line in _lines(file):
        cells = line.split("\t")
        if len(cells) != 7 or not cells[3].isdecimal() or not cells[4].isdecimal():
            continue
        kind, job, _, nodes, seconds, outcome, message = cells
        if kind == "start":
            found.append(Attempt(job, int(nodes), int(seconds)))
        elif found and found[-1].job == job:
            found[-1] = Attempt(job, int(nodes), found[-1].started, int(seconds), outcome, message)
    return found


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    except (FileNotFoundError, NotADirectoryError):
        return []

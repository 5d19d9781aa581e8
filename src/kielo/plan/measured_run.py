"""Measured steps of a run: metrics.jsonl and resolved.toml → seconds of a step by its size; no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.launch_files import Ladder, MeasuredSpeed
from kielo.artifact.metrics import METRICS_NAME, PassedOver, TrainingStep, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.recipe.cards import Cluster, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Precision
from kielo.resolve.memory_row import StepSize
from kielo.resolve.resolved import Resolved
from kielo.resolve.resolved import read as read_resolved

_StepRow = TrainingStep | PassedOver
MIN_ROWS = 3  # of steps of one size, after the warm-up
WARM_UP_STEPS = 2  # of a phase: they take memory, choose kernels and make schedules


@dataclass(frozen=True)
class MeasuredRun:
    """A run's log. seconds: size of a step → seconds of a step of that size, one figure a row of the log."""

    path: Path
    resolved: Resolved
    seconds: dict[StepSize, list[float]]

    @property
    def precision(self) -> Precision:
        """The precision of the first steps. Raises KieloError if a newer or damaged file leaves it open."""
        precision = self.resolved.identity.train.precision
        if precision is None:
            raise KieloError(f"{self.path}: its resolved.toml has no train.precision. Fix: measure again")
        return precision


def read_measured_run(path: Path) -> MeasuredRun:
    """Read the steps of the newest attempt in metrics.jsonl; resolved.toml is beside it or one folder up.

    Raises KieloError for files that are missing, of too few steps, or of another number of ranks.
    """
    if not path.is_file():
        raise KieloError(f"{path}: no such file. Fix: runs/NAME/train/metrics.jsonl of a run of your own")
    plans = [folder / "resolved.toml" for folder in (path.parent, path.parent.parent)]
    plan = next((plan for plan in plans if plan.is_file()), None)
    if plan is None:
        raise KieloError(
            f"{path}: neither {plans[0]} nor {plans[1]} is there, so the shape of this run is not known. "
            "Fix: the file in its run folder, or its resolved.toml copied beside it"
        )
    resolved, rows = read_resolved(plan), _last_attempt(_rows(path))
    if resolved.identity.train.precision == "fp8" and resolved.identity.train.fp8.emulate:
        raise KieloError(
            f"{path}: FP8 was emulated, which says nothing about a machine. Fix: a run in fp32 or bf16"
        )
    if not rows:
        raise KieloError(
            f"{path}: no row of a training step. Fix: the metrics.jsonl of a run that has trained"
        )
    _refuse_other_ranks(path, rows, resolved)
    seconds = {
        size: times for size, times in _seconds_by_size(rows, resolved).items() if len(times) >= MIN_ROWS
    }
    if not seconds:
        raise KieloError(
            f"{path}: no phase with one step size has {MIN_ROWS} rows after its first {WARM_UP_STEPS} "
            "steps. Fix: a longer run, or train.log_every_steps=1"
        )
    return MeasuredRun(path, resolved, seconds)


def metrics_of(paths: Sequence[Path]) -> tuple[list[Path], Cluster | None]:
    """Return the metrics.jsonl of runs and ladders, and the site of the ladders; None: there are none.

    paths: metrics.jsonl, folders of runs, or of ladders, which stand for their measured rungs. On a processor
    the ranks of several "nodes" share its cores, so only the rungs of one node are taken there. Raises
    KieloError for a ladder of which nothing is measured.
    """
    found, site = [], None
    for path in paths:
        ladder = read_json(path, Ladder) if path.is_dir() else None
        if ladder is None:
            found.append(path / "train" / METRICS_NAME if path.is_dir() else path)
            continue
        site = cluster(ladder.cluster)
        is_cpu = accelerator(site.accelerator).device == "cpu"
        rungs = [
            one for one in ladder.rungs if has_measured(path / one.folder) and (one.nodes == 1 or not is_cpu)
        ]
        if not rungs:
            raise KieloError(
                f"{path}: no rung{' on one node' * is_cpu} is measured yet; `kielo status` tells why"
            )
        found += [path / one.folder / "train" / METRICS_NAME for one in rungs]
    return found, site


def has_measured(run_folder: Path) -> bool:
    """Return True for the run folder of a rung whose steps were taken to the last."""
    outcome = read_json(run_folder / "train", Outcome)
    return outcome is not None and outcome.outcome == "finished"


def measured_speed(run_folder: Path) -> MeasuredSpeed | None:
    """Return the speed of a rung's steps, of the size that most rows have; None where it is not measured."""
    if not has_measured(run_folder):
        return None
    try:
        run = read_measured_run(run_folder / "train" / METRICS_NAME)
    except KieloError:
        return None
    size, seconds = max(run.seconds.items(), key=lambda item: len(item[1]))
    identity, placement = run.resolved.identity, run.resolved.placement
    index = next(
        index
        for index, (phase, placed) in enumerate(zip(identity.phases, placement.phases))
        if size
        == StepSize(phase.sequence_length, placed.micro_batch_sequences, placed.micro_batches_per_step)
    )
    tokens_per_second = identity.phases[index].tokens_per_step / float(np.median(seconds))
    flops = tokens_per_second * placement.phases[index].flops_per_token
    return MeasuredSpeed(
        steps=len(seconds),
        step_seconds=float(np.median(seconds)),
        tokens_per_second=tokens_per_second,
        tflops_per_device=flops / placement.world_size / 1e12,
    )


def _rows(path: Path) -> list[_StepRow]:
    return [
        row
        for row in read_metrics(path)
        if isinstance(row, PassedOver) or (isinstance(row, TrainingStep) and row.tokens_per_second)
    ]


def _last_attempt(rows: Iterable[_StepRow]) -> list[_StepRow]:
    """Return the rows of the newest attempt, whose layout is the one in resolved.toml.

    Each attempt counts its seconds from 0.
    """
    last: list[_StepRow] = []
    seconds = 0.0
    for row in rows:
        if isinstance(row, TrainingStep):
            last = [] if row.seconds < seconds else last
            seconds = row.seconds
        last.append(row)
    return last if any(isinstance(row, TrainingStep) for row in last) else []


def _refuse_other_ranks(path: Path, rows: Sequence[_StepRow], resolved: Resolved) -> None:
    """Raise KieloError if the rows are of another number of ranks than resolved.toml.

    A finished run that is started again on other ranks trains nothing, but writes a resolved.toml for them.
    """
    row, placement = next(row for row in reversed(rows) if isinstance(row, TrainingStep)), resolved.placement
    per_token = placement.phases[resolved.identity.phase_index(row.step)].flops_per_token
    ranks = row.tokens_per_second * per_token / (row.tflops_per_second or np.nan) / 1e12
    # A row across two phases has tokens of both; numbers of ranks differ by more than that.
    if ranks / placement.world_size > 1.4 or placement.world_size / ranks > 1.4:
        raise KieloError(
            f"{path}: its rows are of {ranks:.0f} ranks, its resolved.toml of {placement.world_size}. "
            "Fix: a run that was not started again on other ranks after its end"
        )


def _seconds_by_size(rows: Sequence[_StepRow], resolved: Resolved) -> dict[StepSize, list[float]]:
    """Return seconds of a step, one figure a row, by the step's size.

    A row covers the steps since the row before it. Left out are rows with the first steps of a phase or of
    the attempt, rows across two phases or of one with frozen modules, and all rows from the first change
    of precision on.
    """
    identity, before = resolved.identity, None
    found: dict[StepSize, list[float]] = {}
    for row in rows:
        first, before = None if before is None else before + 1, row.step
        if first is None or isinstance(row, PassedOver):
            continue
        index = identity.phase_index(first)
        phase, placed = identity.phases[index], resolved.placement.phases[index]
        if first < phase.first_step + WARM_UP_STEPS or row.step > phase.last_step or phase.trainable:
            continue
        if identity.train.precision_changes and row.step >= identity.train.precision_changes[0][0]:
            continue
        size = StepSize(phase.sequence_length, placed.micro_batch_sequences, placed.micro_batches_per_step)
        found.setdefault(size, []).append(phase.tokens_per_step / row.tokens_per_second)
    return found

"""Measured steps of a run: metrics.jsonl and resolved.toml → seconds of a step by its size; no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.launch_files import Ladder, MeasuredSpeed
from kielo.artifact.metrics import METRICS_NAME, PassedOver, TrainingStep, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.recipe.cards import Cluster, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Precision
from kielo.resolve.memory_row import StepSize
from kielo.resolve.resolved import PhasePlacement, PlannedPhase, Resolved
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
        """The precision of the first steps. Raises KieloError if resolved.toml does not have it."""
        precision = self.resolved.identity.train.precision
        if precision is None:
            raise KieloError(f"{self.path}: its resolved.toml has no train.precision. Fix: measure again")
        return precision


def read_measured_run(path: Path) -> MeasuredRun:
    """Read the newest attempt's steps. Raises KieloError for missing or short files and for other ranks."""
    if not path.is_file():
        raise KieloError(f"{path}: no such file. Fix: runs/NAME/train/metrics.jsonl of a run of your own")
    plans = [folder / "resolved.toml" for folder in (path.parent, path.parent.parent)]
    plan = next((plan for plan in plans if plan.is_file()), None)
    if plan is None:
        raise KieloError(
            f"{path}: neither {plans[0]} nor {plans[1]} exists, so the shape of this run is not known. "
            "Fix: give the file in its run folder, or copy the resolved.toml of the run beside it"
        )
    resolved, rows = read_resolved(plan), _last_attempt(filter(_is_step, read_metrics(path)))
    if resolved.identity.train.precision == "fp8" and resolved.identity.train.fp8.emulate:
        raise KieloError(
            f"{path}: FP8 was emulated, which says nothing about a machine. Fix: a run in fp32 or bf16"
        )
    if not rows:
        raise KieloError(
            f"{path}: no row of a training step. Fix: the metrics.jsonl of a run that has trained"
        )
    _refuse_other_ranks(path, rows, resolved)
    by_size = _seconds_by_size(rows, resolved)
    seconds = {size: times for size, times in by_size.items() if len(times) >= MIN_ROWS}
    if not seconds:
        raise KieloError(
            f"{path}: no phase with one step size has {MIN_ROWS} rows after its first {WARM_UP_STEPS} "
            "steps. Fix: a longer run, or train.log_every_steps=1"
        )
    return MeasuredRun(path, resolved, seconds)


def metrics_of(paths: Sequence[Path]) -> tuple[list[Path], Cluster | None]:
    """Return the metrics.jsonl of runs and ladders (of their measured rungs), and the last ladder's site.

    On a processor only rungs on one node count, because the ranks of several "nodes" share its cores. Raises
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
        folders = [path / one.folder for one in ladder.rungs if one.nodes == 1 or not is_cpu]
        if not (measured := [folder for folder in folders if has_measured(folder)]):
            on = " on one node" * is_cpu
            raise KieloError(f"{path}: no rung{on} is measured yet. Fix: `kielo status` says why")
        found += [folder / "train" / METRICS_NAME for folder in measured]
    return found, site


def has_measured(run_folder: Path) -> bool:
    """Return True for a rung's run folder whose steps are all done."""
    outcome = read_json(run_folder / "train", Outcome)
    return outcome is not None and outcome.outcome == "finished"


def measured_speed(run_folder: Path) -> MeasuredSpeed | None:
    """Return the speed of a rung's steps, of the size with most rows, or None if it is not measured."""
    if not has_measured(run_folder):
        return None
    try:
        run = read_measured_run(run_folder / "train" / METRICS_NAME)
    except KieloError:
        return None
    size, times = max(run.seconds.items(), key=lambda item: len(item[1]))
    phases = list(zip(run.resolved.identity.phases, run.resolved.placement.phases, strict=True))
    phase, placed = next(both for both in phases if step_size(*both) == size)
    seconds = float(np.median(times))
    tokens_per_second = phase.tokens_per_step / seconds
    flops = tokens_per_second * placed.flops_per_token / run.resolved.placement.world_size
    return MeasuredSpeed(
        steps=len(times),
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        tflops_per_device=flops / 1e12,
    )


def step_size(phase: PlannedPhase, placed: PhasePlacement) -> StepSize:
    return StepSize(phase.sequence_length, placed.micro_batch_sequences, placed.micro_batches_per_step)


def _is_step(row: object) -> TypeGuard[_StepRow]:
    return isinstance(row, PassedOver) or (isinstance(row, TrainingStep) and bool(row.tokens_per_second))


def _last_attempt(rows: Iterable[_StepRow]) -> list[_StepRow]:
    """Return the rows of the newest attempt, in resolved.toml's layout. Each counts seconds from 0."""
    last: list[_StepRow] = []
    seconds = 0.0
    for row in rows:
        if isinstance(row, TrainingStep):
            last = [] if row.seconds < seconds else last
            seconds = row.seconds
        last.append(row)
    return last if any(isinstance(row, TrainingStep) for row in last) else []


def _refuse_other_ranks(path: Path, rows: Sequence[_StepRow], resolved: Resolved) -> None:
    """Raise KieloError if a finished run, started again on other ranks, has overwritten resolved.toml."""
    row, placement = next(row for row in reversed(rows) if isinstance(row, TrainingStep)), resolved.placement
    per_token = placement.phases[resolved.identity.phase_index(row.step)].flops_per_token
    ranks = row.tokens_per_second * per_token / (row.tflops_per_second or np.nan) / 1e12
    # A row across two phases has tokens of both; numbers of ranks differ by more than that.
    if ranks / placement.world_size > 1.4 or placement.world_size / ranks > 1.4:
        raise KieloError(
            f"{path}: its rows are for {ranks:.0f} ranks, its resolved.toml for {placement.world_size}. "
            "Fix: a run that was not started again on other ranks after its end"
        )


def _seconds_by_size(rows: Sequence[_StepRow], resolved: Resolved) -> dict[StepSize, list[float]]:
    """Return seconds of a step, one figure a row, by the step's size.

    A row covers the steps since the row before it. Left out are rows with the first steps of a phase or of
    the attempt, rows across two phases, phases with frozen modules, and all rows from the first change of
    precision on.
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
        found.setdefault(step_size(phase, placed), []).append(phase.tokens_per_step / row.tokens_per_second)
    return found

"""Cost of a run on a planned layout: hours, jobs and checkpoints, and its expected speed; no torch."""

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from kielo.plan.failures import Copies, Failures, Rate, Save, Steps, expect
from kielo.plan.planned_layout import PlannedLayout, workload
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import step_seconds
from kielo.recipe.errors import KieloError
from kielo.recipe.layout_on_nodes import in_layout, on_devices
from kielo.recipe.optimisers import OPTIMISERS
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.text import imagined_text


def tokens_per_second(run: RunToPlan, resolved: Resolved) -> list[float]:
    """Compute tokens a second of each phase of the resolved `run`, over all ranks, by the closed form."""
    asked = {phase.number: phase for phase in run.phases}
    placement = resolved.placement
    shard = {"replicate": placement.layout.replicate, "shard": placement.layout.shard}
    layout = on_devices(run.recipe, placement.world_size).layout.model_copy(update=shard)
    shapes = []
    for phase, placed in zip(resolved.identity.phases, placement.phases, strict=True):
        length, tokens_per_step = phase.sequence_length, phase.tokens_per_step
        full = replace(asked[phase.number], sequence_length=length, tokens_per_step=tokens_per_step)
        shapes.append((layout, placed.micro_batch_sequences, full))
    work = workload(run, shapes)
    tokens = np.array([phase.tokens_per_step for phase in resolved.identity.phases], dtype=float)
    return [float(speed) for speed in tokens / step_seconds(work, run.efficiency).total]


def with_expectation(resolved: Resolved, recipe: Recipe) -> Resolved:
    """Return `resolved` with planned speeds, unless FP8 is emulated or no card has the devices' speed."""
    precision = resolved.identity.train.precision
    if precision == "fp8" and resolved.identity.train.fp8.emulate:
        return resolved
    try:
        run = RunToPlan.of(recipe, resolved.identity.model, precision)
    except KieloError:
        if recipe.machine:
            raise
        return resolved
    placement = resolved.placement
    if placement.device != run.card.device or (placement.accelerator != run.card.name and not recipe.machine):
        return resolved
    phases = tuple(
        placed.model_copy(update={"planned_tokens_per_second": round(speed, 1)})
        for placed, speed in zip(placement.phases, tokens_per_second(run, resolved), strict=True)
    )
    return resolved.model_copy(update={"placement": placement.model_copy(update={"phases": phases})})


# From a job's start to its first step: containers and imports on all nodes, communicators, reading the
# checkpoint. OpenEuroLLM measured 330 s for reading replicas alone (2026).
START_SECONDS = 600.0
# A save stops training for 0.2 s and for copying a rank's bytes to host memory
# (benchmarks/checkpoints/checkpoint.py).
_STOP_SECONDS, _COPY_BYTES_PER_SECOND = 0.2, 1e9
# A rank writes at this rate; the file system, of which a job gets half at best, limits a job of many ranks.
_RANK_BYTES_PER_SECOND, _FILE_SYSTEM_SHARE = 1e9, 0.5
# A copy in memory is written, read for the neighbour, and the neighbour's is written, at a rank's rate. Ranks
# send by one TCP connection each, mostly over one of a node's interfaces. Assumed: they get this share.
_COPY_PASSES, _TCP_SHARE = 3, 0.1
_WEIGHT_BYTES = 4  # of a parameter in a checkpoint, beside its two moments
_FORWARD_SHARE = 1 / 3  # of a trained token's work, for a token of held-out text
_LEAST_SHARE = 0.01  # of a job's time that failures must leave for kept steps


@dataclass(frozen=True)
class Cost:
    """Cost of the whole run."""

    steps: int
    training_seconds: float  # steps alone
    heldout_seconds: float
    stop_seconds: float  # that a save stops training
    checkpoints: int
    checkpoint_bytes: float
    checkpoint_seconds: float  # until a save is safe on disk, while training continues
    jobs: int
    wall_seconds: float  # with jobs' starts, saves, held-out text and failures
    device_hours: float
    failures: Failures | None = None  # None if they are left out

    @property
    def days(self) -> float:
        return self.wall_seconds / 86400


def cost(planned: PlannedLayout, wall_hours: float | None = None, rate: Rate | None = None) -> Cost:
    """Compute the cost of all phases on this layout, in jobs of at most `wall_hours`.

    `wall_hours` defaults to the site's longest. Without a `rate` no device fails. Raise KieloError if
    `resolve` refuses the run, a job would end before its first save, or failures leave it no time.
    """
    run = planned.run
    resolved = resolved_of(planned)
    training = _training_seconds(planned, resolved)
    identity, placement = resolved.identity, resolved.placement
    sources = {name for phase in identity.phases for name in phase.mixture}
    sets = 1 + len(sources) * (len(sources) > 1)  # the text of all sources, and of each source
    times = identity.total_steps // placement.train.heldout_every_steps
    heldout = sets * identity.train.heldout_sequences * identity.phases[0].sequence_length * times
    heldout_seconds = heldout / planned.tokens_per_second * _FORWARD_SHARE
    state_bytes = OPTIMISERS[identity.train.optimiser].state_bytes(identity.train.optimiser_state)
    bytes_ = placement.parameters * (_WEIGHT_BYTES + state_bytes)
    safe = bytes_ / planned.devices / _RANK_BYTES_PER_SECOND
    if run.site.file_system_gb_per_second:
        safe = max(safe, bytes_ / (run.site.file_system_gb_per_second * 1e9 * _FILE_SYSTEM_SHARE))
    stop = _STOP_SECONDS + bytes_ / planned.devices / _COPY_BYTES_PER_SECOND
    saves = max(1, identity.total_steps // placement.checkpoint.every_steps)
    copies = _copies(planned, resolved, bytes_, stop)
    work = training + heldout_seconds + saves * stop
    if copies is not None:
        work += (identity.total_steps // copies.between - saves) * copies.cost.stop
    wall = wall_hours or run.site.max_wall_hours
    failures = None
    if rate is not None:
        job = wall * 3600 if wall else work
        checkpoint = placement.checkpoint
        pause, hang = longest_pause_seconds(planned), placement.train.hang_seconds
        steps = Steps(planned.step_seconds, pause, checkpoint.every_steps, hang)
        failures = expect(rate, planned.layout, Save(stop, safe), steps, safe, job, copies)
        if failures.effective_share < _LEAST_SHARE:
            raise KieloError(
                f"--failures: on {planned.devices:,} devices, {rate.per_1000_device_days:g} failures of a "
                f"device in 1,000 days are a failure every {failures.mean_seconds:,.0f} s, and a save every "
                f"{checkpoint.every_steps} steps keeps less than {_LEAST_SHARE:.0%} of the time. "
                f"Fix: checkpoint.every_steps = {failures.best_steps}, a lower rate, or fewer nodes"
            )
        work = (training + heldout_seconds) / failures.effective_share
    jobs = 1
    if wall is not None:
        useful = wall * 3600 - START_SECONDS - safe
        if useful < planned.step_seconds:
            least = math.ceil((START_SECONDS + safe + planned.step_seconds) / 360) / 10
            raise KieloError(
                f"a job of {wall:g} hours ends before its first save: {START_SECONDS:.0f} s to start, a "
                f"step of {planned.step_seconds:.0f} s and {safe:.0f} s to write {bytes_ / 1e9:.0f} GB. "
                f"Fix: --wall-hours {least:g} or more"
            )
        jobs = math.ceil(work / useful)
    whole = work + jobs * (START_SECONDS + safe)
    numbers = identity.total_steps, training, heldout_seconds, stop, saves, bytes_, safe, jobs
    return Cost(*numbers, whole, whole * planned.devices / 3600, failures)


def _copies(planned: PlannedLayout, resolved: Resolved, bytes_: float, stop_seconds: float) -> Copies | None:
    """Return the copies in memory that the recipe makes between its saves of `bytes_`, if it makes any."""
    checkpoint = resolved.placement.checkpoint
    if not 0 < checkpoint.memory_every_steps < checkpoint.every_steps:
        return None
    sent = bytes_ / planned.nodes if planned.nodes > 1 else 0.0
    network = planned.run.site.network_gbit_per_second_per_node * 1e9 / 8
    traffic = sent / network if network else 0.0  # taken from the training's own, at the node's whole rate
    passes = (_COPY_PASSES if sent else 1) * bytes_ / planned.devices / _RANK_BYTES_PER_SECOND
    cost = Save(stop_seconds + traffic, passes + traffic / _TCP_SHARE)
    return Copies(checkpoint.memory_every_steps, cost)


def longest_pause_seconds(planned: PlannedLayout) -> float:
    """Return a bound of a step's time without a layer: a micro-batch, and all parts beside layers."""
    beside = ("bubble", "data_traffic", "optimiser", "fixed", "slowest")
    layers = sum(seconds for part, seconds in planned.seconds.items() if part not in beside)
    return sum(planned.seconds[part] for part in beside) + layers / planned.micro_batches


def with_layout(recipe: Recipe, planned: PlannedLayout) -> Recipe:
    """Return `recipe` with the planned layout and micro-batch."""
    return in_layout(recipe, planned.layout, planned.micro_batch)


def resolved_of(planned: PlannedLayout) -> Resolved:
    """Resolve the run on this layout like `kielo train`, as if all its text existed."""
    run, recipe = planned.run, with_layout(planned.run.recipe, planned)
    return resolve(recipe, "", planned.devices, run.card.device, run.card.name, text=imagined_text(recipe))


def _training_seconds(planned: PlannedLayout, resolved: Resolved) -> float:
    """Compute seconds of all steps. The closed form scales phases from the phase that ranks layouts."""
    per_second = tokens_per_second(planned.run, resolved)
    kind, phases = attrgetter("sequence_length", "tokens_per_step", "trainable"), resolved.identity.phases
    usual = [kind(phase) for phase in phases].index(kind(planned.phase))
    simulated_share = per_second[usual] / planned.tokens_per_second
    seconds = sum(
        phase.steps * phase.tokens_per_step / speed * simulated_share
        for phase, speed in zip(phases, per_second, strict=True)
    )
    skipped = sum(last - first + 1 for first, last in resolved.identity.train.skip_steps)
    return seconds * (1 - skipped / resolved.identity.total_steps)

"""What a planned layout makes of the recipe's token budget: hours, devices' hours, jobs in a chain,
checkpoints; no torch.
"""

import math
from dataclasses import dataclass

from kielo.plan.expected import tokens_per_second
from kielo.plan.planned import Planned
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import imagined_text, resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.state_bytes import STATE_BYTES

# A job's way to its first step: containers and imports on all nodes, communicators, the checkpoint read
# again. OpenEuroLLM saw 330 s for reading replicas alone (2026); communicators are given 300 s each here.
START_SECONDS = 600.0
# Kielo's store stops training for 0.2 s and the copying of a rank's bytes to host memory
# (benchmarks/checkpoint.py).
_STOP_SECONDS, _COPY_BYTES_PER_SECOND = 0.2, 1e9
# What a rank writes; a job of many ranks is bound by the file system, of which it gets half on a good day.
_RANK_BYTES_PER_SECOND, _FILE_SYSTEM_SHARE = 1e9, 0.5
_WEIGHT_BYTES = 4  # of a parameter in a checkpoint, beside its two moments
_FORWARD_SHARE = 1 / 3  # of a trained token's work, for one of held-out text


@dataclass(frozen=True)
class Cost:
    """Of the whole run. `training_seconds` are steps alone; `wall_seconds` also jobs' starts, saves and
    held-out text.

    `checkpoint_seconds`: until it is safe on disk, while training goes on; `stop_seconds`: what it stops for.
    """

    steps: int
    training_seconds: float
    heldout_seconds: float
    stop_seconds: float
    checkpoints: int
    checkpoint_bytes: float
    checkpoint_seconds: float
    jobs: int
    wall_seconds: float
    device_hours: float

    @property
    def days(self) -> float:
        return self.wall_seconds / 86400


def cost(planned: Planned, wall_hours: float | None = None) -> Cost:
    """Of all phases on `planned`'s layout, in jobs of at most `wall_hours` (default: the site's longest).

    Raises KieloError for what `resolve` refuses, and when a job would end before its first save.
    """
    job = planned.job
    resolved = resolved_of(planned)
    training = _training_seconds(planned, resolved)
    identity, placement = resolved.identity, resolved.placement
    heldout = (
        identity.train.heldout_sequences
        * identity.phases[0].sequence_length
        * (identity.total_steps // placement.train.heldout_every_steps)
    )
    heldout_seconds = heldout / planned.tokens_per_second * _FORWARD_SHARE
    bytes_ = placement.parameters * (_WEIGHT_BYTES + 2 * STATE_BYTES[identity.train.optimiser_state])
    safe = bytes_ / planned.devices / _RANK_BYTES_PER_SECOND
    if job.site.file_system_gb_per_second:
        safe = max(safe, bytes_ / (job.site.file_system_gb_per_second * 1e9 * _FILE_SYSTEM_SHARE))
    stop = _STOP_SECONDS + bytes_ / planned.devices / _COPY_BYTES_PER_SECOND
    saves = max(1, identity.total_steps // placement.checkpoint.every_steps)
    work = training + heldout_seconds + saves * stop
    wall = wall_hours or job.site.max_wall_hours
    jobs = 1
    if wall is not None:
        useful = wall * 3600 - START_SECONDS - safe
        if useful < planned.step_seconds:
            raise KieloError(
                f"a job of {wall:g} hours ends before its first save: {START_SECONDS:.0f} s to start, a "
                f"step of {planned.step_seconds:.0f} s and {safe:.0f} s to write {bytes_ / 1e9:.0f} GB; "
                "what would work: --wall-hours "
                f"{math.ceil((START_SECONDS + safe + planned.step_seconds) / 360) / 10:g} or more"
            )
        jobs = math.ceil(work / useful)
    whole = work + jobs * (START_SECONDS + safe)
    return Cost(
        identity.total_steps, training, heldout_seconds, stop, saves, bytes_, safe, jobs, whole,
        whole * planned.devices / 3600,
    )  # fmt: skip


def with_layout(recipe: Recipe, planned: Planned) -> Recipe:
    """`recipe` with the planned layout and micro-batch."""
    size = {"micro_batch_sequences": planned.micro_batch}
    phases = tuple(phase.model_copy(update=size) for phase in recipe.phases)
    train = recipe.train.model_copy(update=size)
    return recipe.model_copy(update={"layout": planned.layout, "train": train, "phases": phases})


def resolved_of(planned: Planned) -> Resolved:
    """The run as `kielo train` would resolve it on this layout, with as much text as it asks for."""
    job, recipe = planned.job, with_layout(planned.job.recipe, planned)
    return resolve(recipe, "", planned.devices, job.card.device, job.card.name, text=imagined_text(recipe))


def _training_seconds(planned: Planned, resolved: Resolved) -> float:
    per_second = tokens_per_second(planned.job, resolved)
    # The phase that layouts are ranked by was planned with its clock; the others are taken by how they
    # compare with it.
    kinds = [(phase.sequence_length, phase.tokens_per_step) for phase in resolved.identity.phases]
    usual = kinds.index((planned.sequence_length, planned.tokens_per_step))
    clock = per_second[usual] / planned.tokens_per_second
    seconds = sum(
        phase.steps * phase.tokens_per_step / speed * clock
        for phase, speed in zip(resolved.identity.phases, per_second)
    )
    skipped = sum(last - first + 1 for first, last in resolved.identity.train.skip_steps)
    return seconds * (1 - skipped / resolved.identity.total_steps)

"""Shares a step's sequences among data-parallel ranks and micro-batches; arithmetic, no torch.

Rank r of n takes sequences r, r + n, … of a step, so two ranks differ by at most one sequence. All ranks run
the same number of micro-batches of one shape, because each is collective. A rank with fewer sequences gets
*empty sequences*, whose labels do not count. The loss is a sum over counted tokens, divided by their number
in the whole step, so empty sequences cost only time.
"""

import math
from dataclasses import dataclass

import numpy as np

from kielo.recipe.sections import Layout
from kielo.resolve.resolved import Resolved
from kielo.resolve.stages import num_stages

# Neighbouring ranks differ in the last.
AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return the rank's coordinates along the axes of the mesh, in a resolved layout."""
    numbers = {}
    for axis in reversed(AXES):
        rank, numbers[axis] = divmod(rank, getattr(layout, axis))
    return numbers


def rank_of_stage(layout: Layout, pipeline_rank: int) -> int:
    """Return the first rank of a pipeline rank, with 0 on all other axes."""
    return pipeline_rank * math.prod(getattr(layout, axis) for axis in AXES if axis != "pipeline")


Column = np.ndarray
# Share of empty sequences that a larger micro-batch can add if it is at least twice as large as the largest
# that adds none. It saves no more than that.
_WORTH = 1 / 128
# A schedule that needs more micro-batches gets empty ones, up to this share of them.
MOST_FILLED = 0.25
_FEW_RANKS = 4  # whose sequences are listed one by one


@dataclass(frozen=True)
class Shares:
    """A step of `sequences` on `data_ranks`, each with `micro_batches` of `micro_batch` sequences."""

    sequences: int
    data_ranks: int
    micro_batch: int
    micro_batches: int

    @property
    def empty_share(self) -> float:
        return 1 - self.sequences / (self.data_ranks * self.micro_batch * self.micro_batches)

    def __str__(self) -> str:
        """Return a description of the uneven step, or "" if no sequence is empty."""
        if not self.empty_share:
            return ""
        ranks, (each, more) = self.data_ranks, divmod(self.sequences, self.data_ranks)
        of_ranks = f"{each} sequences each"
        if more and ranks <= _FEW_RANKS:
            of_ranks = ", ".join([str(each + 1)] * more + [str(each)] * (ranks - more)) + " sequences"
        elif more:
            of_ranks = f"{each + 1} sequences on {more} of them and {each} on the others"
        are = "data-parallel ranks" if ranks > 1 else "data-parallel rank"
        return f"{ranks} {are}: {of_ranks}; {self.empty_share:.1%} of the work is empty"


def micro_batches_needed(layout: Layout, sequences: int | Column, size: int | Column) -> Column:
    """Return the micro-batches of a rank with `sequences` that the layout's schedule accepts."""
    is_pipeline = layout.pipeline > 1
    schedule, stages = layout.pipeline_schedule, num_stages(layout)
    return least_accepted(
        np.ceil(np.asarray(sequences) / size).astype(int),
        layout.pipeline,
        stages if is_pipeline and schedule in NEED_STAGES else 0,
        is_pipeline and schedule.startswith(IN_ROUNDS),
    )


# The rules of `stages.micro_batch_complaint`.
NEED_STAGES = ("1f1b", "dualpipev")
IN_ROUNDS = "interleaved"


def least_accepted(
    at_least: Column, ranks: int | Column, stages: int | Column, in_rounds: bool | Column
) -> Column:
    """Return the least number of micro-batches, from `at_least` on, that pipelines accept.

    `ranks` is the number of the pipeline's ranks, `stages` the least number of micro-batches (0: no limit).
    With `in_rounds` the schedule takes them in equal rounds of `ranks` or more.
    """
    number = np.maximum(at_least, stages)
    rounds = np.maximum(1, number // ranks)
    even = np.minimum(np.ceil(number / rounds) * rounds, (rounds + 1) * ranks)
    return np.where(np.asarray(in_rounds) & (number >= ranks), even, number).astype(int)


def preferred_size(sizes: Column, rows: Column, may: Column) -> Column:
    """Return the size of micro-batch to take, [n], of the allowed sizes, 0 if there is none.

    sizes: [k], rising. rows: [k, n], sequences of a rank with each size, empty ones too. may: [k, n], True if
    the size is allowed. Take the largest size that adds no empty sequences, or a size at least twice as large
    that adds few.
    """
    least = np.where(may, rows, np.inf).min(axis=0)
    limits = (least, least * (1 + _WORTH))
    exact, near = (np.where(may & (rows <= most), sizes[:, None], 0).max(axis=0) for most in limits)
    return np.where(near >= 2 * exact, near, exact)


def uneven_steps(resolved: Resolved) -> list[str]:
    layout, said, ramp = resolved.placement.layout, [], []
    phases = resolved.identity.phases
    for phase, following, placed in zip(phases, [*phases[1:], None], resolved.placement.phases, strict=True):
        shares = Shares(
            phase.sequences_per_step,
            layout.replicate * layout.shard,
            placed.micro_batch_sequences,
            placed.micro_batches_per_step,
        )
        if following is not None and following.number == phase.number:
            work = phase.steps * shares.data_ranks * shares.micro_batch * shares.micro_batches
            ramp.append((shares.empty_share * work, work))
        elif shares.empty_share:
            said.append(f"{phase.sequences_per_step:,} sequences a step on {shares}")
    empty, work = (sum(column) for column in zip(*ramp, strict=True)) if ramp else (0, 1)
    if empty:
        said.append(f"in the steps of the batch ramp, {empty / work:.1%} of the work is empty sequences")
    return said

"""Chooses the sequences of a micro-batch where the recipe names no number; arithmetic, no torch.

FSDP2 adds each micro-batch's gradients to those in fp32: 10 bytes of memory traffic a parameter, whatever the
number of tokens. Larger micro-batches add up less often, and make larger matrix products.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kielo.recipe.cards import Accelerator
from kielo.recipe.sections import Layout, Model
from kielo.resolve.memory import memory_bytes, usable_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.stages import micro_batch_complaint, num_stages

# Sequences where no card knows the device's memory.
_USUAL = 4
# Tokens of a rank. From here on an H200 spends less than 0.4 % of a step on adding up gradients, and the
# tensors of an MLP come near the 2^31 elements that kernels may count to.
_MOST_TOKENS = 2**16
# Share of the usable bytes that a chosen micro-batch may need: no formula counts everything.
_MEMORY_SHARE = 0.9
# Micro-batches a step for each pipeline rank that a larger micro-batch must leave. The bubble is
# (p - 1) / micro-batches of the work. With fewer it grows by more than a sixteenth, which is more than larger
# micro-batches save.
_PER_PIPELINE_RANK = 16


@dataclass(frozen=True)
class RankOfRun:
    """One rank of a run: a complete `model` in a `layout` that has its axes, and the device's card.

    options: one for each precision that the run computes in. card: None where nothing is known of the device,
    or the layout cannot run.
    """

    model: Model
    layout: Layout
    options: tuple[TrainOptions, ...]
    card: Accelerator | None


def micro_batch(rank: RankOfRun, sequence_length: int, sequences: int, at_most: int | None = None) -> int:
    """Returns the sequences of a micro-batch on a rank that has `sequences` a step; they divide those.

    It is the largest size that fits the device's memory with a margin, up to 65,536 tokens; in a pipeline,
    that leaves 16 micro-batches for each of its ranks, or else the smallest that its schedule accepts. Where
    the memory is not known, it is the largest up to 4 that the schedule accepts. at_most: an upper limit.
    """
    sizes = [size for size in range(1, min(sequences, _MOST_TOKENS) + 1) if sequences % size == 0]
    sizes = [size for size in sizes if _is_accepted(rank.layout, sequences // size)] or sizes
    sizes = [size for size in sizes if at_most is None or size <= at_most] or sizes[:1]
    if rank.card is None or rank.card.memory_bytes is None:
        return max([size for size in sizes if size <= _USUAL], default=sizes[0])
    worth = [size for size in sizes if _is_worth_it(rank.layout, sequence_length, sequences, size)]
    return max(_fitting(rank, sequence_length, sequences, worth), default=sizes[0])


def _is_accepted(layout: Layout, micro_batches: int) -> bool:
    """Returns True if the pipeline's schedule runs so many micro-batches."""
    if layout.pipeline == 1:
        return True
    schedule = layout.pipeline_schedule
    return micro_batch_complaint(schedule, micro_batches, layout.pipeline, num_stages(layout)) is None


def _is_worth_it(layout: Layout, sequence_length: int, sequences: int, size: int) -> bool:
    """Returns True if so large a micro-batch is no larger than what still saves time."""
    leaves_enough = layout.pipeline == 1 or sequences // size >= _PER_PIPELINE_RANK * layout.pipeline
    return leaves_enough and size * sequence_length // layout.context <= _MOST_TOKENS


def _fitting(rank: RankOfRun, sequence_length: int, sequences: int, sizes: list[int]) -> Iterator[int]:
    """Yields the sizes whose peak fits the device's memory in every precision of the run."""
    if not sizes:
        return
    steps = [StepSize(sequence_length, size, sequences // size) for size in sizes]
    fits = np.ones(len(sizes), bool)
    for options in rank.options:
        rows = [memory_row(rank.model, rank.layout, step, options, rank.card) for step in steps]
        peak = memory_bytes(MemoryColumns.of(rows)).peak("reserved")
        fits &= peak <= _MEMORY_SHARE * usable_bytes(rank.card.memory_bytes)
    yield from (size for size, is_small in zip(sizes, fits) if is_small)

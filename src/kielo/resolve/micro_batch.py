"""Chooses the sequences of a micro-batch where the recipe names no number; arithmetic, no torch.

FSDP2 adds each micro-batch's gradients to those in fp32: 10 bytes of memory traffic a parameter, whatever the
number of tokens. Larger micro-batches add up less often, and make larger matrix products.
"""

from dataclasses import dataclass, replace

import numpy as np

from kielo.recipe.cards import Accelerator
from kielo.recipe.sections import CompleteModel, Layout
from kielo.resolve.memory import memory_bytes, usable_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.shares import micro_batches_needed, preferred_size

Column = np.ndarray
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

    model: CompleteModel
    layout: Layout
    options: tuple[TrainOptions, ...]
    card: Accelerator | None

    def in_phase(self, trainable: tuple[str, ...]) -> "RankOfRun":
        """Return the rank in a phase that trains these modules, none for all."""
        return replace(self, options=tuple(replace(each, trainable=trainable) for each in self.options))


def micro_batch(rank: RankOfRun, sequence_length: int, sequences: int, at_most: int | None = None) -> int:
    """Return the sequences of a micro-batch on a rank that has `sequences` a step.

    It adds no empty sequences that another size would not, or few (`shares.preferred_size`). It is the
    largest size that fits the device's memory with a margin, up to 65,536 tokens; in a pipeline, that leaves
    16 micro-batches for each of its ranks, or else the smallest. Where the memory is not known, it is the
    largest up to 4. at_most: an upper limit.
    """
    sizes = np.arange(1, min(sequences, at_most or sequences, _MOST_TOKENS) + 1)
    numbers = micro_batches_needed(rank.layout, sequences, sizes)
    may = np.ones(len(sizes), bool)
    usable = None if rank.card is None else usable_bytes(rank.card)
    if usable is None:
        may = sizes <= _USUAL
    else:
        may = _is_worth_it(rank.layout, sequence_length, numbers, sizes)
        may[may] = _fits(rank, usable, sequence_length, sizes[may], numbers[may])
    least = sizes * numbers == (sizes * numbers).min()
    if not (may & least).any():
        # with those that add nothing, so that a size is not chosen for its empty sequences
        may |= sizes == sizes[least][0]
    return int(preferred_size(sizes, (sizes * numbers)[:, None], may[:, None])[0])


def micro_batch_up_to(layout: Layout, sequences: int, asked: int) -> int:
    """Return the sequences of a micro-batch where the recipe asks for `asked`: so many, or fewer.

    Fewer are taken where that leaves fewer empty sequences (`shares.preferred_size`).
    """
    sizes = np.arange(1, min(sequences, asked) + 1)
    rows = sizes * micro_batches_needed(layout, sequences, sizes)
    return int(preferred_size(sizes, rows[:, None], np.ones((len(sizes), 1), bool))[0])


def _is_worth_it(layout: Layout, sequence_length: int, numbers: Column, sizes: Column) -> Column:
    """Return True where so large a micro-batch is no larger than what still saves time."""
    leaves_enough = layout.pipeline == 1 or numbers >= _PER_PIPELINE_RANK * layout.pipeline
    return leaves_enough & (sizes * sequence_length // layout.context <= _MOST_TOKENS)


def _fits(rank: RankOfRun, usable: float, sequence_length: int, sizes: Column, numbers: Column) -> Column:
    """Return True where the peak fits the device's memory in every precision of the run."""
    fits = np.ones(len(sizes), bool)
    if not len(sizes):
        return fits
    steps = [
        StepSize(sequence_length, int(size), int(number)) for size, number in zip(sizes, numbers, strict=True)
    ]
    for options in rank.options:
        rows = [memory_row(rank.model, rank.layout, step, options, rank.card) for step in steps]
        peak = memory_bytes(MemoryColumns.of(rows)).peak("reserved")
        fits &= peak <= _MEMORY_SHARE * usable
    return fits

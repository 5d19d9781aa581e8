"""Chooses the sequences of a micro-batch if the recipe has no number; arithmetic, no torch.

FSDP2 adds each micro-batch's gradients in fp32: 10 bytes of memory traffic a parameter, for any number of
tokens. Larger micro-batches add them less often, and make larger matrix products.
"""

from dataclasses import dataclass, replace

import numpy as np

from kielo.recipe.cards import Accelerator
from kielo.recipe.sections import CompleteModel, Layout
from kielo.resolve.memory import memory_bytes, usable_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.shares import micro_batches_needed, preferred_size

Column = np.ndarray
_USUAL = 4  # sequences, if no card knows the device's memory
# Tokens of a rank. From here on an H200 spends less than 0.4 % of a step on adding gradients, and the tensors
# of an MLP approach the 2^31 elements that kernels can count.
_MOST_TOKENS = 2**16
# Share of the usable bytes that a chosen micro-batch can need, because no formula counts everything.
_MEMORY_SHARE = 0.9
# Micro-batches a step for each pipeline rank that a larger micro-batch must leave. With fewer the bubble, (p
# - 1) / micro-batches of the work, grows by more than a sixteenth, more than larger micro-batches save.
_PER_PIPELINE_RANK = 16


@dataclass(frozen=True)
class RankOfRun:
    """A rank of a run: a complete `model` in a `layout` that has its axes, and the device's card.

    options: one for each precision of the run. card: None if the device is unknown or the layout cannot run.
    """

    model: CompleteModel
    layout: Layout
    options: tuple[TrainOptions, ...]
    card: Accelerator | None

    def in_phase(self, trainable: tuple[str, ...]) -> "RankOfRun":
        """Return the rank in a phase that trains these modules, () for all."""
        return replace(self, options=tuple(replace(each, trainable=trainable) for each in self.options))


def micro_batch(rank: RankOfRun, sequence_length: int, sequences: int, at_most: int | None = None) -> int:
    """Return the sequences of a micro-batch on a rank that has `sequences` a step.

    It adds no empty sequences that another size would not, or few (`shares.preferred_size`). It is the
    largest size, up to 65,536 tokens, that fits the device's memory with a margin and, in a pipeline, leaves
    16 micro-batches for each rank; else the smallest. Without known memory it is the largest up to 4.
    at_most: an upper limit.
    """
    sizes = np.arange(1, min(sequences, at_most or sequences, _MOST_TOKENS) + 1)
    numbers = micro_batches_needed(rank.layout, sequences, sizes)
    may = np.ones(len(sizes), bool)
    usable = None if rank.card is None else usable_bytes(rank.card)
    if usable is None:
        may = sizes <= _USUAL
    else:
        # A micro-batch can also be too large to save time.
        pipeline = rank.layout.pipeline
        leaves_enough = pipeline == 1 or numbers >= _PER_PIPELINE_RANK * pipeline
        may = leaves_enough & (sizes * sequence_length // rank.layout.context <= _MOST_TOKENS)
        may[may] = _fits(rank, usable, sequence_length, sizes[may], numbers[may])
    least = sizes * numbers == (sizes * numbers).min()
    if not (may & least).any():
        # Sizes that add nothing are allowed, so that no size is chosen for its empty sequences.
        may |= sizes == sizes[least][0]
    return int(preferred_size(sizes, (sizes * numbers)[:, None], may[:, None])[0])


def micro_batch_up_to(layout: Layout, sequences: int, asked: int) -> int:
    """Return `asked` sequences of a micro-batch, or fewer if that leaves fewer empty sequences."""
    sizes = np.arange(1, min(sequences, asked) + 1)
    rows = sizes * micro_batches_needed(layout, sequences, sizes)
    return int(preferred_size(sizes, rows[:, None], np.ones((len(sizes), 1), bool))[0])


def _fits(rank: RankOfRun, usable: float, sequence_length: int, sizes: Column, numbers: Column) -> Column:
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

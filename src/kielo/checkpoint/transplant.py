"""A vocabulary transplant: rows of an old embedding or head in a file → rows of a new one, of any layout.

A rank reads the old rows that its own new rows are made of, in the order of the file and at most
`BLOCK_BYTES` of them at a time, so that neither matrix is ever whole. Rows are added up in fp32 in ascending
order of the old ids and then divided, so that every layout computes the same bits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kielo.artifact.row_map import RowMap
from kielo.checkpoint.pieces import is_finite
from kielo.checkpoint.tensor_file import ReadBuffers, TensorFile, Wanted
from kielo.checkpoint.tensor_table import StoredTensor
from kielo.models.piece import Box

BLOCK_BYTES = 32 * 2**20  # of old rows in fp32
# (our name, shape of the whole parameter, box of it) → first values, fp32 on the CPU
FirstValue = Callable[[str, Sequence[int], Box], Tensor]


@dataclass(frozen=True)
class Transplant:
    """The map of rows, and where the values of random rows come from."""

    row_map: RowMap
    first_value: FirstValue

    def misfit(self, shape: Sequence[int], stored: StoredTensor) -> str | None:
        """Returns why a parameter of `shape` cannot take its rows from the stored tensor; None if it can."""
        needed = self.row_map.old_vocabulary_size
        if (
            len(stored.shape) == len(shape)
            and stored.shape[1:] == tuple(shape[1:])
            and needed <= stored.shape[0]
        ):
            return None
        return (
            f"has the shape {list(stored.shape)}, and the rows of {needed} old tokens, of {list(shape[1:])} "
            "numbers, are to come from it; what would work: the tokenizer.json that belongs to these weights "
            "beside them"
        )

    def fill(self, name: str, shape: Sequence[int], shard: Tensor, box: Box, source: "Source") -> bool:
        """Fills `shard`, the box of the parameter `name`; rows beyond the new vocabulary become zero.

        Returns False where what was read is not finite.
        """
        shard.zero_()
        if not shard.numel():
            return True
        of_box = self.row_map.rows[box[0].start : box[0].stop]
        for first, last in _runs([row for row, old in enumerate(of_box) if not old]):
            part = (slice(box[0].start + first, box[0].start + last), *box[1:])
            shard[first:last] = self.first_value(name, shape, part).to(shard)
        counts = torch.tensor([max(1, len(old)) for old in of_box], dtype=torch.float32, device=shard.device)
        finite = self._add(shard, of_box, box, source)
        filled = shard[: len(of_box)]
        filled /= counts.view(-1, *[1] * (shard.dim() - 1))
        return finite and is_finite(shard)

    def _add(self, shard: Tensor, of_box: Sequence[Sequence[int]], box: Box, source: "Source") -> bool:
        """Adds the old rows of each new one to the shard, in ascending order of the old ids."""
        pairs = sorted((old, row) for row, olds in enumerate(of_box) for old in olds)
        olds = np.array([old for old, _ in pairs], dtype=np.int64)
        rows = np.array([row for _, row in pairs], dtype=np.int64)
        row_bytes = 4 * max(1, shard[0].numel())
        most, wanted, finite = max(1, BLOCK_BYTES // row_bytes), np.unique(olds), True
        for begin in range(0, len(wanted), most):
            in_block = wanted[begin : begin + most]
            block = source.read(in_block, box[1:], shard.device)
            finite = finite and is_finite(block)
            first, last = np.searchsorted(olds, [in_block[0], in_block[-1] + 1])
            places = np.searchsorted(in_block, olds[first:last])
            for some in _without_repetition(rows[first:last]):
                to = torch.from_numpy(rows[first:last][some]).to(shard.device)
                shard[to] += block[torch.from_numpy(places[some]).to(shard.device)]
        return finite


@dataclass(frozen=True)
class Source:
    """A stored tensor, and the buffers through which it is read."""

    path: Path
    stored: StoredTensor
    buffers: ReadBuffers

    def read(self, rows: np.ndarray, others: Box, device: torch.device) -> Tensor:
        """Reads these rows (ascending, each once) of the box `others` of the other dims, as fp32."""
        block = torch.empty(len(rows), *(part.stop - part.start for part in others), device=device)
        with TensorFile(self.path, {}, self.buffers) as file:
            file.read(
                Wanted(
                    self.stored,
                    (slice(int(rows[first]), int(rows[first]) + last - first), *others),
                    block[first:last],
                )
                for first, last in _consecutive(rows)
            )
        return block


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, last + 1) of each run of consecutive numbers, which ascend."""
    values = np.array(numbers, dtype=np.int64)
    for first, last in _consecutive(values):
        yield int(values[first]), int(values[last - 1]) + 1


def _consecutive(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (first, last + 1) places of each run of consecutive numbers in `values`, which ascend."""
    if len(values):
        borders = np.flatnonzero(np.diff(values) != 1) + 1
        yield from zip([0, *borders.tolist()], [*borders.tolist(), len(values)])


def _without_repetition(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yields places of `rows` in which no row is there twice: the first of each, then the second, …"""
    seen: Counter[int] = Counter()
    occurrence = np.empty(len(rows), dtype=np.int64)
    for place, row in enumerate(rows.tolist()):
        occurrence[place] = seen[row]
        seen[row] += 1
    for number in range(int(occurrence.max(initial=-1)) + 1):
        yield np.flatnonzero(occurrence == number)

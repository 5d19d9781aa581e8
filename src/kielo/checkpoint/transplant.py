"""A vocabulary transplant: old rows of an embedding or head in a file → new rows, of any layout.

A rank reads the old rows of its own new rows, in the order of the file and at most `BLOCK_BYTES` at a time,
so neither matrix is ever whole. Rows are added up in fp32 in ascending order of the old ids, each times its
weight, or unweighted and then divided: every layout computes the same bits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kielo.artifact.stage_counts import RowMap
from kielo.checkpoint.split_tensor import SplitTensor, read_parts
from kielo.checkpoint.tensor_file import ReadBuffers, Wanted
from kielo.checkpoint.tensor_table import is_finite
from kielo.models.piece import Box

BLOCK_BYTES = 32 * 2**20  # of old rows in fp32
# (our name, shape of the whole parameter, box of it) → first values, fp32 on the CPU
FirstValue = Callable[[str, Sequence[int], Box], Tensor]


@dataclass(frozen=True)
class Transplant:
    row_map: RowMap
    first_value: FirstValue

    def misfit(self, shape: Sequence[int], stored: SplitTensor) -> str | None:
        """Return why a parameter of `shape` cannot take its rows from the stored tensor, None if it can."""
        needed = self.row_map.old_vocabulary_size
        if stored.shape and stored.shape[1:] == tuple(shape[1:]) and needed <= stored.shape[0]:
            return None
        return (
            f"has the shape {list(stored.shape)}, but must have rows of {needed} old tokens, of "
            f"{list(shape[1:])} numbers. Fix: the tokenizer.json that belongs to these weights beside them"
        )

    def fill(self, name: str, shape: Sequence[int], shard: Tensor, box: Box, source: "Source") -> bool:
        """Fill the box `shard` of a parameter, padding with zero. Return False if a row is not finite."""
        shard.zero_()
        if not shard.numel():
            return True
        of_box = self.row_map.rows[box[0].start : box[0].stop]
        for first, last in _runs([row for row, old in enumerate(of_box) if not old], _rows_of_block(shard)):
            part = (slice(box[0].start + first, box[0].start + last), *box[1:])
            shard[first:last] = self.first_value(name, shape, part).to(shard)
        weights = [self.row_map.weights.get(str(box[0].start + row)) for row in range(len(of_box))]
        sizes = [1 if weight else max(1, len(old)) for old, weight in zip(of_box, weights, strict=True)]
        counts = torch.tensor(sizes, dtype=torch.float32, device=shard.device)
        self._add(shard, _parts(of_box, weights), box, source)
        filled = shard[: len(of_box)]
        filled /= counts.view(-1, *[1] * (shard.dim() - 1))
        return is_finite(shard)  # a sum with a value that is not finite is none either

    def _add(self, shard: Tensor, parts: "Parts", box: Box, source: "Source") -> None:
        olds, rows, all_weights = parts
        most, wanted = _rows_of_block(shard), np.unique(olds)
        for begin in range(0, len(wanted), most):
            in_block = wanted[begin : begin + most]
            block = source.read(in_block, box[1:], shard.device)
            first, last = np.searchsorted(olds, [in_block[0], in_block[-1] + 1])
            places = np.searchsorted(in_block, olds[first:last])
            for some in _without_repetition(rows[first:last], most):
                to = torch.from_numpy(rows[first:last][some]).to(shard.device)
                added = block[torch.from_numpy(places[some]).to(shard.device)]
                if all_weights is not None:
                    weights = torch.from_numpy(all_weights[first:last][some]).to(shard.device)
                    added *= weights.view(-1, *[1] * (added.dim() - 1))
                shard[to] += added


class Parts(NamedTuple):
    """Old rows, the new rows that they are added to, and fp32 weights (None: all 1), sorted by old row."""

    olds: np.ndarray
    rows: np.ndarray
    weights: np.ndarray | None


def _parts(of_box: Sequence[Sequence[int]], weights: Sequence[Sequence[float] | None]) -> Parts:
    unsorted = (
        (old, row, weight)
        for row, (olds, weighing) in enumerate(zip(of_box, weights, strict=True))
        for old, weight in zip(olds, weighing or [1.0] * len(olds), strict=True)
    )
    whole = sorted(unsorted, key=itemgetter(0, 1))
    olds, rows, factors = zip(*whole, strict=True) if whole else ((), (), ())
    return Parts(
        np.array(olds, dtype=np.int64),
        np.array(rows, dtype=np.int64),
        np.array(factors, dtype=np.float32) if any(weights) else None,
    )


@dataclass(frozen=True)
class Source:
    stored: SplitTensor
    buffers: ReadBuffers

    def read(self, rows: np.ndarray, others: Box, device: torch.device) -> Tensor:
        """Read these rows (ascending, each once) of the box `others` of the other dims, as fp32."""
        block = torch.empty(len(rows), *(part.stop - part.start for part in others), device=device)
        wanted = list[tuple[Path, Wanted]]()
        for first, last in _consecutive(rows):
            in_file = slice(int(rows[first]), int(rows[first]) + last - first)
            wanted += self.stored.wanted((in_file, *others), block[first:last])
        read_parts(wanted, self.buffers)
        return block


def _rows_of_block(shard: Tensor) -> int:
    return max(1, BLOCK_BYTES // (4 * max(1, shard[0].numel())))


def _runs(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of at most `most` consecutive numbers, which ascend."""
    values = np.array(numbers, dtype=np.int64)
    for first, last in _consecutive(values):
        for begin in range(first, last, most):
            yield int(values[begin]), int(values[min(begin + most, last) - 1]) + 1


def _consecutive(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) places of each run of consecutive numbers in `values`, which ascend."""
    if len(values):
        borders = np.flatnonzero(np.diff(values) != 1) + 1
        yield from zip([0, *borders.tolist()], [*borders.tolist(), len(values)], strict=True)


def _without_repetition(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Yield at most `most` places of `rows` at a time: the first of each row, then the second, …"""
    seen: Counter[int] = Counter()
    occurrence = np.empty(len(rows), dtype=np.int64)
    for place, row in enumerate(rows.tolist()):
        occurrence[place] = seen[row]
        seen[row] += 1
    for number in range(int(occurrence.max(initial=-1)) + 1):
        places = np.flatnonzero(occurrence == number)
        yield from (places[begin : begin + most] for begin in range(0, len(places), most))

"""Tensors in files, read by boxes: the bytes of a box → part of a tensor, in two buffers of fixed size.

Not mapped: mapped pages count as resident memory, and only the kernel decides when they go.
"""

import itertools
import operator
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kielo.checkpoint.tensor_table import DTYPES, StoredTensor, read_table
from kielo.models.piece import Box
from kielo.recipe.errors import KieloError

# Of each of the two buffers. Smaller buffers stay in the processor's cache, but each costs a change of
# threads, and on a busy machine a wait for all of torch's: 8 MiB took two to three times the CPU time of 32.
BUFFER_BYTES = 32 * 2**20
# Up to this gap the bytes between two wanted runs are read and not skipped: the disk brings whole pages, and
# copying them out of the page cache takes no longer than another system call.
READ_THROUGH_BYTES = 8192
# Up to this gap the kernel is asked to read the bytes between two runs too: it streams instead of seeking,
# also for the ranks that want the rest. Linux' default read-ahead, the most in one call.
_READ_AHEAD_BYTES = 128 * 1024
_MAX_RUNS_PER_CALL = 1024  # Linux' IOV_MAX
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Wanted:
    """A box (a slice with bounds for each dim) of a stored tensor, and the target of its shape to fill."""

    stored: StoredTensor
    box: Box
    target: Tensor


class ReadBuffers:
    """The two buffers that bytes are read into, allocated when first needed; pinned when they feed a GPU."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES):
        self.buffer_bytes = buffer_bytes
        self._buffers: dict[tuple[int, bool], Tensor] = {}

    def buffer(self, number: int, pinned: bool) -> Tensor:
        if (key := (number, pinned)) not in self._buffers:
            self._buffers[key] = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[key]


class TensorFile:
    """One file of tensors, open for reading. KieloError if it is damaged. tensors: its table, if known."""

    def __init__(
        self, path: Path, tensors: dict[str, StoredTensor] | None = None, buffers: ReadBuffers | None = None
    ):
        self.path = Path(path)
        self.tensors = read_table(self.path) if tensors is None else tensors
        self._buffers = buffers or ReadBuffers()
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise KieloError(f"{self.path}: cannot be read ({error.strerror})") from error
        # Bytes between two runs are read into this and not used.
        self._between = memoryview(bytearray(READ_THROUGH_BYTES))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill every target, in the order of the bytes in the file."""
        tiles = [tile for one in wanted for tile in _tiles(one, self._buffers.buffer_bytes)]
        tiles.sort(key=lambda tile: tile.begin)
        if not (batches := list(_batches(tiles, self._buffers.buffer_bytes))):
            return
        pinned = any(tile.target.is_cuda for tile in tiles)
        buffers = [self._buffers.buffer(number, pinned) for number in range(min(2, len(batches)))]
        if len(batches) == 1:
            self._read_batch(batches[0], buffers[0])
            _cast_batch(batches[0], buffers[0])
            return
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._read_batch, batches[0], buffers[0])
            for number, batch in enumerate(batches):
                ahead.result()
                if number + 1 < len(batches):
                    ahead = reader.submit(self._read_batch, batches[number + 1], buffers[(number + 1) % 2])
                _cast_batch(batch, buffers[number % 2])

    def _read_batch(self, batch: "list[tuple[int, _Tile]]", buffer: Tensor) -> None:
        memory = buffer.numpy().data
        begin = end = 0
        parts: list[memoryview] = []
        for place, tile in batch:
            if READ_THROUGH_BYTES < tile.gap_bytes <= _READ_AHEAD_BYTES and hasattr(os, "posix_fadvise"):
                last = tile.begin + tile.target.shape[0] * tile.row_stride_bytes
                for offset in range(tile.begin, last, _READ_AHEAD_BYTES):
                    os.posix_fadvise(self._descriptor, offset, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            for offset, part in tile.runs(memory[place : place + tile.num_bytes]):
                gap = offset - end
                if not parts or not 0 <= gap <= READ_THROUGH_BYTES or len(parts) + 2 > _MAX_RUNS_PER_CALL:
                    self._read_run(begin, parts)
                    begin, parts = offset, []
                elif gap:
                    parts.append(self._between[:gap])
                parts.append(part)
                end = offset + len(part)
        self._read_run(begin, parts)

    def _read_run(self, begin: int, parts: list[memoryview]) -> None:
        while parts:
            try:
                got = os.preadv(self._descriptor, parts, begin)
            except OSError as error:
                raise KieloError(f"{self.path}: cannot be read at byte {begin} ({error.strerror})") from error
            if got == 0:
                raise KieloError(f"{self.path}: cut short or damaged: it ends before byte {begin}")
            begin, full = begin + got, 0
            while full < len(parts) and got >= len(parts[full]):
                got, full = got - len(parts[full]), full + 1
            parts = parts[full:]
            if parts:
                parts[0] = parts[0][got:]


@dataclass(frozen=True)
class _Tile:
    """Rows of equal length, `row_stride_bytes` apart from byte `begin` on; target: [rows, columns]."""

    begin: int
    row_stride_bytes: int
    dtype: torch.dtype
    target: Tensor

    @property
    def row_bytes(self) -> int:
        return self.target.shape[1] * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.target.shape[0] * self.row_bytes

    @property
    def gap_bytes(self) -> int:
        return self.row_stride_bytes - self.row_bytes if self.target.shape[0] > 1 else 0

    def runs(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield each run of bytes: its place in the file, and its part of `memory` (rows adjacent)."""
        if self.gap_bytes == 0:
            yield self.begin, memory
            return
        for row in range(self.target.shape[0]):
            in_memory = memory[row * self.row_bytes : (row + 1) * self.row_bytes]
            yield self.begin + row * self.row_stride_bytes, in_memory


def _tiles(wanted: Wanted, buffer_bytes: int) -> Iterator[_Tile]:
    """Divide a box into tiles of at most `buffer_bytes`; dims outermost first, in the order of the file."""
    stored, target, dtype = wanted.stored, wanted.target.detach(), DTYPES[wanted.stored.dtype]
    if not target.numel():
        return
    order = sorted(range(target.dim()), key=lambda dim: -stored.strides[dim])
    strides = [stored.strides[dim] for dim in order]
    first = stored.begin + sum(wanted.box[dim].start * stored.strides[dim] for dim in order) * dtype.itemsize
    target = target.permute(order)
    if not strides or strides[-1] != 1:  # a scalar, or a view that takes every n-th element
        target, strides = target.unsqueeze(-1), [*strides, 1]
    if target.dim() == 1:
        target, strides = target.unsqueeze(0), [0, *strides]
    *outer, rows, columns = target.shape
    row_stride_bytes = strides[-2] * dtype.itemsize
    columns_each = min(columns, buffer_bytes // dtype.itemsize)
    rows_each = max(1, buffer_bytes // (columns_each * dtype.itemsize))
    for index in itertools.product(*map(range, outer)):
        begin = first + sum(map(operator.mul, index, strides)) * dtype.itemsize
        for row in range(0, rows, rows_each):
            for column in range(0, columns, columns_each):
                part = target[index][row : row + rows_each, column : column + columns_each]
                yield _Tile(
                    begin + row * row_stride_bytes + column * dtype.itemsize, row_stride_bytes, dtype, part
                )


def _batches(tiles: Iterable[_Tile], buffer_bytes: int) -> Iterator[list[tuple[int, _Tile]]]:
    batch: list[tuple[int, _Tile]] = []
    filled = 0
    for tile in tiles:
        if batch and filled + tile.num_bytes > buffer_bytes:
            yield batch
            batch, filled = [], 0
        batch.append((filled, tile))
        filled += -(-tile.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if batch:
        yield batch


def _cast_batch(batch: list[tuple[int, _Tile]], buffer: Tensor) -> None:
    for place, tile in batch:
        values = buffer[place : place + tile.num_bytes].view(tile.dtype).view(tile.target.shape)
        if tile.target.is_cuda:  # or the CPU would cast, into memory that is not pinned
            values = values.to(tile.target.device, non_blocking=True)
        tile.target.copy_(values)
    for device in {tile.target.device for _, tile in batch if tile.target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the buffer is filled again next

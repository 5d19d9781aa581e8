"""Tensors in files, read by boxes: the bytes of a box → part of a tensor, in memory that does not grow with
either.

Two kinds of file: safetensors, and the zip that `torch.save` writes (`pytorch_model.bin`), of which nothing
but its table of tensors is unpickled, and that only as far as tensors go. Bytes are read with preadv into two
buffers, one being read while the other is cast into its targets. Not by mapping the file: mapped pages count
as resident memory, and nobody but the kernel says when they go.
"""

import itertools
import json
import math
import operator
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from kielo.artifact.weights_folder import unique_keys
from kielo.checkpoint.safetensors_dtypes import DTYPE_NAMES, DTYPES
from kielo.models.piece import Box
from kielo.recipe.errors import KieloError

# Of each of the two buffers. Smaller ones would stay in the processor's cache, but each costs a change of
# threads, and on a busy machine a wait for all of torch's: 8 MiB took two to three times the processor time
# of 32.
BUFFER_BYTES = 32 * 2**20
# Between two wanted runs of bytes this much is read along rather than skipped: the disk brings whole pages
# anyway, and copying it out of the page cache takes no longer than another system call.
READ_THROUGH_BYTES = 8192
# Up to this the kernel is told to bring what lies between as well: it then streams instead of seeking, for
# the ranks that want the rest too. Linux' default read-ahead, the most that it takes in one call.
_READ_AHEAD_BYTES = 128 * 1024
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MAX_RUNS_PER_CALL = 1024  # Linux' IOV_MAX
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StoredTensor:
    """dtype: a safetensors name ("BF16"). begin: where element 0 lies, in bytes of the file. strides: in
    elements.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """A box (a slice with bounds for each dim) of a stored tensor, and the part of a tensor of its shape to
    fill.
    """

    stored: StoredTensor
    box: Box
    target: Tensor


class ReadBuffers:
    """The two buffers that bytes pass through, made when first needed; pinned when they feed a GPU."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES):
        self.buffer_bytes = buffer_bytes
        self._buffers: dict[tuple[int, bool], Tensor] = {}

    def buffer(self, number: int, pinned: bool) -> Tensor:
        """uint8 [buffer_bytes], number 0 or 1."""
        key = (number, pinned)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[key]


class TensorFile:
    """One file of tensors, open for reading until `close` or the end of a `with`.

    tensors: its table, where that is known already (`read_table`). buffers: shared with other
    files. Raises KieloError, naming the file and where it can the tensor, for a damaged file and for one cut
    short.
    """

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
        # What is read between two runs and not wanted.
        self._aside = memoryview(bytearray(READ_THROUGH_BYTES))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read_into(self, target: Tensor, name: str, box: Box) -> None:
        """Fill `target` (any dtype, device and strides, of the box's shape) with a box of the
        tensor `name`.
        """
        self.read([Wanted(self.tensors[name], box, target)])

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill every target, in the order in which the bytes lie in the file."""
        tiles = sorted(
            (tile for one in wanted for tile in _tiles(one, self._buffers.buffer_bytes)),
            key=lambda tile: tile.begin,
        )
        batches = list(_batches(tiles, self._buffers.buffer_bytes))
        if not batches:
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
        memory = memoryview(buffer.numpy())
        begin = end = 0
        parts: list[memoryview] = []
        for place, tile in batch:
            if READ_THROUGH_BYTES < tile.gap_bytes <= _READ_AHEAD_BYTES:
                self._bring(tile.begin, tile.begin + tile.target.shape[0] * tile.row_stride_bytes)
            for offset, part in tile.runs(memory[place : place + tile.num_bytes]):
                gap = offset - end
                if not parts or not 0 <= gap <= READ_THROUGH_BYTES or len(parts) + 2 > _MAX_RUNS_PER_CALL:
                    self._read_run(begin, parts)
                    begin, parts = offset, []
                elif gap:
                    parts.append(self._aside[:gap])
                parts.append(part)
                end = offset + len(part)
        self._read_run(begin, parts)

    def _bring(self, begin: int, end: int) -> None:
        """Have the kernel start to read these bytes into its cache."""
        if hasattr(os, "posix_fadvise"):
            for offset in range(begin, end, _READ_AHEAD_BYTES):
                os.posix_fadvise(self._descriptor, offset, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

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


def read_table(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name: a safetensors header, or the table of a file that `torch.save` wrote.

    Nothing is believed before it is checked: each tensor lies inside the file, is as long as dtype and shape
    say, and (safetensors) overlaps no other. KieloError names the file and the tensor.
    """
    path = Path(path)
    try:
        return _safetensors_table(path) if path.suffix == ".safetensors" else _torch_table(path)
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror or error})") from error


def _safetensors_table(path: Path) -> dict[str, StoredTensor]:
    # https://github.com/huggingface/safetensors, format section: 8 bytes length, JSON header, data.
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        first = 8 + header_bytes
        if file_bytes < 8 or header_bytes > _MAX_HEADER_BYTES or first > file_bytes:
            raise KieloError(
                f"{path}: cannot be read as safetensors: it has {file_bytes} bytes, of which the header "
                f"would be {header_bytes}; cut short or damaged"
            )
        text = file.read(header_bytes)
    try:
        header = json.loads(text, object_pairs_hook=partial(unique_keys, path))
        header.pop("__metadata__", None)
        entries = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            entries.append((begin, end, name, str(entry["dtype"]), tuple(entry["shape"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KieloError(
            f"{path}: cannot be read as safetensors: its header is damaged ({error!r})"
        ) from error
    for begin, end, name, dtype, shape in entries:
        if dtype not in DTYPES:
            raise KieloError(f"{path}: {name} is stored as {dtype}; known: {', '.join(DTYPES)}")
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise KieloError(
                f"{path}: damaged: {name} lies from {begin} to {end} with the shape {list(shape)}"
            )
        if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise KieloError(
                f"{path}: damaged: {name} has {end - begin} bytes, not those of {dtype} {list(shape)}"
            )
        if first + end > file_bytes:
            raise KieloError(
                f"{path}: cut short or damaged: {name} ends at byte {first + end}, the file at {file_bytes}"
            )
    last_end, last_name = 0, ""
    for begin, end, name, *_ in sorted(entry for entry in entries if entry[0] < entry[1]):
        if begin < last_end:
            raise KieloError(f"{path}: damaged: {name} overlaps {last_name}")
        last_end, last_name = end, name
    return {
        name: StoredTensor(dtype, shape, first + begin, _row_major(shape))
        for begin, _, name, dtype, shape in entries
    }


def _torch_table(path: Path) -> dict[str, StoredTensor]:
    """Fake tensors tell where their bytes lie (torch ≥ 2.6), and no bytes are read for them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    resave = "; transformers' save_pretrained writes it anew as safetensors"
    if not zipfile.is_zipfile(path):
        raise KieloError(
            f"{path}: not a zip: cut short, or saved by a torch before 1.6, and then no part of it can be "
            f"read alone{resave}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            is_packed = any(member.compress_type != zipfile.ZIP_STORED for member in members.values())
            is_big_endian = "byteorder" in members and archive.read(members["byteorder"]) != b"little"
        with FakeTensorMode():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise KieloError(
            f"{path}: refused: it holds more than tensors, and loading it could run code ({reason})"
        ) from error
    except Exception as error:  # zipfile's, torch's reader's and the unpickler's own for damaged bytes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise KieloError(f"{path}: cannot be read, cut short or damaged ({reason})") from error
    if is_packed or is_big_endian:
        raise KieloError(
            f"{path}: {'compressed' if is_packed else 'not little-endian'}, which is not read{resave}"
        )
    if not isinstance(content, dict):
        raise KieloError(f"{path}: holds a {type(content).__name__} and not tensors by name{resave}")
    file_bytes = path.stat().st_size
    return {name: _torch_entry(path, name, value, file_bytes) for name, value in content.items()}


def _torch_entry(path: Path, name: Any, value: Any, file_bytes: int) -> StoredTensor:
    if not isinstance(name, str):
        raise KieloError(f"{path}: holds something under {name!r}, which is no name of a tensor")
    if not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
        found = f"{value.dtype} in {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise KieloError(f"{path}: {name} is a {found}; known: tensors of {', '.join(DTYPES)}")
    storage, item_bytes = value.untyped_storage(), value.dtype.itemsize
    first = getattr(storage, "_checkpoint_offset", None)
    if first is None:  # saved from meta
        raise KieloError(f"{path}: {name} has a shape and no values")
    begin = first + value.storage_offset() * item_bytes
    last = begin + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) * item_bytes
    if value.numel() and not first <= begin <= last <= min(first + storage.nbytes(), file_bytes) - item_bytes:
        raise KieloError(
            f"{path}: cut short or damaged: {name} ends at byte {last + item_bytes}, beyond its storage"
        )
    return StoredTensor(DTYPE_NAMES[value.dtype], tuple(value.shape), begin, tuple(value.stride()))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class _Tile:
    """Rows of equal length that lie `row_stride_bytes` apart from byte `begin` on, and their target [rows,
    columns].
    """

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
        """Between one row and the next."""
        return self.row_stride_bytes - self.row_bytes if self.target.shape[0] > 1 else 0

    def runs(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """(where in the file, where in `memory`) of each run of bytes; in `memory` the rows lie together."""
        if self.gap_bytes == 0:
            yield self.begin, memory
            return
        for row in range(self.target.shape[0]):
            yield (
                self.begin + row * self.row_stride_bytes,
                memory[row * self.row_bytes : (row + 1) * self.row_bytes],
            )


def _tiles(wanted: Wanted, buffer_bytes: int) -> Iterator[_Tile]:
    """What is wanted in pieces of at most `buffer_bytes`: dims outermost first as they lie in the file."""
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
    """Tiles that fill a buffer together, each with its place there."""
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
        torch.cuda.current_stream(device).synchronize()  # the buffer is filled anew next

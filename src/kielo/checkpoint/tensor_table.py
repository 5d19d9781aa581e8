"""Tensors in files: their tables, their dtypes, and the pieces that a family cuts them into.

Two kinds of file: safetensors, and the zip that `torch.save` writes (`pytorch_model.bin`), of which only the
table of tensors is unpickled, and of that only tensors.
"""

import json
import math
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kielo.artifact.checkpoint_folder import MAX_HEADER_BYTES
from kielo.artifact.checkpoint_index import Chunk
from kielo.artifact.weights_folder import unique_keys
from kielo.models.piece import Box, Piece, stored_shape
from kielo.recipe.errors import KieloError

# Names of dtypes in safetensors files.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def cut(stored: Tensor, piece: Piece, shape: Sequence[int]) -> Tensor:
    """Cut the parameter of `shape` (padding rows zero) out of the file's tensor; same dtype and device."""
    value = stored.new_zeros(tuple(shape))
    for ours, theirs in piece.boxes(whole_box(shape)):
        part = stored[theirs]
        value[ours] = part.mT if piece.transposed else part
    return value


def join(pieces: Mapping[str, Piece], values: Mapping[str, Tensor]) -> Tensor:
    """Join our parameters to the file's whole tensor. pieces: our name → its piece, all of one tensor."""
    first = next(iter(values.values()))
    stored = first.new_empty(stored_shape(pieces, {ours: values[ours].shape for ours in pieces}))
    for ours, piece in pieces.items():
        for box, theirs in piece.boxes(whole_box(values[ours].shape)):
            part = values[ours][box]
            stored[theirs] = part.mT if piece.transposed else part
    return stored


def is_finite(values: Tensor) -> bool:
    """Return True for a tensor without NaN and infinities. It allocates no mask and waits for the device."""
    # aminmax of a tensor with NaN is NaN
    return not values.numel() or bool(torch.stack(values.detach().aminmax()).isfinite().all())


def whole_box(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def overlap(box: Sequence[slice], chunk: Chunk) -> Box | None:
    shared = tuple(
        slice(max(part.start, start), min(part.stop, start + size))
        for part, start, size in zip(box, chunk.offset, chunk.shape, strict=True)
    )
    return shared if all(part.start < part.stop for part in shared) else None


def moved(box: Sequence[slice], origin: Sequence[int]) -> Box:
    return tuple(
        slice(part.start - start, part.stop - start) for part, start in zip(box, origin, strict=True)
    )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in its file: a safetensors dtype ("BF16"), its first byte, its strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...]


def read_table(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file by name, and check their places; KieloError names file and tensor."""
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
        if file_bytes < 8 or header_bytes > MAX_HEADER_BYTES or first > file_bytes:
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
        fault = ""
        if dtype not in DTYPES:
            fault = f"{name} is stored as {dtype}; known: {', '.join(DTYPES)}"
        elif not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            fault = f"damaged: {name} is at {begin} to {end} with the shape {list(shape)}"
        elif end - begin != nbytes(DTYPES[dtype], shape):
            fault = f"damaged: {name} has {end - begin} bytes, which is not the size of {dtype} {list(shape)}"
        elif first + end > file_bytes:
            fault = f"cut short or damaged: {name} ends at byte {first + end}, the file at {file_bytes}"
        if fault:
            raise KieloError(f"{path}: {fault}")
    last_end, last_name = 0, ""
    for begin, end, name, *_ in sorted(entry for entry in entries if entry[0] < entry[1]):
        if begin < last_end:
            raise KieloError(f"{path}: damaged: {name} overlaps {last_name}")
        last_end, last_name = end, name
    found = {}
    for begin, _, name, dtype, shape in entries:
        row_major = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        found[name] = StoredTensor(dtype, shape, first + begin, row_major)
    return found


def _torch_table(path: Path) -> dict[str, StoredTensor]:
    """Load fake tensors, which know the places of their bytes (torch ≥ 2.6). No other bytes are read."""
    resave = ". Fix: write it again as safetensors, by transformers' save_pretrained"
    if not zipfile.is_zipfile(path):
        what = "not a zip: cut short, or saved by a torch before 1.6, whose files cannot be read in parts"
        raise KieloError(f"{path}: {what}{resave}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            is_packed = any(member.compress_type != zipfile.ZIP_STORED for member in members.values())
            is_big_endian = "byteorder" in members and archive.read(members["byteorder"]) != b"little"
        with FakeTensorMode():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile's, torch's reader's and the unpickler's own for damaged bytes
        what = "cannot be read, cut short or damaged"
        if isinstance(error, pickle.UnpicklingError):
            what = "refused: it contains more than tensors, and loading it could run code"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise KieloError(f"{path}: {what} ({reason})") from error
    if is_packed or is_big_endian:
        what = "compressed" if is_packed else "not little-endian"
        raise KieloError(f"{path}: {what}, which Kielo does not read{resave}")
    if not isinstance(content, dict):
        raise KieloError(f"{path}: contains a {type(content).__name__} and not tensors by name{resave}")
    file_bytes = path.stat().st_size
    return {name: _torch_entry(path, name, value, file_bytes) for name, value in content.items()}


def _torch_entry(path: Path, name: Any, value: Any, file_bytes: int) -> StoredTensor:
    if not isinstance(name, str):
        raise KieloError(f"{path}: contains something under {name!r}, which is no name of a tensor")
    if not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
        found = f"{value.dtype} in {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise KieloError(f"{path}: {name} is a {found}; known: tensors of {', '.join(DTYPES)}")
    storage, item_bytes = value.untyped_storage(), value.dtype.itemsize
    first = getattr(storage, "_checkpoint_offset", None)
    if first is None:  # saved from meta
        raise KieloError(f"{path}: {name} has a shape and no values")
    begin = first + value.storage_offset() * item_bytes
    extents = ((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    last = begin + sum(extents) * item_bytes
    if value.numel() and not first <= begin <= last <= min(first + storage.nbytes(), file_bytes) - item_bytes:
        raise KieloError(
            f"{path}: cut short or damaged: {name} ends at byte {last + item_bytes}, beyond its storage"
        )
    return StoredTensor(DTYPE_NAMES[value.dtype], tuple(value.shape), begin, tuple(value.stride()))

"""Safetensors files of checkpoints and exports: chunks of ranks, and streams of whole tensors.

`safetensors.torch.save_file` needs all tensors in host memory at once. A stream needs one, and computes the
checksums while it writes, so nothing is read back. Format: 8 bytes header length (little endian), JSON
header, data (https://github.com/huggingface/safetensors, format section).
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open

from kielo.artifact.checkpoint_folder import BlockDigests, CheckpointFile, rank_file_name
from kielo.artifact.checkpoint_index import CheckpointIndex, chunk_key
from kielo.checkpoint.save_plan import HeldChunk
from kielo.checkpoint.tensor_table import DTYPE_NAMES, DTYPES, moved, nbytes, overlap
from kielo.parallel.materialise import local, local_slices

_WRITE_BYTES = 16 * 2**20
Entries = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]  # (key, dtype, shape) of each tensor


@dataclass(frozen=True)
class WrittenFile:
    """A file on the disk. xxh3_64_blocks: a checksum a block. sha256: "" if it was not asked for."""

    bytes: int
    xxh3_64_blocks: list[str]
    sha256: str

    def of_save(self, save_id: str) -> CheckpointFile:
        return CheckpointFile(bytes=self.bytes, xxh3_64_blocks=self.xxh3_64_blocks, save_id=save_id)


class SafetensorsStream:
    """A writer of one safetensors file of `entries` (key, dtype, shape), in order, wide dtypes first."""

    def __init__(
        self, path: Path, entries: Entries, metadata: dict[str, str] | None = None, sha256: bool = False
    ):
        self.path, self._entries, self._written, self.bytes = Path(path), list(entries), 0, 0
        self._rows = 0  # rows of the current tensor that are written
        self._blocks = BlockDigests()
        self._sha256 = hashlib.sha256() if sha256 else None
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        try:
            self._put(_header(self._entries, metadata))
        except BaseException:
            self.abandon()
            raise

    def write_rows(self, rows: torch.Tensor) -> None:
        """Write the next rows (dim 0) of the current tensor; after its last row the next is current."""
        key, dtype, shape = self._entries[self._written]
        self._rows += len(rows) if shape else 1
        due = shape[0] if shape else 1
        if (rows.dtype, tuple(rows.shape[1:])) != (dtype, tuple(shape[1:])) or self._rows > due:
            raise ValueError(
                f"{key}: got {rows.dtype} {tuple(rows.shape)} up to row {self._rows}, announced {dtype} "
                f"{tuple(shape)}"
            )
        flat = rows.detach().cpu().contiguous().reshape(-1)
        self._put(flat.view(torch.uint8).numpy().data)
        if self._rows == due:
            self._written, self._rows = self._written + 1, 0

    def close(self) -> WrittenFile:
        """Bring the file to the disk. Return its size and checksums."""
        if self._written != len(self._entries):
            raise ValueError(f"{self.path}: {self._written} of {len(self._entries)} tensors were written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return WrittenFile(
            self.bytes, self._blocks.hexdigests(), self._sha256.hexdigest() if self._sha256 else ""
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()

    def abandon(self) -> None:
        """Close after an error. Errors of closing are ignored: a full disk gives an error here too."""
        with suppress(OSError):
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _WRITE_BYTES):
            part = data[start : start + _WRITE_BYTES]
            self._blocks.update(part)
            if self._sha256:
                self._sha256.update(part)
            self._file.write(part)
            self.bytes += len(part)


def _header(entries: Entries, metadata: dict[str, str] | None) -> bytes:
    header: dict = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, dtype, shape in entries:
        begin, end = end, end + nbytes(dtype, shape)
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_chunks(
    folder: Path, rank: int, save_id: str, chunks: Sequence[HeldChunk], copies: Mapping[str, torch.Tensor]
) -> dict[str, CheckpointFile]:
    """Write the chunks into the rank's file, if it has any, and bring it to the disk: name → record."""
    if not chunks:
        return {}
    name = rank_file_name(rank)
    entries = [(chunk_key(chunk.name, chunk.offset), DTYPES[chunk.dtype], chunk.shape) for chunk in chunks]
    with SafetensorsStream(folder / name, entries, {"save_id": save_id}) as stream:
        for chunk in chunks:
            if tuple(copies[chunk.name].shape) != tuple(chunk.shape):
                raise ValueError(f"{chunk.name}: {tuple(copies[chunk.name].shape)} is not {chunk.shape}")
            stream.write_rows(copies[chunk.name])
        return {name: stream.close().of_save(save_id)}


@torch.no_grad()
def fill_from_chunks(folder: Path, index: CheckpointIndex, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's part of each tensor from the chunks that overlap it, whatever layout wrote them."""
    by_file = defaultdict(list)
    for name, tensor in tensors.items():
        target, box = local(tensor).detach(), local_slices(tensor)
        for chunk in index.entry(name).chunks:
            if (shared := overlap(box, chunk)) is not None:
                inside = moved(shared, chunk.offset)
                part = target[moved(shared, [part.start for part in box])]
                by_file[chunk.file].append((chunk.key, inside, part))
    for name, parts in by_file.items():
        with safe_open(folder / name, framework="pt") as file:
            for key, inside, part in parts:
                part.copy_(file.get_slice(key)[inside] if inside else file.get_tensor(key))

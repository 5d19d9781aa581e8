"""A stream of tensors into a safetensors file, one at a time: tensors in, file and its checksums out.

`safetensors.torch.save_file` wants all tensors in host memory at once; here only one is, and the checksums
are computed while writing, so that nothing is read back. Format: 8 bytes header length (little endian), JSON
header, data (https://github.com/huggingface/safetensors, format section).
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kielo.artifact.block_digests import BlockDigests
from kielo.checkpoint.safetensors_dtypes import DTYPE_NAMES, nbytes

_WRITE_BYTES = 16 * 2**20


class SafetensorsStream:
    """Writes one safetensors file.

    entries: (key, dtype, shape) of every tensor, in the order of the calls of `write`. Wide dtypes should
    come first, so that every tensor starts aligned. OSError passes through (disk full, ...).
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
        sha256: bool = False,
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

    def write(self, tensor: torch.Tensor) -> None:
        key, dtype, shape = self._entries[self._written]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
            raise ValueError(
                f"{key}: got {tensor.dtype} {tuple(tensor.shape)}, announced {dtype} {tuple(shape)}"
            )
        self.write_rows(tensor)

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
        self._put(memoryview(flat.view(torch.uint8).numpy()))
        if self._rows == due:
            self._written, self._rows = self._written + 1, 0

    def close(self) -> dict[str, Any]:
        """Bring the file to the disk; returns its manifest record {"bytes", "xxh3_64_blocks"[, "sha256"]}."""
        if self._written != len(self._entries):
            raise ValueError(f"{self.path}: {self._written} of {len(self._entries)} tensors were written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        record: dict[str, Any] = {"bytes": self.bytes, "xxh3_64_blocks": self._blocks.hexdigests()}
        return record | ({"sha256": self._sha256.hexdigest()} if self._sha256 else {})

    def abandon(self) -> None:
        """Close after an error; an error in closing is ignored, for a full disk gives one here too."""
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


def _header(
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None
) -> bytes:
    header: dict = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, dtype, shape in entries:
        begin, end = end, end + nbytes(dtype, shape)
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

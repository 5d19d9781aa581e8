"""A safetensors file written one tensor at a time: tensors in, file and its checksum out.

`safetensors.torch.save_file` wants all tensors in host memory at once; here only one is, and the checksum is
taken on the way, so that nothing is read back. Format: 8 bytes header length (little endian), JSON header, data
(https://github.com/huggingface/safetensors, format section).
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

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
_PIECE_BYTES = 16 * 2**20


class SafetensorsStream:
    """`entries`: (key, dtype, shape) of every tensor, in the order in which `write` will be given them.

    Wide dtypes should come first, so that every tensor starts aligned. OSError passes through (disk full, ...).
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
        sha256: bool = False,
    ):
        self.path, self._entries, self._written, self.bytes = Path(path), list(entries), 0, 0
        self._digests = {"xxh3_128": xxhash.xxh3_128()} | ({"sha256": hashlib.sha256()} if sha256 else {})
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
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._put(memoryview(flat.view(torch.uint8).numpy()))
        self._written += 1

    def close(self) -> dict[str, int | str]:
        """Bring the file to the disk; its record for a manifest: {"bytes", "xxh3_128"[, "sha256"]}."""
        if self._written != len(self._entries):
            raise ValueError(f"{self.path}: {self._written} of {len(self._entries)} tensors were written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes} | {name: digest.hexdigest() for name, digest in self._digests.items()}

    def abandon(self) -> None:
        """Close after an error; on a full disk closing fails too, which is no news."""
        with suppress(OSError):
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            for digest in self._digests.values():
                digest.update(piece)
            self._file.write(piece)
            self.bytes += len(piece)


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


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

"""Checksums of a file by blocks of 64 MiB, so that damage has a place: bytes in, one xxh3-64 a block out."""

from itertools import zip_longest
from pathlib import Path

import xxhash

from kielo.artifact.manifest import READ_BYTES

BLOCK_BYTES = 64 * 2**20


class BlockDigests:
    """The xxh3-64 of each `BLOCK_BYTES` of what passes, in hexadecimal; the last block may be shorter."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._block, self._block_bytes = xxhash.xxh3_64(), 0

    def update(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            part = left[: BLOCK_BYTES - self._block_bytes]
            left = left[len(part) :]
            self._block.update(part)
            self._block_bytes += len(part)
            if self._block_bytes == BLOCK_BYTES:
                self._whole.append(self._block.hexdigest())
                self._block, self._block_bytes = xxhash.xxh3_64(), 0

    def hexdigests(self) -> list[str]:
        return self._whole + ([self._block.hexdigest()] if self._block_bytes else [])


def first_wrong_block(path: Path, expected: list[str]) -> int | None:
    """Returns the number of the first block whose digest is not the expected one; None if all are."""
    digests = BlockDigests()
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            digests.update(data)
    pairs = zip_longest(digests.hexdigests(), expected)
    return next((block for block, (found, written) in enumerate(pairs) if found != written), None)

"""Files of parts, joined one after the other: token shards with their index, and any other bytes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kielo.artifact.durable import DurableFile
from kielo.artifact.token_shards import LOSS_MASK, TokenShard, write_index

READ_BYTES = 1 << 23


def join_token_shards(parts: Sequence[Path], prefix: Path) -> None:
    """Writes the shard `prefix` of all documents of the shards `parts`; they have one dtype.

    A loss mask is written where the parts have one. In memory is one part's index at a time.
    """
    for suffix in (".bin", LOSS_MASK):
        files = [part.with_name(part.name + suffix) for part in parts]
        if files[0].is_file():
            join_files(files, prefix.with_name(prefix.name + suffix))

    def lengths() -> Iterator[np.ndarray]:
        for part in parts:
            yield np.diff(TokenShard(part).document_offsets)

    write_index(prefix, TokenShard(parts[0]).dtype, lengths)


def join_files(parts: Sequence[Path], path: Path) -> None:
    """Writes the bytes of `parts`, one file after the other, to a file."""
    with DurableFile(path) as whole:
        for part in parts:
            with open(part, "rb") as file:
                while block := file.read(READ_BYTES):
                    whole.write(block)

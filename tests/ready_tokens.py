"""Token files as other programs write them, for tests: documents (rows of ids, end-of-text included) → files.

Megatron's are written by megatron-core, nanotron's by datatrove; OLMo's are ids and nothing else.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.token_shards import TokenShard

Documents = Sequence[Sequence[int]]


def rows_of(shard: TokenShard) -> list[list[int]]:
    """Returns the documents of a shard of Kielo's."""
    starts = shard.document_offsets.tolist()
    return [shard.read(start, end - start).tolist() for start, end in zip(starts, starts[1:])]


def write_megatron(prefix: Path, documents: Documents, dtype: type = np.uint16) -> None:
    """Writes PREFIX.bin and PREFIX.idx with megatron-core's own builder."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype), [len(document)])
    builder.finalize(f"{prefix}.idx")


def write_ds(prefix: Path, documents: Documents, dtype: type = np.uint16) -> None:
    """Writes PREFIX.ds, its index and its metadata with datatrove's own writer."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    width = np.dtype(dtype).itemsize
    file = TokenizedFile(
        str(prefix.parent), f"{prefix.name}.ds", tokenizer_name_or_path=f"theirs|{width}",
        save_final_metadata=True, token_size=width,
    )  # fmt: skip
    for document in documents:
        file.write(list(document), None)
    file.close()


def write_npy(prefix: Path, documents: Documents, dtype: type = np.uint16) -> None:
    """Writes PREFIX.npy, flat ids as OLMo's."""
    np.concatenate([np.array(document, dtype) for document in documents]).tofile(f"{prefix}.npy")


WRITERS = {"megatron": write_megatron, "ds": write_ds, "npy": write_npy}

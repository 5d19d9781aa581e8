"""A checkpoint of one small file, for tests that read, check and list checkpoints without torch."""

import json
from pathlib import Path

from kielo.artifact.checkpoint_folder import BlockDigests, CheckpointFile
from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    Chunk,
    PlainState,
    TensorEntry,
    chunk_key,
    entry_json,
    write_checkpoint_manifest,
    write_index,
)


def checkpoint(folder: Path, step: int = 1, save_id: str = "0" * 16, **plain) -> Path:
    """A checkpoint of one file with a header, two tensors and a tied one."""
    folder.mkdir(parents=True)
    header = json.dumps({"__metadata__": {"save_id": save_id}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"data"
    (folder / "rank_00000.safetensors").write_bytes(content)
    blocks = BlockDigests()
    blocks.update(content)
    files = {
        "rank_00000.safetensors": CheckpointFile(
            bytes=len(content), xxh3_64_blocks=blocks.hexdigests(), save_id=save_id
        )
    }
    tensors = {
        name: TensorEntry(dtype, shape, tuple(
            Chunk((at, *[0] * (len(shape) - 1)), (size, *shape[1:]), "rank_00000.safetensors",
                  chunk_key(name, (at,)))
            for at, size in chunks
        ))
        for name, dtype, shape, chunks in (
            ("model/a", "BF16", (3, 2), ((0, 2), (2, 1))), ("model/b", "F32", (5,), ((0, 5),)),
            ("model/c", "BF16", (4,), ((0, 4),)), ("optimiser/a", "F8_E4M3", (3, 2), ((0, 3),)),
            ("optimiser/m", "BOOL", (7,), ((0, 7),)),
        )
    }  # fmt: skip
    index = CheckpointIndex(save_id, step, tensors, {"model/tied": "model/b"}, PlainState(step=step, **plain))
    entries = {name: entry_json(entry) for name, entry in tensors.items()}
    files["index.json"] = write_index(folder, index, entries)
    write_checkpoint_manifest(folder, index, files, 100, 1.23456)
    return folder

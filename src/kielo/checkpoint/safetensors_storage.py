"""Chunks in safetensors files: a rank writes its chunks into its file, and fills tensors from any chunks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kielo.artifact.checkpoint_folder import rank_file_name
from kielo.artifact.checkpoint_index import CheckpointIndex, chunk_key
from kielo.checkpoint.safetensors_dtypes import DTYPES
from kielo.checkpoint.safetensors_stream import SafetensorsStream
from kielo.checkpoint.save_plan import HeldChunk
from kielo.parallel.materialise import local, local_slices

FileRecord = dict[str, Any]  # {"bytes", "xxh3_64_blocks", "save_id"}, for the manifest


def write_chunks(
    folder: Path, rank: int, save_id: str, chunks: Sequence[HeldChunk], copies: Mapping[str, torch.Tensor]
) -> dict[str, FileRecord]:
    """Writes the chunks into the rank's file, one at a time, and brings it to the disk: file → record.

    copies: name → values of the chunk. A rank without chunks writes no file.
    """
    if not chunks:
        return {}
    name, metadata = rank_file_name(rank), {"save_id": save_id}
    entries = [(chunk_key(chunk.name, chunk.offset), DTYPES[chunk.dtype], chunk.shape) for chunk in chunks]
    stream = SafetensorsStream(folder / name, entries, metadata)
    try:
        for chunk in chunks:
            stream.write(copies[chunk.name])
        return {name: stream.close() | metadata}
    except BaseException:
        stream.abandon()
        raise


@torch.no_grad()
def fill_from_chunks(folder: Path, index: CheckpointIndex, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's part of each tensor from the chunks that overlap it, whatever layout wrote them.

    A tied name reads the tensor that it is tied to.
    """
    by_file = defaultdict(list)
    for name, tensor in tensors.items():
        target, box = local(tensor).detach(), local_slices(tensor)
        for chunk in index.entry(name).chunks:
            shared = [
                slice(max(part.start, start), min(part.stop, start + size))
                for part, start, size in zip(box, chunk.offset, chunk.shape)
            ]
            if all(part.start < part.stop for part in shared):
                inside = _moved(shared, chunk.offset)
                part = target[_moved(shared, [part.start for part in box])]
                by_file[chunk.file].append((chunk.key, inside, part))
    for name, parts in by_file.items():
        with safe_open(folder / name, framework="pt") as file:
            for key, inside, part in parts:
                part.copy_(file.get_slice(key)[inside] if inside else file.get_tensor(key))


def _moved(box: Sequence[slice], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(part.start - start, part.stop - start) for part, start in zip(box, origin))

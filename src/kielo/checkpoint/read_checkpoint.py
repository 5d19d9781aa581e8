"""A checkpoint read by one process: verified files → whole tensors on the CPU."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from kielo.artifact.checkpoint_faults import FaultyCheckpoint, find_fault
from kielo.artifact.checkpoint_folder import INDEX_NAME
from kielo.artifact.checkpoint_index import CheckpointIndex, TensorEntry, read_index
from kielo.artifact.checkpoint_manifest import listed_files
from kielo.checkpoint.safetensors_dtypes import DTYPES
from kielo.recipe.errors import KieloError


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Reads whole tensors onto the CPU, without a process group: all of them, or those named.

    The files that hold them are verified first. Raises KieloError for damage and for names that the
    checkpoint does not hold.
    """
    path = Path(path)
    names = None if names is None else list(names)
    index = read_index(path, names)
    names = index.names() if names is None else names
    verify(path, index, names)
    return {name: _assemble(path, index.entry(name)) for name in names}


def verify(path: Path, index: CheckpointIndex, names: Iterable[str]) -> None:
    """Raises KieloError unless `path` holds all `names` and the files that hold them are as written."""
    names = list(names)
    complaint = missing_names(path, index, names)
    if complaint:
        raise KieloError(complaint)
    needed = {INDEX_NAME} | {chunk.file for name in names for chunk in index.entry(name).chunks}
    files = listed_files(path)
    fault = find_fault(path, sorted(needed), files)
    if fault is not None:
        raise FaultyCheckpoint(path, fault)


def missing_names(path: Path, index: CheckpointIndex, names: Iterable[str]) -> str | None:
    """Returns a complaint that lists those names that the checkpoint does not hold; None if it holds all."""
    missing = [name for name in names if index.entry(name) is None]
    if not missing:
        return None
    return f"checkpoint {path} does not hold {some_names(missing)}; it holds {some_names(index.names())}"


def some_names(names: list[str]) -> str:
    """Lists the first eight names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _assemble(folder: Path, entry: TensorEntry) -> torch.Tensor:
    """Reads the whole tensor onto the CPU, shape `entry.shape`, from its chunks."""
    whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    for chunk in entry.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.shape))
        with safe_open(Path(folder) / chunk.file, framework="pt") as file:
            whole[box] = file.get_tensor(chunk.key)
    return whole

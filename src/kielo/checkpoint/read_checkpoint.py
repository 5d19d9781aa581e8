"""Checkpoints read back: verified and restored by all ranks in any layout, or read by one process."""

import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from kielo.artifact.checkpoint_folder import (
    INDEX_NAME,
    CheckpointFile,
    Fault,
    FaultyCheckpoint,
    find_fault,
    rank_of,
)
from kielo.artifact.checkpoint_index import CheckpointIndex, listed_files, read_index
from kielo.artifact.json_object import JsonTable
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.safetensors_storage import fill_from_chunks
from kielo.checkpoint.tensor_table import DTYPES
from kielo.recipe.errors import KieloError


def fill(path: Path, tensors: dict[str, torch.Tensor], ranks: Agreement) -> JsonTable:
    """Fill `tensors` from a checkpoint, on all ranks or none (KieloError). Return its plain state."""
    index, complaint = CheckpointIndex("", 0, {}), None
    try:
        index = read_index(path, tensors)
        complaint = missing_names(path, index, tensors) or _misfit(path, index, tensors)
    except KieloError as error:
        complaint = str(error)
    ranks.refuse_together(complaint)
    try:
        ranks.on_all(lambda: fill_from_chunks(path, index, tensors))
    except OSError as error:
        raise KieloError(f"checkpoint {path} cannot be read: {error}") from error
    return index.plain.content()


def _misfit(path: Path, index: CheckpointIndex, tensors: dict[str, torch.Tensor]) -> str | None:
    for name, tensor in tensors.items():
        entry = index.entry(name)
        if tuple(tensor.shape) != entry.shape:
            shapes = f"{list(entry.shape)}, not {list(tensor.shape)} as here"
            return f"checkpoint {path}: {name} has the shape {shapes}"
        if torch.promote_types(DTYPES[entry.dtype], tensor.dtype) != tensor.dtype:
            return f"checkpoint {path}: {name} is stored as {entry.dtype}, which {tensor.dtype} cannot hold"
    return None


class Verification:
    """Comparison of checkpoints with their checksums. All ranks call it together. It remembers results."""

    def __init__(self, ranks: Agreement):
        self._ranks = ranks
        self._whole: set[Path] = set()

    def require(self, path: Path) -> None:
        """Raise FaultyCheckpoint on every rank unless the checkpoint is whole, or was when last read."""
        if path not in self._whole and (fault := self.find_fault(path)) is not None:
            raise FaultyCheckpoint(path, fault)

    def forget(self, path: Path) -> None:
        self._whole.discard(path)

    def find_fault(self, path: Path) -> Fault | None:
        """Read the whole checkpoint, own files first. Return its fault; unreadable outweighs damage."""

        def listed() -> Mapping[str, CheckpointFile] | Fault:
            try:
                return listed_files(path)
            except FaultyCheckpoint as error:
                return error.fault

        if isinstance(files := self._ranks.on_first(listed), Fault):
            return files
        rank, size = self._ranks.rank, self._ranks.size
        share = [name for name in files if (rank_of(name) or 0) % size == rank]
        share.sort(key=lambda name: (rank_of(name) != rank, name))
        fault = find_fault(path, share, files)
        if fault is not None and size > 1:
            found, fix, advice = fault.reason.partition(". Fix: ")
            fault = replace(fault, reason=f"{found} (rank {rank} on {socket.gethostname()}){fix}{advice}")
        faults = sorted(filter(None, self._ranks.gather(fault)), key=lambda fault: fault.kind == "damaged")
        if not faults:
            self._whole.add(path)
        return next(iter(faults), None)


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Read and verify whole tensors onto the CPU, without a process group: all, or `names`."""
    path = Path(path)
    names = None if names is None else list(names)
    index = read_index(path, names)
    names = index.names() if names is None else names
    verify(path, index, names)
    entries = {name: index.entry(name) for name in names}
    tensors = {name: torch.empty(of.shape, dtype=DTYPES[of.dtype]) for name, of in entries.items()}
    fill_from_chunks(path, index, tensors)
    return tensors


def verify(path: Path, index: CheckpointIndex, names: Iterable[str]) -> None:
    names = list(names)
    if complaint := missing_names(path, index, names):
        raise KieloError(complaint)
    needed = {INDEX_NAME} | {chunk.file for name in names for chunk in index.entry(name).chunks}
    if (fault := find_fault(path, sorted(needed), listed_files(path))) is not None:
        raise FaultyCheckpoint(path, fault)


def missing_names(path: Path, index: CheckpointIndex, names: Iterable[str]) -> str | None:
    missing = [name for name in names if not index.holds(name)]
    if not missing:
        return None
    return f"checkpoint {path} does not hold {some_names(missing)}; it holds {some_names(index.names())}"


def some_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

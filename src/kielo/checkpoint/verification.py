"""Verification of a checkpoint by all ranks: each reads its share of the files, and all get one answer."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_faults import Fault, FaultyCheckpoint, find_fault
from kielo.artifact.checkpoint_folder import rank_of
from kielo.artifact.checkpoint_manifest import listed_files
from kielo.checkpoint.agreement import Agreement


class Verification:
    """Compares checkpoints with their checksums; remembers which were whole. All ranks call it together."""

    def __init__(self, ranks: Agreement):
        self._ranks = ranks
        self._whole: set[Path] = set()

    def require(self, path: Path) -> None:
        """Raises FaultyCheckpoint on every rank unless the checkpoint is whole, or was when last read."""
        if path in self._whole:
            return
        fault = self.find_fault(path)
        if fault is not None:
            raise FaultyCheckpoint(path, fault)

    def forget(self, path: Path) -> None:
        """Verify the checkpoint again when next asked: it has been written again."""
        self._whole.discard(path)

    def find_fault(self, path: Path) -> Fault | None:
        """Reads the whole checkpoint and returns its fault, None if it is whole; the same on every rank.

        Each rank reads its share of the files, its own (maybe cached) first. A file that one rank could not
        read outweighs damage that another saw.
        """
        files = self._ranks.on_first(lambda: _files_or_fault(path))
        if isinstance(files, Fault):
            return files
        rank, size = self._ranks.rank, self._ranks.size
        share = [name for name in files if (rank_of(name) or 0) % size == rank]
        share.sort(key=lambda name: (rank_of(name) != rank, name))
        fault = find_fault(path, share, files)
        if fault is not None and size > 1:
            fault = replace(fault, reason=f"{fault.reason} (rank {rank} on {socket.gethostname()})")
        faults = sorted(filter(None, self._ranks.gather(fault)), key=lambda fault: fault.kind == "damaged")
        if not faults:
            self._whole.add(path)
        return next(iter(faults), None)


def _files_or_fault(path: Path) -> dict[str, dict[str, Any]] | Fault:
    try:
        return listed_files(path)
    except FaultyCheckpoint as error:
        return error.fault

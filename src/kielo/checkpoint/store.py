"""Checkpoints of a run: named tensors and plain JSON state in, one folder a step out, and back on any layout.

A checkpoint is written beside its place (`step_00000100.partial`), brought to the disk, and renamed by rank 0 when
every rank has finished, its manifest last. So a kill at any moment leaves a folder that is whole or one that no one
takes for a checkpoint. Every byte read back is checked against the manifest.
"""

import dataclasses
import errno
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint.api import CheckpointException

from kielo.artifact.checkpoint_index import (
    INDEX_NAME,
    VERSION,
    CheckpointIndex,
    find_damage,
    listed_files,
    parse_index,
    read_index,
    step_folder_name,
    step_folders,
    step_of,
)
from kielo.artifact.manifest import MANIFEST_NAME, Manifest, installed_versions, write_json_atomically
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.storage import CheckpointReader, CheckpointWriter, assemble
from kielo.checkpoint.stream import DTYPES
from kielo.parallel.materialise import local
from kielo.recipe.errors import KieloError

logger = logging.getLogger(__name__)
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Store:
    """The checkpoints in `folder`; all ranks of `group` call each method together, and agree on the outcome.

    Works without a process group too. `warnings` lists what the last `newest` passed over, `save` could not prune.
    """

    def __init__(self, folder: Path, keep_newest: int = 2, group: dist.ProcessGroup | None = None):
        self.folder, self.keep_newest = Path(folder), keep_newest
        self.warnings: list[str] = []
        self._ranks = Agreement(group)
        self._verified: set[Path] = set()

    def save(self, step: int, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> Path:
        """Write `step_{step:08d}`, then remove all but the `keep_newest` newest up to it.

        tensors: name → Tensor (equal on all ranks) or DTensor; names of one tied tensor are stored once.
        plain: JSON state, rank 0's is kept. Raises KieloError on every rank when the disk is full or fails;
        nothing of the failed checkpoint stays, and the earlier ones are untouched.
        """
        began = time.monotonic()
        final = self.folder / step_folder_name(step)
        partial = final.with_name(final.name + ".partial")
        aliases = {
            alias: name for found in self._ranks.gather(tied_names(tensors)) for alias, name in found.items()
        }
        stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        writer = CheckpointWriter(partial, step, self._ranks.rank, plain, aliases)
        planner = dist_cp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _plain_errors():
                dist_cp.save(
                    stored,
                    storage_writer=writer,
                    planner=planner,
                    process_group=self._ranks.group,
                    no_dist=not self._ranks.distributed,
                )
            self._ranks.on_first(lambda: self._publish(writer, final, time.monotonic() - began))
        except Exception as error:
            self._ranks.on_first(lambda error=error: self._give_up(writer, final, error))
            raise
        self._verified.discard(final)
        self.warnings = self._ranks.on_first(lambda: self._prune(step))
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, every file read and compared with its checksum; None if there is none.

        A damaged one is renamed to `NAME.damaged` and told in `warnings`; the one before it is looked at next.
        The ranks share the reading; rank 0 decides.
        """
        self.warnings = []
        for path in self._ranks.on_first(self._candidates):
            damage = self._damage(path)
            if damage is None:
                return path
            self.warnings.append(
                self._ranks.on_first(lambda path=path, damage=damage: _set_aside(path, damage))
            )
            if self._ranks.rank == 0:
                logger.warning(self.warnings[-1])
        return None

    def restore(self, path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint `path`, whatever layout wrote it; returns its plain state.

        Raises KieloError on every rank, before any tensor changes, for a damaged checkpoint, and for names,
        shapes or dtypes that the checkpoint cannot fill. A wider dtype may be filled from a narrower one.
        """
        path = Path(path)
        if path not in self._verified:
            damage = self._damage(path)
            if damage is not None:
                raise KieloError(f"checkpoint {path} is damaged: {damage}")
        text = self._ranks.on_first(lambda: (path / INDEX_NAME).read_text(encoding="utf-8"))
        index = parse_index(text, path / INDEX_NAME)
        self._ranks.refuse_together(_misfit(path, index, tensors))
        planner = dist_cp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _plain_errors():
                dist_cp.load(
                    dict(tensors),
                    storage_reader=CheckpointReader(path, index),
                    planner=planner,
                    process_group=self._ranks.group,
                    no_dist=not self._ranks.distributed,
                )
        except OSError as error:
            raise KieloError(f"checkpoint {path} cannot be read: {error}") from error
        return index.plain

    def _damage(self, path: Path) -> str | None:
        """The same answer on every rank; each rank has read its share of the files."""
        try:
            files = self._ranks.on_first(lambda: listed_files(path))
        except KieloError as error:
            return str(error)
        share = sorted(files)[self._ranks.rank :: self._ranks.size]
        damage = next(filter(None, self._ranks.gather(find_damage(path, share, files))), None)
        if damage is None:
            self._verified.add(path)
        return damage

    def _publish(self, writer: CheckpointWriter, final: Path, wall_seconds: float) -> None:
        """Rank 0: the manifest, then the rename. A checkpoint of the same step is moved away, not mixed into."""
        manifest = Manifest(
            kind="checkpoint",
            version=VERSION,
            inputs={},
            section={},
            counts={"step": writer.step, "tensor_bytes": writer.needed_bytes},
            wall_seconds=round(wall_seconds, 3),
            versions=installed_versions(),
            files=writer.files,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_json_atomically(writer.folder / MANIFEST_NAME, dataclasses.asdict(manifest))
        _bring_to_disk(writer.folder)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        writer.folder.rename(final)
        _bring_to_disk(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _give_up(self, writer: CheckpointWriter, final: Path, error: Exception) -> None:
        """Rank 0: leave nothing of the failed checkpoint, and say why in the one message that all ranks raise."""
        shutil.rmtree(writer.folder, ignore_errors=True)
        self._recover(final)
        cause = error if isinstance(error, OSError) else error.__cause__
        if getattr(cause, "errno", None) in _DISK_FULL:
            raise KieloError(
                f"disk full: checkpoint {final.name} was not saved in {self.folder}: it needs "
                f"{writer.needed_bytes:,} bytes, {shutil.disk_usage(self.folder).free:,} are free ({error}). Earlier "
                "checkpoints are untouched. Free space or raise the quota, lower checkpoint.keep_newest, or set "
                "`folder` to another disk"
            ) from error
        if isinstance(error, OSError | KieloError):
            raise KieloError(f"checkpoint {final.name} was not saved in {self.folder}: {error}") from error

    def _recover(self, final: Path) -> None:
        """A kill between the two renames of `_publish` leaves the old checkpoint moved away: bring it back."""
        replaced = final.with_name(final.name + ".replaced")
        if replaced.is_dir() and not final.exists():
            replaced.rename(final)

    def _candidates(self) -> list[Path]:
        if self.folder.is_dir():
            for replaced in self.folder.glob("step_*.replaced"):
                self._recover(replaced.with_suffix(""))
        return step_folders(self.folder)

    def _prune(self, step: int) -> list[str]:
        """Rank 0: remove what is older than the `keep_newest` newest up to `step`, and leftovers of killed saves.

        Renamed before it is removed, so that a half-removed folder is never taken for a damaged checkpoint.
        """
        try:
            old = [path for path in step_folders(self.folder) if step_of(path) <= step][self.keep_newest :]
            for path in old:
                self._verified.discard(path)
                path.rename(path.with_name(path.name + ".removed"))
            for pattern in ("step_*.removed", "step_*.partial", "step_*.replaced"):
                for leftover in self.folder.glob(pattern):
                    shutil.rmtree(leftover)
        except OSError as error:
            return [f"old checkpoints in {self.folder} could not be removed: {error}"]
        return []


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU from a checkpoint, without a process group: all of them, or those named.

    The files that hold them are verified first. Raises KieloError for damage and for names that are not there.
    """
    path = Path(path)
    index = read_index(path)
    names = index.names() if names is None else list(names)
    verify(path, index, names)
    return {name: assemble(path, index.entry(name)) for name in names}


def read_plain(path: Path) -> dict[str, Any]:
    """The plain JSON state of a checkpoint."""
    return read_index(path).plain


def verify(path: Path, index: CheckpointIndex, names: Iterable[str]) -> None:
    """KieloError unless `path` holds all `names` and the files that hold them are as they were written."""
    names = list(names)
    missing = [name for name in names if index.entry(name) is None]
    if missing:
        raise KieloError(
            f"checkpoint {path} does not hold {some_names(missing)}; it holds {some_names(index.names())}"
        )
    needed = {INDEX_NAME} | {chunk.file for name in names for chunk in index.entry(name).chunks}
    files = listed_files(path)
    damage = find_damage(path, sorted(needed), files)
    if damage is not None:
        raise KieloError(f"checkpoint {path} is damaged: {damage}")


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP wraps every rank's error in one CheckpointException (a BaseException): let out the first, with its rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as wrapped:
            rank, (error, _) = min(wrapped.failures.items())
            if isinstance(error, OSError):
                raise OSError(error.errno, f"{error.strerror} on rank {rank}", error.filename) from wrapped
            raise error from wrapped


def tied_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that share all their memory with one named before: alias → name. Empty shards tell nothing."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        shard = local(tensor)
        if shard.numel() == 0:
            continue
        memory = (
            shard.untyped_storage().data_ptr(),
            shard.storage_offset(),
            shard.shape,
            shard.stride(),
            shard.dtype,
        )
        if first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied


def _misfit(path: Path, index: CheckpointIndex, tensors: dict[str, torch.Tensor]) -> str | None:
    missing = [name for name in tensors if index.entry(name) is None]
    if missing:
        return f"checkpoint {path} does not hold {some_names(missing)}; it holds {some_names(index.names())}"
    for name, tensor in tensors.items():
        entry = index.entry(name)
        if tuple(tensor.shape) != entry.shape:
            return f"checkpoint {path}: {name} has the shape {list(entry.shape)}, not {list(tensor.shape)} as here"
        if torch.promote_types(DTYPES[entry.dtype], tensor.dtype) != tensor.dtype:
            return f"checkpoint {path}: {name} is stored as {entry.dtype}, which {tensor.dtype} cannot hold"
    return None


def _set_aside(path: Path, damage: str) -> str:
    aside = path.with_name(path.name + ".damaged")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError as error:
        return (
            f"checkpoint {path} is damaged and skipped: {damage} (it could not be renamed: {error.strerror})"
        )
    return f"checkpoint {path} is damaged and skipped: {damage}; set aside as {aside.name}"


def _bring_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def some_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

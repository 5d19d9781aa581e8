"""Checkpoints of a run: named tensors and plain JSON state in, one folder a step out, and back on any layout.

Saving stops training only while this rank's shards are copied to the host. A thread writes them beside their
place (`step_00000100.ID.partial`), brings them to the disk, and rank 0 renames the folder when every rank has
finished, its manifest last. So a kill at any moment leaves a folder that is whole or one that no one takes
for a checkpoint; and a save that fails is told and tried again when the next is due. Every byte read back is
checked against the manifest.
"""

import json
import logging
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint.api import CheckpointException

from kielo.artifact.checkpoint_faults import Fault, FaultyCheckpoint, find_fault
from kielo.artifact.checkpoint_folder import INDEX_NAME, rank_of, step_folder_name, step_folders, step_of
from kielo.artifact.checkpoint_index import CheckpointIndex, parse_index, read_index
from kielo.artifact.checkpoint_manifest import listed_files, write_checkpoint_manifest
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.publish import (
    aside_name,
    discard,
    failure,
    point_newest,
    prune,
    publish,
    remove_later,
    remove_leftovers,
    set_aside,
)
from kielo.checkpoint.safetensors_storage import SafetensorsStorageReader, SafetensorsStorageWriter, assemble
from kielo.checkpoint.safetensors_stream import DTYPES
from kielo.checkpoint.staging import Staging
from kielo.parallel.materialise import local
from kielo.recipe.errors import KieloError

logger = logging.getLogger(__name__)
# A run without ranks is meant; the filter stands here because filters are no thread's own.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _log_alert(step: int, message: str) -> None:
    logger.warning(message)


def _always() -> None:
    pass


@dataclass(frozen=True)
class Retention:
    """Names the checkpoints that a save keeps beside those that every save keeps: see `Checkpointer.save`."""

    kept_step: int | None
    keep_all: str | None


class Checkpointer:
    """The checkpoints in `folder`; all ranks of `group` call each method together, and agree on the outcome.

    group: of the CPU (gloo) and used by nothing else, for its collectives run in a thread beside the
    training. Works without a process group too. keep_every_steps: checkpoints of its multiples stay whatever
    `keep_newest` says; 0: none. on_alert(step, message): told on rank 0, mostly in the writing thread, of a
    save that failed, of old checkpoints that could not be removed or had to be kept, and of damaged ones.
    permit: asked on rank 0 before a save and again before it is published; its KieloError refuses (another
    job has taken the folder). `warnings` lists what the last `newest` passed over.
    """

    def __init__(
        self,
        folder: Path,
        keep_newest: int = 2,
        keep_every_steps: int = 0,
        group: dist.ProcessGroup | None = None,
        on_alert: Callable[[int, str], None] = _log_alert,
        permit: Callable[[], None] = _always,
    ):
        self.folder, self._keep_newest, self._keep_every_steps = Path(folder), keep_newest, keep_every_steps
        self.warnings: list[str] = []
        self._ranks, self._on_alert, self._permit = Agreement(group), on_alert, permit
        self._verified: set[Path] = set()
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[tuple[Path | None, str | None]] | None = None
        self._published: Path | None = None
        self._failure: str | None = None

    def reserve(self, tensors: dict[str, torch.Tensor]) -> None:
        """Make the host memory for saves of these tensors; otherwise the first save does, and
        takes longer.
        """
        self._staging.reserve(_untied(tensors))

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        plain: dict[str, Any],
        kept_step: int | None = None,
        keep_all: str | None = None,
    ) -> None:
        """Begin to write `step_{step:08d}`; returns when the tensors may change. Waits for a save under way
        first.

        tensors: name → Tensor (equal on all ranks) or DTensor; names of one tied tensor are stored once.
        plain: JSON state, rank 0's is kept. When it is published, older checkpoints are pruned, but not the
        newest of those up to `kept_step`; none where `keep_all` says why not, which `on_alert` is told. When
        it fails (disk full, I/O error, a tensor that is not finite), nothing of it stays, earlier ones are
        untouched, `on_alert` is told, and only `settle` raises. Raises KieloError on every rank when it is
        not permitted.
        """
        self._wait()
        self._ranks.on_first(self._ask_permission)
        copies = self._staging.copy(_untied(tensors))
        plain = json.loads(json.dumps(plain))  # as it is now, and nothing that JSON cannot hold
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        retention = Retention(kept_step, keep_all)
        self._under_way = self._writer.submit(
            self._write, step, dict(tensors), copies, plain, retention, device
        )

    def settle(self) -> Path | None:
        """Wait until the save under way is published; returns the newest that this object has saved, None before
        any.

        Raises KieloError on every rank when the last save failed.
        """
        self._wait()
        if self._failure is not None:
            raise KieloError(self._failure)
        return self._published

    def go_back_to(self, step: int) -> Path | None:
        """The checkpoint of this step, all later ones removed; None, and nothing removed, where there is none
        that is whole.

        Raises FaultyCheckpoint on every rank for one that is unreadable or of another version.
        """
        self._wait()
        path = self.folder / step_folder_name(step)
        if not self._ranks.on_first(lambda: path in step_folders(self.folder)):
            return None
        fault = self._find_fault(path)
        if fault is not None and fault.kind != "damaged":
            raise FaultyCheckpoint(path, fault)
        if fault is not None:
            self._ranks.on_first(lambda: self._on_alert(step, f"checkpoint {path} is {fault}"))
            return None
        self._ranks.on_first(lambda: remove_later(path))
        self._published = path
        return path

    def close(self) -> None:
        """Wait for the save under way, whatever becomes of it. No other may follow."""
        self._writer.shutdown(wait=True)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, every file read and compared with its checksums; None if there
        is none at all.

        Damaged ones that are newer are renamed to `NAME.damaged` and told in `warnings`. What killed saves
        left is removed: only for the job that saves here (others: `newest_complete`). The ranks share the
        reading; rank 0 decides. Raises KieloError on every rank, and renames nothing, where there are
        checkpoints and none is whole, and for one that is unreadable or of another version before a whole one
        was found.
        """
        self._wait()
        self.warnings = []
        damaged: dict[Path, Fault] = {}
        for path in self._ranks.on_first(self._candidates):
            fault = self._find_fault(path)
            if fault is None:
                self._set_aside(damaged, path)
                return path
            if fault.kind != "damaged":
                raise FaultyCheckpoint(path, fault)
            damaged[path] = fault
        if damaged:
            found = "; ".join(f"{path.name}: {fault.reason}" for path, fault in damaged.items())
            raise KieloError(
                f"no checkpoint in {self.folder} is whole, and training does not begin anew over them "
                f"({found}); put a whole one there from a backup, or move {self.folder.parent} away or give "
                "the recipe another folder to begin at step 0"
            )
        return None

    def plain(self, path: Path) -> dict[str, Any]:
        """The plain JSON state of the checkpoint `path`; rank 0 reads it for all."""
        return self._ranks.on_first(lambda: read_plain(path))

    def restore(self, path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint `path`, whatever layout wrote it; returns its plain
        state.

        Raises KieloError on every rank, before any tensor changes, for a damaged checkpoint, and for names,
        shapes or dtypes that the checkpoint cannot fill. A wider dtype may be filled from a narrower one.
        """
        self._wait()
        path = Path(path)
        if path not in self._verified:
            fault = self._find_fault(path)
            if fault is not None:
                raise FaultyCheckpoint(path, fault)
        text = self._ranks.on_first(lambda: (path / INDEX_NAME).read_text(encoding="utf-8"))
        index = parse_index(text, path / INDEX_NAME)
        self._ranks.refuse_together(_misfit(path, index, tensors))
        planner = dist_cp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _plain_errors():
                dist_cp.load(
                    dict(tensors),
                    storage_reader=SafetensorsStorageReader(path, index),
                    planner=planner,
                    process_group=self._ranks.group,
                    no_dist=self._ranks.size == 1,
                )
        except OSError as error:
            raise KieloError(f"checkpoint {path} cannot be read: {error}") from error
        return index.plain

    def _wait(self) -> None:
        """For the writing thread, which has no collective of its own running after this."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            published, self._failure = under_way.result()
            self._published = published or self._published

    def _write(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        copies: dict[str, torch.Tensor],
        plain: dict[str, Any],
        retention: Retention,
        device: int | None,
    ) -> tuple[Path | None, str | None]:
        """In the thread: the published path, or why there is none; the same on every rank.

        Of `tensors`, which training changes meanwhile, only the layout is looked at; `copies` are their
        values.
        """
        if device is not None:
            torch.cuda.set_device(device)  # the current device belongs to the thread
        began = time.monotonic()
        final = self.folder / step_folder_name(step)
        index = CheckpointIndex("", step, {}, self._all_tied(tensors), plain)
        index = replace(index, save_id=self._ranks.on_first(lambda: secrets.token_hex(8)))
        partial = aside_name(final, index.save_id, "partial")
        writer = SafetensorsStorageWriter(partial, index, self._ranks.rank, copies)
        try:
            self._ranks.refuse_together(_complaint_unless_finite(copies))
            self._ranks.on_first(self._make_room)
            self._write_files(writer, {name: tensors[name] for name in tensors if name not in index.aliases})
            self._ranks.on_first(lambda: self._publish(writer, final, time.monotonic() - began))
        except (KieloError, OSError) as error:
            return None, self._ranks.on_first(lambda error=error: self._give_up(writer, final, error))
        self._verified.discard(final)
        self._ranks.on_first(lambda: self._clear_up(final, retention))
        return final, None

    def _all_tied(self, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        return {
            alias: name for tied in self._ranks.gather(tied_names(tensors)) for alias, name in tied.items()
        }

    def _write_files(self, writer: SafetensorsStorageWriter, stored: dict[str, torch.Tensor]) -> None:
        planner = dist_cp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _plain_errors(), torch.no_grad():
            dist_cp.save(
                stored,
                storage_writer=writer,
                planner=planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.size == 1,
            )

    def _ask_permission(self) -> None:
        # cannot be known just now, which alone stops no training; asked again in `_publish`
        with suppress(OSError):
            self._permit()

    def _make_room(self) -> None:
        """Rank 0: what a killed save left takes room that this one may need."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def _publish(self, writer: SafetensorsStorageWriter, final: Path, wall_seconds: float) -> None:
        """Rank 0, when all files are on the disk."""
        write_checkpoint_manifest(
            writer.folder, writer.index, writer.files, writer.tensor_bytes, wall_seconds
        )
        self._permit()
        publish(writer.folder, final)

    def _give_up(self, writer: SafetensorsStorageWriter, final: Path, error: Exception) -> str:
        """Rank 0: leave nothing of the failed checkpoint, and say why."""
        with suppress(OSError):
            discard(writer.folder, final)
        message = failure(final, writer.tensor_bytes, error)
        self._on_alert(writer.index.step, message)
        return message

    def _clear_up(self, newest: Path, retention: Retention) -> None:
        """Rank 0, once `newest` is published: what fails here spoils no checkpoint."""
        point_newest(newest)
        if retention.keep_all is not None:
            self._on_alert(step_of(newest), retention.keep_all)
            return
        try:
            prune(newest, self._keep_newest, self._keep_every_steps, retention.kept_step)
        except (OSError, KieloError) as error:
            self._on_alert(step_of(newest), f"old checkpoints in {self.folder} could not be removed: {error}")

    def _set_aside(self, damaged: dict[Path, Fault], newest: Path) -> None:
        for path, fault in damaged.items():
            reason = fault.reason
            self.warnings.append(
                self._ranks.on_first(lambda path=path, reason=reason: set_aside(path, reason))
            )
            if self._ranks.rank == 0:
                self._on_alert(step_of(path), self.warnings[-1])
        if damaged:
            self._ranks.on_first(lambda: point_newest(newest))

    def _candidates(self) -> list[Path]:
        """Rank 0: what may be taken for a checkpoint, newest first."""
        with suppress(OSError):
            remove_leftovers(self.folder)
        return step_folders(self.folder)

    def _find_fault(self, path: Path) -> Fault | None:
        """The same answer on every rank; each rank has read its share of the files, its own (maybe cached)
        first.

        A file that one rank could not read outweighs damage that another saw.
        """
        files = self._ranks.on_first(lambda: _listed_files(path))
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
            self._verified.add(path)
        return next(iter(faults), None)


def _listed_files(path: Path) -> dict[str, dict[str, Any]] | Fault:
    try:
        return listed_files(path)
    except FaultyCheckpoint as error:
        return error.fault


def _complaint_unless_finite(copies: dict[str, torch.Tensor]) -> str | None:
    """In the writing thread, which reads all of it anyway: one more pass, as fast as memory gives it."""
    for name, copy in copies.items():
        if (
            copy.numel()
            and copy.is_floating_point()
            and copy.itemsize > 1
            and not all(map(torch.isfinite, torch.aminmax(copy)))
        ):
            return f"{name} holds values that are not finite; whatever went on from them would have no finite loss"
    return None


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU from a checkpoint, without a process group: all of them, or those named.

    The files that hold them are verified first. Raises KieloError for damage and for names that are not
    there.
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
    fault = find_fault(path, sorted(needed), files)
    if fault is not None:
        raise FaultyCheckpoint(path, fault)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP wraps every rank's error in one CheckpointException (a BaseException): let out the first, with its
    rank.
    """
    try:
        yield
    except CheckpointException as wrapped:
        rank, (error, _) = min(wrapped.failures.items())
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror} on rank {rank}", error.filename) from wrapped
        raise error from wrapped


def tied_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that share all their memory with one named before: alias → name. Empty shards tell
    nothing.
    """
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


def _untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank may have to write: each tied tensor once."""
    tied = tied_names(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


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


def some_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

"""One save, from host copies to a published checkpoint: the work of the writing thread on every rank.

Files are written beside their place. Rank 0 renames the folder at last, and prunes old checkpoints.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kielo.artifact.checkpoint_folder import INDEX_NAME, Files, saved_step, step_folder_name
from kielo.artifact.checkpoint_index import (
    CheckpointIndex,
    PlainState,
    write_checkpoint_manifest,
    write_index,
)
from kielo.checkpoint import publish
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.remote_copies import RemoteCopies
from kielo.checkpoint.safetensors_storage import write_chunks
from kielo.checkpoint.save_plan import SavePlanner, WholePlan
from kielo.checkpoint.tensor_table import is_finite
from kielo.parallel.materialise import local
from kielo.recipe.errors import KieloError

_ALIGNMENT = 512  # bytes between the first bytes of two copies are multiples of it


class Staging:
    """One buffer of host memory for the copies of a rank's shards, kept from save to save.

    For tensors on a GPU it is registered with the driver (pinned). torch's allocator of pinned memory would
    round each tensor up to a power of two, and keep freed memory.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._is_registered = False
        self._copies: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory before a save, because fresh memory costs several times the copy."""
        shards = {name: local(tensor) for name, tensor in tensors.items()}
        kept = {name: (copy.shape, copy.dtype) for name, copy in self._copies.items()}
        if all(kept.get(name) == (shard.shape, shard.dtype) for name, shard in shards.items()):
            return
        self.close()
        ends, end = {}, 0
        for name, shard in shards.items():
            end = ends[name] = -(-end // _ALIGNMENT) * _ALIGNMENT + shard.nbytes
        self._buffer = torch.empty(end, dtype=torch.uint8).zero_()
        if end and any(shard.is_cuda for shard in shards.values()):  # a rank may hold empty shards only
            error = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), end, 0)
            torch.cuda.check_error(int(error))
            self._is_registered = True
        for name, shard in shards.items():
            copy = self._buffer[ends[name] - shard.nbytes : ends[name]]
            self._copies[name] = copy.view(shard.dtype).view(shard.shape)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's shard of each tensor as it is now: name → copy, valid until the next call."""
        self.reserve(tensors)
        shards = {name: local(tensor) for name, tensor in tensors.items()}
        for name, shard in shards.items():
            self._copies[name].copy_(shard, non_blocking=True)
        if any(shard.is_cuda for shard in shards.values()):
            torch.cuda.current_stream().synchronize()
        return {name: self._copies[name] for name in tensors}

    def close(self) -> None:
        if self._buffer is not None and self._is_registered:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())))
        self._buffer, self._is_registered = None, False
        self._copies.clear()


@dataclass(frozen=True)
class Save:
    """The content of one save. `Checkpointer.save` explains kept_step and keep_all."""

    step: int
    tensors: dict[str, torch.Tensor]  # live, their values change meanwhile: only their layout is read
    copies: dict[str, torch.Tensor]  # the values of this rank's shards
    plain: PlainState
    device: int | None  # the current GPU of the training thread
    kept_step: int | None
    keep_all: str | None


@dataclass(frozen=True)
class Saver:
    folder: Path
    keep_newest: int
    keep_every_steps: int
    ranks: Agreement
    planner: SavePlanner
    on_alert: Callable[[int, str], None]
    permit: Callable[[], None]
    copies: RemoteCopies | None = None

    def write(self, save: Save) -> tuple[Path | None, str | None]:
        """Return the published path, or None and why the save failed, the same on every rank."""
        if save.device is not None:
            torch.cuda.set_device(save.device)  # the current device belongs to the thread
        began, whole = time.monotonic(), WholePlan()
        save_id = self.ranks.on_first(lambda: secrets.token_hex(8))
        final = self.folder / step_folder_name(save.step)
        aside = publish.aside_name(final, save_id, "partial")

        def make_room() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            publish.remove_leftovers(self.folder)
            room = room_needed(whole, len(json.dumps(save.plain.content())))
            publish.refuse_if_too_full(self.folder, *room)
            aside.mkdir()

        def finish() -> None:
            describe_files(aside, index, whole, records, began)
            self.permit()
            publish.publish(aside, final)

        try:
            self.ranks.refuse_together(complaint_unless_finite(save.copies))
            plan = self.planner.plan(save.tensors)
            whole = plan.whole
            index = CheckpointIndex(save_id, save.step, {}, whole.aliases, save.plain)
            self.ranks.on_first(make_room)
            records = self.ranks.on_all(
                lambda: write_chunks(aside, self.ranks.rank, save_id, plan.written, save.copies)
            )
            self.ranks.on_first(finish)
        except (KieloError, OSError) as error:
            return None, self.ranks.on_first(partial(self._give_up, aside, final, whole.tensor_bytes, error))
        self.ranks.on_first(lambda: self._clear_up(final, save))
        return final, None

    def _give_up(self, aside: Path, final: Path, tensor_bytes: int, error: Exception) -> str:
        """Rank 0: leave nothing of the failed checkpoint. Return why it failed."""
        with suppress(OSError):
            publish.discard(aside, final)
        message = publish.failure(final, tensor_bytes, error)
        self.on_alert(saved_step(final), message)
        return message

    def _clear_up(self, newest: Path, save: Save) -> None:
        """Rank 0, once `newest` is published: prune older checkpoints. An error here damages none."""
        publish.point_newest(newest)
        if self.copies is not None:
            self.copies.begin(saved_step(newest))
        if save.keep_all is not None:
            self.on_alert(saved_step(newest), save.keep_all)
            return
        try:
            waiting = self.copies.kept() if self.copies is not None else set[str]()
            publish.prune(newest, self.keep_newest, self.keep_every_steps, save.kept_step, waiting)
        except (OSError, KieloError) as error:
            message = f"old checkpoints in {self.folder} could not be removed: {error}"
            self.on_alert(saved_step(newest), message)


def describe_files(
    partial: Path, index: CheckpointIndex, whole: WholePlan, records: Sequence[Files], began: float
) -> None:
    files = {name: record for of_rank in records for name, record in of_rank.items()}
    files[INDEX_NAME] = write_index(partial, index, whole.entries)
    write_checkpoint_manifest(partial, index, files, whole.tensor_bytes, time.monotonic() - began)


def room_needed(whole: WholePlan, plain_bytes: int) -> tuple[int, int]:
    """Return bytes and files of a save. The index describes a chunk in more bytes than its file's header."""
    described = plain_bytes + 2 * sum(map(len, whole.entries.values()))
    # Besides the ranks' files: index, manifest, the folder itself, and the symbolic link.
    return whole.tensor_bytes + described, whole.num_files + 4


def complaint_unless_finite(copies: dict[str, torch.Tensor]) -> str | None:
    for name, copy in copies.items():
        is_checked = copy.is_floating_point() and copy.itemsize > 1
        if is_checked and not is_finite(copy):
            return f"{name} has values that are not finite: a run that resumes from them has no finite loss"
    return None

"""One save, from host copies to a published checkpoint: the work of the writing thread on every rank.

The files are written beside their place (`step_00000100.ID.partial`) and brought to the disk. Rank 0 renames
the folder when every rank has finished, its manifest last. Then old checkpoints are pruned.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kielo.artifact.checkpoint_folder import step_folder_name, step_of
from kielo.artifact.checkpoint_index import CheckpointIndex
from kielo.artifact.checkpoint_manifest import write_checkpoint_manifest
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.distributed_checkpoint import save_tensors
from kielo.checkpoint.prune import prune, remove_leftovers
from kielo.checkpoint.publish import aside_name, discard, failure, point_newest, publish
from kielo.checkpoint.safetensors_storage import SafetensorsStorageWriter
from kielo.checkpoint.tied_tensors import tied_names
from kielo.recipe.errors import KieloError


@dataclass(frozen=True)
class Save:
    """The content of one save, and the older checkpoints that it leaves.

    tensors: name → live tensor; training changes its values meanwhile, so only its layout is read. copies:
    name → the values of this rank's shard. device: the current GPU of the thread that trains, None without
    one. kept_step, keep_all: see `Checkpointer.save`.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    copies: dict[str, torch.Tensor]
    plain: dict[str, Any]
    device: int | None
    kept_step: int | None
    keep_all: str | None


@dataclass(frozen=True)
class Saver:
    """Writes, publishes and prunes the checkpoints of `folder`; its arguments are those of `Checkpointer`."""

    folder: Path
    keep_newest: int
    keep_every_steps: int
    ranks: Agreement
    on_alert: Callable[[int, str], None]
    permit: Callable[[], None]

    def write(self, save: Save) -> tuple[Path | None, str | None]:
        """Returns the published path, or None and why the save failed; the same on every rank."""
        if save.device is not None:
            torch.cuda.set_device(save.device)  # the current device belongs to the thread
        began = time.monotonic()
        final = self.folder / step_folder_name(save.step)
        index = CheckpointIndex("", save.step, {}, self._all_tied(save.tensors), save.plain)
        index = replace(index, save_id=self.ranks.on_first(lambda: secrets.token_hex(8)))
        partial = aside_name(final, index.save_id, "partial")
        writer = SafetensorsStorageWriter(partial, index, self.ranks.rank, save.copies)
        stored = {name: tensor for name, tensor in save.tensors.items() if name not in index.aliases}
        try:
            self.ranks.refuse_together(complaint_unless_finite(save.copies))
            self.ranks.on_first(self._make_room)
            save_tensors(writer, stored, self.ranks)
            self.ranks.on_first(lambda: self._publish(writer, final, time.monotonic() - began))
        except (KieloError, OSError) as error:
            return None, self.ranks.on_first(lambda error=error: self._give_up(writer, final, error))
        self.ranks.on_first(lambda: self._clear_up(final, save))
        return final, None

    def _all_tied(self, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        return {
            alias: name for tied in self.ranks.gather(tied_names(tensors)) for alias, name in tied.items()
        }

    def _make_room(self) -> None:
        """Rank 0: remove what a killed save left; this save may need its room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def _publish(self, writer: SafetensorsStorageWriter, final: Path, wall_seconds: float) -> None:
        """Rank 0, when all files are on the disk: write the manifest and rename the folder."""
        write_checkpoint_manifest(
            writer.folder, writer.index, writer.files, writer.tensor_bytes, wall_seconds
        )
        self.permit()
        publish(writer.folder, final)

    def _give_up(self, writer: SafetensorsStorageWriter, final: Path, error: Exception) -> str:
        """Rank 0: leave nothing of the failed checkpoint; returns why it failed."""
        with suppress(OSError):
            discard(writer.folder, final)
        message = failure(final, writer.tensor_bytes, error)
        self.on_alert(writer.index.step, message)
        return message

    def _clear_up(self, newest: Path, save: Save) -> None:
        """Rank 0, once `newest` is published: prune older ones. An error here spoils no checkpoint."""
        point_newest(newest)
        if save.keep_all is not None:
            self.on_alert(step_of(newest), save.keep_all)
            return
        try:
            prune(newest, self.keep_newest, self.keep_every_steps, save.kept_step)
        except (OSError, KieloError) as error:
            self.on_alert(step_of(newest), f"old checkpoints in {self.folder} could not be removed: {error}")


def complaint_unless_finite(copies: dict[str, torch.Tensor]) -> str | None:
    """Returns a complaint that names the first tensor with NaN or infinities; None if all are finite.

    One more pass over memory that the writing thread reads anyway.
    """
    for name, copy in copies.items():
        if (
            copy.numel()
            and copy.is_floating_point()
            and copy.itemsize > 1
            and not all(map(torch.isfinite, torch.aminmax(copy)))
        ):
            return (
                f"{name} holds values that are not finite; "
                "training that continued from them would have no finite loss"
            )
    return None

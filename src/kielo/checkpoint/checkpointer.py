"""Checkpoints of a run: named tensors and plain JSON state in, one folder a step out, and back on any layout.

Saving stops training only while this rank's shards are copied to the host; a thread writes them
(`saving.py`). A kill at any moment leaves whole checkpoints only. Every byte read back is checked.
"""

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from kielo.artifact.checkpoint_folder import (
    Fault,
    FaultyCheckpoint,
    saved_step,
    step_folder_name,
    step_folders,
)
from kielo.artifact.checkpoint_index import PlainState, read_plain
from kielo.artifact.json_object import JsonTable
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.memory_copies import MemoryCopies
from kielo.checkpoint.publish import mark_damaged, point_newest, remove_later, remove_leftovers, shortage
from kielo.checkpoint.read_checkpoint import Verification, fill
from kielo.checkpoint.remote_copies import RemoteCopies
from kielo.checkpoint.save_plan import SavePlanner, untied
from kielo.checkpoint.saving import Save, Saver, Staging, room_needed
from kielo.recipe.errors import KieloError

logger = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]  # name → Tensor (equal on all ranks) or DTensor


class Checkpointer:
    """The checkpoints in `folder`. All ranks of `group` call each method together and agree on the outcome.

    `group` is a CPU group (gloo) for collectives of a thread beside the training. Checkpoints of multiples of
    `keep_every_steps` stay whatever `keep_newest` says (0: none). Rank 0 calls on_alert(step, message),
    mostly in the writing thread, and `permit` before a save and before its publication. A KieloError of
    `permit` refuses the save (another job has taken the folder). `copies` copies each checkpoint to an
    address, and no checkpoint is removed before its copy was verified. `warnings` lists the checkpoints that
    the last `newest` skipped.
    """

    def __init__(
        self,
        folder: Path,
        keep_newest: int = 2,
        keep_every_steps: int = 0,
        group: dist.ProcessGroup | None = None,
        on_alert: Callable[[int, str], None] = lambda step, message: logger.warning(message),
        permit: Callable[[], None] = lambda: None,
        copies: RemoteCopies | None = None,
    ):
        self.folder = Path(folder)
        self.warnings: list[str] = []
        self._ranks, self._on_alert, self._permit = Agreement(group), on_alert, permit
        self._verification = Verification(self._ranks)
        self._staging = Staging()
        self.planner = SavePlanner(self._ranks)
        self._saver = Saver(
            self.folder, keep_newest, keep_every_steps, self._ranks, self.planner, on_alert, permit, copies
        )
        self._memory_copies: MemoryCopies | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[tuple[Path | None, str | None] | None] | None = None
        self._published: Path | None = None
        self._failure: str | None = None

    def use_memory(self, local_rank: int) -> None:
        """Copy to the nodes' memory between checkpoints. `local_rank` is this rank's number on its node."""
        self._memory_copies = MemoryCopies(
            self.folder, self._ranks, self.planner, local_rank, self._on_alert, self._permit
        )

    def reserve(self, tensors: Tensors) -> None:
        """Allocate the host memory for saves of these tensors and plan them, so that no step waits for it."""
        self._wait()  # the save under way reads the memory that may be replaced
        self._staging.reserve(untied(tensors))
        self.planner.plan(tensors)

    def save(
        self,
        step: int,
        tensors: Tensors,
        plain: JsonTable,
        kept_step: int | None = None,
        keep_all: str | None = None,
    ) -> None:
        """Begin to write `step_{step:08d}`, after the save under way. Return when the tensors may change.

        plain: rank 0's is kept. After publication older checkpoints are pruned, except the newest up to
        `kept_step`. None is pruned if `keep_all` says why (an alert). A failed save (disk full, I/O error, a
        tensor that is not finite) leaves nothing, touches no earlier checkpoint and calls `on_alert`. Only
        `settle` raises. Raise KieloError on every rank if the save is not permitted.
        """
        self._wait()
        self._ranks.on_first(self._ask_permission)
        save = self._staged(step, tensors, plain, kept_step, keep_all)
        self._under_way = self._writer.submit(self._saver.write, save)

    def copy_to_memory(self, step: int, tensors: Tensors, plain: JsonTable) -> None:
        """Begin to copy the state to the nodes' memory. Return as `save` does. A failed copy is an alert."""
        if self._memory_copies is None:
            raise RuntimeError("copies are made after `use_memory`")
        self._wait()
        save = self._staged(step, tensors, plain, None, None)
        self._under_way = self._writer.submit(self._memory_copies.write, save)

    def settle(self) -> Path | None:
        """Wait for the save under way. Return the newest checkpoint of here. KieloError if that failed."""
        self._wait()
        if self._failure is not None:
            raise KieloError(self._failure)
        if self._memory_copies is not None:
            self._memory_copies.clear()
        return self._published

    def shortage(self) -> str | None:
        """Return, on rank 0, why the disk has no room for the next save; None during a save."""
        if self._under_way is not None and not self._under_way.done():
            return None
        folder = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        return shortage(folder, *room_needed(self.planner.whole, plain_bytes=0))

    def go_back_to(self, step: int) -> Path | None:
        """Remove later checkpoints. Return this step's, None without it; FaultyCheckpoint if unreadable."""
        self._wait()
        path = self.folder / step_folder_name(step)
        if not self._ranks.on_first(lambda: path in step_folders(self.folder)):
            return None
        if (fault := self._verification.find_fault(path)) is not None:
            if fault.kind != "damaged":
                raise FaultyCheckpoint(path, fault)
            self._ranks.on_first(lambda: self._on_alert(step, f"checkpoint {path} is {fault}"))
            return None
        if self._memory_copies is not None:
            self._memory_copies.clear()  # or a restart would resume from a state that was given up
        self._ranks.on_first(lambda: remove_later(path))
        self._published = path
        return path

    def go_back_before(self, step: int) -> Path | None:
        """Do as `go_back_to`, for the newest whole checkpoint from before `step`."""
        self._wait()
        earlier = self._ranks.on_first(
            lambda: [saved_step(path) for path in step_folders(self.folder) if saved_step(path) < step]
        )
        return next((path for path in map(self.go_back_to, earlier) if path is not None), None)

    def close(self) -> None:
        """Wait for the save under way, whether it succeeds or fails, and free its host memory, for good."""
        self._writer.shutdown(wait=True)
        self._staging.close()

    def newest(self) -> Path | None:
        """Find the newest whole checkpoint by reading every file; None if there is no checkpoint.

        A newer copy in the nodes' memory is made a checkpoint first. Newer damaged checkpoints are renamed to
        `NAME.damaged`, and leftovers of killed saves removed, so only the job that saves here may call it
        (others: `newest_complete`). If no checkpoint is whole, or a newer checkpoint is unreadable or of
        another version, nothing is renamed and every rank raises KieloError.
        """
        self._wait()
        if self._memory_copies is not None:
            self._memory_copies.make_checkpoint()
        self.warnings = []
        damaged: dict[Path, Fault] = {}
        for path in self._ranks.on_first(self._candidates):
            fault = self._verification.find_fault(path)
            if fault is None:
                self._mark_damaged(damaged, path)
                return path
            if fault.kind != "damaged":
                raise FaultyCheckpoint(path, fault)
            damaged[path] = fault
        if damaged:
            found = "; ".join(f"{path.name}: {fault.reason}" for path, fault in damaged.items())
            raise KieloError(
                f"no checkpoint in {self.folder} is whole, and training does not start over them ({found}). "
                f"Fix: restore a whole checkpoint from a backup, or, to begin at step 0, move "
                f"{self.folder.parent} away or give the recipe another folder"
            )
        return None

    def plain(self, path: Path) -> JsonTable:
        return self._ranks.on_first(lambda: read_plain(path))

    def restore(self, path: Path, tensors: Tensors) -> JsonTable:
        """Fill all `tensors` in place, or none (KieloError). Return the checkpoint's plain state."""
        self._wait()
        self._verification.require(Path(path))
        return fill(Path(path), tensors, self._ranks)

    def _staged(
        self, step: int, tensors: Tensors, plain: JsonTable, kept_step: int | None, keep_all: str | None
    ) -> Save:
        copies = self._staging.copy(untied(tensors))
        # As it is now, and nothing that JSON cannot hold.
        state = PlainState.model_validate_json(json.dumps(plain))
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        return Save(step, dict(tensors), copies, state, device, kept_step, keep_all)

    def _wait(self) -> None:
        """Wait for the writing thread, which then has no collective of its own running."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            if (saved := under_way.result()) is None:  # a copy in memory
                return
            published, self._failure = saved
            if published is not None:
                self._published = published
                self._verification.forget(published)

    def _ask_permission(self) -> None:
        # An I/O error says nothing about the lease and stops no training; asked again before publication.
        with suppress(OSError):
            self._permit()

    def _mark_damaged(self, damaged: dict[Path, Fault], newest: Path) -> None:
        for path, fault in damaged.items():
            self.warnings.append(self._ranks.on_first(partial(mark_damaged, path, fault.reason)))
            if self._ranks.rank == 0:
                self._on_alert(saved_step(path), self.warnings[-1])
        if damaged:
            self._ranks.on_first(lambda: point_newest(newest))

    def _candidates(self) -> list[Path]:
        with suppress(OSError):
            remove_leftovers(self.folder)
        return step_folders(self.folder)

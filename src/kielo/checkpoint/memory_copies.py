"""Copies of a run's newest state in the memory of its nodes: a restart resumes from there, not from the disk.

A copy has the files of a checkpoint. Each node keeps the files of its own ranks and of the node before it, so
a run survives the loss of one node. A restart makes a checkpoint of the newest copy that follows the newest
checkpoint and is whole on the nodes together, and reads it in any layout.
"""

import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from kielo.artifact.checkpoint_folder import (
    INDEX_NAME,
    FaultyCheckpoint,
    saved_step,
    step_folder_name,
    step_folders,
)
from kielo.artifact.checkpoint_index import CheckpointIndex, read_checkpoint_manifest
from kielo.artifact.durable import bring_to_disk
from kielo.artifact.manifest import MANIFEST_NAME
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.node_memory import Arrival, CopyName, FoundCopy, NodeMemory, SlowLinks
from kielo.checkpoint.publish import aside_name, discard, point_newest, publish, refuse_if_too_full
from kielo.checkpoint.safetensors_storage import write_chunks
from kielo.checkpoint.save_plan import SavePlanner
from kielo.checkpoint.saving import Save, complaint_unless_finite, describe_files
from kielo.recipe.errors import KieloError

PIECE_BYTES = 64 * 2**20
SizedFiles = Sequence[tuple[Path, int]]  # files and their bytes


def exchange_files(
    sent: SizedFiles, to: int, received: SizedFiles, source: int, group: dist.ProcessGroup | None
) -> Arrival | None:
    """Send files to rank `to` and receive files from rank `source`. All ranks of `group` call it together.

    Return how the first piece arrived: later pieces also wait for ranks that wait for a slow link. Raise
    OSError for a bad file only after all pieces were exchanged, so that no other rank waits.
    """
    for path, _ in received:
        path.unlink(missing_ok=True)
    outgoing, incoming = _pieces(sent), _pieces(received)
    failure: OSError | None = None
    first: Arrival | None = None
    for number in range(max(len(outgoing), len(incoming))):
        sending, arriving = None, None
        if number < len(outgoing):
            piece = torch.zeros(outgoing[number][2], dtype=torch.uint8)
            try:
                piece = _read(*outgoing[number])
            except OSError as error:
                failure = failure or error
            sending = dist.isend(piece, to, group=group)
        if number < len(incoming):
            arriving, began = torch.empty(incoming[number][2], dtype=torch.uint8), time.monotonic()
            dist.recv(arriving, source, group=group)
            first = first or Arrival(incoming[number][2], time.monotonic() - began)
        if sending is not None:
            sending.wait()
        if arriving is not None and failure is None:
            try:
                with open(incoming[number][0], "ab") as file:
                    file.write(arriving.numpy().data)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return first


def _pieces(files: SizedFiles) -> list[tuple[Path, int, int]]:
    return [
        (path, begin, min(PIECE_BYTES, num_bytes - begin))
        for path, num_bytes in files
        for begin in range(0, num_bytes, PIECE_BYTES)
    ]


def _read(path: Path, begin: int, num_bytes: int) -> torch.Tensor:
    found = np.fromfile(path, np.uint8, num_bytes, offset=begin)
    if found.size < num_bytes:
        raise OSError(f"{path} is shorter than it was when it was written")
    return torch.from_numpy(found)


class MemoryCopies:
    """The copies of a run in its nodes' memory, of equally many ranks. All ranks call methods together."""

    def __init__(
        self,
        checkpoints: Path,
        ranks: Agreement,
        planner: SavePlanner,
        local_rank: int,
        on_alert: Callable[[int, str], None],
        permit: Callable[[], None],
    ):
        self._checkpoints, self._ranks, self._planner = checkpoints, ranks, planner
        self._on_alert, self._permit = on_alert, permit
        numbers, hosts = map(list, zip(*ranks.gather((local_rank, socket.gethostname())), strict=True))
        self._ranks_a_node = max(numbers) + 1
        expected = [rank % self._ranks_a_node for rank in range(ranks.size)]
        if numbers != expected or ranks.size % self._ranks_a_node:
            raise KieloError(
                "checkpoint.memory_every_steps needs the same number of ranks on each node, numbered node by "
                "node. Fix: checkpoint.memory_every_steps = 0"
            )
        self._is_first_of_node = local_rank == 0
        self._node = NodeMemory(checkpoints, ranks.rank - local_rank)
        self._slow_links = SlowLinks(hosts, self._ranks_a_node)

    def write(self, save: Save) -> None:
        """Copy the state of `save`, then remove the copy before it. A failure is an alert."""
        if save.device is not None:
            torch.cuda.set_device(save.device)  # the current device belongs to the thread
        save_id, after = self._ranks.on_first(lambda: (secrets.token_hex(8), self._newest_save_id()))
        if after is None:
            return
        name = CopyName(save.step, save_id, after)
        try:
            self._write_files(save, name)
            self._on_nodes(lambda: self._node.finish(name))
        except (KieloError, OSError) as error:
            if self._is_first_of_node:
                self._node.abandon(name)
            if self._ranks.rank == 0:
                self._on_alert(save.step, f"step {save.step} was not copied to the nodes' memory: {error}")
            return
        if self._is_first_of_node:
            self._node.remove_all_but(name)

    def make_checkpoint(self) -> Path | None:
        """Make the newest copy a checkpoint, if it is newer than all. A failure is an alert."""
        found = self._ranks.gather(self._node.find())
        name, path = self._ranks.on_first(lambda: self._choose(found)), None
        if name is not None:
            path = self._copy_to_disk(name, [copies.get(name, FoundCopy()).files for copies in found])
        if name is None or path is not None:
            self.clear()
        return path

    def clear(self) -> None:
        self._on_nodes(self._node.clear)

    def _on_nodes(self, action: Callable[[], None]) -> None:
        self._ranks.on_all(lambda: action() if self._is_first_of_node else None)

    def _newest_save_id(self) -> str | None:
        for path in step_folders(self._checkpoints):
            with suppress(FaultyCheckpoint):
                return read_checkpoint_manifest(path).saved.save_id
        return None

    def _write_files(self, save: Save, name: CopyName) -> None:
        began, rank, size = time.monotonic(), self._ranks.rank, self._ranks.size
        self._ranks.refuse_together(complaint_unless_finite(save.copies))
        plan, partial = self._planner.plan(save.tensors), self._node.partial(name)
        nodes = size // self._ranks_a_node
        kept_bytes = plan.whole.tensor_bytes * min(2, nodes) // nodes
        self._on_nodes(lambda: self._node.make_partial(name, kept_bytes))
        records = self._ranks.on_all(
            lambda: write_chunks(partial, rank, name.save_id, plan.written, save.copies)
        )

        def describe() -> dict[str, int]:
            index = CheckpointIndex(name.save_id, save.step, {}, plan.whole.aliases, save.plain)
            describe_files(partial, index, plan.whole, records, began)
            return {file: (partial / file).stat().st_size for file in (INDEX_NAME, MANIFEST_NAME)}

        described = self._ranks.on_first(describe)
        if nodes == 1:
            return
        files = [{file: record.bytes for file, record in of_rank.items()} for of_rank in records]
        files[0] |= described
        to, source = (rank + self._ranks_a_node) % size, (rank - self._ranks_a_node) % size
        sent, received = (
            [(partial / file, num_bytes) for file, num_bytes in files[of].items()] for of in (rank, source)
        )
        arrivals = self._ranks.on_all(lambda: exchange_files(sent, to, received, source, self._ranks.group))
        message = self._slow_links.look(arrivals)
        if message is not None and rank == 0:
            self._on_alert(save.step, message)

    def _choose(self, found: list[dict[CopyName, FoundCopy]]) -> CopyName | None:
        """Rank 0: return the newest copy that follows the newest checkpoint and is whole on all nodes."""
        copies: dict[CopyName, FoundCopy] = {}
        for of_rank in found:
            for name, copy in of_rank.items():
                copies.setdefault(name, FoundCopy()).add(copy)
        newest_step = max(map(saved_step, step_folders(self._checkpoints)), default=0)
        after = self._newest_save_id()
        names = [name for name, copy in copies.items() if copy.is_whole and name.after == after]
        later = [name for name in names if name.step > newest_step]
        return max(later, key=lambda name: name.step, default=None)

    def _copy_to_disk(self, name: CopyName, held: list[Mapping[str, int]]) -> Path | None:
        """Write a whole copy to the disk. held: name → bytes of the files that each rank finds."""
        final = self._checkpoints / step_folder_name(name.step)
        partial = aside_name(final, name.save_id, "partial")
        sizes = {file: num_bytes for files in held for file, num_bytes in files.items()}

        def make_room() -> None:
            refuse_if_too_full(self._checkpoints, sum(sizes.values()), len(sizes) + 2)
            shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was killed here
            partial.mkdir()

        def copy_share() -> None:
            shares: list[list[str]] = [[] for _ in held]
            for file in sorted(sizes):  # by the holder that has the fewest files so far
                holders = [rank for rank, files in enumerate(held) if file in files]
                shares[min(holders, key=lambda rank: len(shares[rank]))].append(file)
            for file in shares[self._ranks.rank]:
                shutil.copyfile(self._node.path_of(name, file), partial / file)
                bring_to_disk(partial / file)

        def finish() -> None:
            self._permit()
            publish(partial, final)
            point_newest(final)

        try:
            self._ranks.on_first(make_room)
            self._ranks.on_all(copy_share)
            self._ranks.on_first(finish)
        except (KieloError, OSError) as error:
            if self._ranks.rank == 0:
                discard(partial, final)
                what = f"the copy of step {name.step} in the nodes' memory could not be used"
                self._on_alert(name.step, f"{what}: {error}")
            return None
        return final

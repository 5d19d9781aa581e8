"""Copies in the memory of several nodes: which files lie where, and what is told; ranks are threads here."""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.checkpoint_index import PlainState
from kielo.checkpoint import agreement, memory_copies, node_memory
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.memory_copies import MemoryCopies
from kielo.checkpoint.node_memory import CopyName, NodeMemory
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.checkpoint.save_plan import SavePlanner
from kielo.checkpoint.saving import Save
from kielo.recipe.errors import KieloError
from tests.checkpoint.threads import Group, run_threads

TENSORS = {"model/a": torch.arange(12.0).view(4, 3), "model/b": torch.ones(5).bfloat16()}  # 48 and 10 bytes
OF_ALL = ["index.json", "manifest.json"]


class Nodes:
    """Ranks with copies, as many on a node as told; alerts and the room that was asked for are noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.memory = folder / "run", folder / "shm"
        self.alerts: list[tuple[int, str]] = []
        self.asked: list[int] = []
        self.refusal: Exception | None = None
        self.memory.mkdir()
        monkeypatch.setattr(node_memory, "MEMORY_FOLDER", self.memory)
        original = NodeMemory.make_partial

        def make_partial(node: NodeMemory, name: CopyName, num_bytes: int) -> None:
            self.asked.append(num_bytes)
            original(node, name, num_bytes)

        monkeypatch.setattr(NodeMemory, "make_partial", make_partial)
        self.run = partial(run_threads, monkeypatch, [agreement, memory_copies])
        checkpointer = Checkpointer(self.folder)
        checkpointer.save(100, TENSORS, {"step": 100})
        checkpointer.settle()

    def copies(self, group: Group, ranks_a_node: int) -> MemoryCopies:
        ranks = Agreement(group)
        alert = lambda step, message: self.alerts.append((step, message))  # noqa: E731
        return MemoryCopies(
            self.folder, ranks, SavePlanner(ranks), ranks.rank % ranks_a_node, alert, self.permit
        )

    def permit(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def write(self, num_ranks: int, ranks_a_node: int, step: int = 110, **values: float) -> None:
        tensors = (
            {name: torch.full_like(one, values["all"]) for name, one in TENSORS.items()}
            if values
            else TENSORS
        )

        def action(group: Group) -> None:
            save = Save(step, tensors, tensors, PlainState(step=step), None, None, None)
            self.copies(group, ranks_a_node).write(save)

        assert self.run(num_ranks, action) == [None] * num_ranks

    def restart(self, num_ranks: int, ranks_a_node: int) -> list[Any]:
        return self.run(num_ranks, lambda group: self.copies(group, ranks_a_node).make_checkpoint())

    def files(self) -> dict[str, list[str]]:
        """Returns node → names of its files, without "rank_0000" and the ending."""
        found = {}
        for node in sorted(self.memory.glob("kielo_*/*/node_*")):
            (copy,) = node.iterdir()
            names = (path.name.removesuffix(".safetensors") for path in copy.iterdir())
            found[node.name] = sorted(name.removeprefix("rank_0000") for name in names)
        return found


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_a_node", "room", "files"),
    [
        (2, 2, 58, {"node_00000": ["0", "1", *OF_ALL]}),
        (4, 2, 58, {"node_00000": ["0", "1", *OF_ALL], "node_00002": ["0", "1", *OF_ALL]}),
        (3, 1, 38, {"node_00000": ["0", *OF_ALL], "node_00001": ["0", "1", *OF_ALL], "node_00002": ["1"]}),
    ],
)
def test_each_node_keeps_its_files_and_those_of_the_one_before(
    num_ranks, ranks_a_node, room, files, nodes
) -> None:
    """Two of three parts of 58 bytes in each of three nodes; two ranks write a tensor each."""
    nodes.write(num_ranks, ranks_a_node)
    assert nodes.files() == files and nodes.alerts == []
    assert nodes.asked.count(room) == 1 and len(nodes.asked) == num_ranks // ranks_a_node


def test_a_lost_node_is_made_up_for(nodes) -> None:
    """Its files come from the next one; then no copy is left anywhere."""
    nodes.write(3, 1, 105, all=2.0)
    nodes.write(3, 1, 110)
    lost = next(nodes.memory.glob("kielo_*/*/node_00000"))
    lost.rename(nodes.memory / "lost")
    path = nodes.folder / "step_00000110"
    assert nodes.restart(3, 1) == [path] * 3 and nodes.alerts == []
    found = read_tensors(path)
    assert all(found[name].equal(tensor) for name, tensor in TENSORS.items())
    assert list(nodes.memory.glob("kielo_*")) == [] and (nodes.folder / "newest").resolve() == path
    assert nodes.restart(3, 1) == [None] * 3


def test_an_older_copy_and_half_a_copy_are_not_used(nodes) -> None:
    nodes.write(3, 1, 100)
    assert nodes.restart(3, 1) == [None] * 3 and nodes.files() == {}
    nodes.write(3, 1, 101)
    for number in (0, 1):
        next(nodes.memory.glob(f"kielo_*/*/node_0000{number}")).rename(nodes.memory / f"lost{number}")
    assert nodes.restart(3, 1) == [None] * 3
    assert sorted(path.name for path in nodes.folder.iterdir()) == ["newest", "step_00000100"]


def test_a_copy_that_may_not_be_published_stays(nodes) -> None:
    """And is told once; nothing of it is left on the disk."""
    nodes.write(3, 1)
    before = nodes.files()
    nodes.refusal = KieloError("no more")
    assert nodes.restart(3, 1) == [None] * 3 and nodes.files() == before
    assert nodes.alerts == [(110, "the copy of step 110 in the nodes' memory could not be used: no more")]
    assert sorted(path.name for path in nodes.folder.iterdir()) == ["newest", "step_00000100"]
    nodes.refusal = None
    assert nodes.restart(3, 1) == [nodes.folder / "step_00000110"] * 3


def test_a_copy_that_fails_on_one_node_is_told_and_the_one_before_stays(nodes, monkeypatch) -> None:
    nodes.write(2, 1)
    before = nodes.files()
    original = NodeMemory.finish

    def finish(node: NodeMemory, name: CopyName) -> None:
        if node.partial(name).parent.name == "node_00001":
            raise OSError(errno.EIO, "broken")
        original(node, name)

    monkeypatch.setattr(NodeMemory, "finish", finish)
    nodes.write(2, 1, 120, all=float("inf"))
    ((step, message),) = nodes.alerts
    assert step == 120 and message.startswith(
        "step 120 was not copied to the nodes' memory: model/a has values"
    )
    nodes.write(2, 1, 130)
    assert nodes.alerts[1:] == [
        (130, "step 130 was not copied to the nodes' memory: [Errno 5] broken on rank 1")
    ]
    assert list(nodes.memory.glob("kielo_*/*/*/*.partial")) == []
    monkeypatch.undo()
    assert {name: len(files) for name, files in before.items()} == {"node_00000": 4, "node_00001": 4}


@pytest.mark.parametrize("local_ranks", [[0, 1, 0], [0, 0, 1], [1, 0], [0, 1, 1, 0], [0, 2, 1]])
def test_nodes_of_different_sizes_are_refused(local_ranks, nodes) -> None:
    def action(group: Group) -> None:
        ranks = Agreement(group)
        MemoryCopies(nodes.folder, ranks, SavePlanner(ranks), local_ranks[ranks.rank], print, nodes.permit)

    for error in nodes.run(len(local_ranks), action):
        assert str(error).startswith(
            "checkpoint.memory_every_steps needs the same number of ranks on each node"
        )

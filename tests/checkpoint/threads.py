"""Ranks as threads of one process, with what `torch.distributed` does for the code of this folder.

A group knows its rank, so that any thread of a rank may use it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

WAIT_SECONDS = 60


class World:
    """What the ranks share: a value of each, and letters from one to another."""

    def __init__(self, size: int):
        self.size = size
        self.letters: dict[tuple[int, int], Queue] = defaultdict(Queue)
        self.sent: list[tuple[int, int, int]] = []
        self._barrier = threading.Barrier(size, timeout=WAIT_SECONDS)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Group(NamedTuple):
    world: World
    rank: int


def _all_gather_object(values: list[Any], value: Any, group: Group) -> None:
    values[:] = group.world.exchange(group.rank, value)


def _broadcast_object_list(values: list[Any], group: Group, group_src: int) -> None:
    values[:] = group.world.exchange(group.rank, list(values))[group_src]


def _gather_object(value: Any, values: list[Any] | None, group: Group, group_dst: int) -> None:
    assert (values is not None) == (group.rank == group_dst)
    found = group.world.exchange(group.rank, value)
    if values is not None:
        values[:] = found


def _scatter_object_list(received: list[Any], parts: list[Any] | None, group: Group, group_src: int) -> None:
    assert (parts is not None) == (group.rank == group_src)
    received[0] = group.world.exchange(group.rank, parts)[group_src][group.rank]


def _isend(values: torch.Tensor, to: int, group: Group) -> SimpleNamespace:
    group.world.sent.append((group.rank, to, values.numel()))
    group.world.letters[group.rank, to].put(values.clone())
    return SimpleNamespace(wait=lambda: None)


def _irecv(values: torch.Tensor, source: int, group: Group) -> SimpleNamespace:
    letters = group.world.letters[source, group.rank]
    return SimpleNamespace(wait=lambda: values.copy_(letters.get(timeout=WAIT_SECONDS)))


DIST = SimpleNamespace(
    ProcessGroup=Group,
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_rank=lambda group: group.rank,
    get_world_size=lambda group: group.world.size,
    all_gather_object=_all_gather_object,
    broadcast_object_list=_broadcast_object_list,
    gather_object=_gather_object,
    scatter_object_list=_scatter_object_list,
    isend=_isend,
    irecv=_irecv,
)


def run_threads(
    monkeypatch: pytest.MonkeyPatch, modules: list[ModuleType], size: int, action: Callable[[Group], Any]
) -> list[Any]:
    """Returns what `action` returned on each rank, or the error that it raised there."""
    world = World(size)

    def of_rank(rank: int) -> Any:
        try:
            return action(Group(world, rank))
        except Exception as error:
            return error

    with monkeypatch.context() as patch, ThreadPoolExecutor(size) as threads:
        for module in modules:
            patch.setattr(module, "dist", DIST)
        return list(threads.map(of_rank, range(size)))

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

from kielo.ranks.objects import from_json, to_json

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


def _all_gather(value: Any, group: Group) -> list[Any]:
    return [*map(from_json, group.world.exchange(group.rank, to_json(value)))]


def _gather(value: Any, group: Group) -> list[Any]:
    found = _all_gather(value, group)
    return found if group.rank == 0 else []


def _broadcast(value: Any, group: Group) -> Any:
    return from_json(group.world.exchange(group.rank, to_json(value))[0])


def _scatter(parts: list[Any], group: Group) -> Any:
    return from_json(group.world.exchange(group.rank, [*map(to_json, parts)])[0][group.rank])


def _isend(values: torch.Tensor, to: int, group: Group) -> SimpleNamespace:
    group.world.sent.append((group.rank, to, values.numel()))
    group.world.letters[group.rank, to].put(values.clone())
    return SimpleNamespace(wait=lambda: None)


def _recv(values: torch.Tensor, source: int, group: Group) -> None:
    values.copy_(group.world.letters[source, group.rank].get(timeout=WAIT_SECONDS))


DIST = SimpleNamespace(
    ProcessGroup=Group,
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_rank=lambda group: group.rank,
    get_world_size=lambda group: group.world.size,
    isend=_isend,
    recv=_recv,
)
OBJECTS = SimpleNamespace(all_gather=_all_gather, gather=_gather, broadcast=_broadcast, scatter=_scatter)


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
            if hasattr(module, "objects"):
                patch.setattr(module, "objects", OBJECTS)
        return list(threads.map(of_rank, range(size)))

"""A world of any size of which one rank is real, which counts what its start asks of the others.

The start's own code runs, but with a store that answers as if all other ranks had been there before, and with
process groups whose collectives end at once. Both count.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kielo.ranks.world import World, end_world, enter_world

DEVICE_BACKEND, HOST_BACKEND = "counted_device", "counted_host"  # in place of NCCL and gloo


class CountedStore(dist.Store):
    """A store that counts its operations by name. Keys of other ranks count as present when waited for."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size
        self._texts: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}
        self.operations: Counter[str] = Counter()

    def set(self, key: str, value: bytes | str) -> None:
        self.operations["set"] += 1
        self._texts[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self.operations["get"] += 1
        return self._texts.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Counts on from the ranks' number less one: this rank is the last to come, which has most to do."""
        self.operations["add"] += 1
        self._numbers[key] = self._numbers.get(key, self._size - 1) + amount
        return self._numbers[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.operations["compare_set"] += 1
        return self._texts.setdefault(key, desired.encode())

    def check(self, keys: Sequence[str]) -> bool:
        self.operations["check"] += 1
        return all(key in self._texts for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.operations["wait"] += 1

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> "CountedStore":
        return self


class CountedGroup(dist.ProcessGroup):
    """A communicator that counts; `messages`: group ranks that this rank sent to or received from.

    All ranks are taken to give what this one gives.
    """

    def __init__(self, rank: int, size: int, backend: str):
        super().__init__(rank, size)
        self.backend = backend
        self.messages: set[int] = set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        for tensor in tensors:
            tensor.mul_(self.size())

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> None:
        self.messages.add(target)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        self.messages.add(source)

    def getBackendName(self) -> str:
        return self.backend

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name


class CountedWorld:
    """The rank's world, its store, and the communicators that it has made."""

    def __init__(self, rank: int, size: int):
        self.store = CountedStore(size)
        self.groups: list[CountedGroup] = []
        # From here on torch keeps C++ references only, for which the Python halves must stay alive.
        self.world = World(
            rank, size, 0, torch.device("cpu"), 600.0, dist.PrefixStore("kielo/0", self.store), HOST_BACKEND
        )

    def make(self, backend: str, rank: int, size: int) -> CountedGroup:
        self.groups.append(CountedGroup(rank, size, backend))
        return self.groups[-1]


@contextmanager
def counted_world(rank: int, size: int) -> Iterator[CountedWorld]:
    """Makes this process rank `rank` of `size`, in a process that has no process group."""
    counted = CountedWorld(rank, size)
    for backend in (DEVICE_BACKEND, HOST_BACKEND):
        dist.Backend.register_backend(
            backend,
            lambda store, rank, size, timeout, backend=backend: counted.make(backend, rank, size),
            devices=["cpu"],
        )
    enter_world(counted.world, DEVICE_BACKEND)
    try:
        yield counted
    finally:
        end_world()

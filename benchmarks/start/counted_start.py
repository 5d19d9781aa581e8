"""Counts the start of one rank of a job of any size: store operations, communicators, sockets, weights.

The start's own code runs, up to the model's layout, in a world of which this rank alone is real. What NCCL,
gloo and checkpoint plans do below it is computed by the formulas here, each with its source.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kielo.models import families
from kielo.parallel.materialise import local
from kielo.parallel.mesh import build_mesh
from kielo.ranks.rendezvous import Rendezvous
from kielo.ranks.world import World, end_world, enter_world, make_host_group, once_a_node
from kielo.resolve.resolved import Resolved
from kielo.train.build import laid_out

# A world of any size of which one rank is real, which counts what its start asks of the others.
#
# The start's own code runs, but with a store that answers as if all other ranks had been there before, and
# with process groups whose collectives end at once. Both count.


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


TENSORS_SAVED = 3  # of each parameter: the weight and AdamW's two moments
NORMAL_NUMBERS_PER_SECOND = 87e6  # on one core (measured, benchmarks/results/first_weights_cpu.json)
SECONDS_PER_PLANNED_PART = 17e-6  # on rank 0 (measured, benchmarks/results/save_planning.json)
# torch's TORCH_NCCL_RANKS_PER_ROOT: larger communicators have several roots (NCCL 2.23 and later).
_RANKS_PER_ROOT = 128
# NCCL's bootstrap.cc: to the ring's next rank and from the one before; one that listens for messages, one for
# the proxy. Data uses rings and two trees: at most 2 + 2 × 3 other ranks, at any size.
_BOOTSTRAP_SOCKETS = 4


@dataclass(frozen=True)
class StartCounts:
    """Counts of one rank's start, and of the job as far as rank 0 has to do with all of it.

    store_operations: by Kielo and torch (counted), by NCCL and by gloo (computed). communicators: sizes of
    NCCL's, larger than one rank. pairs: communicators of two ranks for a pipeline's messages. nccl_sockets,
    host_sockets: for NCCL's bootstrap, and of the host group once a checkpoint was saved. weights: elements
    of first weights that this rank owns. parts: parts of tensors that this rank saves; job_parts: those of
    all ranks, for which rank 0 makes the plan.
    """

    ranks: int
    rank: int
    store_operations: dict[str, int]
    communicators: tuple[int, ...]
    pairs: int
    nccl_sockets: int
    host_sockets: int
    weights: int
    parts: int
    job_parts: int


def count_start(resolved: Resolved, rank: int, ranks_per_node: int = 8) -> StartCounts:
    """Starts rank `rank` of the job in a process without a process group, and returns its counts."""
    placement = resolved.placement
    size, layout = placement.world_size, placement.layout
    place = Rendezvous(rank, size, rank % ranks_per_node)
    with counted_world(rank, size) as counted:
        once_a_node("find the weights", lambda: None, place, counted.world.store, 1.0)
        mesh = build_mesh(counted.world, layout)
        make_host_group(counted.world, "checkpoint", 1.0)
        model = laid_out(resolved.identity, placement, mesh, resolved.identity.train.precision)
        parameters = list(model.parameters())
        device_groups = [group for group in counted.groups if _is_nccl(group)]
        pairs = sum(len(group.messages) for group in device_groups)
        sizes = tuple(group.size() for group in device_groups)
        operations = {
            "counted": counted.store.operations.total(),
            "NCCL": pairs + sum(map(nccl_store_operations, sizes)),
            "gloo": gloo_store_operations(rank, size),
        }
    stages_ranks = size // layout.pipeline
    return StartCounts(
        ranks=size,
        rank=rank,
        store_operations=operations,
        communicators=sizes,
        pairs=pairs,
        nccl_sockets=_BOOTSTRAP_SOCKETS * (len(sizes) + pairs),
        host_sockets=1 + len(gloo_peers(rank, size)),
        weights=sum(local(parameter).numel() for parameter in parameters),
        parts=TENSORS_SAVED * sum(local(parameter).numel() > 0 for parameter in parameters),
        job_parts=TENSORS_SAVED * _tensors(resolved) * stages_ranks,
    )


def nccl_store_operations(size: int) -> int:
    """Returns a rank's operations for the ids of a new communicator (torch's ProcessGroupNCCL).

    Its first rank sets an id and each other one gets it; with several roots, each rank gets the ids of all in
    one operation, and a root sets its own before.
    """
    return 1 if size <= _RANKS_PER_ROOT else 2


def gloo_store_operations(rank: int, size: int) -> int:
    """Returns a rank's operations in a lazily connected group: it sets its address and gets each peer's."""
    return 1 + 2 * len(gloo_peers(rank, size))


def gloo_peers(rank: int, size: int) -> set[int]:
    """Returns the group ranks that a rank connects with in the collectives of saving and restoring.

    All-reduce and all-gather: its neighbours in a ring. Broadcast from rank 0: its parent and children in a
    binomial tree. Gather to rank 0 and scatter from it: rank 0, which connects with all.
    """
    ring = {(rank - 1) % size, (rank + 1) % size}
    span = 1 << rank.bit_length()  # the smallest power of two above `rank`
    children = {rank + (span << power) for power in range(size.bit_length()) if rank + (span << power) < size}
    tree = children | ({rank - span // 2} if rank else set())
    star = {0} if rank else set(range(1, size))
    return (ring | tree | star) - {rank}


def server_operations(counts: list[StartCounts]) -> int:
    """Returns the operations of all ranks, if each has as many as the busiest one in `counts`."""
    size = counts[0].ranks
    alike = max(count.store_operations["counted"] + count.store_operations["NCCL"] for count in counts)
    return alike * size + sum(gloo_store_operations(rank, size) for rank in range(size))


def _is_nccl(group: CountedGroup) -> bool:
    # A group of one rank is never used, and NCCL connects at first use.
    return group.backend == DEVICE_BACKEND and group.size() > 1


def _tensors(resolved: Resolved) -> int:
    with torch.device("meta"):
        return len(list(families.build_model(resolved.identity.model).parameters()))

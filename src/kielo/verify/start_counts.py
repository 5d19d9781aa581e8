"""Counts the start of one rank of a job of any size: store operations, communicators, sockets, weights.

The start's own code runs, up to the model's layout (`counted_world.py`). What NCCL, gloo and checkpoint plans
do below it is computed by the formulas here, each with its source.
"""

from dataclasses import dataclass

import torch

from kielo.models import families
from kielo.parallel.materialise import local
from kielo.parallel.mesh import build_mesh
from kielo.ranks.rendezvous import Rendezvous
from kielo.ranks.world import make_host_group, once_a_node
from kielo.resolve.resolved import Resolved
from kielo.train.build import laid_out
from kielo.verify.counted_world import DEVICE_BACKEND, CountedGroup, counted_world

TENSORS_SAVED = 3  # of each parameter: the weight and AdamW's two moments
NORMAL_NUMBERS_PER_SECOND = 87e6  # on one core (measured, benchmarks/first_weights.py)
SECONDS_PER_PLANNED_PART = 17e-6  # on rank 0 (measured, benchmarks/save_planning.py)
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

"""Check: every collective on every group of the run's mesh returns the right numbers, and how fast.

Networks have returned wrong sums without an error (NVIDIA/nccl issue 2001: LL128 on Slingshot with GH200), so
every element is compared with its known value. Values are whole numbers that a dtype holds exactly, and so
are their sums. They repeat after a prime number of elements, so that data in the wrong place shows too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from kielo.parallel.mesh import Mesh
from kielo.ranks.hang_watch import some
from kielo.recipe.cards import Cluster
from kielo.verify.preflight.job import Finding, Job, spread

ALL_RANKS = "all ranks"
PERIOD = 1021
DTYPES = (torch.float32, torch.bfloat16)
# The largest sum that a dtype holds exactly, as it holds every whole number up to it.
EXACT = {torch.float32: 2**24, torch.bfloat16: 2**8}
# Larger groups do not exchange all to all in training, and NCCL would connect every pair of ranks.
LARGEST_ALL_TO_ALL = 64
# Between nodes, of the rate of a rank's share of the network. Without its plugin NCCL reached 0.04 on Alps,
# and rings of 2023's LUMI 0.37.
LEAST_OF_NETWORK = 0.15
SLOWEST_OF_GROUPS = 0.5  # of the median of the groups of one axis; a proposal
# torch 2.13's names. torch 2.10 and 2.11 have only the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SHOWN = 3  # wrong results of a rank
_NAMED_RANKS = 8  # of a group


@dataclass(frozen=True)
class Group:
    """One communicator of this rank: its axis, and this rank's number among the group's ranks."""

    axis: str
    process_group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Exchange:
    """A collective that fills a new tensor, and the values that the tensor must have then."""

    call: Callable[[Tensor], object]
    expected: Tensor

    def run(self) -> Tensor:
        result = torch.empty_like(self.expected)
        self.call(result)
        return result


def groups_of(mesh: Mesh, rank: int) -> list[Group]:
    """Return this rank's groups of two ranks and more, each once. An axis's name wins over "all ranks"."""
    found: dict[str, Group] = {}
    of_axes = ((mesh.ranks, ""), (mesh.parameters, " of weights"))
    named = [
        (axis + suffix, ranks[axis].get_group())
        for ranks, suffix in of_axes
        for axis in ranks.mesh_dim_names or ()
    ]
    for name, process_group in (*named, (ALL_RANKS, dist.group.WORLD)):
        if process_group is None:
            continue
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if len(ranks) > 1 and process_group.group_name not in found:
            found[process_group.group_name] = Group(name, process_group, ranks.index(rank), ranks)
    return list(found.values())


def values(rank: int, size: int, dtype: torch.dtype, start: int, count: int, device: torch.device) -> Tensor:
    """Return elements [start, start + count) of the contribution of group rank `rank` of `size`."""
    return _repeated(_period(rank, size, dtype).to(device, dtype), start, count)


def sums(size: int, dtype: torch.dtype, start: int, count: int, device: torch.device) -> Tensor:
    total = torch.stack([_period(rank, size, dtype) for rank in range(size)]).sum(0)
    return _repeated(total.to(device, dtype), start, count)


def _period(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return PERIOD whole numbers, few of them large or not 0, so that sums over ranks are exact."""
    step = -(-size // EXACT[dtype])
    if rank % step:
        return torch.zeros(PERIOD, dtype=torch.int64)
    most = min(EXACT[dtype] // -(-size // step), 2**12)
    return torch.randint(most + 1, (PERIOD,), generator=torch.Generator().manual_seed(rank))


def _repeated(period: Tensor, start: int, count: int) -> Tensor:
    return period.roll(-(start % PERIOD)).repeat(-(-count // PERIOD))[:count]


def all_reduce(group: Group, dtype: torch.dtype, elements: int, device: torch.device) -> Exchange:
    buffer = values(group.rank, group.size, dtype, 0, elements, device)
    expected = sums(group.size, dtype, 0, elements, device)
    return Exchange(lambda result: dist.all_reduce(result.copy_(buffer), group=group.process_group), expected)


def reduce_scatter(group: Group, dtype: torch.dtype, elements: int, device: torch.device) -> Exchange:
    buffer, part = values(group.rank, group.size, dtype, 0, elements, device), elements // group.size
    expected = sums(group.size, dtype, group.rank * part, part, device)
    return Exchange(lambda result: _reduce_scatter(result, buffer, group=group.process_group), expected)


def all_gather(group: Group, dtype: torch.dtype, elements: int, device: torch.device) -> Exchange:
    part = elements // group.size
    parts = [values(rank, group.size, dtype, 0, part, device) for rank in range(group.size)]
    buffer, expected = parts[group.rank], torch.cat(parts)
    return Exchange(lambda result: _all_gather(result, buffer, group=group.process_group), expected)


def all_to_all(group: Group, dtype: torch.dtype, elements: int, device: torch.device) -> Exchange:
    buffer, part = values(group.rank, group.size, dtype, 0, elements, device), elements // group.size
    parts = [values(rank, group.size, dtype, group.rank * part, part, device) for rank in range(group.size)]
    expected = torch.cat(parts)
    return Exchange(
        lambda result: dist.all_to_all_single(result, buffer, group=group.process_group), expected
    )


def message(group: Group, dtype: torch.dtype, elements: int, device: torch.device, step: int) -> Exchange:
    """Send `step` ranks on in the group and receive from as far before, as stages of a pipeline do."""
    buffer = values(group.rank, group.size, dtype, 0, elements, device)
    target, source = (group.rank + step) % group.size, (group.rank - step) % group.size

    def exchange(result: Tensor) -> None:
        both = [
            dist.P2POp(dist.isend, buffer, group=group.process_group, group_peer=target),
            dist.P2POp(dist.irecv, result, group=group.process_group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Exchange(exchange, values(source, group.size, dtype, 0, elements, device))


@dataclass(frozen=True)
class Collective:
    """A collective: a maker of a call, and the part of its larger buffer that a rank sends."""

    prepare: Callable[[Group, torch.dtype, int, torch.device], Exchange]
    sent_share: Callable[[int], float]  # group's ranks → share


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES = {
    "all-reduce": Collective(all_reduce, lambda ranks: 2 * _all_but_own(ranks)),
    "reduce-scatter": Collective(reduce_scatter, _all_but_own),
    "all-gather": Collective(all_gather, _all_but_own),
    "all-to-all": Collective(all_to_all, _all_but_own),
    "message to the next rank": Collective(partial(message, step=1), lambda ranks: 1.0),
    "message to the rank before": Collective(partial(message, step=-1), lambda ranks: 1.0),
}


def collectives_of(group_size: int) -> list[str]:
    return [name for name in COLLECTIVES if name != "all-to-all" or group_size <= LARGEST_ALL_TO_ALL]


class Measured(TypedDict):
    """Of a rank: messages, axis → collective → rate, and axis → ranks of its group."""

    wrong: list[str]
    gb_per_second: dict[str, dict[str, float]]
    groups: dict[str, list[int]]


def measure(job: Job) -> Measured:
    wrong: list[str] = []
    rates: dict[str, dict[str, float]] = {}
    groups = groups_of(job.mesh, job.world.rank)
    for group in groups:
        for name in collectives_of(group.size):
            for dtype in DTYPES:
                for size in job.sizes.message_bytes:
                    elements = num_elements(size, dtype, group.size)
                    exchange = COLLECTIVES[name].prepare(group, dtype, elements, job.world.device)
                    message = difference(exchange.run(), exchange.expected)
                    if message:
                        over = f"{group.axis} (ranks {some(group.ranks, _NAMED_RANKS)})"
                        wrong.append(f"{name} of {str(dtype).removeprefix('torch.')} over {over}: {message}")
            sent = COLLECTIVES[name].sent_share(group.size) * elements * dtype.itemsize
            rates.setdefault(group.axis, {})[name] = _rate(exchange, sent, job)
    return {
        "wrong": wrong[:_SHOWN] + ([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []),
        "gb_per_second": rates,
        "groups": {group.axis: list(group.ranks) for group in groups},
    }


def difference(result: Tensor, expected: Tensor) -> str:
    """Return "" if all elements are equal, else the first wrong element and the number of wrong elements."""
    unequal = result != expected  # NaN is unequal to everything
    count = int(unequal.sum())
    if not count:
        return ""
    index = int(unequal.nonzero()[0])
    return (
        f"element {index} is {result[index].item():.9g} and must be {expected[index].item():.9g}; {count} of "
        f"{len(result)} elements are wrong"
    )


def _rate(exchange: Exchange, sent_bytes: float, job: Job) -> float:
    """Return 10^9 bytes a second that this rank sends (NCCL's "bus bandwidth"), at the largest size."""
    if job.world.device.type == "cuda":
        torch.cuda.synchronize(job.world.device)
    started = time.perf_counter()
    for _ in range(job.sizes.timed_collectives):
        exchange.run()
    if job.world.device.type == "cuda":
        torch.cuda.synchronize(job.world.device)
    return sent_bytes * job.sizes.timed_collectives / (time.perf_counter() - started) / 1e9


def judge(found: Sequence[Measured], job: Job) -> list[Finding]:
    findings = [Finding(rank, message) for rank, one in enumerate(found) for message in one["wrong"]]
    # gloo's speed on one machine depends on the processor.
    return findings if job.world.device.type == "cpu" else findings + slow_groups(found, job)


def slow_groups(found: Sequence[Measured], job: Job) -> list[Finding]:
    """Name the groups whose all-reduce is slow for their network, or beside the groups of their axis."""
    findings = []
    for axis in dict.fromkeys(axis for one in found for axis in one["groups"]):
        groups: dict[tuple[int, ...], float] = {}
        for one in found:
            if axis in one["groups"]:
                ranks = tuple(one["groups"][axis])
                rate = one["gb_per_second"][axis]["all-reduce"]
                groups[ranks] = min(rate, groups.get(ranks, rate))
        median = statistics.median(groups.values())
        for ranks, rate in groups.items():
            nodes = {job.nodes[rank] for rank in ranks}
            share = network_share(job.cluster, len(ranks), len(nodes))
            if share and rate < LEAST_OF_NETWORK * share:
                reason = f"the network gives {share:.3g}: is its plugin missing?"
            elif rate < SLOWEST_OF_GROUPS * median:
                reason = f"the median of the {len(groups)} groups of this axis is {median:.3g}"
            else:
                continue
            over = f"{axis} (ranks {some(ranks, _NAMED_RANKS)})"
            findings += [
                Finding(rank, f"all-reduce over {over}: {rate:.3g} GB/s, and {reason}")
                for rank in ranks
                if rank == min(other for other in ranks if job.nodes[other] == job.nodes[rank])
            ]
    return findings


def network_share(cluster: Cluster, group_size: int, nodes: int) -> float | None:
    """Return 10^9 bytes a second of the network for a rank's part of a ring; None within a node.

    A ring leaves each node once, and all groups of an axis work together: a node's groups share its network.
    """
    if nodes == 1:
        return None
    rings = cluster.devices_per_node * nodes / group_size  # through each node
    return cluster.network_gbit_per_second_per_node / 8 / max(1.0, rings)


def summarise(found: Sequence[Measured], job: Job) -> str:
    rates: dict[str, list[float]] = {}
    for one in found:
        for axis, of_axis in one["gb_per_second"].items():
            rates.setdefault(axis, []).append(of_axis["all-reduce"])
    if not rates:
        return "one rank, which sends nothing"
    wrong = sum(bool(one["wrong"]) for one in found)
    said = f"wrong values on {wrong} of {len(found)} ranks" if wrong else "every value right"
    of_axes = ", ".join(f"{axis} {spread(of, 'GB/s')}" for axis, of in rates.items())
    return f"{said}; all-reduce {of_axes}"


def num_elements(size: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the elements that `size` bytes hold, rounded up to a multiple of the group's ranks."""
    return -(-(size // dtype.itemsize) // ranks) * ranks

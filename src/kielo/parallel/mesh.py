"""The mesh: ranks on six named axes, each with its communicator. `World` and placement → `DeviceMesh`.

Ranks next to each other differ first in the last axis, so the axes that talk most (tensor, context) stay within
a node and `replicate` goes across nodes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kielo.parallel.communicator import raise_communicator
from kielo.parallel.world import World
from kielo.recipe.errors import KieloError

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
DATA_AXES = ("replicate", "shard")  # the axes along which ranks see different samples


def build_mesh(world: World, placement: "Placement") -> DeviceMesh:
    """Lay the world's ranks out as `placement` says, making and warming one communicator after another.

    Groups are made here rather than by `init_device_mesh`, which makes all at once without a time limit, and for
    an axis of size 1 makes one group for every rank of the world on every rank.

    Raises KieloError when the sizes do not fit the world, an axis is not supported yet, or ranks do not arrive
    within placement.start_timeout_seconds (for each communicator).
    """
    sizes = [getattr(placement, axis) for axis in AXES]
    _check(world, sizes)
    ranks = torch.arange(world.size).reshape(sizes)
    here = (ranks == world.rank).nonzero()[0].tolist()

    groups, alone = [], None
    for dim, axis in enumerate(AXES):
        index = [slice(None) if other == dim else at for other, at in enumerate(here)]
        mine = ranks[tuple(index)].tolist()
        if len(mine) == world.size:
            group = dist.group.WORLD  # already made and warmed; a second one would only be a second risk
        elif len(mine) == 1:
            # One group of this rank alone serves every axis of size 1.
            alone = alone or dist.new_group(mine, use_local_synchronization=True)
            group = alone
        else:
            rows = ranks.movedim(dim, -1).reshape(-1, len(mine)).tolist()
            timeout = placement.start_timeout_seconds
            make = _maker(rows, mine, axis)
            group = raise_communicator(axis, mine, world.rank, world.store, world.device, timeout, make)
        groups.append(group)
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=AXES)


def data_ranks(mesh: DeviceMesh) -> int:
    """How many ranks see different samples."""
    count = 1
    for axis in DATA_AXES:
        count *= mesh[axis].size()
    return count


def data_rank(mesh: DeviceMesh) -> int:
    """This rank's number among `data_ranks`."""
    number = 0
    for axis in DATA_AXES:
        number = number * mesh[axis].size() + mesh[axis].get_local_rank()
    return number


def sum_over_data(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A new tensor: the sum over all data ranks, the same on each of them.

    The shard axis comes first, so that ranks holding the same shard add the same numbers in the same order.
    """
    total = tensor.detach().clone()
    for axis in reversed(DATA_AXES):
        if mesh[axis].size() > 1:
            dist.all_reduce(total, group=mesh[axis].get_group())
    return total


def _maker(rows: list[list[int]], mine: list[int], axis: str) -> Callable[[], dist.ProcessGroup]:
    def make() -> dist.ProcessGroup:
        # Every rank makes every row, in the same order: torch numbers groups by counting.
        made = [dist.new_group(row, group_desc=axis) for row in rows]
        return made[rows.index(mine)]

    return make


def _check(world: World, sizes: Sequence[int]) -> None:
    layout = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes))
    for axis, size in zip(AXES, sizes):
        if size > 1 and axis not in DATA_AXES:
            raise KieloError(
                f"layout.{axis} = {size}: only layout.replicate and layout.shard can exceed 1 yet"
            )
    product = torch.tensor(sizes).prod().item()
    if product != world.size:
        raise KieloError(
            f"the layout ({layout}) needs {product} ranks but {world.size} are running; layout.shard = 0 takes "
            "all that are left"
        )

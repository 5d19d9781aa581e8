"""The mesh: ranks on six named axes, each with its communicator. `World` and layout → `Mesh`.

The last axes communicate most, so neighbouring ranks, of one node, differ first in these.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kielo.ranks.communicator import raise_communicator, warm_messages
from kielo.ranks.world import World
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from kielo.resolve.shares import AXES

SAMPLE_AXES = ("replicate", "shard")  # ranks along these see different samples
TOKEN_AXES = (*SAMPLE_AXES, "context")  # ranks along these see different tokens
UNBUILT_AXES = ("expert",)


class Mesh:
    """The ranks in two views: `mesh["tensor"]` is an axis (or several) of computing, `parameters` of weights.

    Ranks along `context` share weights, so FSDP can split weights over them: in `parameters`, `shard` is
    shard × context, and there is no axis `context`.
    """

    def __init__(self, ranks: DeviceMesh, parameters: DeviceMesh) -> None:
        self.ranks = ranks
        self.parameters = parameters
        # torch makes a new, equal axis at each look-up. DTensor remembers the first, and a second model of a
        # process, whose weights name another axis, does not compile (2.13, Inductor).
        self._axes = _by_name(ranks)
        self._axes_of_parameters = _by_name(parameters)

    def __getitem__(self, axis: str | tuple[str, ...]) -> DeviceMesh:
        """Return an axis of computing, or several. A single axis is the same object each time."""
        return self._axes.get(axis) or self.ranks[axis]

    def of_parameters(self, axis: str | tuple[str, ...]) -> DeviceMesh:
        """Return an axis of weights, or several. A single axis is the same object each time."""
        return self._axes_of_parameters.get(axis) or self.parameters[axis]


def _by_name(ranks: DeviceMesh) -> dict[str | tuple[str, ...], DeviceMesh]:
    return {name: ranks[name] for name in ranks.mesh_dim_names or ()}


def build_mesh(world: World, layout: Layout) -> Mesh:
    """Arrange the world's ranks as in `layout`. Communicators are made and warmed one after another.

    `init_device_mesh` would make all at once without a time limit, and for an axis of size 1 a group for
    every rank of the world on every rank. Raise KieloError if the sizes do not fit the world, or ranks do not
    arrive within the time limit.
    """
    sizes = [getattr(layout, axis) for axis in AXES]
    _check(world, sizes)
    ranks = torch.arange(world.size).reshape(sizes)
    communicators = _Communicators(world)
    mesh = communicators.mesh(ranks, AXES)
    if layout.pipeline > 1 and not world.is_rehearsed:
        group = mesh["pipeline"].get_group()
        warm_messages(world.startup, "pipeline", dist.get_process_group_ranks(group), group)
    if layout.context == 1:
        return Mesh(mesh, mesh)
    merged = ranks.flatten(AXES.index("shard"), AXES.index("context"))
    return Mesh(mesh, communicators.mesh(merged, tuple(axis for axis in AXES if axis != "context")))


class _Communicators:
    """Make each group of ranks once, for all meshes and axes."""

    def __init__(self, world: World):
        self._world = world
        # The world's group is made and warmed already: a second group is only a second risk.
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(world.size)): _whole_world()}

    def mesh(self, ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh:
        groups = [self._group(ranks, dim, name) for dim, name in enumerate(names)]
        return DeviceMesh.from_group(groups, self._world.device.type, ranks, mesh_dim_names=tuple(names))

    def _group(self, ranks: torch.Tensor, dim: int, name: str) -> dist.ProcessGroup:
        rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        mine = next(row for row in rows if self._world.rank in row)
        if tuple(mine) not in self._made:
            # A group of this rank alone serves every axis of size 1. A rehearsed rank has no other group.
            if len(mine) == 1 or self._world.is_rehearsed:
                group = dist.new_group(mine, use_local_synchronization=True)
            else:
                startup = self._world.startup

                def make() -> dist.ProcessGroup:
                    # Every rank makes every row, in the same order: torch numbers groups by counting.
                    timeout = startup.group_timeout
                    made = [dist.new_group(row, timeout=timeout, group_desc=name) for row in rows]
                    return made[rows.index(mine)]

                group = raise_communicator(startup, name, mine, make)
            self._made[tuple(mine)] = group
        return self._made[tuple(mine)]


def communicators(mesh: Mesh) -> list[dist.ProcessGroup]:
    """Return this rank's groups, each once: the world's group and the groups of all axes."""
    groups = [
        _whole_world(),
        *(group for ranks in (mesh.ranks, mesh.parameters) for group in ranks.get_all_groups()),
    ]
    return list({group.group_name: group for group in groups}.values())


def _whole_world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the group of all ranks is not made yet")
    return world


def alike_communicators(mesh: Mesh) -> list[dist.ProcessGroup]:
    """Return the groups in which all ranks begin the same collectives but no messages between two ranks."""
    pipeline = mesh["pipeline"].get_group() if mesh["pipeline"].size() > 1 else None
    return [group for group in communicators(mesh) if group is not pipeline]


def data_ranks(mesh: Mesh) -> int:
    """Return the number of ranks that see different samples."""
    return math.prod(mesh[axis].size() for axis in SAMPLE_AXES)


def data_rank(mesh: Mesh) -> int:
    """Return this rank's number among `data_ranks`."""
    number = 0
    for axis in SAMPLE_AXES:
        number = number * mesh[axis].size() + mesh[axis].get_local_rank()
    return number


def sum_over_data(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the sum over all ranks that see different tokens, as a new tensor, the same on each rank."""
    return sum_over(tensor, [mesh[axis] for axis in TOKEN_AXES])


def sum_over(tensor: torch.Tensor, axes: Sequence[DeviceMesh]) -> torch.Tensor:
    """Return the sum over all ranks of these axes, as a new tensor, the same on each rank."""
    total = tensor.detach().clone()
    for axis in reversed(axes):
        if axis.size() > 1:
            dist.all_reduce(total, group=axis.get_group())
    return total


def _check(world: World, sizes: Sequence[int]) -> None:
    layout = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    for axis, size in zip(AXES, sizes, strict=True):
        if size > 1 and axis in UNBUILT_AXES:
            raise KieloError(f"layout.{axis} = {size}: this axis is not built yet and must be 1")
    product = math.prod(sizes)
    if product != world.size:
        raise KieloError(
            f"the layout ({layout}) needs {product} ranks, but {world.size} are running. Fix: "
            "layout.shard = 0, which takes all ranks that are left"
        )

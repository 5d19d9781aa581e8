"""A world of any size of which only one rank exists, for rehearsals: its collectives do nothing."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_schedule import without_peers
from kielo.parallel.world import World
from kielo.recipe.errors import KieloError
from kielo.resolve.ranks import AXES
from kielo.verify.torch_fakes import check_version, end_fake_group, start_fake_group


@contextmanager
def fake_world(rank: int, size: int, has_pipeline: bool) -> Iterator[World]:
    """Makes this process rank `rank` of `size`.

    Raises KieloError where this process is in another world already, or where torch cannot rehearse.
    """
    check_version()
    if dist.is_initialized():
        raise KieloError("a rehearsal needs a process of its own, and this one has a process group already")
    # torch would warn for every gathered tensor that gathering takes two steps.
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    store = start_fake_group(rank, size)
    try:
        world = World(rank, size, 0, torch.device("cpu"), math.inf, store, is_rehearsed=True)
        if has_pipeline:
            with without_peers():
                yield world
        else:
            yield world
    finally:
        end_fake_group()
        logger.setLevel(level)


def groups_of(mesh: Mesh) -> tuple[dict[str, str], str]:
    """Returns (a communicator's name → its axis, the name of the communicator that weights are split over).

    Where weights are split over shard × context, that is the axis `shard` too, or `context` where shard is 1.
    """
    found: dict[str, str] = {}
    for ranks in (mesh.ranks, mesh.parameters):
        for axis in (axis for axis in AXES if axis in ranks.mesh_dim_names):
            if ranks[axis].size() > 1:
                found.setdefault(ranks[axis].get_group().group_name, axis)
    return found, mesh.of_parameters("shard").get_group().group_name

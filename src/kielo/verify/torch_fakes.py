"""Torch's undocumented parts that rehearsing needs: fake ranks, fake tensors, and two internal queries.

Tested with torch 2.10, 2.11 and 2.13.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from kielo.parallel.mesh import Mesh
from kielo.parallel.pipeline_schedule import without_peers
from kielo.ranks.world import World
from kielo.recipe.errors import KieloError
from kielo.resolve.shares import AXES
from kielo.resolve.software import NEWEST

_NEEDED = (
    (torch._C, "_current_graph_task_id"),
    (debug, "_clear_python_sharding_prop_cache"),
    (debug, "_clear_fast_path_sharding_prop_cache"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
)


def fake_tensors() -> AbstractContextManager:
    """Return a context in which tensors have shapes, types and devices, but no memory and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextmanager
def storages_watched(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized(storage)` after each change of a storage's size.

    FSDP2 frees memory in this way, which no operator reports.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = before(storage, size)
        resized(storage)
        return result

    setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010 - it is inherited
    try:
        yield
    finally:
        # The original is inherited, so removing the class's own attribute restores it.
        del torch.UntypedStorage.resize_


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that all tensors of the storage share, while it lives."""
    return storage._cdata


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory inside `tensor`: itself, or inside a DTensor or a weight in FP8."""
    # Not `materialise.local`: it calls an operator that weights gathered in FP8 do not have.
    part: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    part = part._tensor if hasattr(part, "fsdp_pre_all_gather") else part
    if not is_wrapper(type(part)):
        return [part]
    inside = (getattr(part, name) for name in part.__tensor_flatten__()[0])
    return [one for one in inside if isinstance(one, torch.Tensor)]


def is_wrapper(kind: type) -> bool:
    """Return True if tensors of this class wrap others, into which torch decomposes their operators."""
    return hasattr(kind, "__tensor_flatten__")


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def group_name(argument: object) -> str | None:
    """Return the communicator's name if an operator's argument is a communicator, else None."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            argument = dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):  # not a process group
            return None
    return argument.group_name if isinstance(argument, dist.ProcessGroup) else None


@contextmanager
def sharding_watched(entered: Callable[[bool], None]) -> Iterator[None]:
    """Call `entered(True)` when torch computes a DTensor operator's shapes, and `entered(False)` after it.

    Operators between the two have the size of the whole model, and are not the rank's work.
    """
    name = "_propagate_tensor_meta_non_cached"
    before = getattr(ShardingPropagator, name)

    def propagate(propagator: ShardingPropagator, schema: Any) -> Any:
        entered(True)
        try:
            return before(propagator, schema)
        finally:
            entered(False)

    setattr(ShardingPropagator, name, propagate)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, before)


@contextmanager
def fake_world(rank: int, size: int, has_pipeline: bool) -> Iterator[World]:
    """Make this process rank `rank` of `size`. The others do not exist, and collectives do nothing.

    Raise KieloError if this process is in another world already, or if torch cannot rehearse.
    """
    if missing := [name for owner, name in _NEEDED if not hasattr(owner, name)]:
        raise KieloError(
            f"kielo rehearse does not support torch {torch.__version__} (no {', '.join(missing)}). "
            f"Fix: torch {NEWEST}, on any machine, with or without a GPU"
        )
    if dist.is_initialized():
        raise KieloError("a rehearsal needs its own process, and this process has a process group already")
    # torch would warn for every gathered tensor that gathering takes two steps.
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    store = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=size, store=store)
    try:
        world = World(rank, size, 0, torch.device("cpu"), math.inf, store, is_rehearsed=True)
        if has_pipeline:
            with without_peers():
                yield world
        else:
            yield world
    finally:
        dist.destroy_process_group()
        # DTensor's cached plans have this rank's communicators.
        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
        logger.setLevel(level)


def groups_of(mesh: Mesh) -> tuple[dict[str, str], str]:
    """Return (communicator's name → its axis, the name of the communicator over which weights are split).

    If weights are split over shard × context, that is the axis `shard` too, or `context` with shard = 1.
    """
    found: dict[str, str] = {}
    for ranks in (mesh.ranks, mesh.parameters):
        for axis in (axis for axis in AXES if axis in (ranks.mesh_dim_names or ())):
            if ranks[axis].size() > 1:
                found.setdefault(ranks[axis].get_group().group_name, axis)
    return found, mesh.of_parameters("shard").get_group().group_name

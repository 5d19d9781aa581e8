"""All that rehearsing needs of torch beyond its documented surface, by version: fake ranks, fake tensors, and
the two questions that only the inside of torch answers.

Tested with torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from kielo.recipe.errors import KieloError

_NEEDED = (
    (torch._C, "_current_graph_task_id"),
    (debug, "_clear_sharding_prop_cache"),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
)


def check_version() -> None:
    """KieloError, naming the version, for a torch that has not what rehearsing needs."""
    missing = [name for owner, name in _NEEDED if not hasattr(owner, name)]
    if missing:
        raise KieloError(
            f"kielo rehearse does not know the inside of torch {torch.__version__} (no "
            f"{', '.join(missing)}); what would "
            "work: torch 2.13. A rehearsal needs no GPU, so any machine with that version will do"
        )


def start_fake_group(rank: int, size: int) -> dist.Store:
    """The default process group of `size` ranks of which only this one is there; collectives
    return at once.
    """
    store = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=size, store=store)
    return store


def end_fake_group() -> None:
    """DTensor's plans are forgotten too: they would be taken for those of another rank, with communicators of
    this one.
    """
    dist.destroy_process_group()
    debug._clear_sharding_prop_cache()


def fake_tensors() -> AbstractContextManager:
    """While it lasts, tensors have shapes, types and devices, but no memory and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_in_backward() -> bool:
    """Is autograd at work on the calling thread?"""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def storages_watched(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """`resized(storage)` after each change of a storage's size: so FSDP2 gives memory back, and no operator
    tells.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = before(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        # Inherited, not the class's own.
        del torch.UntypedStorage.resize_


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all tensors that share the storage, while it lives."""
    return storage._cdata


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that it is made of: itself, or what DTensors and weights in FP8 are wrapped
    around.
    """
    # Not `materialise.local`: that is an operator, which what is gathered in FP8 does not know.
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    part = part._tensor if hasattr(part, "fsdp_pre_all_gather") else part
    if not is_wrapper(type(part)):
        return [part]
    inside = (getattr(part, name) for name in part.__tensor_flatten__()[0])
    return [one for one in inside if isinstance(one, torch.Tensor)]


def is_wrapper(kind: type) -> bool:
    """Is a tensor of this class made of others, which its operators are taken apart into?"""
    return hasattr(kind, "__tensor_flatten__")


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def group_name(argument: object) -> str | None:
    """The name of the communicator that an operator got as this argument; None for other arguments."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            argument = dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):  # another kind of object
            return None
    return argument.group_name if isinstance(argument, dist.ProcessGroup) else None


@contextmanager
def sharding_watched(entered: Callable[[bool], None]) -> Iterator[None]:
    """`entered(True)` when torch begins to ask how a DTensor operator changes shapes, `entered(False)` when
    it knows: what runs between the two is of the size of the whole model, and not the rank's work.
    """
    before = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(propagator: ShardingPropagator, schema: object) -> object:
        entered(True)
        try:
            return before(propagator, schema)
        finally:
            entered(False)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = before

"""Data parallelism by FSDP2: parameters, gradients and optimiser state split over the `shard` axis.

Parameters are fp32, compute is bf16 or fp32, gradients are reduced in fp32 and *summed*: the loss is already
divided by the global number of counted tokens, so a mean over ranks would divide twice.

The head's weight is read outside the model's forward (the loss makes logits by chunks), so the root's
parameters (embedding, last norm, head) must be whole from forward to the end of backward: the root is never
resharded after forward, and FSDP2 reduces the root's gradients after all others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(
    model: nn.Module, mesh: DeviceMesh, placement: "Placement", precision: Literal["fp32", "bf16"]
) -> None:
    """Wrap each layer of `model.layers`, then the root, in place.

    Ranks along `replicate` hold equal shards (hybrid sharding: reduce-scatter along `shard`, then all-reduce
    along `replicate`). The same path serves one rank.
    """
    data_mesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(
            layer, mesh=data_mesh, mp_policy=policy, reshard_after_forward=placement.reshard_after_forward
        )
    fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)
    model.layers_reshard_after_forward = placement.reshard_after_forward  # set_last_micro_batch asks
    if data_mesh.size() > 1:
        # One rank has nothing to divide, and would be charged a copy for it.
        for module in _wrapped(model):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor becomes PREMUL_SUM, which gloo refuses (torch 2.13).
            module.set_force_sum_reduction_for_comms(True)


def set_last_micro_batch(model: nn.Module, is_last: bool) -> None:
    """Say before each micro-batch whether it is the step's last: only then are gradients reduced.

    Until then each rank keeps whole gradients (and, unless resharding after forward, whole parameters), and a
    step costs one all-gather and one reduce-scatter a layer however many micro-batches it has.
    """
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)
    # Layers that give up their whole parameters after forward do so after every backward too.
    model.set_reshard_after_backward(is_last or model.layers_reshard_after_forward)
    model.set_reshard_after_backward(is_last, recurse=False)


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and leave the model sharded.

    Without the reshard at the end, whole parameters would outlive the next optimiser step and the next forward
    would silently use the old values (FSDP2 gathers only what is not whole).
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in _wrapped(model):
            module.reshard()
        model.train(was_training)


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]

"""Data parallelism by FSDP2: parameters, gradients and optimiser state split over the `shard` (and `context`)
axis.

How much stays split through a step goes by the ZeRO degrees of Rajbhandari et al. 2020 (arXiv:1910.02054).
With P parameters and m micro-batches a step, each rank sends and receives about

    zero 1   P (gathered once)      + P (gradients scattered once)     whole parameters and gradients are held
    zero 2   P                      + m P                              whole parameters are held
    zero 3   2 m P (also backward)  + m P                              one layer's at a time

and with `replicate` > 1 (hybrid sharding) an all-reduce of its gradient shard, once a step.

Parameters are fp32, compute is bf16 or fp32, gradients are reduced in fp32 and *summed*: the loss is already
divided by the global number of counted tokens, so a mean over ranks would divide twice.

The head's weight is read outside the model's forward (the loss makes logits by chunks), so the root's
parameters (embedding, last norm, head) must be whole from forward to the end of backward: the root is never
resharded after forward, and FSDP2 reduces the root's gradients after all others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from kielo.parallel.mesh import Mesh
from kielo.recipe.sections import Layout

if TYPE_CHECKING:
    from kielo.recipe.sections import Precision

# fp8: what lies between products
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def shard(model: nn.Module, mesh: Mesh, layout: Layout, precision: "Precision") -> None:
    """Wrap each layer of `model.layers`, then the root, in place.

    Ranks along `replicate` hold equal shards (hybrid sharding: reduce-scatter along `shard`, then all-reduce
    along `replicate`). The same path serves one rank.
    """
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.parameters.device_type == "cuda")
        if layout.cpu_offload
        else OffloadPolicy()
    )
    is_hybrid = mesh["replicate"].size() > 1
    data_mesh = mesh.parameters["replicate", "shard"] if is_hybrid else mesh.parameters["shard"]
    gives_up_parameters = layout.zero == 3
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(
            layer,
            mesh=data_mesh,
            mp_policy=policy,
            reshard_after_forward=gives_up_parameters,
            offload_policy=offload,
        )
    fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    model.zero = layout.zero  # set_last_micro_batch asks
    if data_mesh.size() > 1:
        # One rank has nothing to divide, and would be charged a copy for it.
        for module in _wrapped(model):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor becomes PREMUL_SUM, which gloo refuses (torch 2.13).
            module.set_force_sum_reduction_for_comms(True)


def set_last_micro_batch(model: nn.Module, is_last: bool) -> None:
    """Say before each micro-batch whether it is the step's last: what waits until then depends on the ZeRO
    degree.

    At degree 1 each rank keeps whole gradients and parameters until then, and a step costs one all-gather and
    one reduce-scatter a layer however many micro-batches it has.
    """
    model.set_requires_gradient_sync(is_last or model.zero >= 2)
    model.set_requires_all_reduce(is_last)  # across replicas once a step, whatever is scattered before
    model.set_is_last_backward(is_last)
    # Layers that give up their whole parameters after forward do so after every backward too.
    model.set_reshard_after_backward(is_last or model.zero == 3)
    model.set_reshard_after_backward(is_last, recurse=False)


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and leave the model sharded.

    Without the reshard at the end, whole parameters would outlive the next optimiser step and the next
    forward would silently use the old values (FSDP2 gathers only what is not whole).
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

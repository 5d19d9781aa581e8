"""Data parallelism by FSDP2: parameters, gradients and optimiser state are split over `shard` and `context`.

The ZeRO degrees of Rajbhandari et al. 2020 (arXiv:1910.02054) set how much stays split through a step. With P
parameters and m micro-batches a step, each rank sends and receives about

    zero 1   P (gathered once)      + P (gradients scattered once)     whole parameters and gradients are held
    zero 2   P                      + m P                              whole parameters are held
    zero 3   2 m P (also backward)  + m P                              one layer's or the head's at a time

and with `replicate` > 1 (hybrid sharding) an all-reduce of its gradient shard, once a step.

Parameters are fp32, compute is bf16 or fp32, gradients are reduced in fp32 or bf16 and *summed*: the loss is
already divided by the global number of counted tokens, so a mean over ranks would divide twice.

Gradients of micro-batches are added up in fp32 whatever they are reduced in: at degree 1, and in pipelines
that split the backward pass, whole on each rank and reduced once a step; else at degrees 2 and 3 reduced
first and added up as shards (in pipelines by `pipeline_schedule.py`).
`MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)` would add up whole gradients in bf16, because FSDP2
converts them only where the dtypes differ (`FSDPParam.to_accumulated_grad_if_needed`, torch 2.10 to 2.13).

An untied head is gathered during the last layer's forward, and its gradient is reduced during that layer's
backward. Its loss needs it whole, so it is not resharded in between. The root's parameters (embedding, last
norm, a tied head) are whole from the first layer's forward to the end of backward, and FSDP2 reduces their
gradients after all others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from kielo.models.blocks.decoder import Decoder, Head
from kielo.parallel.mesh import Mesh
from kielo.recipe.sections import Layout, Precision, ReduceDtype

# fp8: dtype of activations between products
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

# renamed in torch 2.13
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class _ReduceInBf16:
    """The reduction of FSDP2 (`set_custom_reduce_scatter`) with buffers in bf16.

    FSDP2 takes these buffers from here, and rounds gradients as it copies them in. The all-reduce across
    replicas works on the same buffer. The result is converted to the parameter's fp32.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: distributed.ReduceOp,
        async_op: bool = False,
    ) -> distributed.Work | None:
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def apply_fsdp(
    model: Decoder,
    mesh: Mesh,
    layout: Layout,
    precision: Precision,
    gradient_reduce_dtype: ReduceDtype = "fp32",
) -> None:
    """Wrap each layer of `model.layers`, an untied head, then the root, in place.

    Ranks along `replicate` hold equal shards (hybrid sharding: reduce-scatter along `shard`, then all-reduce
    along `replicate`). The same path serves one rank.
    """
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.parameters.device_type == "cuda")
        if layout.cpu_offload
        else OffloadPolicy()
    )
    is_hybrid = mesh["replicate"].size() > 1
    data_mesh = mesh.of_parameters(("replicate", "shard")) if is_hybrid else mesh.of_parameters("shard")
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=data_mesh, mp_policy=policy, offload_policy=offload)
    layers: list[Any] = list(model.layers.values())
    for layer in layers:
        shard(layer, reshard_after_forward=layout.zero == 3)
    if model.head is not None and not model.config.tie_word_embeddings:
        head: Any = model.head
        shard(head, reshard_after_forward=False)
        head.set_unshard_in_backward(False)  # the gradients are computed in the forward of the loss
        # Waited for in the forward, the buffer of the collective would live as long as the loss's logits.
        head.register_forward_pre_hook(lambda head, _: head.unshard(), prepend=True)
        for last in layers[-1:]:
            last.set_modules_to_forward_prefetch([head])
    shard(model, reshard_after_forward=False)
    model.zero = layout.zero  # read by set_last_micro_batch
    if data_mesh.size() > 1:
        # One rank has nothing to divide, and would make a copy for it.
        for module in _wrapped(model):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor becomes PREMUL_SUM, which gloo refuses (torch 2.13).
            module.set_force_sum_reduction_for_comms(True)
            if gradient_reduce_dtype == "bf16":
                reduction: Any = _ReduceInBf16()  # the base class that torch names is not public
                module.set_custom_reduce_scatter(reduction)


def set_last_micro_batch(model: nn.Module, is_last: bool) -> None:
    """Tell FSDP2 before each micro-batch whether it is the step's last. The ZeRO degree sets what waits.

    At degree 1 each rank keeps whole gradients and parameters until then, and a step costs one all-gather and
    one reduce-scatter a layer however many micro-batches it has.
    """
    sharded: Any = model  # a Decoder, of which `fully_shard` has made an FSDPModule
    sharded.set_requires_gradient_sync(is_last or sharded.zero >= 2)
    sharded.set_requires_all_reduce(is_last)  # across replicas once a step, whatever is scattered before
    sharded.set_is_last_backward(is_last)
    # Layers that give up their whole parameters after forward do so after every backward too.
    sharded.set_reshard_after_backward(is_last or sharded.zero == 3)
    sharded.set_reshard_after_backward(is_last, recurse=False)


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and leave the model sharded.

    Without the reshard at the end, whole parameters would outlive the next optimiser step and the next
    forward would silently use the old values (FSDP2 gathers only parameters that are sharded).
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in _wrapped(model):
            if isinstance(module, Head) and _is_gathering(module):
                module.unshard()  # waits for the gather that the last layer begins, if no loss has
            module.reshard()
        model.train(was_training)


def _is_gathering(module: Any) -> bool:
    # Nothing public says it (torch 2.10 to 2.13). `unshard` begins a gather if none is pending, and would
    # then wait for a rank that has failed.
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group._all_gather_result is not None


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]

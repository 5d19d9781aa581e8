"""Memory for a parallel model on meta: each rank makes its own shards, on the CPU, one at a time."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from kielo.models.piece import Box

Fill = Callable[[str, torch.Size, Box], torch.Tensor]


Model = TypeVar("Model")  # a `Decoder`, or the `Stages` of a rank


def materialise(model: Model, device: torch.device, fill: Fill | None, is_offloaded: bool = False) -> Model:
    """Give `model` memory on `device` and values from `fill(name, global shape, box)`. Return the model.

    `fill` returns the box that this rank holds (fp32, CPU), and is called once for tied parameters. None
    leaves the memory uninitialised. is_offloaded: parameters are on the CPU, as FSDP2's offload policy needs.
    """
    whole: Any = model
    whole.to_empty(device="cpu" if is_offloaded else device)
    whole.tie()  # to_empty gives a tied head memory of its own
    if fill is not None:
        _fill(whole, fill)
    whole.reset_buffers(device)
    return model


@torch.no_grad()
def _fill(model: nn.Module, fill: Fill) -> None:
    for name, parameter in model.named_parameters():
        part = local(parameter)
        if not part.numel():
            continue
        values = fill(name, parameter.shape, local_slices(parameter))
        if values.shape != part.shape:
            raise ValueError(f"{name}: {tuple(part.shape)} is held here, got {tuple(values.shape)}")
        part.copy_(values)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, sharing its memory. A plain tensor is its own part.

    A tensor class with its own gather (torchao's FP8 weights) has the values in an inner tensor.
    """
    part: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part._tensor if hasattr(part, "fsdp_pre_all_gather") else part


def local_slices(tensor: torch.Tensor) -> Box:
    """Return the slices of the whole tensor that `local(tensor)` is, one a dim, empty if it has nothing.

    A sharded dim is cut as torch.chunk cuts it. A dim that both `tensor` and FSDP2 split is cut by `tensor`
    first, though its axis is the later one: a strided placement marks that FSDP2 splits its chunks.
    """
    slices = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(slices)
    # Any, because torch has no name for a strided placement in all versions.
    cuts: list[tuple[int, Any]] = [
        (axis, placement) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    ]
    names = tensor.device_mesh.mesh_dim_names or ()
    for axis, placement in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        if type(placement) is not Shard and not hasattr(placement, "split_factor"):
            raise NotImplementedError(f"{placement} on mesh axis {names[axis]}")
        start, stop = slices[placement.dim].start, slices[placement.dim].stop
        chunk = -(-(stop - start) // tensor.device_mesh.size(axis))
        begin = min(start + chunk * tensor.device_mesh.get_local_rank(axis), stop)
        slices[placement.dim] = slice(begin, min(begin + chunk, stop))
    return tuple(slices)

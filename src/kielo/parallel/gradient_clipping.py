"""The norm of all gradients, the same on every rank, and clipping by it. Nothing here waits for a GPU."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from kielo.parallel.materialise import local
from kielo.parallel.mesh import Mesh, sum_over


def sum_over_parts(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor's values over its parts, the same bits on all ranks that hold any.

    values: [k] of this rank's part of each of `tensors`, on the part's device. Of ranks with the same part
    only the first counts. The others add zeros, which is exact. All ranks call it together, with the same
    tensors. Each axis costs one all-reduce.
    """
    sums = list(values)
    of_mesh: dict[DeviceMesh, list[tuple[int, DTensor]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            of_mesh[tensor.device_mesh].append((number, tensor))
    for mesh, numbered in of_mesh.items():
        counted = [
            values[number] if _is_first(tensor) else torch.zeros_like(values[number])
            for number, tensor in numbered
        ]
        # communicators work on the mesh's devices; values of offloaded tensors are elsewhere
        total = torch.stack(counted).to(mesh.device_type)
        for axis in reversed(range(mesh.ndim)):
            if mesh.size(axis) > 1:
                dist.all_reduce(total, group=mesh.get_group(axis))
        for (number, _), row in zip(numbered, total.to(counted[0].device), strict=True):
            sums[number] = row
    return sums


def _is_first(tensor: DTensor) -> bool:
    """Return True on the first of the ranks that hold the same part of the tensor."""
    mesh = tensor.device_mesh
    return all(
        mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def gradient_norm(model: nn.Module, mesh: Mesh) -> Tensor:
    """Compute the 2-norm of all gradients, a scalar fp32, not finite on all ranks if on one."""
    gradients = _gradients(model)
    # of communicators; offloaded gradients are elsewhere
    device = torch.device(mesh.parameters.device_type)
    if gradients:
        norms = torch._foreach_norm([local(gradient) for gradient in gradients])
        torch._foreach_mul_(norms, [_copies(gradient, mesh) ** -0.5 for gradient in gradients])
        total = torch.stack(norms).square().sum().to(device)
    else:
        total = torch.zeros((), device=device)
    return sum_over(total, [mesh.of_parameters(axis) for axis in mesh.parameters.mesh_dim_names or ()]).sqrt()


def _copies(gradient: Tensor, mesh: Mesh) -> int:
    """Return the number of ranks that hold the same part of a gradient, whose square must count only once."""
    ranks = mesh.parameters.size() // mesh.of_parameters("pipeline").size()
    if not isinstance(gradient, DTensor):
        return ranks
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return ranks // math.prod(size for size, placement in axes if not placement.is_replicate())


def clip_gradients(model: nn.Module, mesh: Mesh, max_norm: float) -> Tensor:
    """Clip gradients as torch.nn.utils.clip_grad_norm_ does. Return their norm before that."""
    norm = gradient_norm(model, mesh)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # On the CPU the value costs nothing to read, and multiplying by one costs a pass over memory.
    if norm.device.type != "cpu" or coefficient != 1.0:
        gradients = [local(gradient) for gradient in _gradients(model)]
        if gradients:
            torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))
    return norm


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

"""The global gradient norm, the same on every rank, and clipping by it. Nothing here waits for a GPU."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kielo.parallel.materialise import local
from kielo.parallel.mesh import Mesh, sum_over


def gradient_norm(model: nn.Module, mesh: Mesh) -> torch.Tensor:
    """Computes the 2-norm of all gradients, as on one device: a scalar fp32 tensor on the model's device.

    A non-finite gradient on any rank makes it non-finite on every rank. Tied parameters count once.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # where communicators work; offloaded gradients are elsewhere
    device = torch.device(mesh.parameters.device_type)
    if gradients:
        norms = torch._foreach_norm([local(gradient) for gradient in gradients])
        torch._foreach_mul_(norms, [_copies(gradient, mesh) ** -0.5 for gradient in gradients])
        total = torch.stack(norms).square().sum().to(device)
    else:
        total = torch.zeros((), device=device)
    return sum_over(total, [mesh.of_parameters(axis) for axis in mesh.parameters.mesh_dim_names]).sqrt()


def _copies(gradient: torch.Tensor, mesh: Mesh) -> int:
    """Counts the ranks that hold the same part of a gradient; its square must count only once.

    Ranks of other pipeline stages hold other parameters.
    """
    ranks = mesh.parameters.size() // mesh.of_parameters("pipeline").size()
    if not isinstance(gradient, DTensor):
        return ranks
    parts = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements):
        parts *= 1 if placement.is_replicate() else size
    return ranks // parts


def clip_gradients(model: nn.Module, mesh: Mesh, max_norm: float) -> torch.Tensor:
    """Scales the gradients so that their norm is at most `max_norm`; returns the norm before that.

    The formula is torch.nn.utils.clip_grad_norm_'s: multiply by min(1, max_norm / (norm + 1e-6)).
    """
    norm = gradient_norm(model, mesh)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # On the CPU the value costs nothing to read, and multiplying by one costs a pass over memory.
    if norm.device.type != "cpu" or coefficient != 1.0:
        gradients = _local_gradients(model)
        if gradients:
            torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))
    return norm


def _local_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

"""One global gradient norm, the same on every rank, and clipping by it. Nothing here waits for a GPU."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kielo.parallel.materialise import local
from kielo.parallel.mesh import sum_over_data


def gradient_norm(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    """The 2-norm of all gradients as if on one device: a scalar fp32 tensor on the model's device.

    A non-finite gradient on any rank makes it non-finite on every rank. Tied parameters count once.
    """
    gradients = _local_gradients(model)
    device = next(model.parameters()).device
    norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=device)]
    squares = torch.stack(norms).square().sum()
    # Ranks along `replicate` hold the same gradients, so each square arrives that many times.
    return (sum_over_data(squares, mesh) / mesh["replicate"].size()).sqrt()


def clip_gradients(model: nn.Module, mesh: DeviceMesh, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before that.

    The formula is torch.nn.utils.clip_grad_norm_'s: multiply by min(1, max_norm / (norm + 1e-6)).
    """
    norm = gradient_norm(model, mesh)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # On the CPU the value costs nothing to read, and multiplying by one costs a pass over memory.
    if norm.device.type != "cpu" or coefficient != 1.0:
        torch._foreach_mul_(_local_gradients(model), coefficient)
    return norm


def _local_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

"""A LayerNorm without weights over features of which each tensor rank has a part.

Mean and variance are of all features: three sums over the ranks, of one or two numbers a token. Computed in
fp32 inside. Shape letters: t = tensor ranks, f = features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kielo.parallel.tensor_collectives import TensorAxis, start_sum, wait


def split_norm(x: Tensor, epsilon: float, axis: TensorAxis) -> Tensor:
    """Returns this rank's part [..., f/t] of the normed features, of its part x [..., f/t]."""
    return _SplitNorm.apply(x, epsilon, axis._replace(along_sequence=False))


class _SplitNorm(torch.autograd.Function):
    """`apply(x, epsilon, axis)`; keeps its input and two fp32 numbers a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, axis: TensorAxis) -> Tensor:
        mean = _mean(x.float(), axis)
        centred = x.float() - mean
        scale = torch.rsqrt(_mean(centred.square(), axis) + epsilon)
        ctx.save_for_backward(x, mean, scale)
        ctx.axis = axis
        return (centred * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, mean, scale = ctx.saved_tensors
        normed, gradient = (x.float() - mean) * scale, gradient.float()
        means = _mean(torch.stack((gradient, gradient * normed)), ctx.axis)
        return ((gradient - means[0] - normed * means[1]) * scale).to(x.dtype), None, None


def _mean(x: Tensor, axis: TensorAxis) -> Tensor:
    """Returns the mean over all ranks' features, [..., 1]."""
    total = wait(start_sum(x.sum(-1, keepdim=True), axis))
    return total / (x.shape[-1] * axis.ranks)

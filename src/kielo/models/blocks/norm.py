"""Norms of activations. Data in: [..., d] in any precision; data out: the same shape and precision.

RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), LayerNorm (Ba et al. 2016, arXiv:1607.06450). For the
backward both keep their input unchanged and fp32 numbers of each row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """RMSNorm, computed in fp32. is_zero_centred: the factor is 1 + weight, before the cast back (Gemma)."""

    def __init__(self, size: int, epsilon: float, is_zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if is_zero_centred else torch.ones(size))
        self.epsilon = epsilon
        self.is_zero_centred = is_zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """Norm x. The cast back precedes the weight, as in Hugging Face's Llama: bf16 shows the order."""
        # A compiler decides itself which tensors to keep, and cannot look into a function of autograd.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _weighted(x, self.weight, _scale(x, self.epsilon), self.is_zero_centred)
        return _RMSNorm.apply(x, self.weight, self.epsilon, self.is_zero_centred)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, with weight and bias, with a weight alone, or without both."""

    def __init__(self, size: int, epsilon: float, has_weights: bool = True, has_bias: bool = True) -> None:
        super().__init__(size, eps=epsilon, elementwise_affine=has_weights, bias=has_bias)

    @property
    def epsilon(self) -> float:
        return self.eps


def _scale(x: Tensor, epsilon: float) -> Tensor:
    """Return the inverse root mean square of each row, fp32 [..., 1]."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)


def _weighted(x: Tensor, weight: Tensor, scale: Tensor, is_zero_centred: bool) -> Tensor:
    normed = x.float() * scale
    if is_zero_centred:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one fp32 number a row: `apply(x, weight, epsilon, is_zero_centred)`.

    Autograd alone would keep the input in fp32 and the normed rows too, 3 times as many bytes in bf16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, is_zero_centred: bool) -> Tensor:
        scale = _scale(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.is_zero_centred = is_zero_centred
        return _weighted(x, weight, scale, is_zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        gradient_x = gradient_weight = None
        if ctx.needs_input_grad[1]:
            # As autograd rounds: products in the precision of their factors, the sum in fp32.
            products = gradient.float() * normed if ctx.is_zero_centred else gradient * normed.to(x.dtype)
            gradient_weight = products.sum(list(range(x.dim() - 1))).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            if ctx.is_zero_centred:
                of_normed = gradient.float() * (1.0 + weight.float())
            else:
                of_normed = (gradient * weight).float()
            along = (of_normed * normed).mean(-1, keepdim=True)
            gradient_x = ((of_normed - normed * along) * scale).to(x.dtype)
        return gradient_x, gradient_weight, None, None

"""Attention with linear biases (ALiBi): scores fall with distance, with a slope of its own for each head.

Press et al. 2021, arXiv:2108.12409. Data in: distances [q, n] of keys before their queries; data out: biases
[h, q, n] to add to scores. Shape letters: b = batch, h = heads, q = queries, n = keys, k = head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Alibi(nn.Module):
    """The slopes of a tensor rank: `num_heads` heads from `first_head` on, of `total_heads`; not saved."""

    slopes: Tensor

    def __init__(self, total_heads: int) -> None:
        super().__init__()
        self.total_heads, self.first_head, self.num_heads = total_heads, 0, total_heads
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device | str) -> None:
        all_slopes = torch.tensor(slopes(self.total_heads), dtype=torch.float32, device="cpu")
        own = all_slopes[self.first_head : self.first_head + self.num_heads]
        self.register_buffer("slopes", own.to(device), persistent=False)

    def of(self, heads: slice | None) -> Tensor:
        """Return the slopes [h] in fp32 of some of this rank's heads, None for all."""
        return self.slopes if heads is None else self.slopes[heads]


def biases(slopes_h: Tensor, distance_qn: Tensor) -> Tensor:
    """Return biases [h, q, n] in fp32, 0 on the diagonal."""
    return -slopes_h[:, None, None] * distance_qn


def slopes(num_heads: int) -> list[float]:
    """Return slopes 2^(-8 i / h); if h is no power of two, then between the slopes of the power below."""
    # Others take every second slope of the next power of two (the authors' code).
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return first + between


# Attention with ALiBi by a tensor of biases. Biases [h, q, n] that autograd keeps are O(h·s²) bytes in every
# layer. Layers share slopes and distances, so the backward makes the biases again. On a CPU the kernels are
# those that torch's `scaled_dot_product_attention` calls, bit by bit. On a GPU FlexAttention computes biases
# in its kernel, and this is its replacement.


def attend(
    q: Tensor, k: Tensor, v: Tensor, slopes_h: Tensor, seen: tuple[Tensor, Tensor], scale: float | None = None
) -> Tensor:
    """Return [b, h, q, k]. `seen` has distances [q, n] and visible [b or 1, 1, q, n]. No `scale`: 1/√k."""
    if q.device.type == "cpu":
        return _Attention.apply(q, k, v, scale, slopes_h, *seen)
    return attend_again(q, k, v, slopes_h, seen, scale)


def attend_again(
    q: Tensor, k: Tensor, v: Tensor, slopes_h: Tensor, seen: tuple[Tensor, Tensor], scale: float | None = None
) -> Tensor:
    """Do the same on any device. The backward computes attention again, with its biases."""

    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = _masked(slopes_h, *seen, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)

    # Nothing in it draws random numbers.
    return checkpoint(biased, q, k, v, use_reentrant=False, preserve_rng_state=False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *biased: Tensor) -> Tensor:
        slopes_h, distance_qn, visible = biased
        bias = _masked(slopes_h, distance_qn, visible, q.dtype)
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, log_sum, *biased)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, slopes_h, distance_qn, visible = ctx.saved_tensors
        bias = _masked(slopes_h, distance_qn, visible, q.dtype)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = kernel(gradient, q, k, v, out, log_sum, 0.0, False, attn_mask=bias, scale=ctx.scale)
        return *gradients, None, None, None, None


def _masked(slopes_h: Tensor, distance_qn: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return biases [b or 1, h, q, n], -∞ for keys that are not visible."""
    return biases(slopes_h, distance_qn).to(dtype).masked_fill(~visible, -torch.inf)

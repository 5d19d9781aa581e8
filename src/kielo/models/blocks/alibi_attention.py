"""Attention with ALiBi on a processor, which keeps no biases from forward to backward.

Biases [h, q, n] that autograd keeps are O(h·s²) bytes of every layer. They follow from slopes and distances,
which all layers share, so that the backward makes them again; the kernels are those of torch's
`scaled_dot_product_attention`, bit by bit. On a GPU FlexAttention computes each bias inside its kernel
(`blocks/flex.py`) and keeps none either.

Shape letters: b = batch, h = heads, q = queries, n = keys, k = head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kielo.models.blocks.alibi import biases


def attend(
    q_bhqk: Tensor,
    k_bhnk: Tensor,
    v_bhnk: Tensor,
    slopes_h: Tensor,
    seen: tuple[Tensor, Tensor],
    scale: float | None = None,
) -> Tensor:
    """Returns [b, h, q, k]. seen: distances [q, n] and visible [b or 1, 1, q, n]; scale: None for 1/√k."""
    return _Attention.apply(q_bhqk, k_bhnk, v_bhnk, scale, slopes_h, *seen)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *biased: Tensor) -> Tensor:
        bias = _masked(*biased, q.dtype)
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, log_sum, *biased)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, *rest = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = kernel(
            gradient, q, k, v, out, log_sum, 0.0, False, attn_mask=_masked(*rest, q.dtype), scale=ctx.scale
        )
        return *gradients, None, None, None, None


def _masked(slopes_h: Tensor, distance_qn: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns biases [b or 1, h, q, n], -∞ at what is not visible."""
    return biases(slopes_h, distance_qn).to(dtype).masked_fill(~visible, -torch.inf)

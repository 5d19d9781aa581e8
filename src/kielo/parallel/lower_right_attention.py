"""Attention of the last queries of a sequence to all its keys, causal, without a mask in memory.

torch's CausalBias, aligned to the lower right, cannot be made in compiled code, and flash attention on AMD
aligns to the upper left (ROCm/aotriton pull request 55). So the keys are cut in two: keys before the queries,
which all queries see, and the queries' own, square and causal. Every flash kernel computes both, with the
(natural) log of each softmax's sum, by which the outputs are merged (ring attention; Liu et al. 2023,
arXiv:2310.01889; on AMD since torch 2.9, pytorch/pytorch pull request 156903). Shape letters: b = batch, h =
heads, g = key and value heads, q = queries, n = keys, k = head_dim.
"""

from typing import Any

import torch
from torch import Tensor

_LARGEST_HEAD = 256  # of the flash kernels of every GPU


def has_kernel(q_bhqk: Tensor) -> bool:
    """Return True if a flash kernel takes these queries: any on a CPU, half precision on a GPU."""
    if q_bhqk.device.type == "cpu":
        return True
    head_dim = q_bhqk.shape[-1]
    return q_bhqk.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD


def attend_to_all(q_bhqk: Tensor, k_bgnk: Tensor, v_bgnk: Tensor, scale: float | None = None) -> Tensor:
    """Return [b, h, q, k]. The queries are the last q of n positions. `scale` is None for 1/√k."""
    scale = q_bhqk.shape[-1] ** -0.5 if scale is None else scale
    return OPERATOR(q_bhqk, k_bgnk, v_bgnk, scale)[0]


@torch.library.custom_op("kielo::lower_right_attention", mutates_args=())
def _forward(q_bhqk: Tensor, k_bgnk: Tensor, v_bgnk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (output [b, h, q, k], log of the softmax's sum [b, h, q] in fp32)."""
    before = k_bgnk.shape[2] - q_bhqk.shape[2]
    out, log_sum = _kernel(q_bhqk, k_bgnk[:, :, before:], v_bgnk[:, :, before:], True, scale)
    if before:
        all_seen, its_log_sum = _kernel(q_bhqk, k_bgnk[:, :, :before], v_bgnk[:, :, :before], False, scale)
        merged = torch.logaddexp(log_sum, its_log_sum)
        share, its_share = ((part - merged).exp().unsqueeze(-1) for part in (log_sum, its_log_sum))
        out, log_sum = (out * share + all_seen * its_share).to(q_bhqk.dtype), merged
    return out.contiguous(), log_sum.contiguous()


@_forward.register_fake
def _(q_bhqk: Tensor, k_bgnk: Tensor, v_bgnk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q_bhqk.new_empty(q_bhqk.shape), q_bhqk.new_empty(q_bhqk.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("kielo::lower_right_attention_backward", mutates_args=())
def _backward(
    gradient_bhqk: Tensor,
    q_bhqk: Tensor,
    k_bgnk: Tensor,
    v_bgnk: Tensor,
    out_bhqk: Tensor,
    log_sum_bhq: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The merged sum makes each part's gradient the whole's."""
    before = k_bgnk.shape[2] - q_bhqk.shape[2]
    first, last = (gradient_bhqk.contiguous(), q_bhqk), (out_bhqk, log_sum_bhq)
    own = k_bgnk[:, :, before:], v_bgnk[:, :, before:]
    dq, dk, dv = _kernel_backward((*first, *own, *last), True, scale)
    if before:
        seen = k_bgnk[:, :, :before], v_bgnk[:, :, :before]
        other_dq, *earlier = _kernel_backward((*first, *seen, *last), False, scale)
        dq = dq + other_dq
        dk, dv = (torch.cat(parts, dim=2) for parts in zip(earlier, (dk, dv), strict=True))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward.register_fake
def _(_: Tensor, q_bhqk: Tensor, k_bgnk: Tensor, v_bgnk: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q_bhqk.new_empty(q_bhqk.shape), k_bgnk.new_empty(k_bgnk.shape), v_bgnk.new_empty(v_bgnk.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient_bhqk: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *torch.ops.kielo.lower_right_attention_backward(gradient_bhqk, *ctx.saved_tensors, ctx.scale), None


_forward.register_autograd(_differentiate, setup_context=_save)
OPERATOR = torch.ops.kielo.lower_right_attention


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]


def _kernel_backward(
    inputs: tuple[Tensor, ...], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """inputs: gradient of the output, q, k, v, output, log of the sum."""
    _, q, k, *_ = inputs
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*inputs, 0.0, is_causal, scale=scale)
    # Without dropout the random state is not read; without packed sequences there are no offsets.
    unread = torch.zeros((), dtype=torch.int64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return kernel(*inputs, *lengths, 0.0, is_causal, unread, unread, scale=scale)

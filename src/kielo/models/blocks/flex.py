"""Attention with windows, documents, ALiBi and capped scores in one kernel on a GPU, without O(s²) memory.

torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496), compiled there. The dense code in
`blocks/attention.py` is the reference. Forward only on the CPU, uncompiled: the tests compare the two there.

Shape letters: b = batch, s = sequence, h = heads, g = key and value heads, k = head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_SMALLEST_HEAD = 16  # of the kernel; smaller heads are padded


@dataclass(frozen=True)
class Scores:
    """Options of the scores: scale, and one of softcap, slopes and change, or none, as in `InnerAttention`.

    positions_q: the positions of the queries, None where they are 0, 1, …. change: what FlexAttention calls
    a score_mod.
    """

    scale: float | None = None
    softcap: float | None = None
    slopes_h: Tensor | None = None
    positions_q: Tensor | None = None
    change: ScoreMod | None = None


def document_mask(documents_bs: Tensor) -> BlockMask:
    """Returns FlexAttention's block mask of encoders: each token sees its document, before and after it."""

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents_bs[b, query] == documents_bs[b, key]

    (batch, length), device = documents_bs.shape, documents_bs.device
    return compiled_on(device, create_block_mask)(is_visible, batch, None, length, length, device=device)


def block_mask(
    window: int | None,
    documents_bs: Tensor | None,
    length: int,
    device: torch.device,
    positions_q: Tensor | None = None,
) -> BlockMask:
    """Returns FlexAttention's block mask: causal, and within the window and the document if given.

    The keys are whole sequences of `length`; positions_q: the positions of the queries, None for all.
    """

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if positions_q is None else positions_q[query]
        visible = position >= key
        if window is not None:
            visible = visible & (position - key < window)
        if documents_bs is not None:
            visible = visible & (documents_bs[b, position] == documents_bs[b, key])
        return visible

    batch = None if documents_bs is None else documents_bs.shape[0]
    queries = length if positions_q is None else positions_q.numel()
    return compiled_on(device, create_block_mask)(is_visible, batch, None, queries, length, device=device)


def attend(
    q_bhsk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, blocks: BlockMask | None, scores: Scores
) -> Tensor:
    """Returns [b, h, s, k]. blocks: None where every query sees every key."""
    scale, softcap, slopes_h, positions_q = (
        scores.scale,
        scores.softcap,
        scores.slopes_h,
        scores.positions_q,
    )

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    def sloped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if positions_q is None else positions_q[query]
        return score - slopes_h[h] * (position - key)

    size = q_bhsk.shape[-1]
    padded = (F.pad(x, (0, max(0, _SMALLEST_HEAD - size))) for x in (q_bhsk, k_bgsk, v_bgsk))
    out_bhsk = compiled_on(q_bhsk.device, flex_attention)(
        *padded,
        score_mod=capped if softcap is not None else sloped if slopes_h is not None else scores.change,
        block_mask=blocks,
        scale=size**-0.5 if scale is None else scale,
        enable_gqa=q_bhsk.shape[1] != k_bgsk.shape[1],
    )
    return out_bhsk[..., :size]


def compiled_on(device: torch.device, function: Callable) -> Callable:
    """Returns `function`, compiled on a GPU; inside a layer that is compiled, it becomes a part of that."""
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable) -> Callable:
    """Compiles a function once a process: each `torch.compile` has a cache of its own."""
    return torch.compile(function)

"""Attention with windows, documents, ALiBi and capped scores in one kernel on a GPU, without O(s²) memory.

torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496), compiled. The dense code in `blocks/attention.py`
is the reference. On the CPU it runs uncompiled and forward only, for tests that compare the two.

Shape letters: b = batch, s = sequence, h = heads, g = key and value heads, k = head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from kielo.models.blocks.dropout import WeightNoise

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_SMALLEST_HEAD = 16  # of the kernel; smaller heads are padded


@dataclass(frozen=True)
class Scores:
    """Options of the scores: scale, and at most one of softcap, slopes and change, as in `InnerAttention`.

    positions_q: the positions of the queries, None for 0, 1, …. change: a score_mod of FlexAttention.
    """

    scale: float | None = None
    softcap: float | None = None
    slopes_h: Tensor | None = None
    positions_q: Tensor | None = None
    change: ScoreMod | None = None


@dataclass(frozen=True)
class Seen:
    """The keys that queries see in window and document. `positions_q` are the queries', None for all.

    Without is_causal a window reaches forward too, except in documents with negative numbers.
    """

    window: int | None = None
    documents_bs: Tensor | None = None
    positions_q: Tensor | None = None
    is_causal: bool = True


def block_mask(seen: Seen, length: int, device: torch.device) -> BlockMask:
    """Return FlexAttention's block mask over keys of whole sequences of `length`."""
    window, documents_bs, positions_q = seen.window, seen.documents_bs, seen.positions_q
    is_causal = seen.is_causal

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if positions_q is None else positions_q[query]
        visible = position >= key if is_causal else key >= 0
        if window is not None:
            visible = visible & (position - key < window)
        if window is not None and not is_causal:
            visible = visible & (key - position < window)
        if documents_bs is not None:
            visible = visible & (documents_bs[b, position] == documents_bs[b, key])
        if documents_bs is not None and not is_causal:
            visible = visible & ((documents_bs[b, position] >= 0) | (position >= key))
        return visible

    batch = None if documents_bs is None else documents_bs.shape[0]
    queries = length if positions_q is None else positions_q.numel()
    return compiled_on(device, create_block_mask)(is_visible, batch, None, queries, length, device=device)


def attend(
    q_bhsk: Tensor,
    k_bgsk: Tensor,
    v_bgsk: Tensor,
    blocks: BlockMask | None,
    scores: Scores,
    noise: WeightNoise | None = None,
) -> Tensor:
    """Return the outputs [b, h, s, k]. `blocks` is None if every query sees every key. `noise` drops weights.

    Dropout comes after the softmax, but the kernel changes scores only. So it runs twice: with -∞ for dropped
    weights it gives their mean of values and the log of their sum, and without dropout the log of the whole
    sum. The ratio of the sums makes the result exact, without weights in memory.
    """
    size, change = q_bhsk.shape[-1], _score_mod(scores)

    def run(score_mod: Any, **options: Any) -> Any:  # Dynamo cannot read `ScoreMod | None`
        padded = (F.pad(x, (0, max(0, _SMALLEST_HEAD - size))) for x in (q_bhsk, k_bgsk, v_bgsk))
        return compiled_on(q_bhsk.device, flex_attention)(
            *padded,
            score_mod=score_mod,
            block_mask=blocks,
            scale=size**-0.5 if scores.scale is None else scores.scale,
            enable_gqa=q_bhsk.shape[1] != k_bgsk.shape[1],
            **options,
        )

    if noise is None:
        return run(change)[..., :size]
    is_kept = noise.is_kept(k_bgsk.shape[2])

    def dropped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score if change is None else change(score, b, h, query, key)
        return torch.where(is_kept(b, h, query, key), score, -torch.inf)

    (out_bhsk, kept), (_, whole) = (
        run(score_mod, return_aux=AuxRequest(lse=True)) for score_mod in (dropped, change)
    )
    share_bhs = torch.exp(kept.lse - whole.lse) / (1 - noise.rate)
    return (out_bhsk[..., :size] * share_bhs[..., None]).to(out_bhsk.dtype)


def _score_mod(scores: Scores) -> ScoreMod | None:
    if scores.softcap is not None:
        softcap = scores.softcap

        def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        return capped
    if scores.slopes_h is not None:
        slopes_h, positions_q = scores.slopes_h, scores.positions_q

        def sloped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            position = query if positions_q is None else positions_q[query]
            return score - slopes_h[h] * (position - key)

        return sloped
    return scores.change


def compiled_on(device: torch.device, function: Callable) -> Callable:
    """Return `function`, compiled on a GPU; inside a compiled layer it becomes a part of the layer."""
    return function if device.type == "cpu" or torch.compiler.is_compiling() else _compiled(function)


@cache
def _compiled(function: Callable) -> Callable:
    """Compile a function once a process, because each `torch.compile` has a cache of its own."""
    return torch.compile(function)

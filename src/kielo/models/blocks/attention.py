"""Attention, causal or to both sides, with grouped key and value heads.

GQA: Ainslie et al. 2023, arXiv:2305.13245.
Data in and out: [b, s, d]. Shape letters: b = batch, s = sequence, d = hidden size, h = heads, g = key and
value heads, k = head_dim, q = queries, n = keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from kielo.models.blocks import alibi, blocked_attention, flex
from kielo.models.blocks.alibi import Alibi
from kielo.models.blocks.dropout import WeightNoise
from kielo.models.blocks.mlp import JointProjection
from kielo.models.blocks.rope import rotate
from kielo.recipe.sections import CompleteModel


@dataclass(frozen=True)
class Mask:
    """An attention mask: the keys that each query attends to.

    visible: [b or 1, 1, q, n] bool, None for plain attention, without O(s²) memory. Every query sees itself.
    distance: query position - key position [q, n], for ALiBi. blocks: FlexAttention's on a GPU, in place of
    both. positions: the queries' with blocks, None for whole sequences. is_causal: causal plain attention.
    """

    visible: Tensor | None
    distance: Tensor | None = None
    blocks: BlockMask | None = None
    positions: Tensor | None = None
    is_causal: bool = True

    def part(self, queries: slice, keys: slice) -> "Mask":
        """Return the mask of some queries and some keys. `visible` must not be None."""
        if self.visible is None:
            raise ValueError("a plain mask has no parts")
        distance = None if self.distance is None else self.distance[queries, keys]
        return Mask(self.visible[:, :, queries, keys], distance)


class MaskMaker(nn.Module):
    """A module that makes one `Mask` for each window, once a forward. Context parallelism replaces it.

    windows: tokens back, itself included, that a layer's queries see (Beltagy et al. 2020, arXiv:2004.05150),
    None for all. is_capped: True if scores are capped, which plain attention on a GPU cannot do. is_causal:
    False for encoders. Their queries see as many tokens forward, except in documents with negative numbers.
    """

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        needs_distance: bool = False,
        is_capped: bool = False,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        self.windows = tuple(dict.fromkeys(windows))
        self.needs_distance, self.is_capped, self.is_causal = needs_distance, is_capped, is_causal
        self.is_dense = False  # `parallel` sets it: masks are dense on a GPU too

    def forward(
        self, documents_bs: Tensor | None, positions_s: Tensor | None, length: int, device: torch.device
    ) -> dict[int | None, Mask]:
        """Return window → mask. `positions_s` is unused here, because all columns are present in order."""
        make = self.in_blocks if self.makes_blocks(device) else self.dense
        return make(documents_bs, length, device)

    def makes_blocks(self, device: torch.device) -> bool:
        """Return True if masks on `device` are FlexAttention's."""
        return device.type != "cpu" and not self.is_dense

    def places(self, documents_bs: Tensor, positions_s: Tensor | None) -> Tensor:
        """Return each token's place in its document, from 0: int64 [b, s]."""
        columns_s = torch.arange(documents_bs.shape[1], device=documents_bs.device)
        begins_bs = torch.ones_like(documents_bs, dtype=torch.bool)
        begins_bs[:, 1:] = documents_bs[:, 1:] != documents_bs[:, :-1]
        return columns_s - columns_s.where(begins_bs, 0).cummax(dim=1).values

    def dense(self, documents_bs: Tensor | None, length: int, device: torch.device) -> dict[int | None, Mask]:
        """Return window → mask of whole sequences, dense if a mask is needed."""
        places_s = torch.arange(length, device=device)
        return self.masks(places_s, places_s, documents_bs, documents_bs)

    def in_blocks(
        self,
        documents_bs: Tensor | None,
        length: int,
        device: torch.device,
        positions_q: Tensor | None = None,
    ) -> dict[int | None, Mask]:
        """Return window → mask of whole sequences for FlexAttention. `positions_q` is None for all."""
        is_plain = documents_bs is None and not self.needs_distance and not self.is_capped
        masks = {}
        for window in self.windows:
            reach = None if window is None or window >= length else window
            if is_plain and reach is None:
                masks[window] = Mask(None, is_causal=self.is_causal)
            else:
                seen = flex.Seen(reach, documents_bs, positions_q, self.is_causal)
                blocks = flex.block_mask(seen, length, device)
                masks[window] = Mask(None, blocks=blocks, positions=positions_q)
        return masks

    def masks(
        self,
        query_positions_q: Tensor,
        key_positions_n: Tensor,
        query_documents_bq: Tensor | None,
        key_documents_bn: Tensor | None,
    ) -> dict[int | None, Mask]:
        """Return window → mask of queries and keys at these positions, in these documents."""
        num_keys = key_positions_n.numel()
        needs_none = [
            query_documents_bq is None and (window is None or window >= num_keys) for window in self.windows
        ]
        if all(needs_none) and not self.needs_distance:
            return dict.fromkeys(self.windows, Mask(None, is_causal=self.is_causal))
        distance_qn = query_positions_q[:, None] - key_positions_n
        reach_qn = distance_qn if self.is_causal else distance_qn.abs()
        visible = (distance_qn >= 0 if self.is_causal else reach_qn >= 0)[None, None]
        if query_documents_bq is not None and key_documents_bn is not None:
            visible = visible & (query_documents_bq[:, :, None] == key_documents_bn[:, None, :]).unsqueeze(1)
        if query_documents_bq is not None and not self.is_causal:
            may_see_all_bq = query_documents_bq >= 0
            visible = visible & (may_see_all_bq[:, None, :, None] | (distance_qn >= 0))
        distance = distance_qn if self.needs_distance else None
        masks = {}
        for window, needs_no_mask in zip(self.windows, needs_none, strict=True):
            within = visible
            if window is not None and window < num_keys:
                within = visible & (reach_qn < window)
            is_plain = needs_no_mask and distance is None
            masks[window] = Mask(None if is_plain else within, distance, is_causal=self.is_causal)
        return masks


class InnerAttention(nn.Module):
    """Queries, keys and values to outputs. Context parallelism replaces this module.

    scale: factor of the scores, None for 1/√k. softcap: scores become cap × tanh(score / cap) (Gemma 2).
    """

    def __init__(
        self, scale: float | None = None, softcap: float | None = None, alibi: Alibi | None = None
    ) -> None:
        super().__init__()
        self.scale, self.softcap, self.alibi = scale, softcap, alibi

    def forward(
        self, q_bhsk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, mask: Mask, noise: WeightNoise | None = None
    ) -> Tensor:
        return self.attend(q_bhsk, k_bgsk, v_bgsk, mask, noise)

    def attend(
        self,
        q_bhsk: Tensor,
        k_bgsk: Tensor,
        v_bgsk: Tensor,
        mask: Mask,
        noise: WeightNoise | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """Return [b, h, s, k]. heads: the slice of this rank's heads that q has, None for all.

        `noise` drops attention's weights, only in encoders, whose attention is plain (`resolve/rules.py`).
        """
        if noise is not None and heads is not None:
            noise = noise.of_heads(heads)
        if mask.blocks is not None or (noise is not None and q_bhsk.device.type != "cpu"):
            slopes_h = None if self.alibi is None else self.alibi.of(heads)
            scores = flex.Scores(self.scale, self.softcap, slopes_h, mask.positions)
            return flex.attend(q_bhsk, k_bgsk, v_bgsk, mask.blocks, scores, noise)
        if noise is not None:
            scale = q_bhsk.shape[-1] ** -0.5 if self.scale is None else self.scale
            terms = blocked_attention.Terms(scale, visible=mask.visible, noise=noise)
            return blocked_attention.attend(q_bhsk, k_bgsk, v_bgsk, terms)
        if self.softcap is not None:
            return self._capped(self.softcap, q_bhsk, k_bgsk, v_bgsk, mask)
        if self.alibi is not None:
            if mask.distance is None or mask.visible is None:
                raise ValueError("ALiBi needs a mask with distances")
            seen = mask.distance, mask.visible
            return alibi.attend(q_bhsk, k_bgsk, v_bgsk, self.alibi.of(heads), seen, self.scale)
        return F.scaled_dot_product_attention(
            q_bhsk,
            k_bgsk,
            v_bgsk,
            attn_mask=mask.visible,
            is_causal=mask.visible is None and mask.is_causal,
            scale=self.scale,
            enable_gqa=q_bhsk.shape[1] != k_bgsk.shape[1],
        )

    def _capped(self, cap: float, q_bhsk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, mask: Mask) -> Tensor:
        """Compute attention with capped scores: no kernel of the CPU does. O(s²) memory a head."""
        groups = q_bhsk.shape[1] // k_bgsk.shape[1]
        k_bhsk, v_bhsk = (x.repeat_interleave(groups, dim=1) for x in (k_bgsk, v_bgsk))
        scale = q_bhsk.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = torch.matmul(q_bhsk, k_bhsk.mT) * scale
        scores = cap * torch.tanh(scores / cap)
        visible = mask.visible
        if visible is None:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = scores.float().masked_fill(~visible, -torch.inf).softmax(-1).to(v_bhsk.dtype)
        return torch.matmul(weights, v_bhsk)


class Attention(nn.Module):
    """Projections to queries, keys and values, their rotation, inner attention, and the output projection.

    inner: None for plain scaled dot products. norms: RMSNorm of queries and keys, made by `make_norm(size)`,
    "head": each head by itself (Qwen3, Gemma 3), "width": all heads together (OLMo 2). has_output_bias: bias
    of the output projection, None for the config's attention_bias.
    """

    def __init__(
        self,
        config: CompleteModel,
        inner: InnerAttention | None = None,
        norms: Literal["head", "width"] | None = None,
        make_norm: Callable[[int], nn.Module] = nn.Identity,
        has_output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.norms = config.head_dim, norms
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q = nn.Linear(hidden, queries, bias=bias)
        self.k = nn.Linear(hidden, keys, bias=bias)
        self.v = nn.Linear(hidden, keys, bias=bias)
        self.o = nn.Linear(queries, hidden, bias=bias if has_output_bias is None else has_output_bias)
        if norms is not None:
            self.q_norm = make_norm(queries if norms == "width" else config.head_dim)
            self.k_norm = make_norm(keys if norms == "width" else config.head_dim)
        self.project = JointProjection()
        self.inner = InnerAttention() if inner is None else inner

    def forward(
        self,
        x_bsd: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Mask,
        noise: WeightNoise | None = None,
    ) -> Tensor:
        """Return [b, s, d]. cos, sin: [s, r] rotate the first r numbers of each head, None for no RoPE."""
        q, k, v = self.project(x_bsd, (self.q, self.k, self.v))
        if self.norms == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.norms == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        # Rotate before transposing: attention's output has the queries' order in memory, so the next matrix
        # takes it without a copy.
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (x_bshk.transpose(1, 2) for x_bshk in (q, k, v))
        out_bhsk = self.inner(q, k, v, mask, noise)
        return self.o(out_bhsk.transpose(1, 2).flatten(2))

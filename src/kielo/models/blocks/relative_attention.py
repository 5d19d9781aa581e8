"""Attention of an encoder with relative positions: content to content, content to position and back.

DeBERTa's disentangled attention (He et al. 2021, arXiv:2006.03654, section 3.1) as LTG-BERT has it (Samuel et
al. 2023, arXiv:2303.09859). Positions are rows of a table of 2p - 1 that all layers share, projected by the
matrices of the hidden states. Distances up to p/2 have a row each; farther rows are shared, on a logarithmic
scale. A score is (q·k + q·kpos[r] + k·qpos[r]) / √(3 head_dim), with r the row of query position - key
position. Its second and third term are looked up in two tables [b, h, s, 2p - 1], so nothing of size s × s ×
hidden_size exists.

Shape letters: b = batch, s = sequence, d = hidden size, h = heads, k = head_dim, q = queries, n = keys, r =
rows of relative positions.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from kielo.models.blocks import blocked_attention, flex
from kielo.models.blocks.dropout import WeightNoise
from kielo.models.blocks.mlp import JointProjection
from kielo.models.blocks.rope import refuse_longer


def row_of_distance(distance: int, bucket_size: int, max_positions: int) -> int:
    """Return the row of a distance (query position - key position): 0 … 2 × bucket_size - 2."""
    middle, size = bucket_size // 2, min(abs(distance), max_positions - 1)
    if size > middle:
        share = math.log(size / middle) / math.log((max_positions - 1) / middle)
        size = math.ceil(share * (middle - 1)) + middle
    return bucket_size - 1 + (size if distance > 0 else -size)


@dataclass(frozen=True)
class RelativeMask:
    """The positions that each query sees, and `row_of` distance d at d + half [2 half + 1].

    On a CPU rows_qn [q, n] of all pairs, and visible [b, 1, q, n], None for all pairs; on a GPU blocks,
    FlexAttention's mask of documents, None for all pairs.
    """

    row_of: Tensor
    half: int
    rows_qn: Tensor | None = None
    visible: Tensor | None = None
    blocks: BlockMask | None = None


class RelativeMaskMaker(nn.Module):
    """A module that makes the mask of a forward, for all layers. Its table of rows is not saved."""

    row_of: Tensor

    def __init__(self, bucket_size: int, max_positions: int) -> None:
        super().__init__()
        self.bucket_size, self.max_positions = bucket_size, max_positions
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device | str) -> None:
        most = self.max_positions - 1
        rows = [
            row_of_distance(number, self.bucket_size, self.max_positions) for number in range(-most, most + 1)
        ]
        self.register_buffer("row_of", torch.tensor(rows, device=device), persistent=False)

    def forward(self, documents_bs: Tensor | None, length: int, device: torch.device) -> RelativeMask:
        refuse_longer(length, self.max_positions)
        make = self.dense if device.type == "cpu" else self.in_blocks
        return make(documents_bs, length)

    def dense(self, documents_bs: Tensor | None, length: int) -> RelativeMask:
        places = torch.arange(length, device=self.row_of.device)
        half = self.max_positions - 1
        rows_qn = self.row_of[places[:, None] - places + half]
        visible = None
        if documents_bs is not None:
            is_before_qn = places <= places[:, None]
            visible = documents_bs[:, :, None] == documents_bs[:, None, :]
            visible = (visible & ((documents_bs[:, :, None] >= 0) | is_before_qn)).unsqueeze(1)
        return RelativeMask(self.row_of, half, rows_qn, visible)

    def in_blocks(self, documents_bs: Tensor | None, length: int) -> RelativeMask:
        blocks = None
        if documents_bs is not None:
            seen = flex.Seen(documents_bs=documents_bs, is_causal=False)
            blocks = flex.block_mask(seen, length, documents_bs.device)
        return RelativeMask(self.row_of, self.max_positions - 1, blocks=blocks)


class RelativeInnerAttention(nn.Module):
    def forward(
        self,
        q_bhsk: Tensor,
        k_bhsk: Tensor,
        v_bhsk: Tensor,
        positions: tuple[Tensor, Tensor],
        mask: RelativeMask,
        noise: WeightNoise | None = None,
    ) -> Tensor:
        """Return the outputs [b, h, s, k]. `positions`: relative positions' queries and keys, [h, r, k]."""
        qpos_hrk, kpos_hrk = positions
        scale = (3 * q_bhsk.shape[-1]) ** -0.5
        of_queries_bhsr = torch.matmul(q_bhsk, kpos_hrk.mT) * scale
        of_keys_bhsr = torch.matmul(k_bhsk, qpos_hrk.mT) * scale
        if mask.rows_qn is None:
            row_of, half = mask.row_of, mask.half

            def change(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                row = row_of[query - key + half]
                return score + of_queries_bhsr[b, h, query, row] + of_keys_bhsr[b, h, key, row]

            scores = flex.Scores(scale, change=change)
            return flex.attend(q_bhsk, k_bhsk, v_bhsk, mask.blocks, scores, noise)
        tables = blocked_attention.Tables(of_queries_bhsr, of_keys_bhsr, mask.rows_qn)
        terms = blocked_attention.Terms(scale, tables, mask.visible, noise)
        return blocked_attention.attend(q_bhsk, k_bhsk, v_bhsk, terms)


class PositionHeads(nn.Module):
    """Projected relative positions, [r, d] each, to queries and keys of each head, [h, r, k] each."""

    def __init__(self, head_dim: int, is_interleaved: bool) -> None:
        super().__init__()
        self.head_dim, self.is_interleaved = head_dim, is_interleaved

    def forward(self, qpos_rd: Tensor, kpos_rd: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_interleaved:
            pairs_rhk = torch.cat((qpos_rd, kpos_rd), dim=-1).unflatten(-1, (-1, 2 * self.head_dim))
            qpos, kpos = pairs_rhk.chunk(2, dim=-1)
        else:
            qpos, kpos = (x.unflatten(-1, (-1, self.head_dim)) for x in (qpos_rd, kpos_rd))
        return qpos.transpose(0, 1), kpos.transpose(0, 1)


class RelativeAttention(nn.Module):
    """Projections with biases, inner attention with relative positions, and the output projection.

    position_heads: "concatenated": the positions' queries, then their keys, are cut into heads.
    "interleaved": both side by side are cut into a piece of 2 × head_dim for each head (NorBERT 3). Weights
    look the same.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, position_heads: Literal["concatenated", "interleaved"]
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.project, self.project_positions = JointProjection(), JointProjection()
        self.position_heads = PositionHeads(head_dim, position_heads == "interleaved")
        self.inner = RelativeInnerAttention()

    def forward(
        self, x_bsd: Tensor, relative_rd: Tensor, mask: RelativeMask, noise: WeightNoise | None = None
    ) -> Tensor:
        q, k, v = self.project(x_bsd, (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        positions = self.project_positions(relative_rd[None], (self.q, self.k))
        heads = self.position_heads(*(x.squeeze(0) for x in positions))
        out_bhsk = self.inner(q, k, v, heads, mask, noise)
        return self.o(out_bhsk.transpose(1, 2).flatten(2))

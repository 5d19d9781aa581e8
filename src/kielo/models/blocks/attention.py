"""Causal attention with grouped key and value heads (GQA, Ainslie et al. 2023, arXiv:2305.13245).

Data in and out: [b, s, d]. Shape letters: b = batch, s = sequence, d = hidden size, h = heads, g = key and value
heads, k = head_dim.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from kielo.models.blocks.position import rotate


def document_mask(documents_bs: Tensor) -> Tensor:
    """Which position may look at which, [b, 1, s, s] bool: not ahead, and not across a document's border.

    Dense, so O(s²) memory: the plain causal path (no mask) is the fast one. Every position sees itself, so no
    row is empty and no softmax divides by zero.
    """
    same_document = documents_bs[:, :, None] == documents_bs[:, None, :]
    return same_document.tril().unsqueeze(1)


class AttentionMask(nn.Module):
    """Who may look at whom, made once a forward: a module of its own, because context parallelism replaces it."""

    def forward(self, documents_bs: Tensor | None, positions_s: Tensor | None) -> Tensor | None:
        """None (plain causal attention) without documents, else [b, 1, s, s] bool from `document_mask`.

        `positions_s` is for the version that replaces this one: here all columns are present, in their order.
        """
        return None if documents_bs is None else document_mask(documents_bs)


class InnerAttention(nn.Module):
    """Queries, keys and values to outputs: a module of its own, because context parallelism replaces it."""

    def forward(self, q_bhsk: Tensor, k_bgsk: Tensor, v_bgsk: Tensor, mask: Tensor | None) -> Tensor:
        """[b, h, s, k]. `mask` as from `document_mask`; None means causal."""
        return F.scaled_dot_product_attention(
            q_bhsk, k_bgsk, v_bgsk, attn_mask=mask, is_causal=mask is None,
            enable_gqa=q_bhsk.shape[1] != k_bgsk.shape[1],
        )


class Attention(nn.Module):
    def __init__(
        self, hidden_size: int, num_heads: int, num_key_value_heads: int, head_dim: int, bias: bool
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.v = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.o = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.inner = InnerAttention()

    def forward(self, x_bsd: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """cos, sin: [s, k/2]. The number of heads is read off the projections: a tensor rank has fewer."""
        q = rotate(self._heads(self.q(x_bsd)), cos, sin)
        k = rotate(self._heads(self.k(x_bsd)), cos, sin)
        v = self._heads(self.v(x_bsd))
        out_bhsk = self.inner(q, k, v, mask)
        return self.o(out_bhsk.transpose(1, 2).flatten(2))

    def _heads(self, x_bsd: Tensor) -> Tensor:
        batch, sequence, _ = x_bsd.shape
        return x_bsd.view(batch, sequence, -1, self.head_dim).transpose(1, 2)

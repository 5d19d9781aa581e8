"""Attention on a CPU with terms of relative positions, or with dropped weights: a block of queries at a time.

The backward makes a block's scores and weights again, so memory does not grow with the square of the length
(the idea of flash attention, Dao et al. 2022, arXiv:2205.14135; here a block has all keys). torch's kernels
for the CPU take no bias with a gradient and no weights to drop. Shape letters: b = batch, h = heads, k =
head_dim, q = queries, n = keys, r = rows of relative positions, m = queries of a block.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kielo.models.blocks.dropout import WeightNoise, drop_weights

_BLOCK_SCORES = 2**19  # 2 MB in fp32; scores and results fit a core's share of the last cache


class Tables(NamedTuple):
    """The terms that each row of a distance adds to scores, and the row of each pair's distance."""

    of_queries_bhqr: Tensor
    of_keys_bhnr: Tensor
    rows_qn: Tensor


class Terms(NamedTuple):
    """The changes of scores and weights. `scale` is the factor of q·k. `tables` are of relative positions.

    visible: [b or 1, 1, q, n], True for keys that are seen, None for all. noise: drops weights.
    """

    scale: float
    tables: Tables | None = None
    visible: Tensor | None = None
    noise: WeightNoise | None = None

    def of(self, block: slice) -> "Terms":
        tables = self.tables
        if tables is not None:
            of_queries = tables.of_queries_bhqr[:, :, block]
            tables = Tables(of_queries, tables.of_keys_bhnr, tables.rows_qn[block])
        visible = None if self.visible is None else self.visible[:, :, block]
        noise = None if self.noise is None else self.noise.of_queries(block)
        return Terms(self.scale, tables, visible, noise)


def attend(q_bhqk: Tensor, k_bhnk: Tensor, v_bhnk: Tensor, terms: Terms) -> Tensor:
    """Return [b, h, q, k]. The softmax is in fp32 at least, and dropout comes after it."""
    tables = (None, None, None) if terms.tables is None else terms.tables
    rate, *of_noise = (None, None, None) if terms.noise is None else terms.noise
    return OPERATOR(q_bhqk, k_bhnk, v_bhnk, *tables, terms.visible, *of_noise, terms.scale, rate)


# Each direction is one operator, which compiled code does not look into. If it did, it would find the same
# products in forward and backward, and keep the weights of all blocks from one to the other.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? of_queries, Tensor? of_keys, Tensor? rows, Tensor? visible, "
    "Tensor? keys, Tensor? positions, float scale, float? rate"
)


def forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """Return the output of the operator `kielo::blocked_attention`, whose schema names the arguments."""
    terms = _terms(others)
    outputs = []
    for block in _blocks(q, k):
        of_block = terms.of(block)
        weights = _weights(q[:, :, block], k, of_block)
        if of_block.noise is not None:
            weights = drop_weights(weights, of_block.noise)
        outputs.append(torch.matmul(weights.to(v.dtype), v).transpose(1, 2))
    # In the order in memory that the next matrix takes without a copy.
    return torch.cat(outputs, dim=1).transpose(1, 2)


def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    """Return the gradients of q, k and v, and of the two tables if there are tables."""
    terms = _terms(others)
    wide = torch.promote_types(q.dtype, torch.float32)
    gradients_q = []
    gradient_k, gradient_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    of_tables = None
    if terms.tables is not None:
        of_keys = terms.tables.of_keys_bhnr
        # Of keys [b, h, r, n], because numbers are added along the keys, which lie side by side.
        of_tables = (
            torch.zeros_like(terms.tables.of_queries_bhqr, dtype=wide),
            of_keys.new_zeros(of_keys.mT.shape, dtype=wide),
        )
    for block in _blocks(q, k):
        of_block, gradient_block = terms.of(block), gradient[:, :, block]
        weights = _weights(q[:, :, block], k, of_block)
        of_weights, kept = torch.matmul(gradient_block, v.mT).to(wide), weights
        if of_block.noise is not None:
            kept = drop_weights(weights, of_block.noise)
            of_weights = drop_weights(of_weights, of_block.noise)
        gradient_v += torch.matmul(kept.to(v.dtype).mT, gradient_block)
        of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, wide)
        if of_tables is not None and of_block.tables is not None:
            rows = of_block.tables.rows_qn.expand(of_scores.shape)
            of_tables[0][:, :, block].scatter_add_(-1, rows, of_scores)
            of_tables[1].scatter_add_(-2, rows, of_scores)
        of_products = (of_scores * terms.scale).to(q.dtype)
        gradients_q.append(torch.matmul(of_products, k))
        gradient_k += torch.matmul(of_products.mT, q[:, :, block])
    matrices = [torch.cat(gradients_q, dim=2), gradient_k.to(k.dtype), gradient_v.to(v.dtype)]
    if of_tables is None:
        return matrices
    return [*matrices, of_tables[0].to(q.dtype), of_tables[1].mT.to(q.dtype)]


_forward = torch.library.custom_op(
    "kielo::blocked_attention", forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)
_backward = torch.library.custom_op(
    "kielo::blocked_attention_backward",
    backward,
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}) -> Tensor[]",
)


@_forward.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)


@_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    of_queries, of_keys = others[:2]
    matrices = [q.new_empty(q.shape), torch.empty_like(k), torch.empty_like(v)]
    if of_queries is None:
        return matrices
    return [*matrices, torch.empty_like(of_queries), of_keys.new_empty(of_keys.mT.shape).mT]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.rate = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = torch.ops.kielo.blocked_attention_backward(gradient, *tensors, ctx.scale, ctx.rate)
    return *found, *(None for _ in range(len(tensors) + 2 - len(found)))


_forward.register_autograd(_differentiate, setup_context=_save)
OPERATOR = torch.ops.kielo.blocked_attention


def _terms(others: Sequence[Any]) -> Terms:
    of_queries, of_keys, rows_qn, visible, keys_blh2, positions_q, scale, rate = others
    tables = None if of_queries is None else Tables(of_queries, of_keys, rows_qn)
    noise = None if rate is None else WeightNoise(rate, keys_blh2, positions_q)
    return Terms(scale, tables, visible, noise)


def _weights(q_bhmk: Tensor, k_bhnk: Tensor, terms: Terms) -> Tensor:
    """Return the weights [b, h, m, n] of a block before dropout."""
    scores = torch.matmul(q_bhmk, k_bhnk.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(terms.scale)
    if terms.tables is not None:
        rows = terms.tables.rows_qn.expand(scores.shape)
        scores += terms.tables.of_queries_bhqr.gather(-1, rows)
        scores += terms.tables.of_keys_bhnr.mT.gather(-2, rows)
    if terms.visible is not None:
        scores.masked_fill_(~terms.visible, -torch.inf)
    return scores.softmax(-1)


def _blocks(q_bhqk: Tensor, k_bhnk: Tensor) -> Iterator[slice]:
    queries = q_bhqk.shape[2]
    size = max(1, _BLOCK_SCORES // (q_bhqk.shape[0] * q_bhqk.shape[1] * k_bhnk.shape[2]))
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))

"""Gathers before, and sums after, matrix products that tensor ranks share; at once, or in chunks beside them.

With sequence parallelism a rank's part of the sequence is gathered before a column-split matrix, and in the
backward of a row-split matrix, after which partial sums are summed and scattered. In chunks
(`layout.tensor_overlap`) the collective of a chunk runs during the product of the chunk beside it, with the
same numbers in the same order (the idea of Wang et al. 2023, doi:10.1145/3567955.3567959). Shape letters: t =
tensor ranks, b = batch, s = sequence, d = features.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

_collectives = torch.ops._c10d_functional


class TensorAxis(NamedTuple):
    """The ranks that share a product. chunks: of a rank's part of the sequence, 1 for the whole at once.

    along_sequence: between the products each rank holds a part of the sequence.
    """

    group_name: str
    ranks: int
    along_sequence: bool
    chunks: int = 1

    @property
    def is_chunked(self) -> bool:
        return self.along_sequence and self.chunks > 1


def gather_and_multiply(
    part_bsd: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: TensorAxis | None,
    keeps_whole: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Gather [b, s/t, d] to [b, s, d] and multiply it with each matrix [f, d], as F.linear does.

    Return (results [b, s, f], the gathered input, or None without `keeps_whole`). Nothing is sent without an
    axis, or if ranks hold whole sequences.
    """
    if axis is None or not axis.is_chunked:
        whole_bsd = gather(part_bsd, axis)
        return _products(whole_bsd, matrices, biases), whole_bsd if keeps_whole else None
    coming: Iterable[Tensor] = (start_gather(piece, axis) for piece in _pieces(part_bsd, axis))
    if part_bsd.is_cuda:
        coming = list(coming)  # all start now
    # On gloo each starts when it is taken, because two at a time write outside of their memory (torch 2.13).
    gathered = []
    results: list[list[Tensor]] = [[] for _ in matrices]
    for piece in coming:
        rows = _collectives.wait_tensor(piece)  # [t·b, s/(t·chunks), d]
        gathered += [rows] if keeps_whole else []
        for one, product in zip(results, _products(rows, matrices, biases)):
            one.append(product)
    joined = [_join(one, axis.ranks) for one in results]
    return joined, _join(gathered, axis.ranks) if keeps_whole else None


def multiply_and_sum(x_bsd: Tensor, matrix: Tensor, axis: TensorAxis) -> Tensor:
    """Multiply [b, s, d] by a matrix [f, d] and sum over the ranks: this rank's part [b, s/t, f], or all."""
    if not axis.is_chunked:
        return wait(start_sum(_product(x_bsd, matrix), axis))
    by_rank = x_bsd.unflatten(1, (axis.ranks, -1))  # [b, t, s/t, d]
    coming = []
    for piece in by_rank.tensor_split(_chunks(by_rank.shape[2], axis), dim=2):
        product = _product(piece.transpose(0, 1).flatten(0, 1), matrix)
        coming.append(_collectives.reduce_scatter_tensor(product, "sum", axis.ranks, axis.group_name))
    return torch.cat([wait(piece) for piece in coming], dim=1)


def gather(x_bsd: Tensor, axis: TensorAxis | None) -> Tensor:
    """Gather the input along the sequence if ranks hold parts of it: [b, s/t, d] → [b, s, d]."""
    if axis is None or not axis.along_sequence:
        return x_bsd
    return in_sequence_order(wait(start_gather(x_bsd, axis)), axis.ranks)


def start_gather(part_bsd: Tensor, axis: TensorAxis) -> Tensor:
    """Start an all-gather of [b, s/t, d]; the result, after `wait`, is [t·b, s/t, d]."""
    return _collectives.all_gather_into_tensor(part_bsd.contiguous(), axis.ranks, axis.group_name)


def start_sum(x_bsd: Tensor, axis: TensorAxis) -> Tensor:
    """Start the sum over the ranks; the result, after `wait`, is [b, s/t, d] if ranks hold parts."""
    if not axis.along_sequence:
        return _collectives.all_reduce(x_bsd, "sum", axis.group_name)
    by_rank = x_bsd.unflatten(1, (axis.ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _collectives.reduce_scatter_tensor(by_rank, "sum", axis.ranks, axis.group_name)


def wait(coming: Tensor) -> Tensor:
    return _collectives.wait_tensor(coming)


def in_sequence_order(parts: Tensor, ranks: int) -> Tensor:
    """Join the ranks' parts: [t·b, s/t, d] → [b, s, d]; no copy if b is 1."""
    if parts.shape[0] == ranks:
        # Not a transposition: by its stride of the first dim torch would multiply by bmm and not by mm, whose
        # results `recompute = "operators"` keeps.
        return parts.reshape(1, -1, parts.shape[-1])
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def needed_now(ctx: Any) -> tuple[bool, ...]:
    """Return which gradients this pass asks for. ctx.are_tensors: which of the inputs are tensors.

    A schedule that splits the backward runs the node twice, for its input and then for its weights, but
    `ctx.needs_input_grad` is True for both each time.
    """
    if torch.compiler.is_compiling():  # always both
        return ctx.needs_input_grad
    nodes = iter(node for node, _ in ctx.next_functions)  # of the inputs that are tensors
    of_inputs = [next(nodes) if is_tensor else None for is_tensor in ctx.are_tensors]
    return tuple(is_needed and _runs(node) for is_needed, node in zip(ctx.needs_input_grad, of_inputs))


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot say it of a leaf that `torch.autograd.grad` was asked for
        return True


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, with its gradients; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply as F.linear does, by an operator that stays itself inside of another operator."""
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix.t()).unflatten(0, x.shape[:-1])


def _products(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases)]


def _pieces(part_bsd: Tensor, axis: TensorAxis) -> tuple[Tensor, ...]:
    return part_bsd.tensor_split(_chunks(part_bsd.shape[1], axis), dim=1)


def _chunks(length: int, axis: TensorAxis) -> int:
    return min(axis.chunks, length)


def _join(pieces: Sequence[Tensor], ranks: int) -> Tensor:
    """Join chunks of all ranks' parts, each [t·b, s/(t·chunks), d], to [b, s, d], in one copy."""
    by_rank = [piece.unflatten(0, (ranks, -1)).transpose(0, 1) for piece in pieces]
    return torch.cat(by_rank, dim=2).flatten(1, 2)

"""Queries, keys and values, or gate and up, as one node of autograd: their input is kept and sent once.

Gradients of the shared input are added up inside the matrix products (`addmm_`) instead of being written one
by one and added afterwards. The products stay separate: to join them, rows of all matrices would have to be
copied into one for each forward and backward, which costs more than it gives (docs/speed.md).

On the tensor axis with sequence parallelism each rank keeps its part of the input only, s/t of s positions,
and gathers the rest again for the gradients of the weights (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2). That gather runs beside the products of the input's gradient, and the sum of that gradient
over the ranks beside the products of the weights' gradients, in one piece each; the forward's gather runs
beside products where it is chunked (`tensor_collectives.py`). Shape letters: t = tensor ranks, b = batch,
s = sequence, d = hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kielo.models.blocks.joint_projection import JointProjection
from kielo.parallel.tensor_collectives import (
    TensorAxis,
    gather,
    gather_and_multiply,
    in_sequence_order,
    needed_now,
    own_part,
    start_gather,
    start_sum,
    wait,
)


def apply_projection(model: nn.Module) -> None:
    """Replaces each block's joint projections by `AccumulatingProjection`s, in place.

    It leaves blocks with a matrix in FP8, which is torchao's module.
    """
    for block in list(model.modules()):
        linears = [child for child in block.children() if isinstance(child, nn.Linear)]
        if all(type(linear) is nn.Linear for linear in linears):
            for name, child in list(block.named_children()):
                if type(child) is JointProjection:
                    setattr(block, name, AccumulatingProjection())


class AccumulatingProjection(JointProjection):
    """Linears of one input whose gradient is added up in the products.

    axis: set where the linears' rows are split over tensor ranks. keeps_whole: the gathered input is kept
    until the backward and not gathered again, for a layer that is recomputed just before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axis: TensorAxis | None = None
        self.keeps_whole = False

    def forward(self, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        x_bsd = own_part(x_bsd)
        if not torch.is_grad_enabled():
            return super().forward(gather(x_bsd, self.axis), linears)
        weights = [own_part(linear.weight) for linear in linears]
        biases = [None if linear.bias is None else own_part(linear.bias) for linear in linears]
        return _Accumulated.apply(x_bsd, self.axis, self.keeps_whole, *weights, *biases)


class _Accumulated(torch.autograd.Function):
    """Products of one input with several matrices, and their biases: `apply(x, axis, keeps_whole, *both)`."""

    @staticmethod
    def forward(
        ctx: Any, x_bsd: Tensor, axis: TensorAxis | None, keeps_whole: bool, *both: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = both[: len(both) // 2], both[len(both) // 2 :]
        ctx.axis = axis
        ctx.are_tensors = True, False, False, *(tensor is not None for tensor in both)
        ctx.gathers_again = axis is not None and axis.along_sequence and not keeps_whole
        results, whole_bsd = gather_and_multiply(x_bsd, weights, biases, axis, not ctx.gathers_again)
        # Not a copy of the weights: FSDP2 frees them after the layer and gathers them in place again.
        ctx.save_for_backward(x_bsd if ctx.gathers_again else whole_bsd, *weights)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept_bsd, *weights = ctx.saved_tensors
        axis, needs = ctx.axis, needed_now(ctx)
        of_weights, of_biases = needs[3 : 3 + len(weights)], needs[3 + len(weights) :]
        shape = gradients[0].shape[:-1]
        rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        gathers_again = ctx.gathers_again and any(of_weights)
        if gathers_again:
            coming = _start_gathering_again(kept_bsd, gradients[0], axis)
        if needs[0]:
            gradient_x = rows[0] @ weights[0]
            for row, weight in zip(rows[1:], weights[1:]):
                gradient_x.addmm_(row, weight)
            gradient_x = gradient_x.view(*shape, -1)
        if gathers_again:
            kept_bsd = in_sequence_order(wait(coming), axis.ranks)
        if needs[0] and axis is not None:
            summed = start_sum(gradient_x, axis)
        inputs = kept_bsd.reshape(-1, kept_bsd.shape[-1])
        results = [row.t() @ inputs if is_needed else None for row, is_needed in zip(rows, of_weights)]
        results += [row.sum(0) if is_needed else None for row, is_needed in zip(rows, of_biases)]
        if needs[0] and axis is not None:
            gradient_x = wait(summed)
        return gradient_x if needs[0] else None, None, None, *results


def _start_gathering_again(part_bsd: Tensor, gradient: Tensor, axis: TensorAxis) -> Tensor:
    """Starts an all-gather in the backward pass; the result, to be waited for, is [t·b, s/t, d]."""
    if torch.compiler.is_compiling():
        return _gather_in_backward(part_bsd.contiguous(), gradient, axis.ranks, axis.group_name)
    return start_gather(part_bsd, axis)


@torch.library.custom_op("kielo::gather_in_backward", mutates_args=())
def _gather_in_backward(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    """Starts an all-gather of `part`. `gradient` is not read: it keeps the gather in the backward.

    Otherwise a compiler would take it for the forward's gather and keep that one's result.
    """
    return torch.ops._c10d_functional.all_gather_into_tensor(part, ranks, group_name)


@_gather_in_backward.register_fake
def _(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    return part.new_empty(ranks * part.shape[0], *part.shape[1:])

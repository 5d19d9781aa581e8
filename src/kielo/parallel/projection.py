"""Queries, keys and values, or gate and up, as one node of autograd: their input is kept and sent once.

Gradients of the shared input are added up inside the matrix products (`addmm_`) instead of being written one
by one and added afterwards. The products stay separate: to join them, rows of all matrices would have to be
copied into one for each forward and backward, which costs more than it gives (docs/speed.md).

On the tensor axis with sequence parallelism each rank keeps its part of the input only, s/t of s positions,
and gathers the rest again for the gradients of the weights (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2). That gather runs beside the products of the input's gradient, and the sum of that gradient
over the ranks beside the products of the weights' gradients. Shape letters: t = tensor ranks, b = batch,
s = sequence, d = hidden size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from kielo.models.blocks.joint_projection import JointProjection

_collectives = torch.ops._c10d_functional


class TensorAxis(NamedTuple):
    """The ranks that share a projection. along_sequence: each holds a part of the input, not all of it."""

    group_name: str
    ranks: int
    along_sequence: bool


def apply_projection(model: nn.Module) -> None:
    """Replaces each block's `project` by an `AccumulatingProjection`, in place.

    It leaves blocks with a matrix in FP8, which is torchao's module.
    """
    for block in list(model.modules()):
        linears = [child for child in block.children() if isinstance(child, nn.Linear)]
        if hasattr(block, "project") and all(type(linear) is nn.Linear for linear in linears):
            block.project = AccumulatingProjection()


class AccumulatingProjection(JointProjection):
    """Linears of one input whose gradient is added up in the products.

    axis: set where the linears' rows are split over tensor ranks. keeps_whole: the gathered input is kept
    until the backward and not gathered again, for a layer that is recomputed just before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axis: TensorAxis | None = None
        self.keeps_whole = False

    def split_over(self, axis: DeviceMesh, along_sequence: bool) -> None:
        self.axis = TensorAxis(axis.get_group().group_name, axis.size(), along_sequence)

    def forward(self, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        x_bsd = _local(x_bsd)
        if not torch.is_grad_enabled():
            return super().forward(_whole(x_bsd, self.axis), linears)
        weights = [_local(linear.weight) for linear in linears]
        biases = [None if linear.bias is None else _local(linear.bias) for linear in linears]
        return _Accumulated.apply(x_bsd, self.axis, self.keeps_whole, *weights, *biases)


class _Accumulated(torch.autograd.Function):
    """Products of one input with several matrices, and their biases: `apply(x, axis, keeps_whole, *both)`."""

    @staticmethod
    def forward(
        ctx: Any, x_bsd: Tensor, axis: TensorAxis | None, keeps_whole: bool, *both: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = both[: len(both) // 2], both[len(both) // 2 :]
        whole_bsd = _whole(x_bsd, axis)
        ctx.axis = axis
        ctx.are_tensors = True, False, False, *(tensor is not None for tensor in both)
        ctx.gathers_again = axis is not None and axis.along_sequence and not keeps_whole
        # Not a copy of the weights: FSDP2 frees them after the layer and gathers them in place again.
        ctx.save_for_backward(x_bsd if ctx.gathers_again else whole_bsd, *weights)
        return tuple(F.linear(whole_bsd, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept_bsd, *weights = ctx.saved_tensors
        axis, needs = ctx.axis, _needed_now(ctx)
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
            kept_bsd = _in_sequence_order(_collectives.wait_tensor(coming), axis.ranks)
        if needs[0] and axis is not None:
            summed = _start_summing(gradient_x, axis)
        inputs = kept_bsd.reshape(-1, kept_bsd.shape[-1])
        results = [row.t() @ inputs if is_needed else None for row, is_needed in zip(rows, of_weights)]
        results += [row.sum(0) if is_needed else None for row, is_needed in zip(rows, of_biases)]
        if needs[0] and axis is not None:
            gradient_x = _collectives.wait_tensor(summed)
        return gradient_x if needs[0] else None, None, None, *results


def _needed_now(ctx: Any) -> tuple[bool, ...]:
    """Returns which gradients this pass asks for.

    A schedule that splits the backward runs the node twice, for its input and then for its weights, where
    `ctx.needs_input_grad` says each time that it needs both.
    """
    if torch.compiler.is_compiling():  # always both
        return ctx.needs_input_grad
    nodes = iter(node for node, _ in ctx.next_functions)  # of the inputs that are tensors
    of_inputs = [next(nodes) if is_tensor else None for is_tensor in ctx.are_tensors]
    return tuple(is_needed and _runs(node) for is_needed, node in zip(ctx.needs_input_grad, of_inputs))


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not say it of a leaf whose gradient `torch.autograd.grad` was asked for
        return True


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(x_bsd: Tensor, axis: TensorAxis | None) -> Tensor:
    """Gathers the input along the sequence where ranks hold parts of it: [b, s/t, d] → [b, s, d]."""
    if axis is None or not axis.along_sequence:
        return x_bsd
    parts = _collectives.all_gather_into_tensor(x_bsd.contiguous(), axis.ranks, axis.group_name)
    return _in_sequence_order(_collectives.wait_tensor(parts), axis.ranks)


def _in_sequence_order(parts: Tensor, ranks: int) -> Tensor:
    """Joins the ranks' parts: [t·b, s/t, d] → [b, s, d]; no copy where b is 1."""
    if parts.shape[0] == ranks:
        # Not a transposition: its stride of the first dim makes torch multiply by bmm in place of mm, whose
        # results `recompute = "operators"` keeps.
        return parts.reshape(1, -1, parts.shape[-1])
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def _start_summing(gradient_bsd: Tensor, axis: TensorAxis) -> Tensor:
    """Starts the sum over the ranks; the result, to be waited for, is [b, s/t, d] where they hold parts."""
    if not axis.along_sequence:
        return _collectives.all_reduce(gradient_bsd, "sum", axis.group_name)
    by_rank = gradient_bsd.unflatten(1, (axis.ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _collectives.reduce_scatter_tensor(by_rank, "sum", axis.ranks, axis.group_name)


def _start_gathering_again(part_bsd: Tensor, gradient: Tensor, axis: TensorAxis) -> Tensor:
    """Starts an all-gather in the backward pass; the result, to be waited for, is [t·b, s/t, d]."""
    part_bsd = part_bsd.contiguous()
    if torch.compiler.is_compiling():
        return _gather_in_backward(part_bsd, gradient, axis.ranks, axis.group_name)
    return _collectives.all_gather_into_tensor(part_bsd, axis.ranks, axis.group_name)


@torch.library.custom_op("kielo::gather_in_backward", mutates_args=())
def _gather_in_backward(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    """Starts an all-gather of `part`. `gradient` is not read: it keeps the gather in the backward.

    Otherwise a compiler would take it for the forward's gather and keep that one's result.
    """
    return _collectives.all_gather_into_tensor(part, ranks, group_name)


@_gather_in_backward.register_fake
def _(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    return part.new_empty(ranks * part.shape[0], *part.shape[1:])

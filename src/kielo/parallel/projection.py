"""Matrix products of tensor ranks as nodes of autograd: projections before, and rows after them.

Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198. Shape letters: t = tensor
ranks, b = batch, s = sequence, f = features of the whole input, d = hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kielo.models.blocks.joint_projection import JointProjection
from kielo.parallel.tensor_collectives import (
    TensorAxis,
    gather,
    gather_and_multiply,
    in_sequence_order,
    multiply_and_sum,
    needed_now,
    own_part,
    start_gather,
    start_sum,
    wait,
)


def apply_projection(model: nn.Module) -> None:
    """Replace each block's joint projections by `AccumulatingProjection`s in place, but not beside FP8."""
    for block in list(model.modules()):
        linears = [child for child in block.children() if isinstance(child, nn.Linear)]
        if all(type(linear) is nn.Linear for linear in linears):
            for name, child in list(block.named_children()):
                if type(child) is JointProjection:
                    setattr(block, name, AccumulatingProjection())


class AccumulatingProjection(JointProjection):
    """Queries, keys and values, or gate and up, as one node of autograd: their input is kept and sent once.

    Gradients of the input are added up inside the matrix products (`addmm_`). The products stay separate,
    because joining their matrices costs more than it gives (benchmarks/results/speed.md).

    With sequence parallelism each rank keeps its part of the input only, and gathers the rest again for the
    gradients of the weights (Korthikanti et al. 2022, section 4.2.2), beside the products of the input's
    gradient, which is summed over the ranks beside the products of the weights' gradients.

    axis: set if the linears' rows are split over tensor ranks. keeps_whole: keep the gathered input until the
    backward, for a layer that is recomputed just before.
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
    """`apply(x, axis, keeps_whole, *weights, *biases)`: products of one input with several matrices."""

    @staticmethod
    def forward(
        ctx: Any, x_bsd: Tensor, axis: TensorAxis | None, keeps_whole: bool, *both: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = both[: len(both) // 2], both[len(both) // 2 :]
        ctx.axis = axis
        ctx.are_tensors = True, False, False, *(tensor is not None for tensor in both)
        ctx.gathers_again = axis is not None and axis.along_sequence and not keeps_whole
        results, whole_bsd = gather_and_multiply(x_bsd, weights, biases, axis, not ctx.gathers_again)
        # The weights without a copy: FSDP2 frees them after the layer and gathers them in place again.
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
    """Start an all-gather in the backward pass; the result, after a wait, is [t·b, s/t, d]."""
    if torch.compiler.is_compiling():
        return _gather_in_backward(part_bsd.contiguous(), gradient, axis.ranks, axis.group_name)
    return start_gather(part_bsd, axis)


@torch.library.custom_op("kielo::gather_in_backward", mutates_args=())
def _gather_in_backward(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-gather; `gradient` keeps a compiler from taking it for the forward's gather."""
    return torch.ops._c10d_functional.all_gather_into_tensor(part, ranks, group_name)


@_gather_in_backward.register_fake
def _(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    return part.new_empty(ranks * part.shape[0], *part.shape[1:])


class RowSplitLinear(nn.Linear):
    """A linear whose input features are split over tensor ranks: [b, s, f/t] → [b, s/t, d], summed.

    Without sequence parallelism the result is [b, s, d] on every rank. The bias is added after the sum. The
    backward gathers the gradient once. `split_rows` makes it of a linear. is_one_operator: product and sum
    are one operator, `SUMMED_PRODUCT`, whose result selective checkpointing can keep.
    """

    axis: TensorAxis
    is_one_operator: bool

    def forward(self, x_bsf: Tensor) -> Tensor:
        weight = own_part(self.weight)
        bias = None if self.bias is None else own_part(self.bias)
        return _SummedProduct.apply(x_bsf, weight, bias, self.axis, self.is_one_operator)


def split_rows(linear: nn.Linear, mesh: DeviceMesh, axis: TensorAxis) -> None:
    """Make a `RowSplitLinear` of `linear`, in place: the weight is split by columns, the bias is whole."""
    weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [Shard(1)]), linear.weight.requires_grad)
    linear.register_parameter("weight", weight)
    if linear.bias is not None:
        bias = nn.Parameter(distribute_tensor(linear.bias, mesh, [Replicate()]), linear.bias.requires_grad)
        linear.register_parameter("bias", bias)
    # Change its class, not its forward, because compiled layers share code only if their parts are alike.
    made: Any = linear
    made.__class__ = RowSplitLinear
    made.axis, made.is_one_operator = axis, False


class _SummedProduct(torch.autograd.Function):
    """Product, sum and bias as one node, for collectives in chunks, and for `SUMMED_PRODUCT`."""

    @staticmethod
    def forward(
        ctx: Any, x_bsf: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, is_one_operator: bool
    ) -> Tensor:
        ctx.axis, ctx.whole_gradient = axis, None
        ctx.are_tensors = True, True, bias is not None, False, False
        ctx.save_for_backward(weight, x_bsf if ctx.needs_input_grad[1] else None)
        summed = (SUMMED_PRODUCT if is_one_operator else summed_product)(x_bsf, weight, *axis)
        return summed if bias is None else summed + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, x_bsf = ctx.saved_tensors
        needs = needed_now(ctx)
        gradient_x, whole = None, ctx.whole_gradient
        wants_whole = any(ctx.needs_input_grad[1:3])
        if needs[0]:
            (gradient_x,), whole = gather_and_multiply(gradient, [weight.t()], [None], ctx.axis, wants_whole)
        elif whole is None:
            whole = gather(gradient, ctx.axis)
        # Gradients of the weights may be asked for in a pass of their own.
        ctx.whole_gradient = None if needs[1] or needs[2] else whole
        of_weight = _rows(whole).t() @ _rows(x_bsf) if needs[1] else None
        of_bias = _rows(whole).sum(0) if needs[2] else None
        return gradient_x, of_weight, of_bias, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def summed_product(
    x: Tensor, weight: Tensor, group_name: str, ranks: int, along_sequence: bool, chunks: int
) -> Tensor:
    """Multiply [b, s, f/t] with a weight [d, f/t] and sum; the axis is given by its fields."""
    return multiply_and_sum(x, weight, TensorAxis(group_name, ranks, along_sequence, chunks))


SUMMED_PRODUCT = torch.library.custom_op("kielo::summed_product", summed_product, mutates_args=())


@SUMMED_PRODUCT.register_fake
def _(x: Tensor, weight: Tensor, group_name: str, ranks: int, along_sequence: bool, chunks: int) -> Tensor:
    length = x.shape[1] // ranks if along_sequence else x.shape[1]
    return x.new_empty(x.shape[0], length, weight.shape[0])

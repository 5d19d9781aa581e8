"""The row-split matrix of a tensor-parallel pair as one node of autograd: attention's output, an MLP's last.

Each rank has some of the matrix's columns and of the input's features, so that products are partial sums,
which are summed over the ranks and, with sequence parallelism, scattered along the sequence. The bias is
added after the sum. In the backward the gradient is gathered once, for the input's and for the weight's
(Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198). Where nothing is chunked
or joined torch's own style does it. Shape letters: t = tensor ranks, b = batch, s = sequence, f = features of
the whole input, d = hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kielo.parallel.tensor_collectives import (
    TensorAxis,
    gather,
    gather_and_multiply,
    multiply_and_sum,
    needed_now,
    own_part,
)


class RowSplitLinear(nn.Linear):
    """A linear whose input features are split over tensor ranks: [b, s, f/t] → [b, s/t, d], summed.

    Without sequence parallelism the result is [b, s, d] on every rank. Made of a linear by `split_rows`.
    is_one_operator: product and sum are one operator, `SUMMED_PRODUCT`, so that selective checkpointing can
    keep the sum in place of the partial sums.
    """

    axis: TensorAxis
    is_one_operator: bool

    def forward(self, x_bsf: Tensor) -> Tensor:
        weight = own_part(self.weight)
        bias = None if self.bias is None else own_part(self.bias)
        return _SummedProduct.apply(x_bsf, weight, bias, self.axis, self.is_one_operator)


def split_rows(linear: nn.Linear, mesh: DeviceMesh, axis: TensorAxis) -> None:
    """Makes a `RowSplitLinear` of `linear`, in place: the weight is split by columns, the bias is whole."""
    weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [Shard(1)]), linear.weight.requires_grad)
    linear.register_parameter("weight", weight)
    if linear.bias is not None:
        bias = nn.Parameter(distribute_tensor(linear.bias, mesh, [Replicate()]), linear.bias.requires_grad)
        linear.register_parameter("bias", bias)
    # Its class, and not its forward, because compiled layers share their code only if their parts do.
    linear.__class__ = RowSplitLinear
    linear.axis, linear.is_one_operator = axis, False


class _SummedProduct(torch.autograd.Function):
    """Product, sum and bias as one node, for collectives in chunks, and for `SUMMED_PRODUCT`."""

    @staticmethod
    def forward(
        ctx: Any, x_bsf: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, is_one_operator: bool
    ) -> Tensor:
        ctx.axis, ctx.whole_gradient = axis, None
        ctx.are_tensors = True, True, bias is not None, False, False
        ctx.save_for_backward(weight, x_bsf if ctx.needs_input_grad[1] else None)
        return _with_bias((SUMMED_PRODUCT if is_one_operator else summed_product)(x_bsf, weight, *axis), bias)

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


def _with_bias(summed: Tensor, bias: Tensor | None) -> Tensor:
    return summed if bias is None else summed + bias


def summed_product(
    x: Tensor, weight: Tensor, group_name: str, ranks: int, along_sequence: bool, chunks: int
) -> Tensor:
    """Multiplies [b, s, f/t] with a weight [d, f/t] and sums; the axis is given by its fields."""
    return multiply_and_sum(x, weight, TensorAxis(group_name, ranks, along_sequence, chunks))


SUMMED_PRODUCT = torch.library.custom_op("kielo::summed_product", summed_product, mutates_args=())


@SUMMED_PRODUCT.register_fake
def _(x: Tensor, weight: Tensor, group_name: str, ranks: int, along_sequence: bool, chunks: int) -> Tensor:
    length = x.shape[1] // ranks if along_sequence else x.shape[1]
    return x.new_empty(x.shape[0], length, weight.shape[0])

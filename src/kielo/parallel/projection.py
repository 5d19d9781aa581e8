"""Matrix products of tensor ranks as nodes of autograd, and the gathers and sums between the ranks.

Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198. With sequence parallelism a
rank's part of the sequence is gathered before a column-split matrix, and in the backward of a row-split
matrix, after which partial sums are summed and scattered. In chunks (`layout.tensor_overlap`) the collective
of a chunk runs during the product of the chunk beside it, with the same numbers in the same order (the idea
of Wang et al. 2023, doi:10.1145/3567955.3567959). Shape letters: t = tensor ranks, b = batch, s = sequence, d
= hidden size or features of a part, f = features of the whole.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from kielo.models.blocks.mlp import JointProjection

_collectives = torch.ops._c10d_functional
wait = _collectives.wait_tensor


class TensorAxis(NamedTuple):
    """The ranks that share a product. along_sequence: each has a part of the sequence, in `chunks`."""

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
    pieces = part_bsd.tensor_split(_chunks(part_bsd.shape[1], axis), dim=1)
    coming: Iterable[Tensor] = (start_gather(piece, axis) for piece in pieces)
    if part_bsd.is_cuda:
        coming = list(coming)  # all start now
    # On gloo each starts when it is taken, because two at a time write outside of their memory (torch 2.13).
    gathered = []
    results: list[list[Tensor]] = [[] for _ in matrices]
    for piece in coming:
        rows = wait(piece)  # [t·b, s/(t·chunks), d]
        gathered += [rows] if keeps_whole else []
        for one, product in zip(results, _products(rows, matrices, biases), strict=True):
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
    """Start an all-gather of [b, s/t, d]. The result, after `wait`, is [t·b, s/t, d]."""
    return _collectives.all_gather_into_tensor(part_bsd.contiguous(), axis.ranks, axis.group_name)


def start_sum(x_bsd: Tensor, axis: TensorAxis) -> Tensor:
    """Start the sum over the ranks. The result, after `wait`, is [b, s/t, d] if ranks hold parts."""
    if not axis.along_sequence:
        return _collectives.all_reduce(x_bsd, "sum", axis.group_name)
    by_rank = x_bsd.unflatten(1, (axis.ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _collectives.reduce_scatter_tensor(by_rank, "sum", axis.ranks, axis.group_name)


def in_sequence_order(parts: Tensor, ranks: int) -> Tensor:
    """Join the ranks' parts: [t·b, s/t, d] → [b, s, d], without a copy if b is 1."""
    if parts.shape[0] == ranks:
        # Not a transposition: by its stride of the first dim torch would multiply by bmm and not by mm, whose
        # results `recompute = "operators"` keeps.
        return parts.reshape(1, -1, parts.shape[-1])
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def needed_now(ctx: Any) -> tuple[bool, ...]:
    """Return which gradients this pass asks for. `ctx.are_tensors` marks the inputs that are tensors.

    A schedule that splits the backward runs the node twice, for its input and then for its weights, but
    `ctx.needs_input_grad` is True for both each time.
    """
    if torch.compiler.is_compiling():  # always both
        return ctx.needs_input_grad
    nodes = iter(node for node, _ in ctx.next_functions)  # of the inputs that are tensors
    of_inputs = [next(nodes) if is_tensor else None for is_tensor in ctx.are_tensors]
    return tuple(
        is_needed and _runs(node) for is_needed, node in zip(ctx.needs_input_grad, of_inputs, strict=False)
    )


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot say it of a leaf that `torch.autograd.grad` was asked for
        return True


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, with its gradients. A plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply as F.linear does, by an operator that stays itself inside of another operator."""
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix.t()).unflatten(0, x.shape[:-1])


def _products(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]


def _chunks(length: int, axis: TensorAxis) -> int:
    return min(axis.chunks, length)


def _join(pieces: Sequence[Tensor], ranks: int) -> Tensor:
    """Join chunks of all ranks' parts, each [t·b, s/(t·chunks), d], to [b, s, d], in one copy."""
    by_rank = [piece.unflatten(0, (ranks, -1)).transpose(0, 1) for piece in pieces]
    return torch.cat(by_rank, dim=2).flatten(1, 2)


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
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                gradient_x.addmm_(row, weight)
            gradient_x = gradient_x.view(*shape, -1)
        if gathers_again:
            kept_bsd = in_sequence_order(wait(coming), axis.ranks)
        if needs[0] and axis is not None:
            summed = start_sum(gradient_x, axis)
        inputs = kept_bsd.reshape(-1, kept_bsd.shape[-1])
        results = [
            row.t() @ inputs if is_needed else None for row, is_needed in zip(rows, of_weights, strict=True)
        ]
        results += [row.sum(0) if is_needed else None for row, is_needed in zip(rows, of_biases, strict=True)]
        if needs[0] and axis is not None:
            gradient_x = wait(summed)
        return gradient_x if needs[0] else None, None, None, *results


def _start_gathering_again(part_bsd: Tensor, gradient: Tensor, axis: TensorAxis) -> Tensor:
    """Start an all-gather in the backward pass. The result, after a wait, is [t·b, s/t, d]."""
    if torch.compiler.is_compiling():
        return _gather_in_backward(part_bsd.contiguous(), gradient, axis.ranks, axis.group_name)
    return start_gather(part_bsd, axis)


@torch.library.custom_op("kielo::gather_in_backward", mutates_args=())
def _gather_in_backward(part: Tensor, gradient: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start an all-gather. `gradient` keeps a compiler from taking it for the forward's gather."""
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
    """Multiply [b, s, f/t] with a weight [d, f/t] and sum. The axis is given by its fields."""
    return multiply_and_sum(x, weight, TensorAxis(group_name, ranks, along_sequence, chunks))


SUMMED_PRODUCT = torch.library.custom_op("kielo::summed_product", summed_product, mutates_args=())


@SUMMED_PRODUCT.register_fake
def _(x: Tensor, weight: Tensor, group_name: str, ranks: int, along_sequence: bool, chunks: int) -> Tensor:
    length = x.shape[1] // ranks if along_sequence else x.shape[1]
    return x.new_empty(x.shape[0], length, weight.shape[0])

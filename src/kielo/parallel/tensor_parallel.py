"""Tensor and sequence parallelism: matrices are split over the `tensor` axis, activations along the sequence.

Shoeybi et al. 2019 (arXiv:1909.08053) with the sequence parallelism of Korthikanti et al. 2022
(arXiv:2205.05198), which is optional: it has the same traffic and divides the activations. The family's
`tables.py` names a style for each module. Here each style becomes a parallel style of torch.

Shape letters: t = tensor ranks, b = batch, s = sequence, d = hidden size, f = features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from kielo.models import families
from kielo.models.blocks.alibi import Alibi
from kielo.models.blocks.decoder import Decoder, Head
from kielo.models.blocks.norm import LayerNorm
from kielo.models.parameter_shapes import style_of
from kielo.parallel.mesh import Mesh
from kielo.parallel.projection import (
    AccumulatingProjection,
    TensorAxis,
    own_part,
    split_rows,
    start_sum,
    wait,
)
from kielo.recipe.sections import Layout
from kielo.resolve.stages import chunks_of

Kind = TypeVar("Kind", bound=nn.Module)


def _checked(module: nn.Module, kind: type[Kind]) -> Kind:
    if not isinstance(module, kind):
        raise TypeError(f"a {type(module).__name__} is not split as a {kind.__name__} is")
    return module


class OwnStyle(parallel.ParallelStyle):
    """A style of torch that changes a module by `change(module, axis)`."""

    def __init__(self, change: Callable[[nn.Module, DeviceMesh], object]) -> None:
        super().__init__()
        self.change = change

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        self.change(module, axis)
        return module


def split_embedding(output: Placement, module: nn.Module, axis: DeviceMesh) -> None:
    """Split a vocabulary's embedding, whose rows divide by the ranks: each has rows r·v/t up to (r + 1)·v/t.

    Each rank looks up the tokens of its rows, writes zeros for all others, and the results are summed,
    exactly (Shoeybi et al. 2019, section 3). torch's `RowwiseParallel` would give each rank the gradient of
    the whole vocabulary. output: placement of the hidden states, of which each rank gets its part as a plain
    tensor.
    """
    distribute_module(module, axis, _split_parameters)
    module.forward = partial(_look_up, _checked(module, nn.Embedding), axis, output)


def _split_parameters(_: str, module: nn.Module, axis: DeviceMesh) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, axis, [Shard(0)])))


def _look_up(embedding: nn.Embedding, axis: DeviceMesh, output: Placement, ids_bs: Tensor) -> Tensor:
    # Read at each call: FSDP2 replaces the parameter by the gathered one.
    rows_vd = own_part(embedding.weight)
    row_bs = ids_bs - axis.get_local_rank() * rows_vd.shape[0]
    is_elsewhere_bs = (row_bs < 0) | (row_bs >= rows_vd.shape[0])
    x_bsd = F.embedding(row_bs.masked_fill_(is_elsewhere_bs, 0), rows_vd)
    # This also zeroes the gradient that row 0 would get from the tokens of other ranks.
    x_bsd = x_bsd.masked_fill_(is_elsewhere_bs[..., None], 0)
    summed = DTensor.from_local(x_bsd, axis, [Partial()], run_check=False)
    return summed.redistribute(placements=[output]).to_local()


def split_norm(x: Tensor, epsilon: float, axis: TensorAxis) -> Tensor:
    """Norm features that tensor ranks share, x [..., f/t], by mean and variance of all features, in fp32."""
    return _SplitNorm.apply(x, epsilon, axis._replace(along_sequence=False))


class _SplitNorm(torch.autograd.Function):
    """`apply(x, epsilon, axis)`. It keeps its input and two fp32 numbers a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, axis: TensorAxis) -> Tensor:
        mean = _mean(x.float(), axis)
        centred = x.float() - mean
        scale = torch.rsqrt(_mean(centred.square(), axis) + epsilon)
        ctx.save_for_backward(x, mean, scale)
        ctx.axis = axis
        return (centred * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, mean, scale = ctx.saved_tensors
        normed, gradient = (x.float() - mean) * scale, gradient.float()
        means = _mean(torch.stack((gradient, gradient * normed)), ctx.axis)
        return ((gradient - means[0] - normed * means[1]) * scale).to(x.dtype), None, None


def _mean(x: Tensor, axis: TensorAxis) -> Tensor:
    total = wait(start_sum(x.sum(-1, keepdim=True), axis))
    return total / (x.shape[-1] * axis.ranks)


SEQUENCE_DIM = 1  # of activations [b, s, d]
ALONG_SEQUENCE = ("sequence", "residual", "whole", "positions")


def apply_tensor_parallel(model: Decoder, mesh: Mesh, layout: Layout) -> None:
    """Split the parameters of `model` (best on meta) in place by its family's tensor-parallel plan.

    Inputs stay whole token ids. The hidden states that come out are split along the sequence, or whole on
    every rank without sequence parallelism. `head.weight` holds this rank's rows of the vocabulary.
    `resolve/rules.py` has checked the sizes.
    """
    if layout.tensor == 1:
        return
    plan = families.module(model.config.model_type, "tables").TENSOR_PARALLEL_PLAN
    mesh_axis = mesh.of_parameters("tensor")
    chunks = chunks_of(layout)
    axis = TensorAxis(mesh_axis.get_group().group_name, layout.tensor, layout.sequence_parallel, chunks)
    styles = {}
    for name, module in model.named_modules():
        style = style_of(plan, name)
        if style == "row" and type(module) is nn.Linear and _joins_sums(layout):
            style = "summed row"
        # Without sequence parallelism every rank computes the others whole, from the same numbers.
        if style is not None and (style not in ALONG_SEQUENCE or layout.sequence_parallel):
            styles[name] = _torch_style(style, module, axis)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallel.parallelize_module(model, mesh_axis, styles)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)  # torch's styles make parameters that are trained
    noise, rank = model.make_noise, mesh_axis.get_local_rank()
    own_heads = len(noise.heads) // layout.tensor
    noise.heads = noise.heads[rank * own_heads : (rank + 1) * own_heads]
    if layout.sequence_parallel:
        noise.part, noise.parts = rank, layout.tensor
    model.tie()  # embedding and head each got a tensor of their own


def _joins_sums(layout: Layout) -> bool:
    """Return True if the sum over ranks belongs to the product, which recomputed layers would repeat."""
    return layout.recompute == "operators" or (
        layout.tensor_overlap == "chunked" and layout.recompute != "full"
    )


def _torch_style(style: str, module: nn.Module, axis: TensorAxis) -> parallel.ParallelStyle:
    # of activations outside of the split matrices
    between = Shard(SEQUENCE_DIM) if axis.along_sequence else Replicate()
    if style == "column" and not isinstance(module, Head):
        return parallel.ColwiseParallel()
    if style == "row":
        return parallel.RowwiseParallel(output_layouts=between)
    if style in ("sequence", "residual"):
        return parallel.SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=style == "residual")
    if style == "gather" and not isinstance(module, AccumulatingProjection):
        # As a DTensor, so that the gradients of all matrices are added up before they are sent, once.
        return parallel.PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None), use_local_output=False
        )
    changes: dict[str, Callable[[nn.Module, DeviceMesh], object]] = {
        "vocabulary": partial(split_embedding, between),
        # The loss computes with this rank's rows of the head, and sends what the ranks exchange.
        "column": partial(distribute_module, partition_fn=_split_parameters),
        "summed row": lambda linear, mesh: split_rows(_checked(linear, nn.Linear), mesh, axis),
        "gather": partial(_split_projection, axis),
        "whole_input": partial(_split_projection, axis._replace(along_sequence=False)),
        "features": partial(_split_features, axis),
        "positions": _split_positions,
        # [b, s, h/t, k] on a rank: the weight is whole, gradients are summed.
        "each_head": partial(distribute_module, input_fn=_split_along_heads, output_fn=_to_local),
        # [b, s, hk/t] on a rank: the weight is split as the heads, the mean is global.
        "all_heads": partial(
            distribute_module,
            partition_fn=_split_parameters,
            input_fn=_split_along_heads,
            output_fn=_to_local,
        ),
        "slopes": _split_slopes,
        "whole": _keep_whole,
        "position_heads": _split_position_heads,
    }
    return OwnStyle(changes[style])


def _split_projection(axis: TensorAxis, module: nn.Module, _: DeviceMesh) -> None:
    """Let linears of one input, each split in rows, send input and gradient themselves."""
    _checked(module, AccumulatingProjection).axis = axis


def _split_features(axis: TensorAxis, module: nn.Module, _: DeviceMesh) -> None:
    """Norm features of which each rank has a part, without weights: [b, s, f/t]."""
    norm = _checked(module, LayerNorm)
    if norm.elementwise_affine:
        raise ValueError("a norm of split features has weights, which would have to be split too")
    module.forward = partial(split_norm, epsilon=norm.epsilon, axis=axis)


def _keep_whole(module: nn.Module, axis: DeviceMesh) -> None:
    """Multiply this rank's part of the sequence by a whole weight, whose gradient is summed."""
    distribute_module(module, axis)
    module.forward = partial(_with_whole_weight, _checked(module, nn.Linear))


def _with_whole_weight(linear: nn.Linear, x_bsd: Tensor) -> Tensor:
    # Plain tensors: a DTensor that is split along the sequence would be gathered to be multiplied.
    bias = None if linear.bias is None else _whole(linear.bias)
    return F.linear(own_part(x_bsd), _whole(linear.weight), bias)


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()])


def _split_position_heads(module: nn.Module, axis: DeviceMesh) -> None:
    """Keep the relative positions of this rank's heads, which other ranks' matrices may make."""
    if module.is_interleaved:
        module.forward = partial(_own_position_heads, module.forward, axis)


def _own_position_heads(
    cut_into_heads: Callable[..., tuple[Tensor, Tensor]], axis: DeviceMesh, *positions: Tensor
) -> tuple[Tensor, ...]:
    whole = [
        DTensor.from_local(part_rd, axis, [Shard(1)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local(grad_placements=[Partial()])
        for part_rd in positions
    ]
    return tuple(heads.chunk(axis.size())[axis.get_local_rank()] for heads in cut_into_heads(*whole))


def _split_positions(module: nn.Module, axis: DeviceMesh) -> None:
    """Read the rows of this rank's part of the sequence from a whole embedding: [1, s] → [1, s/t, d]."""

    def part(_: nn.Module, inputs: tuple, axis: DeviceMesh) -> Any:
        whole = DTensor.from_local(inputs[0], axis, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(SEQUENCE_DIM)])

    distribute_module(module, axis, None, part, _to_local)


def _split_slopes(module: nn.Module, axis: DeviceMesh) -> None:
    alibi = _checked(module, Alibi)
    alibi.num_heads = alibi.total_heads // axis.size()
    alibi.first_head = alibi.num_heads * axis.get_local_rank()
    alibi.reset_buffers(alibi.slopes.device)


# torch says that such functions return None, but uses the result.
def _split_along_heads(_: nn.Module, inputs: tuple, axis: DeviceMesh) -> Any:
    return DTensor.from_local(inputs[0], axis, [Shard(2)], run_check=False)


def _to_local(_: nn.Module, output: DTensor, axis: DeviceMesh) -> Any:
    return output.to_local()


def gather_sequence(x_bsd: Tensor, axis: DeviceMesh, is_split: bool) -> Tensor:
    """Gather the output of `model` from the ranks of the tensor axis: [b, s, d], a plain tensor on each.

    is_split: each rank has a part of the sequence. Backward: one collective sums the ranks' gradients.
    """
    if not isinstance(x_bsd, DTensor):
        placement = Shard(SEQUENCE_DIM) if is_split else Replicate()
        x_bsd = DTensor.from_local(x_bsd, axis, [placement], run_check=False)
    return x_bsd.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

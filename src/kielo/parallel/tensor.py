"""Tensor and sequence parallelism: matrices split over the `tensor` axis, everything between them along the
sequence.

Shoeybi et al. 2019 (arXiv:1909.08053) with the sequence parallelism of Korthikanti et al. 2022
(arXiv:2205.05198), which can be left out: it costs the same traffic and divides the activations. Which module
lies how is a word in the family's `layout.py`; here each word becomes one of torch's own parallel styles.
"""

import inspect
from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from kielo.models import families
from kielo.parallel.mesh import Mesh
from kielo.recipe.sections import Layout

SEQUENCE_DIM = 1  # of activations [b, s, d]
ALONG_SEQUENCE = ("sequence", "residual", "positions")


def lay_tensor(model: nn.Module, mesh: Mesh, layout: Layout) -> None:
    """Split the parameters of `model` (best on meta) in place by its family's table; nothing on one tensor
    rank.

    Inputs stay whole token ids. The hidden states that come out are a DTensor split along the sequence, or
    whole on every rank without sequence parallelism; `head.weight` holds this rank's rows of the vocabulary.
    Sizes were checked by `resolve/layout_check.py`.
    """
    if layout.tensor == 1:
        return
    table = families.module(model.config.model_type, "layout").TENSOR_AXIS
    between = Shard(SEQUENCE_DIM) if layout.sequence_parallel else Replicate()
    styles = {}
    for name, module in model.named_modules():
        word = _word(table, name)
        # Without sequence parallelism every rank computes these whole, from the same numbers.
        if word is not None and (word not in ALONG_SEQUENCE or layout.sequence_parallel):
            styles[name] = _style(word, module, between)
    parallelize_module(model, mesh.parameters["tensor"], styles)
    model.tie()  # each of the two got a tensor of its own


def _word(table: dict[str, str], name: str) -> str | None:
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    return table.get(".".join(parts))


def _style(word: str, module: nn.Module, between: DTensorPlacement) -> ParallelStyle:
    """`between`: how activations lie outside of the split matrices."""
    if word == "vocabulary":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if word == "column":
        return ColwiseParallel()
    if word == "row":
        return RowwiseParallel(output_layouts=between)
    if word in ("sequence", "residual"):
        return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=word == "residual")
    if word in _OWN_STYLES:
        return _OWN_STYLES[word]()
    if word == "gather":
        others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
        # As a DTensor, so that the gradients of all matrices inside are added up before they are sent, once.
        return PrepareModuleInput(
            input_layouts=(between, *others),
            desired_input_layouts=(Replicate(), *others),
            use_local_output=False,
        )
    raise ValueError(f"{word!r} is no word of a layout table")


class PositionTable(ParallelStyle):
    """A whole table of vectors, looked up by each rank for its part of the sequence: [1, s] ids → [1, s/t,
    d].
    """

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        def part(_: nn.Module, inputs: tuple, axis: DeviceMesh) -> DTensor:
            whole = DTensor.from_local(inputs[0], axis, [Replicate()], run_check=False)
            return whole.redistribute(placements=[Shard(SEQUENCE_DIM)])

        return distribute_module(module, axis, None, part, _to_local)


class EachHead(ParallelStyle):
    """A norm of each head by itself, [b, s, h/t, k] on a rank: the weight is whole, its gradients
    are summed.
    """

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        return distribute_module(module, axis, None, _split_along(2), _to_local)


class AllHeads(ParallelStyle):
    """A norm over all heads together, [b, s, hk/t] on a rank: weights go with their heads, the mean is over
    all ranks.
    """

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        def split(_: str, norm: nn.Module, axis: DeviceMesh) -> None:
            for name, parameter in norm.named_parameters(recurse=False):
                norm.register_parameter(name, nn.Parameter(distribute_tensor(parameter, axis, [Shard(0)])))

        return distribute_module(module, axis, split, _split_along(2), _to_local)


class OwnHeads(ParallelStyle):
    """ALiBi slopes of the heads that a rank has."""

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        module.num_heads = module.total_heads // axis.size()
        module.first_head = module.num_heads * axis.get_local_rank()
        module.reset_buffers(module.slopes.device)
        return module


_OWN_STYLES = {"positions": PositionTable, "each_head": EachHead, "all_heads": AllHeads, "slopes": OwnHeads}


def _split_along(dim: int) -> Callable[[nn.Module, tuple, DeviceMesh], DTensor]:
    return lambda _, inputs, axis: DTensor.from_local(inputs[0], axis, [Shard(dim)], run_check=False)


def _to_local(_: nn.Module, output: DTensor, axis: DeviceMesh) -> Tensor:
    return output.to_local()


def gather_sequence(x_bsd: Tensor, axis: DeviceMesh) -> Tensor:
    """What `model` returned on the ranks of the tensor axis, whole [b, s, d] and a plain tensor on each.

    Backward: each rank's gradient is its own vocabulary's part; they are summed in one collective.
    """
    if not isinstance(x_bsd, DTensor):
        x_bsd = DTensor.from_local(x_bsd, axis, [Replicate()], run_check=False)
    return x_bsd.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

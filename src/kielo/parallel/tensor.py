"""Tensor and sequence parallelism: matrices split over the `tensor` axis, everything between them along the sequence.

Shoeybi et al. 2019 (arXiv:1909.08053) with the sequence parallelism of Korthikanti et al. 2022 (arXiv:2205.05198),
which can be left out: it costs the same traffic and divides the activations. Which module lies how is a word in the
family's `layout.py`; here each word becomes one of torch's own parallel styles.
"""

import inspect
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
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

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement

SEQUENCE_DIM = 1  # of activations [b, s, d]


def lay_tensor(model: nn.Module, mesh: Mesh, placement: "Placement") -> None:
    """Split the parameters of `model` (best on meta) in place by its family's table; nothing on one tensor rank.

    Inputs stay whole token ids. The hidden states that come out are a DTensor split along the sequence, or whole on
    every rank without sequence parallelism; `head.weight` holds this rank's rows of the vocabulary. Sizes were
    checked by `plan/layout_check.py`.
    """
    if placement.tensor == 1:
        return
    table = families.module(model.config.model_type, "layout").TENSOR_AXIS
    between = Shard(SEQUENCE_DIM) if placement.sequence_parallel else Replicate()
    styles = {}
    for name, module in model.named_modules():
        word = _word(table, name)
        # Without sequence parallelism every rank computes the whole norms, from the same numbers.
        if word is not None and (word != "sequence" or placement.sequence_parallel):
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
    if word == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE_DIM)
    if word == "gather":
        others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
        # As a DTensor, so that the gradients of all matrices inside are added up before they are sent, once.
        return PrepareModuleInput(
            input_layouts=(between, *others), desired_input_layouts=(Replicate(), *others), use_local_output=False
        )
    raise ValueError(f"{word!r} is no word of a layout table")


def gather_sequence(x_bsd: Tensor, axis: DeviceMesh) -> Tensor:
    """What `model` returned on the ranks of the tensor axis, whole [b, s, d] and a plain tensor on each.

    Backward: each rank's gradient is its own vocabulary's part; they are summed in one collective.
    """
    if not isinstance(x_bsd, DTensor):
        x_bsd = DTensor.from_local(x_bsd, axis, [Replicate()], run_check=False)
    return x_bsd.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

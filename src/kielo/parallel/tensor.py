"""Tensor and sequence parallelism: matrices split over the `tensor` axis, everything between them along the sequence.

Shoeybi et al. 2019 (arXiv:1909.08053) with the sequence parallelism of Korthikanti et al. 2022 (arXiv:2205.05198),
which always comes with it: it costs the same traffic and divides the activations. Which module lies how is a word
in the family's `layout.py`; here each word becomes one of torch's own parallel styles.
"""

import inspect
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from kielo.models import families
from kielo.parallel.mesh import Mesh

if TYPE_CHECKING:
    from kielo.plan.resolved import Placement

SEQUENCE_DIM = 1  # of activations [b, s, d]


def lay_tensor(model: nn.Module, mesh: Mesh, placement: "Placement") -> None:
    """Split the parameters of `model` (best on meta) in place by its family's table; nothing on one tensor rank.

    Inputs stay whole token ids; the hidden states that come out are a DTensor split along the sequence, [b, s/t, d],
    and `head.weight` holds this rank's rows of the vocabulary. Sizes were checked by `plan/layout_check.py`.
    """
    if placement.tensor == 1:
        return
    table = families.module(model.config.model_type, "layout").TENSOR_AXIS
    modules = dict(model.named_modules())
    words = {name: word for name in modules if (word := _word(table, name)) is not None}
    styles = {name: _style(word, modules[name]) for name, word in words.items()}
    parallelize_module(model, mesh.parameters["tensor"], styles)
    model.tie()  # each of the two got a tensor of its own


def _word(table: dict[str, str], name: str) -> str | None:
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    return table.get(".".join(parts))


def _style(word: str, module: nn.Module) -> ParallelStyle:
    along_sequence = Shard(SEQUENCE_DIM)
    if word == "vocabulary":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=along_sequence)
    if word == "column":
        return ColwiseParallel()
    if word == "row":
        return RowwiseParallel(output_layouts=along_sequence)
    if word == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE_DIM)
    if word == "gather":
        others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
        return PrepareModuleInput(
            input_layouts=(along_sequence, *others),
            desired_input_layouts=(Replicate(), *others),
            use_local_output=True,
        )
    raise ValueError(f"{word!r} is no word of a layout table")


def gather_sequence(x_bsd: Tensor) -> Tensor:
    """What `model` returned, [b, s/t, d] on each rank, as a plain tensor [b, s, d] on all; a plain one stays as it is.

    Backward: each rank's gradient is its own vocabulary's part; they are summed and scattered in one collective.
    """
    if not isinstance(x_bsd, DTensor):
        return x_bsd
    return x_bsd.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

"""Bytes that a rank of Kielo holds between steps: parameters, gradients and optimiser state; arithmetic, no
torch.

They follow from the shapes of the parameters, the words of the family's layout table and the placement. They
are exact: `kielo rehearse` measures the same numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from kielo.models.families import module
from kielo.models.parameter_shapes import parameter_shapes
from kielo.models.tensor_parallel_styles import style_of
from kielo.recipe.sections import Model
from kielo.resolve.ranks import coordinates
from kielo.resolve.stages import layer_numbers, stages_of_rank

if TYPE_CHECKING:
    from kielo.resolve.resolved import Placement

_FP32 = 4
_MOMENTS = 2
STATE_BYTES = {"fp32": 4, "bf16": 2}  # of a moment
# Moments kept in bf16 are fp32 for the optimiser's step, so many bytes of them at a time
# (`train/optimiser.py`).
WIDENED_BYTES = 2**28
# style → dim of the weight on the tensor axis
_SPLIT_DIM = {"vocabulary": 0, "column": 0, "all_heads": 0, "row": 1}


@dataclass(frozen=True)
class StateBytes:
    """parameters: fp32, with what FSDP2 pads them by. gradients: fp32, as they are before the optimiser's
    step. optimiser: two moments, and a count of steps in fp32 for each parameter.
    """

    parameters: int
    gradients: int
    optimiser: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser


def state_bytes(
    model: Model, placement: "Placement", rank: int, optimiser_state: Literal["fp32", "bf16"] = "fp32"
) -> StateBytes:
    """Of rank `rank`. `model` is complete, and the layout one that `resolve` has passed.

    With tied embeddings the last pipeline stage has a copy of the embedding as its head, with a gradient
    (which lies in one buffer with that of the last norm, though it is used up before the step) and no
    optimiser state.
    """
    place = coordinates(placement, rank)
    ranks, number = placement.shard * placement.context, place["shard"] * placement.context + place["context"]
    padded = exact = steps = 0
    for shape, is_copy in _shapes_of_rank(model, placement, place["pipeline"]):
        row, rows = prod(shape[1:]), shape[0]
        # as torch.chunk cuts: equal pieces rounded up, the last ranks with less or none
        piece = -(-rows // ranks)
        padded += piece * row
        if not is_copy:
            exact += max(0, min(piece, rows - piece * number)) * row
            steps += 1
    moments = _MOMENTS * STATE_BYTES[optimiser_state] * exact
    return StateBytes(_FP32 * padded, _FP32 * padded, moments + _FP32 * steps)


def _shapes_of_rank(
    model: Model, placement: "Placement", pipeline_rank: int
) -> Iterator[tuple[tuple[int, ...], bool]]:
    """(shape on this rank of the tensor axis, is it the copy of a tied embedding) of each parameter of its
    stages.
    """
    plan = module(model.model_type, "tensor_parallel_plan").TENSOR_PARALLEL_PLAN
    shapes = parameter_shapes(model)
    layers, is_last = _layers_of_rank(model, placement, pipeline_rank)
    for name, shape in shapes.items():
        module_name, _, kind = name.rpartition(".")
        if name.startswith("layers."):
            is_here = int(name.split(".")[1]) in layers
        elif module_name in ("norm", "head"):
            is_here = is_last
        else:
            is_here = pipeline_rank == 0
        if is_here:
            yield _on_tensor_axis(shape, kind, style_of(plan, module_name), placement.tensor), False
    if is_last and placement.pipeline > 1 and "head.weight" not in shapes:
        yield _on_tensor_axis(shapes["embed.weight"], "weight", "column", placement.tensor), True


def _layers_of_rank(model: Model, placement: "Placement", pipeline_rank: int) -> tuple[set[int], bool]:
    """(numbers of its layers, does it have the last stage)."""
    if placement.pipeline == 1:
        return set(range(model.num_hidden_layers)), True
    ranges = layer_numbers(placement.pipeline_layers)
    stages = stages_of_rank(
        placement.pipeline_schedule, placement.pipeline, pipeline_rank, len(ranges) // placement.pipeline
    )
    return {layer for stage in stages for layer in ranges[stage]}, stages[-1] == len(ranges) - 1


def _on_tensor_axis(shape: tuple[int, ...], kind: str, style: str | None, ranks: int) -> tuple[int, ...]:
    dim = _SPLIT_DIM.get(style or "")
    if dim is None or dim >= len(shape) or (kind == "bias" and style == "row"):
        return shape
    return tuple(size // ranks if number == dim else size for number, size in enumerate(shape))

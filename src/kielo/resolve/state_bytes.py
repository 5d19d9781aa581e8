"""Bytes that a rank holds between steps: parameters, gradients and optimiser state; no torch.

They follow exactly from the shapes of the parameters, the family's tensor-parallel plan and the layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np

from kielo.models.families import module
from kielo.models.parameter_shapes import parameter_shapes, style_of
from kielo.recipe.optimisers import OPTIMISERS
from kielo.recipe.sections import CompleteModel, Layout, StateDtype
from kielo.resolve.planned_phases import trains
from kielo.resolve.shares import coordinates
from kielo.resolve.stages import layer_numbers, stages_of_rank

Bytes = TypeVar("Bytes", float, np.ndarray)  # a number, or a column of them
_COPIES_IN_MEMORY = 4
_FP32 = 4
# Style → dimension of the weight on the tensor axis.
_SPLIT_DIM = {"vocabulary": 0, "column": 0, "all_heads": 0, "row": 1}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on a rank.

    parameters: fp32, with FSDP2's padding. gradients: fp32, before the optimiser's step. optimiser: moments,
    and a count of steps in fp32 for each parameter.
    """

    parameters: int
    gradients: int
    optimiser: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser


def state_bytes(
    model: CompleteModel,
    layout: Layout,
    rank: int,
    optimiser_state: StateDtype = "fp32",
    trainable: Sequence[str] = (),
    optimiser: str = "adamw",
) -> StateBytes:
    """Compute the bytes of rank `rank`, for a complete `model` and a resolved `layout`.

    trainable: the modules that are trained, () for all; others have neither gradients nor optimiser state.
    With tied embeddings the last pipeline stage has a copy of the embedding as its head, with a gradient (in
    one buffer with the last norm's, though it is used up before the step) and no optimiser state.
    """
    place = coordinates(layout, rank)
    ranks, number = layout.shard * layout.context, place["shard"] * layout.context + place["context"]
    padded = trained = exact = steps = 0
    for name, shape, is_copy in _shapes_of_rank(model, layout, place["pipeline"]):
        row, rows = prod(shape[1:]), shape[0]
        # torch.chunk: equal numbers of rows, rounded up, so the last ranks have fewer or none.
        rows_of_rank = -(-rows // ranks)
        padded += rows_of_rank * row
        if not trains(model, trainable, name):
            continue
        trained += rows_of_rank * row
        if not is_copy:
            exact += max(0, min(rows_of_rank, rows - rows_of_rank * number)) * row
            steps += 1
    moments = OPTIMISERS[optimiser].state_bytes(optimiser_state) * exact
    return StateBytes(_FP32 * padded, _FP32 * trained, moments + _FP32 * steps)


def host_bytes(
    parameters: Bytes, gradients: Bytes, optimiser: Bytes, is_offloaded: bool, is_copied: bool = False
) -> Bytes:
    """Compute a rank's bytes in its node's memory, from the bytes that it holds between steps.

    These are the copies of a save (`checkpoint/saving.py`), and with layout.cpu_offload all three. With
    checkpoint.memory_every_steps (`is_copied`) also the files of its own and a neighbour's state, twice while
    new files are written (`checkpoint/memory_copies.py`). What devices without their own memory hold is not
    counted.
    """
    offloaded = parameters + gradients + optimiser if is_offloaded else 0
    copied = _COPIES_IN_MEMORY * (parameters + optimiser) if is_copied else 0
    return parameters + optimiser + offloaded + copied


def _shapes_of_rank(
    model: CompleteModel, layout: Layout, pipeline_rank: int
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield (name, shape on a tensor rank, True for a copy) of each parameter.

    Copies: of a tied embedding, and of parameters that every pipeline stage needs.
    """
    plan = module(model.model_type, "tables").TENSOR_PARALLEL_PLAN
    shapes = parameter_shapes(model)
    layers, stages, is_last = _layers_of_rank(model, layout, pipeline_rank)
    for name, shape in shapes.items():
        module_name, _, kind = name.rpartition(".")
        if name.startswith("layers."):
            is_here = int(name.split(".")[1]) in layers
        elif module_name in ("norm", "head") or name.startswith("transform."):
            is_here = is_last
        else:
            is_here = pipeline_rank == 0
        if is_here:
            yield name, _on_tensor_axis(shape, kind, style_of(plan, module_name), layout.tensor), False
    if is_last and layout.pipeline > 1 and "head.weight" not in shapes:
        copy = _on_tensor_axis(shapes["embed.weight"], "weight", "column", layout.tensor)
        yield "head.weight", copy, True
    for name in getattr(module(model.model_type, "tables"), "OF_ALL_STAGES", ()):
        for _ in range(stages - (pipeline_rank == 0)):
            yield name, shapes[name], True


def _layers_of_rank(model: CompleteModel, layout: Layout, pipeline_rank: int) -> tuple[set[int], int, bool]:
    """Return (the numbers of its layers, its number of stages, True if it has the last stage)."""
    if layout.pipeline == 1:
        return set(range(model.num_hidden_layers)), 1, True
    ranges = layer_numbers(layout)
    per_rank = len(ranges) // layout.pipeline
    stages = stages_of_rank(layout.pipeline_schedule, layout.pipeline, pipeline_rank, per_rank)
    layers = {layer for stage in stages for layer in ranges[stage]}
    return layers, len(stages), stages[-1] == len(ranges) - 1


def _on_tensor_axis(shape: tuple[int, ...], kind: str, style: str | None, ranks: int) -> tuple[int, ...]:
    dim = _SPLIT_DIM.get(style or "")
    if dim is None or dim >= len(shape) or (kind == "bias" and style == "row"):
        return shape
    return tuple(size // ranks if number == dim else size for number, size in enumerate(shape))

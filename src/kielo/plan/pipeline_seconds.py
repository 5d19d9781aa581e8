"""Seconds of a layout's pipeline: its stages, and a step's parts with the simulated bubble; no torch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kielo.plan.collective_seconds import context_layer_seconds, stage_seconds
from kielo.plan.efficiency import Efficiency
from kielo.plan.layer_seconds import head_seconds, layer_seconds
from kielo.plan.overlap_seconds import exposed_tensor_seconds
from kielo.plan.pipeline_simulation import StageSeconds, closed_form_seconds, simulated_seconds
from kielo.plan.workload import Workload
from kielo.recipe.sections import Layout, Model
from kielo.resolve.stages import layers_of_stages, stages_of_rank

_OF_LAYERS = ("matrix", "attention", "elementwise", "launch", "tensor_traffic", "context_traffic")


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with the seconds of its stages.

    `stages`: seconds of each with a micro-batch, in the model's order. Of these, `exposed` in each stage wait
    for a neighbour, and `head` in the last are the head's. `layers`: of each stage.
    """

    schedule: str
    ranks: int
    micro_batches: int
    stages: StageSeconds
    layers: tuple[int, ...]
    head: float
    exposed: float

    def simulated_seconds(self) -> float:
        return simulated_seconds(self.schedule, self.stages, self.ranks, self.micro_batches)

    def closed_form_seconds(self) -> float:
        return closed_form_seconds(self.schedule, self.stages, self.ranks, self.micro_batches)

    def busiest_rank(self) -> tuple[int, ...]:
        """Returns the stages of the rank with most work."""
        whole, chunks = self.stages.whole(), len(self.layers) // self.ranks
        owned = (stages_of_rank(self.schedule, self.ranks, rank, chunks) for rank in range(self.ranks))
        return max(owned, key=lambda some: sum(whole[stage] for stage in some))


class Passes(NamedTuple):
    """Seconds of a micro-batch: of a layer, of the head, and of a hop to the next stage.

    `again` is the forward work of a layer that the backward pass repeats, `exposed` the part of a hop that
    keeps its rank busy.
    """

    layer: float
    head: float
    hop: float
    again: float
    exposed: float


def passes(work: Workload, efficiency: Efficiency) -> list[Passes]:
    """Computes the passes of each entry of `work`."""
    rates = efficiency.of(work)
    traffic = exposed_tensor_seconds(work, rates) + context_layer_seconds(work, rates)
    layer, hop = layer_seconds(work, rates).total(traffic), stage_seconds(work, rates)
    again = np.maximum(work.layers_again, work.operators_again * 0.5)
    columns = (layer, head_seconds(work, rates), hop, again, hop * rates.pipeline_exposed)
    return [Passes(*(float(value) for value in values)) for values in zip(*columns)]


def layout_pipeline(
    model: Model, layout: Layout, one: Passes, micro_batches: int, sequence_length: int
) -> Pipeline:
    """Returns the pipeline of a layout.

    Forward, gradients of inputs and gradients of weights take a third of a layer each; recomputation comes
    before the gradients of inputs.
    """
    layer, head, hop, again, exposed = one
    layers = layers_of_stages(model, sequence_length, layout)
    third = [number * layer / (3 + again) for number in layers]
    heads = [0.0] * (len(layers) - 1) + [head / 3]
    stages = StageSeconds(
        tuple(seconds + exposed + more for seconds, more in zip(third, heads)),
        tuple(seconds * (1 + again) + exposed + more for seconds, more in zip(third, heads)),
        tuple(seconds + more for seconds, more in zip(third, heads)),
        hop,
    )
    return Pipeline(
        layout.pipeline_schedule, layout.pipeline, micro_batches, stages, layers, head, 2 * exposed
    )


def with_simulation(parts: dict[str, float], pipeline: Pipeline, layers_assumed: float) -> dict[str, float]:
    """Returns `parts` for the rank that has most work, with the simulated wait beyond its work as "bubble".

    layers_assumed: those of the heaviest rank in `parts`.
    """
    own = pipeline.busiest_rank()
    share = sum(pipeline.layers[stage] for stage in own) / layers_assumed
    found = parts | {name: parts[name] * share for name in _OF_LAYERS}
    found["head"] = pipeline.micro_batches * pipeline.head if own[-1] == len(pipeline.layers) - 1 else 0.0
    found["pipeline_traffic"] = pipeline.micro_batches * pipeline.exposed * len(own)
    work = sum(found[name] for name in (*_OF_LAYERS, "head", "pipeline_traffic"))
    seconds = pipeline.simulated_seconds()
    found["bubble"] = max(0.0, seconds - work)
    found["slowest"] *= seconds / sum(parts[name] for name in (*_OF_LAYERS, "head", "bubble"))
    return found

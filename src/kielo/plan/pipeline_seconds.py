"""A layout's pipeline by its clock: seconds of each stage that Kielo would make, and a step's parts with what
idles; no torch.
"""

from dataclasses import dataclass

import numpy as np

from kielo.plan.collective_seconds import context_layer_seconds, stage_seconds, tensor_layer_seconds
from kielo.plan.efficiency import Efficiency
from kielo.plan.layer_seconds import head_seconds, layer_seconds
from kielo.plan.pipeline_simulation import StageSeconds, closed_form_seconds, simulated_seconds
from kielo.plan.workload import Workload
from kielo.recipe.sections import Layout, Model
from kielo.resolve.stages import layers_of_stages, stages_of_rank

_OF_LAYERS = ("matrix", "attention", "elementwise", "launch", "tensor_traffic", "context_traffic")


@dataclass(frozen=True)
class Pipeline:
    """`stages`: seconds of each with a micro-batch, in the model's order, of which `exposed` (each) wait for
    a neighbour and `head` (the last's) are the head's. `layers`: of each stage.
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
        """The stages of the rank with most to do."""
        whole, chunks = self.stages.whole(), len(self.layers) // self.ranks
        owned = (stages_of_rank(self.schedule, self.ranks, rank, chunks) for rank in range(self.ranks))
        return max(owned, key=lambda some: sum(whole[stage] for stage in some))


def pipeline(
    model: Model, layout: Layout, work: Workload, efficiency: Efficiency, sequence_length: int
) -> Pipeline:
    """Of a `work` of one entry. Forward, gradients of inputs and gradients of weights take a third of a layer
    each; what is computed anew comes before the gradients of inputs. What of a hop is not hidden keeps its
    rank busy.
    """
    rates = efficiency.of(work)
    traffic = tensor_layer_seconds(work, rates) + context_layer_seconds(work, rates)
    layer = float(layer_seconds(work, rates).total(traffic)[0])
    head, hop = float(head_seconds(work, rates)[0]), float(stage_seconds(work, rates)[0])
    again = float(np.maximum(work.layers_again, work.operators_again * 0.5)[0])
    exposed = hop * float(np.ravel(rates.pipeline_exposed)[0])
    layers = layers_of_stages(model, sequence_length, layout)
    third = [number * layer / (3 + again) for number in layers]
    heads = [0.0] * (len(layers) - 1) + [head / 3]
    stages = StageSeconds(
        tuple(seconds + exposed + more for seconds, more in zip(third, heads)),
        tuple(seconds * (1 + again) + exposed + more for seconds, more in zip(third, heads)),
        tuple(seconds + more for seconds, more in zip(third, heads)),
        hop,
    )
    many = int(work.micro_batches[0])
    return Pipeline(layout.pipeline_schedule, layout.pipeline, many, stages, layers, head, 2 * exposed)


def with_clock(parts: dict[str, float], line: Pipeline, layers_assumed: float) -> dict[str, float]:
    """`parts` as those of the rank that really has most to do, and as "bubble" what the clock takes beyond
    its work.

    `layers_assumed`: of the heaviest rank, in `parts`.
    """
    own = line.busiest_rank()
    share = sum(line.layers[stage] for stage in own) / layers_assumed
    found = parts | {name: parts[name] * share for name in _OF_LAYERS}
    found["head"] = line.micro_batches * line.head if own[-1] == len(line.layers) - 1 else 0.0
    found["pipeline_traffic"] = line.micro_batches * line.exposed * len(own)
    work = sum(found[name] for name in (*_OF_LAYERS, "head", "pipeline_traffic"))
    clock = line.simulated_seconds()
    found["bubble"] = max(0.0, clock - work)
    found["slowest"] *= clock / sum(parts[name] for name in (*_OF_LAYERS, "head", "bubble"))
    return found

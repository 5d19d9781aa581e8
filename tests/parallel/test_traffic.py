"""What each ZeRO degree sends: collectives of one step, counted, as the docstring of `parallel/fsdp.py`
says.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kielo.dataset.batches import Batch
from kielo.models.llama.model import Llama
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import build_mesh, sum_over_data
from kielo.parallel.parallelise import parallelise
from kielo.ranks.world import start_world
from kielo.recipe.sections import TrainIdentity
from kielo.train.feed import MicroBatch, StepBatch, cut
from kielo.train.forward_backward import NextToken, PlainForwardBackward, forward_backward_of, tensor_axis
from tests.parallel.test_layouts import LENGTH, SEQUENCES, VOCABULARY, batch, config, fill, layout
from tests.started_ranks import run_ranks

LAYERS, MICRO_BATCHES = 2, 4
GROUPS = LAYERS + 2  # FSDP2 moves a layer or the head at a time, and the rest with the root


class CollectiveCounter(TorchDispatchMode):
    """Counts the calls of each c10d operator while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        # DTensor's redistributions are functional collectives, FSDP2's are not.
        if operator.namespace in ("c10d", "_c10d_functional") and "wait" not in operator._opname:
            self.calls[operator._opname] += 1
        return operator(*args, **(kwargs or {}))


def in_micro_batches(inputs: torch.Tensor, labels: torch.Tensor) -> list[MicroBatch]:
    samples = np.arange(len(inputs))
    return cut(Batch(inputs.numpy(), labels.numpy(), None, samples), len(inputs) // MICRO_BATCHES)


def collectives_of_a_step(sizes: dict) -> dict[str, int]:
    world = start_world(30, "cpu")
    placement = layout(**sizes)
    mesh = build_mesh(world, placement)
    shape = config(tied=False).model_copy(update={"vocab_size": VOCABULARY + 1})  # an even number
    with torch.device("meta"):
        model = Llama(shape)
    parallelise(model, mesh, placement, "fp32")
    materialise(model, world.device, fill(shape))
    inputs, labels = batch()
    micro_batches = in_micro_batches(inputs, labels)
    objective = NextToken(0.0, LENGTH * SEQUENCES, tensor_axis(mesh))
    step = PlainForwardBackward(model, objective, lambda tensor: sum_over_data(tensor, mesh))
    with CollectiveCounter() as counter:
        step(StepBatch(1, (), micro_batches, (labels >= 0).sum()))
    return dict(counter.calls)


@pytest.mark.parametrize(
    ("zero", "gathers", "scatters"),
    [
        (1, GROUPS, GROUPS),  # once a step, however many micro-batches
        (2, GROUPS, GROUPS * MICRO_BATCHES),
        # layers for forward and backward, the head for its loss; the root once
        (3, 1 + (2 * LAYERS + 1) * MICRO_BATCHES, GROUPS * MICRO_BATCHES),
    ],
)
def test_a_step_sends_what_its_zero_degree_says(zero, gathers, scatters):
    """All-gathers and reduce-scatters of one step of four micro-batches on two shard ranks."""
    calls = run_ranks(collectives_of_a_step, 2, {"shard": 2, "zero": zero})[0]
    assert calls["_allgather_base_"] == gathers
    assert calls["_reduce_scatter_base_"] == scatters


def scatters_of_a_pipeline(schedule: str) -> list[int]:
    """Reduce-scatters of a step at ZeRO degrees 1, 2 and 3, on a rank of two stages × two shards."""
    world = start_world(30, "cpu")
    found = []
    for zero in (1, 2, 3):
        sizes = {"pipeline": 2, "shard": 2, "zero": zero}
        placement = layout(**sizes, pipeline_schedule=schedule, pipeline_layers=(1, 1))
        mesh = build_mesh(world, placement)
        with torch.device("meta"):
            model = Llama(config(tied=False))
        model = parallelise(model, mesh, placement, "fp32")
        materialise(model, world.device, fill(config(tied=False)))
        inputs, labels = batch()
        micro_batches = in_micro_batches(inputs, labels)
        step = forward_backward_of(model, mesh, TrainIdentity(), LENGTH * SEQUENCES, placement, "fp32")
        with CollectiveCounter() as counter:
            step(StepBatch(1, (), micro_batches, (labels >= 0).sum()))
        found.append(counter.calls["_reduce_scatter_base_"])
    return found


def test_a_pipeline_scatters_after_each_backward_from_degree_2_on():
    """So that what waits for the last micro-batch is a shard; a stage has its layer, the last its head, and
    the rest.
    """
    for number, rank in enumerate(run_ranks(scatters_of_a_pipeline, 4, "1f1b")):
        groups = 2 + (number >= 2)
        assert rank == [groups, groups * MICRO_BATCHES, groups * MICRO_BATCHES]


def test_replicas_are_summed_once_a_step():
    """Hybrid sharding: gradients cross the replicas at the last micro-batch only,
    whatever was scattered before.
    """
    hybrid = run_ranks(collectives_of_a_step, 4, {"shard": 2, "replicate": 2, "zero": 2})[0]
    alone = run_ranks(collectives_of_a_step, 2, {"shard": 2, "zero": 2})[0]
    sums_of_the_loss = 2  # the counted tokens and the loss, over the axis `replicate` too
    assert hybrid["allreduce_"] - alone["allreduce_"] == GROUPS + sums_of_the_loss


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_tensor_rank_sends_each_activation_once(sequence_parallel):
    """Two gathers and two scatters a layer, forward and backward alike, and two gathers of inputs again; sums
    in their place without sequence parallelism. Beside them embedding, head, the softmax of one chunk, and
    each norm's gradient.
    """
    sizes = {"tensor": 2, "sequence_parallel": sequence_parallel}
    calls = run_ranks(collectives_of_a_step, 2, sizes)[0]
    if sequence_parallel:
        inside, again, ends = 4 * LAYERS, 2 * LAYERS, 2  # the embedding's and the head's
        assert calls["all_gather_into_tensor"] == MICRO_BATCHES * (inside + again + ends)
        assert calls["reduce_scatter_tensor"] == MICRO_BATCHES * (inside + ends)
        assert calls["all_reduce"] == 2 * LAYERS + 1
    else:
        assert calls["all_reduce"] == MICRO_BATCHES * (4 * LAYERS + 2)
        assert "reduce_scatter_tensor" not in calls and "all_gather_into_tensor" not in calls
    assert calls["allgather_"] == MICRO_BATCHES  # the softmax

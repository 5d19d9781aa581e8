"""Stages: which rank has which, which layers each has, and that whatever cannot run is refused
with what can.
"""

import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from kielo.models.families import complete
from kielo.parallel.pipeline_schedule import TORCH_CLASSES
from kielo.recipe.sections import Layout, Model
from kielo.resolve.stages import (
    SCHEDULES,
    layer_numbers,
    layers_of_stages,
    micro_batch_complaint,
    num_stages,
    rank_of_each_stage,
    split_by_cost,
    stages_of_rank,
)
from tests.resolve.rule_cases import layout_complaints

MODEL = complete(Model(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64,
    vocab_size=32000, max_position_embeddings=1024,
), 1024)  # fmt: skip


def test_stages_lie_in_a_loop_or_in_a_v():
    """Rank r has r, r + p, …, or r and 2p - 1 - r; and back again."""
    assert [stages_of_rank("interleaved_1f1b", 3, rank, 2) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [stages_of_rank("zbv", 3, rank, 2) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert rank_of_each_stage("1f1b", 3, 1) == [0, 1, 2]
    assert rank_of_each_stage("interleaved_zero_bubble", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert rank_of_each_stage("dualpipev", 3, 2) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("head_cost", [0.0, 0.4, 1.0, 2.5, 7.0])
def test_no_other_split_has_a_lighter_heaviest_stage(head_cost):
    """Against every split there is, of up to nine layers over up to five stages."""

    def heaviest(split: tuple[int, ...]) -> float:
        return max(*split[:-1], split[-1] + head_cost)

    for num_layers, stages in product(range(1, 10), range(2, 6)):
        if num_layers < stages - 1:
            with pytest.raises(ValueError, match=f"{num_layers} layers do not make {stages} stages"):
                split_by_cost(num_layers, stages, 1.0, head_cost)
            continue
        found = split_by_cost(num_layers, stages, 1.0, head_cost)
        assert len(found) == stages and sum(found) == num_layers and min(found[:-1]) >= 1
        every = [split for split in product(range(num_layers + 1), repeat=stages) if sum(split) == num_layers]
        best = min(heaviest(split) for split in every if min(split[:-1]) >= 1)
        assert heaviest(found) == best


def test_layers_are_split_by_flops():
    """Attention counts by the sequence's length and the head by the vocabulary:
    by hand, and for the model at hand.
    """
    assert layers_of_stages(MODEL, 1024, Layout()) == (8,)
    assert layers_of_stages(MODEL, 1024, Layout(pipeline=2, pipeline_layers=(8, 0))) == (8, 0)
    # A layer: 3.0M matrix parameters × 6 + attention 6 × 512 × 1024; the head: 16.4M × 6, as much as five
    # layers.
    assert layers_of_stages(MODEL, 1024, Layout(pipeline=2)) == (6, 2)
    assert layers_of_stages(MODEL, 65536, Layout(pipeline=2)) == (4, 4)
    small = MODEL.model_copy(update={"vocab_size": 100})
    assert layers_of_stages(small, 1024, Layout(pipeline=2, pipeline_schedule="zbv")) == (2, 2, 2, 2)
    assert layer_numbers(Layout(pipeline=3, pipeline_layers=(2, 1, 0))) == [
        range(0, 2),
        range(2, 3),
        range(3, 3),
    ]


INTERLEAVED = {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"}


@pytest.mark.parametrize(
    ("refused", "named", "works"),
    [
        ({"pipeline_layers": (8,)}, "need layout.pipeline of 2 or more",
         {"pipeline": 2, "pipeline_layers": (4, 4)}),
        ({"pipeline_stages_per_rank": 2}, "need layout.pipeline of 2 or more",
         INTERLEAVED | {"pipeline_stages_per_rank": 2}),
        ({"pipeline": 2, "pipeline_stages_per_rank": 2}, "'1f1b' has 1 stage on",
         INTERLEAVED | {"pipeline_stages_per_rank": 2}),
        ({"pipeline": 2, "pipeline_schedule": "zbv", "pipeline_stages_per_rank": 3},
         "2 stages on each rank", {"pipeline_stages_per_rank": 2}),
        (INTERLEAVED | {"pipeline_stages_per_rank": 1},
         "needs layout.pipeline_stages_per_rank of 2 or more", {"pipeline_stages_per_rank": 2}),
        ({"pipeline": 2, "pipeline_schedule": "zbv", "zero": 3}, "wrong gradients", {"zero": 2}),
        ({"pipeline": 2, "pipeline_schedule": "interleaved_zero_bubble", "zero": 3}, "wrong gradients",
         {"pipeline_schedule": "interleaved_1f1b"}),
        ({"pipeline": 2, "pipeline_schedule": "dualpipev", "zero": 3}, "wrong gradients",
         {"pipeline_schedule": "1f1b"}),
        ({"pipeline": 2, "pipeline_schedule": "zbv", "recompute": "full"}, "splits the backward pass",
         {"recompute": "none"}),
        ({"pipeline": 2, "pipeline_layers": (8,)}, "Fix: [4, 4]", {"pipeline_layers": (4, 4)}),
        ({"pipeline": 2, "pipeline_layers": (4, 5)}, "num_hidden_layers = 8", {"pipeline_layers": (4, 4)}),
        ({"pipeline": 2, "pipeline_layers": (9, -1)}, "Fix: [4, 4]", {"pipeline_layers": (4, 4)}),
        ({"pipeline": 2, "pipeline_layers": (0, 8)}, "only the last can be 0", {"pipeline_layers": (8, 0)}),
        ({"pipeline": 4, "pipeline_layers": (8, 0, 0, 0)}, "Fix: [2, 2, 2, 2]",
         {"pipeline_layers": (2, 2, 2, 2)}),
        ({"pipeline": 10}, "at most 9 stages", {"pipeline": 9}),
        ({"pipeline": 5, "pipeline_schedule": "dualpipev"}, "at most 9 stages", {"pipeline": 4}),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_what_can(refused, named, works):
    """Each complaint alone, by key; and its advice, followed, has no complaint."""
    (complaint,) = layout_complaints(MODEL, 1024, Layout(**refused))
    assert named in complaint
    assert layout_complaints(MODEL, 1024, Layout(**(refused | works))) == []


def torch_takes(name: str, micro_batches: int, ranks: int) -> bool:
    """Does torch's own schedule say that it can run so many? Those of several stages are made and
    checked in full.
    """
    layout = Layout(pipeline=ranks, pipeline_schedule=name)
    stages = num_stages(layout)
    numbers = stages_of_rank(name, ranks, 0, stages // ranks)
    # What the makers of schedules read of a stage.
    made = [
        SimpleNamespace(
            stage_index=number, num_stages=stages, group_size=ranks, group_rank=0, is_first=number == 0,
            is_last=number == stages - 1, submod=torch.nn.Identity(), has_backward=True, group=None,
            device=torch.device("cpu"),
        ) for number in numbers
    ]  # fmt: skip
    of_torch = getattr(torch_schedules, TORCH_CLASSES[name])
    is_single = issubclass(of_torch, torch_schedules.PipelineScheduleSingle)
    try:
        of_torch(made[0] if is_single else made, n_microbatches=micro_batches, loss_fn=lambda *_: None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_are_refused_where_torch_would(name):
    """Every number of them and of ranks is refused before anything starts;
    the numbers that a complaint names do work.
    """
    for ranks, micro_batches in product((2, 3, 4), range(1, 18)):
        stages = num_stages(Layout(pipeline=ranks, pipeline_schedule=name))
        complaint = micro_batch_complaint(name, micro_batches, ranks, stages)
        assert (complaint is None) == torch_takes(name, micro_batches, ranks), (
            ranks,
            micro_batches,
            complaint,
        )
        if complaint:
            named = [int(number) for number in re.findall(r"\d+", complaint.partition("Fix: ")[2])]
            assert named and micro_batches not in named
            assert all(micro_batch_complaint(name, number, ranks, stages) is None for number in named)


def test_refusals_of_stages_begin_at_their_borders():
    """A rank of an interleaved schedule may have two stages or more; a layer for all stages but the last."""
    for stages, layers in ((2, 3), (3, 5)):
        layout = Layout(**INTERLEAVED, pipeline_stages_per_rank=stages)
        few = MODEL.model_copy(update={"num_hidden_layers": layers - 1})
        assert layout_complaints(MODEL.model_copy(update={"num_hidden_layers": layers}), 1024, layout) == []
        (complaint,) = layout_complaints(few, 1024, layout)
        assert complaint == (
            f"model.num_hidden_layers = {layers - 1} are too few for {2 * stages} stages (layout.pipeline = "
            "2 × "
            f"{stages} stages a rank); only the last stage can have no layer. Fix: at most "
            f"{layers} "
            "stages"
        )
    (one,) = layout_complaints(MODEL, 1024, Layout(pipeline=2, pipeline_stages_per_rank=3))
    assert one == (
        "layout.pipeline_schedule = '1f1b' has 1 stage on each rank, but layout.pipeline_stages_per_rank = "
        "3. "
        "Fix: 1, or interleaved_1f1b"
    )
    (two,) = layout_complaints(
        MODEL, 1024, Layout(pipeline=2, pipeline_schedule="zbv", pipeline_stages_per_rank=3)
    )
    assert two.startswith("layout.pipeline_schedule = 'zbv' has 2 stages on each rank, but")
    for again in ("norms", "activations", "norms+activations"):
        assert not layout_complaints(
            MODEL, 1024, Layout(pipeline=2, pipeline_schedule="zbv", recompute=again)
        )
    assert list(
        layout_complaints(
            MODEL, 1024, Layout(pipeline=2, pipeline_schedule="zbv", recompute="attention+norms")
        )
    )
    with pytest.raises(ValueError, match="3 layers do not make 0 stages"):
        split_by_cost(3, 0, 1.0, 0.0)
    assert split_by_cost(0, 1, 1.0, 0.0) == (0,) and split_by_cost(1, 2, 1.0, 5.0) == (1, 0)
    # of equal splits the last stage has fewer layers
    assert split_by_cost(5, 2, 1.0, 1.0) == (3, 2) and split_by_cost(4, 2, 1.0, 1.0) == (3, 1)


def test_numbers_of_micro_batches_that_would_work_are_the_nearest():
    assert micro_batch_complaint("1f1b", 3, 4, 4) == (
        "1f1b needs at least one micro-batch a step for each stage, but there are 3 for 4. Fix: "
        "4 "
        "micro-batches a step, by a smaller train.micro_batch_sequences or more tokens a step"
    )
    assert micro_batch_complaint("1f1b", 4, 4, 4) is None
    assert micro_batch_complaint("interleaved_1f1b", 11, 4, 8) == (
        "interleaved_1f1b takes its micro-batches in equal rounds over layout.pipeline = 4 ranks, but 11 do "
        "not "
        "make them. Fix: 10 or 12 micro-batches a step"
    )

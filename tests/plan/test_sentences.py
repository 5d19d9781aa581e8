"""Sentences on layouts whose seconds and bytes are made up: each as a whole, with its numbers by hand."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kielo.plan import compare, explain
from kielo.plan.explain import bubble_share, recomputed_seconds, why
from kielo.plan.pipeline_simulation import StageSeconds
from kielo.plan.planned_layout import PlannedLayout
from tests.plan.hand_made import planned, run

ASKED: list[Any] = []


@pytest.fixture(autouse=True)
def other(monkeypatch) -> PlannedLayout:
    """A changed layout takes 11.5 s, of which 0.25 s are the bubble, and 56.7 GB."""
    found = planned(seconds={"bubble": 0.25, "matrix": 6.5}, bytes_={"weights": 30e9})
    ASKED.clear()

    def plan(run, layouts, phase) -> list[PlannedLayout]:
        ASKED.append((layouts, phase))
        return [found]

    monkeypatch.setattr(explain, "plan_layouts", plan)
    monkeypatch.setattr(compare, "plan_layouts", lambda *of: [planned()])  # which is no faster
    return found


def test_a_layout_is_explained():
    """12 s for 48 sequences of 2,048. A token has 6 FLOPs for each of 135.5 million weights with norms, and
    6 × 1,024 × 2,048 for attention in each of 8 layers; devices reach 0.8 × 0.5 of their peak, by the root of
    a quarter of the power. A save holds 12 of 16 bytes: 48 GB of four devices.
    """
    stages = StageSeconds.equal(4, 0.1)
    assert why(replace(planned(), stages=stages)) == [
        "tp2-pp4-dp3-mb2-zero1-1f1b on 6 nodes (24 devices): a step of 98,304 tokens takes 12.00 s, which is "
        "8,192 tokens/s, 0.3 TFLOP/s a device (model FLOPs) and 31.2% of its peak. Each of 3 data-parallel "
        "ranks takes 8 micro-batches of 2 × 2,048 tokens a step.",
        "Memory fits: 30.7 GB on the fullest, rank 0 (stage 0), of 48.0 usable GB; 17.3 GB (36%) are left. "
        "In GB of 1e9 bytes: activations 10.2, optimiser state 8.0, gradients 4.5, weights 4.0, gathered "
        "parameters 3.0, workspace 1.0.",
        "Host memory fits: at most 48.0 GB a node, of 107.4 GB, for the copies that a save makes of weights "
        "and optimiser state.",
        "Matrix products: 6.00 s, 50.0%. 2 FLOPs a weight and token forward and 4 backward, at 20.0% of the "
        "device's peak, of which products of any size reach at most 20.0%; larger micro-batches make larger "
        "products.",
        "Pipeline bubble: 1.25 s, 10.4%. 4 pipeline ranks wait while 8 micro-batches fill and empty the "
        "pipeline. For 1f1b and equal stages the wait is (p − 1)/m = 3/8 = 37.5% of a rank's work; simulated "
        "with these stages and hops, it is 37.5%. 16 micro-batches would leave 18.8% of the work: that takes "
        "196,608 tokens a step or micro-batches of 1 × 2,048 tokens. interleaved_1f1b with 2 stages a rank "
        "would have a bubble of 0.25 s, a step of 11.50 s and 56.7 GB, which does not fit into 48.0 GB. zbv "
        "with 2 stages a rank would have a bubble of 0.25 s, a step of 11.50 s and 56.7 GB, which does not "
        "fit into 48.0 GB.",
        "Attention: 1.00 s, 8.3%. It grows with the sequence: 4,096 tokens instead of 2,048 would take twice "
        "as long a token.",
        "Tensor traffic: 0.90 s, 7.5%. 2 ranks inside a node of 4 devices. 5 all-reduces a layer and "
        "micro-batch, two halves of one to gather inputs again for the gradients of weights, each of 2 (t − "
        "1)/t × the hidden states; 70% of it is not hidden.",
        "Norms and activations: 0.80 s, 6.7%. The bytes of norms, residuals, rotation and activations "
        "through memory, and of gradients, added up 8 times a step (less often with larger micro-batches).",
        "Data traffic: 0.60 s, 5.0%. Between 3 ranks gradients and parameters are exchanged once a step, so "
        "more tokens a step make its share smaller. Another 0.45 s are hidden: 60% of a backward pass can "
        "hide traffic, which slows it by 20% of what is hidden.",
        "Output head and loss: 0.50 s, 4.2%. The output matrix and the loss over 32,000 tokens on the last "
        "of 4 pipeline ranks, beside its layers, split over 2 tensor ranks.",
        "Slowest device: 0.40 s, 3.3%. The slowest of 24 devices is expected √(2 ln 24) = 2.5 standard "
        "deviations of 1.50% behind their mean, and all wait for it.",
        "Pipeline traffic: 0.30 s, 2.5%. Hidden states and their gradients go from stage to stage over the "
        "network, 2 times a micro-batch on each rank; 40% of it is not hidden.",
        "Optimiser: 0.13 s, 1.1%. 46 bytes a parameter through memory once a step, of its share of 1/3 of "
        "the rank's parameters.",
        "Fixed costs: 0.10 s, 0.8%. A constant of the engine for all that no other part counts; steps of "
        "more tokens pay it less often.",
        "Kernel launches: 0.020 s, 0.2%. The device waits for the host to launch kernels, 2.00 ms a layer "
        "and micro-batch at least; larger micro-batches give it more to do meanwhile.",
        "What bounds it: beside matrix work (54.2% with the head), pipeline bubble takes most, 1.25 s or "
        "10.4% of the step.",
        "Prediction interval: 80% of measured steps are expected between 11.00 s and 14.50 s.",
    ]
    changes = [layout for ((layout, nodes, size),), _ in ASKED]
    assert [(one.pipeline_schedule, one.pipeline_stages_per_rank) for one in changes] == [
        ("interleaved_1f1b", 2), ("zbv", 2)
    ]  # fmt: skip
    assert {(nodes, size, phase.tokens_per_step) for ((_, nodes, size),), phase in ASKED} == {(6, 2, 98_304)}


ALONE = {"tensor": 1, "pipeline": 1, "shard": 1, "micro_batch": 48}
ROUND = {"pipeline_schedule": "interleaved_1f1b", "pipeline": 2}
# Keys of the layout, the part, and what its sentence ends with.
SAID: list[tuple[dict[str, Any], str, str]] = [
    (ALONE, "dp1-", "on 1 node (1 device): a step of 98,304 tokens takes 12.00 s, which is 8,192 tokens/s, "
     "7.5 TFLOP/s a device (model FLOPs) and 748.7% of its peak. 1 data-parallel rank takes 1 micro-batch of "
     "48 × 2,048 tokens a step."),
    (ALONE, "Memory", " rank 0 (as every rank), of 48.0 usable GB; 17.3 GB (36%) are left. In GB of 1e9 "
     "bytes: activations 10.2, optimiser state 8.0, gradients 4.5, weights 4.0, gathered parameters 3.0, "
     "workspace 1.0."),
    (ALONE, "Optimiser", "once a step, of all parameters of the rank."),
    (ALONE, "Norms", " through memory."), (ALONE, "Output", " over 32,000 tokens."),
    (ALONE, "Tensor", ". 4 all-reduces a layer and micro-batch, each of 2 (t − 1)/t × the hidden states; 70% "
     "of it is not hidden."),
    (ALONE, "Slowest", "The slowest of 1 device is expected √(2 ln 1) = 0.0 standard deviations of 1.50% "
     "behind their mean, and all wait for it."),
    # five sequences of 48 are empty: 5 ranks with 9 or 10
    ({"shard": 5, "tensor": 1, "pipeline": 1}, "dp5-", "Each of 5 data-parallel ranks takes 5 micro-batches "
     "of 2 × 2,048 tokens a step (5 data-parallel ranks: 10 sequences on 3 of them and 9 on the others; 4.0% "
     "of the work is empty)."),
    (ROUND | {"shard": 1, "micro_batch": 3}, "Pipeline bubble", ". 2 pipeline ranks wait while 16 "
     "micro-batches fill and empty the pipeline. For interleaved_1f1b and equal stages the wait is (p − "
     "1)/(2 m) = 1/32 = 3.1% of a rank's work. 32 micro-batches would leave 1.6% of the work: that takes "
     "196,608 tokens a step. interleaved_1f1b with 4 stages a rank would have a bubble of 0.25 s, a step of "
     "11.50 s and 56.7 GB, which does not fit into 48.0 GB. zbv with 2 stages a rank would have a bubble of "
     "0.25 s, a step of 11.50 s and 56.7 GB, which does not fit into 48.0 GB."),
    # twelve stages a rank: none that is tried has twice as many
    (ROUND | {"pipeline_stages_per_rank": 4, "shard": 6}, "Pipeline bubble", "is (p − 1)/(4 m) = 1/16 = 6.2% "
     "of a rank's work. 8 micro-batches would leave 3.1% of the work: that takes 196,608 tokens a step, "
     "micro-batches of 1 × 2,048 tokens or 3 data-parallel ranks instead of 6 (half of the devices)."),
    ({"pipeline_schedule": "interleaved_zero_bubble", "pipeline": 2, "shard": 2, "micro_batch": 3},
     "Pipeline bubble", "is (p − 1)/(6 m) = 1/48 = 2.1% of a rank's work. 16 micro-batches would leave 1.0% "
     "of the work: that takes 196,608 tokens a step or 1 data-parallel rank instead of 2 (half of the "
     "devices)."),
    (ROUND | {"shard": 1, "micro_batch": 3, "tensor": 2}, "Pipeline traffic", " inside a node, 4 times a "
     "micro-batch on each rank (2 stages); 40% of it is not hidden."),
    (ROUND | {"shard": 3, "tensor": 1}, "Pipeline traffic", " over the network, 4 times a micro-batch on "
     "each rank (2 stages); 40% of it is not hidden."),
    (ROUND | {"pipeline_stages_per_rank": 4}, "Memory", "rank 0 (stages 0, 2, 4, 6), of 48.0 usable GB; 17.3 "
     "GB (36%) are left. In GB of 1e9 bytes: activations 10.2, optimiser state 8.0, gradients 4.5, weights "
     "4.0, gathered parameters 3.0, workspace 1.0."),
    ({"zero": 3, "replicate": 2, "shard": 2, "pipeline": 2, "micro_batch": 4}, "Data", ". Between 4 ranks "
     "parameters are gathered and gradients scattered for each of 3 micro-batches. Another 0.45 s are "
     "hidden: 90% of the passes over it can hide traffic, which slows it by 20% of what is hidden."),
    ({"zero": 3, "replicate": 2, "shard": 1, "pipeline": 2, "micro_batch": 4}, "Data", "Another 0.45 s are "
     "hidden: 60% of a backward pass can hide traffic, which slows it by 20% of what is hidden."),
    ({"zero": 3, "shard": 1, "context": 2, "pipeline": 2, "micro_batch": 48}, "Data", ". Between 2 ranks "
     "parameters are gathered and gradients scattered for each of 1 micro-batch. Another 0.45 s are hidden: "
     "90% of the passes over it can hide traffic, which slows it by 20% of what is hidden."),
    ({"zero": 3}, "Norms", " through memory."),
    ({"zero": 2, "shard": 6, "pipeline": 2, "seconds": {"data_traffic": 0.0}}, "Data", ": 0.00 s, 0.000%. "
     "Between 6 ranks parameters are gathered once a step, and gradients scattered for each of 4 "
     "micro-batches. Another 0.45 s are hidden: 60% of the passes over it can hide traffic, which slows it "
     "by 20% of what is hidden."),
    ({"zero": 2, "shard": 2, "pipeline": 2, "pipeline_schedule": "zbv"}, "Data", ". Between 2 ranks "
     "gradients and parameters are exchanged once a step, so more tokens a step make its share smaller. "
     "Another 0.45 s are hidden: 60% of a backward pass can hide traffic, which slows it by 20% of what is "
     "hidden."),
    ({"zero": 2, "shard": 3, "context": 2, "pipeline": 1}, "Optimiser", ", of its share of 1/6 of the rank's "
     "parameters."),
    ({"tensor": 8, "pipeline": 1, "shard": 1, "sequence_parallel": False}, "Tensor", ". 8 ranks over several "
     "nodes of 4 devices, at the network's speed. 4 all-reduces a layer and micro-batch, each of 2 (t − 1)/t "
     "× the hidden states; 70% of it is not hidden."),
    ({"tensor": 4, "pipeline": 1}, "Tensor", ". 4 ranks inside a node of 4 devices. 5 all-reduces a layer "
     "and micro-batch, two halves of one to gather inputs again for the gradients of weights, each of 2 (t − "
     "1)/t × the hidden states; 70% of it is not hidden."),
    ({"recompute": "full", "recompute_every_layers": 4}, "Tensor", ". 5.5 all-reduces a layer and "
     "micro-batch, 0.5 of them for recomputation, two halves of one to gather inputs again for the gradients "
     "of weights, each of 2 (t − 1)/t × the hidden states; 70% of it is not hidden."),
    ({"tensor_overlap": "chunked"}, "Tensor", " 70% of it is not hidden. Of this, gathers before products "
     "and sums after them run in 2 chunks beside products, of which the first or the last is waited for, by "
     "assumption: a product beside a collective keeps 90% of its rate. It was not measured on a GPU."),
    ({"tensor": 8, "pipeline": 1, "shard": 1, "sequence_parallel": False}, "Norms", ", added up 24 times a "
     "step (less often with larger micro-batches); sequence parallelism would split norms and residuals over "
     "8 tensor ranks."),
    ({"context": 2, "seconds": {"context_traffic": 0.005}}, "Context", ": 0.0050 s, 0.042%. Keys and values "
     "go through all 2 context ranks, and their gradients back."),
    ({"seconds": {"context_traffic": 0.024}}, "Context", ": 0.024 s, 0.2%. Keys and values "
     "go through all 1 context ranks, and their gradients back."),
    ({"seconds": {"head": 2.0}}, "What bounds", ": beside matrix work (59.3% with the head), pipeline bubble "
     "takes most, 1.25 s or 9.3% of the step."),
    # products are made again by a half, attention not, and norms as a whole
    ({"recompute": "operators"}, "Matrix", "forward (1 more for recomputation) and 4 backward, at 20.0% of "
     "the device's peak, of which products of any size reach at most 20.0%; larger micro-batches make larger "
     "products."),
    ({"recompute": "operators"}, "Recomputation", ": 11% more FLOPs than the model's. Without it the step "
     "would take 11.50 s and 56.7 GB, which does not fit into 48.0 GB."),
    ({"recompute": "attention"}, "Recomputation", ": 4% more FLOPs than the model's. Without it the step "
     "would take 11.50 s and 56.7 GB, which does not fit into 48.0 GB."),
    # half of 16,777,216 FLOPs of attention, of two a weight, by 913.8 million
    ({"recompute": "full", "recompute_every_layers": 2}, "Recomputation", "(full in one layer of 2) is 1.25 "
     "s of these (matrix products 0.86 s, attention 0.12 s, norms and activations 0.11 s, kernel launches "
     "0.0029 s, tensor traffic 0.15 s): 13% more FLOPs than the model's. Without it the step would take "
     "11.50 s and 56.7 GB, which does not fit into 48.0 GB."),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "start", "end"), SAID)
def test_a_sentence_has_the_numbers_of_its_layout(keys, start, end):
    (line,) = [line for line in why(planned(**keys)) if re.match(rf"(?:[a-z0-9]+-)?{start}", line)]
    assert line.endswith(end), line


def test_the_last_rank_may_be_the_fullest():
    one = replace(planned(pipeline_schedule="interleaved_1f1b"), is_last_fullest=True)
    assert one.fullest == "rank 18 (stages 3, 7)"  # of 24, six on each pipeline rank
    assert replace(planned(), is_last_fullest=True).fullest == "rank 18 (stage 3)"
    assert planned(pipeline_schedule="zbv").fullest == "rank 0 (stages 0, 7)"


MIXED = {"precision": "bf16", "precision_changes": [[4, "fp8"]], "tokens": 983_040, "tokens_per_step": 98_304}


def test_precision_is_told():
    """Three of ten steps in bf16. Attention has 4,194,304 of 12,845,056 weights of a layer; with a scale a
    row its products reach 0.25 × 0.8 × 0.5 × 0.5 of 4 TFLOP/s, as much as those in bf16 do of 1.
    """
    fp8 = {"scaling": "rowwise_with_gw_hp", "head": True, "kept_in_bf16": ["layers.*.mlp"]}
    lines = why(planned(run("fp8", train=MIXED | {"fp8": fp8})))
    assert lines[1:3] == [
        "The plan is for fp8, which 7 of 10 steps are computed in (3 in bf16).",
        "FP8 (rowwise_with_gw_hp) is for 33% of the layers' matrices; products for weights' gradients are in "
        "bf16; the head's weight gradient, attention and what is kept for the backward pass are in bf16.",
    ]
    assert (
        "at 5.0% of the device's peak in FP8, of which products of any size reach at most 6.2%;" in lines[5]
    )
    plain = {"tokens": 983_040, "tokens_per_step": 98_304, "precision": "fp8"}
    lines = why(planned(run("fp8", train=plain)))
    assert lines[1] == (
        "FP8 (tensorwise) is for 100% of the layers' matrices, which are also gathered in 8 bits; the head, "
        "attention and what is kept for the backward pass are in bf16."
    )
    assert "7.8% of its peak" in lines[0]


def test_memory_of_a_node_is_told():
    """Offloaded, a device's 52.5 GB of state lie there too, and files of two ranks twice: 48 GB each, beside
    the 48 of a save. A processor has 12 and all its 30.7 GB there.
    """
    keeps = run(checkpoint={"memory_every_steps": 5})
    lines = why(planned(keeps, bytes_={"weights": 40e9, "activations": 0.0}, cpu_offload=True))
    assert lines[1] == (
        "Memory does not fit: 56.5 GB on the fullest, rank 0 (stage 0), of 48.0 usable GB; 8.5 GB too much. "
        "In GB of 1e9 bytes: weights 40.0, optimiser state 8.0, gradients 4.5, gathered parameters 3.0, "
        "workspace 1.0."
    )
    assert lines[2] == (
        "Host memory does not fit: at most 1170.0 GB a node, of 107.4 GB, for weights, gradients and "
        "optimiser state, and the copies that a save makes of weights and optimiser state, and those that "
        "stay in memory (checkpoint.memory_every_steps)."
    )
    on_processor = why(planned(run(card={"device": "cpu"})))
    assert on_processor[2] == (
        "Host memory does not fit: at most 170.8 GB a node, of 107.4 GB, for all of the above and the copies "
        "that a save makes of weights and optimiser state."
    )


def test_what_is_made_again_is_a_share_of_its_part():
    """Of products a seventh, of attention (1 of 1 + 2.5 + 1), of norms a quarter, of sums 2 of 12."""
    operators = recomputed_seconds(planned(recompute="operators"))
    assert operators["matrix"] == pytest.approx(6 / 7) and operators["elementwise"] == pytest.approx(0.2)
    assert operators["attention"] == operators["tensor_traffic"] == 0
    assert recomputed_seconds(planned(recompute="attention"))["attention"] == pytest.approx(1 / 4.5)
    full = recomputed_seconds(planned(recompute="full"))
    expected = {"matrix": 6 / 4, "attention": 1 / 4.5, "elementwise": 0.2, "tensor_traffic": 0.9 / 6}
    assert full == pytest.approx(expected | {"tensor_traffic": 0.9 * 4 / 14, "launch": full["launch"]})


def test_a_bubble_is_a_share_of_a_ranks_work():
    found = [bubble_share(*of) for of in (("gpipe", 4, 1, 6), ("1f1b", 4, 1, 6), ("zbv", 4, 2, 6))]
    assert found == [3 / 6, 3 / 6, 3 / 36] and bubble_share("interleaved_1f1b", 4, 5, 6) == 3 / 30

"""Explanations of layouts whose seconds and bytes are made up: each row, with its numbers by hand."""

from dataclasses import replace
from typing import Any

import pytest

from kielo.plan import compare
from kielo.plan import explain as room
from kielo.plan.explain import bubble_share, explain, recomputed_seconds
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

    monkeypatch.setattr(room, "plan_layouts", plan)
    monkeypatch.setattr(compare, "plan_layouts", lambda *of: [planned()])  # which is no faster
    return found


def test_a_layout_is_explained():
    """12 s for 48 sequences of 2,048. A token has 6 FLOPs for each of 135.5 million weights with norms, and
    6 × 1,024 × 2,048 for attention in each of 8 layers; devices reach 0.8 × 0.5 of their peak, by the root of
    a quarter of the power. A save holds 12 of 16 bytes: 48 GB of four devices.
    """
    stages = StageSeconds.equal(4, 0.1)
    one = replace(planned(), stages=stages)
    assert [row.cells(one) for row in explain(one)] == [
        ("step", "12.00", "100.0%",
         "tp2-pp4-dp3-mb2-zero1-1f1b on 6 nodes (24 devices): 98,304 tokens at 8,192 tokens/s, 0.3 "
         "TFLOP/s a device (model FLOPs), 31.2% of its peak; 3 data-parallel ranks with 8 "
         "micro-batches of 2 × 2,048 tokens; 80% of measured steps are expected in 11.00 s to 14.50 s"),
        ("matrix products", "6.00", "50.0%",
         "2 FLOPs a weight and token forward, 4 backward, at 20.0% of the device's peak; products of "
         "any size reach at most 20.0%, larger micro-batches make larger products"),
        ("pipeline bubble", "1.25", "10.4%",
         "bounds the step beside matrix work (54.2% with the head); 4 pipeline ranks wait while 8 "
         "micro-batches fill and empty the pipeline: for 1f1b and equal stages (p − 1)/m = 3/8 = "
         "37.5% of a rank's work; simulated with these stages and hops, 37.5%"),
        ("attention", "1.00", "8.3%",
         "grows with the sequence: twice the seconds a token at 4,096 tokens instead of 2,048"),
        ("tensor traffic", "0.90", "7.5%",
         "2 ranks inside a node of 4 devices; 5 all-reduces a layer and micro-batch, two halves of "
         "one to gather inputs again for the gradients of weights, each of 2 (t − 1)/t × the hidden "
         "states; 70% is not hidden"),
        ("norms and activations", "0.80", "6.7%",
         "norms, residuals, rotation and activations through memory; gradients added up 8 times a "
         "step (less often with larger micro-batches)"),
        ("data traffic", "0.60", "5.0%",
         "between 3 ranks gradients and parameters are exchanged once a step, so larger steps make "
         "its share smaller; another 0.45 s are hidden, as 60% of a backward pass can hide traffic, "
         "which slows it by 20% of the hidden seconds"),
        ("output head and loss", "0.50", "4.2%",
         "output matrix and loss over 32,000 tokens; on the last of 4 pipeline ranks, beside its "
         "layers; split over 2 tensor ranks"),
        ("slowest device", "0.40", "3.3%",
         "the slowest of 24 devices is expected √(2 ln 24) = 2.5 standard deviations of 1.50% behind "
         "their mean, and all wait for it"),
        ("pipeline traffic", "0.30", "2.5%",
         "hidden states and their gradients from stage to stage over the network, 2 times a "
         "micro-batch on each rank; 40% is not hidden"),
        ("optimiser", "0.13", "1.1%",
         "46 bytes a parameter through memory once a step, of 1/3 of the rank's parameters"),
        ("fixed costs", "0.10", "0.8%",
         "a constant of the engine for what no other part counts; larger steps pay it less often"),
        ("kernel launches", "0.020", "0.2%",
         "the host launches kernels in 2.00 ms a layer and micro-batch at least; larger micro-batches"
         " give the device more to do meanwhile"),
        ("memory", "", "64.0%",
         "fits: 30.7 of 48.0 usable GB on the fullest, rank 0 (stage 0): activations 10.2, optimiser "
         "state 8.0, gradients 4.5, weights 4.0, gathered parameters 3.0, workspace 1.0"),
        ("host memory", "", "44.7%",
         "fits: at most 48.0 of 107.4 GB a node: the copies that a save makes of weights and "
         "optimiser state"),
        ("16 micro-batches", "", "",
         "would leave a bubble of 18.8% of the work; needs 196,608 tokens a step or micro-batches of "
         "1 × 2,048 tokens"),
        ("interleaved_1f1b", "11.50", "95.8%",
         "2 stages a rank: pipeline bubble 0.25 s; 56.7 instead of 30.7 GB, which does not fit into 48.0 GB"),
        ("zbv", "11.50", "95.8%",
         "2 stages a rank: pipeline bubble 0.25 s; 56.7 instead of 30.7 GB, which does not fit into 48.0 GB"),
    ]  # fmt: skip
    changes = [layout for ((layout, nodes, size),), _ in ASKED]
    assert [(one.pipeline_schedule, one.pipeline_stages_per_rank) for one in changes] == [
        ("interleaved_1f1b", 2), ("zbv", 2)
    ]  # fmt: skip
    assert {(nodes, size, phase.tokens_per_step) for ((_, nodes, size),), phase in ASKED} == {(6, 2, 98_304)}


ALONE = {"tensor": 1, "pipeline": 1, "shard": 1, "micro_batch": 48}
ROUND = {"pipeline_schedule": "interleaved_1f1b", "pipeline": 2}
# Keys of the layout, the part, and what its reason ends with.
SAID: list[tuple[dict[str, Any], str, str]] = [
    (ALONE, "step",
     "dp1-mb48-zero1 on 1 node (1 device): 98,304 tokens at 8,192 tokens/s, 7.5 TFLOP/s a device "
     "(model FLOPs), 748.7% of its peak; 1 data-parallel rank with 1 micro-batch of 48 × 2,048 "
     "tokens; 80% of measured steps are expected in 11.00 s to 14.50 s"),
    (ALONE, "memory",
     "fits: 30.7 of 48.0 usable GB on the fullest, rank 0 (as every rank): activations 10.2, "
     "optimiser state 8.0, gradients 4.5, weights 4.0, gathered parameters 3.0, workspace 1.0"),
    (ALONE, "optimiser",
     "46 bytes a parameter through memory once a step, of all parameters of the rank"),
    (ALONE, "norms and activations",
     "norms, residuals, rotation and activations through memory"),
    (ALONE, "output head and loss",
     "output matrix and loss over 32,000 tokens"),
    (ALONE, "tensor traffic",
     "1 ranks inside a node of 4 devices; 4 all-reduces a layer and micro-batch, each of 2 (t − 1)/t "
     "× the hidden states; 70% is not hidden"),
    (ALONE, "slowest device",
     "the slowest of 1 device is expected √(2 ln 1) = 0.0 standard deviations of 1.50% behind their "
     "mean, and all wait for it"),
    # five sequences of 48 are empty: 5 ranks with 9 or 10
    ({"shard": 5, "tensor": 1, "pipeline": 1}, "step",
     "dp5-mb2-zero1 on 2 nodes (5 devices): 98,304 tokens at 8,192 tokens/s, 1.5 TFLOP/s a device "
     "(model FLOPs), 149.7% of its peak; 5 data-parallel ranks with 5 micro-batches of 2 × 2,048 "
     "tokens (5 data-parallel ranks: 10 sequences on 3 of them and 9 on the others; 4.0% of the work "
     "is empty); 80% of measured steps are expected in 11.00 s to 14.50 s"),
    (ROUND | {"shard": 1, "micro_batch": 3},
     "pipeline bubble",
     "bounds the step beside matrix work (54.2% with the head); 2 pipeline ranks wait while 16 "
     "micro-batches fill and empty the pipeline: for interleaved_1f1b and equal stages (p − 1)/(2 m) "
     "= 1/32 = 3.1% of a rank's work"),
    (ROUND | {"shard": 1, "micro_batch": 3}, "32 micro-batches",
     "32 micro-batches|||would leave a bubble of 1.6% of the work; needs 196,608 tokens a step"),
    (ROUND | {"shard": 1, "micro_batch": 3}, "interleaved_1f1b",
     "interleaved_1f1b|11.50|95.8%|4 stages a rank: pipeline bubble 0.25 s; 56.7 instead of 30.7 GB, "
     "which does not fit into 48.0 GB"),
    # twelve stages a rank: none that is tried has twice as many
    (ROUND | {"pipeline_stages_per_rank": 4, "shard": 6}, "pipeline bubble",
     "bounds the step beside matrix work (54.2% with the head); 2 pipeline ranks wait while 4 "
     "micro-batches fill and empty the pipeline: for interleaved_1f1b and equal stages (p − 1)/(4 m) "
     "= 1/16 = 6.2% of a rank's work"),
    (ROUND | {"pipeline_stages_per_rank": 4, "shard": 6}, "8 micro-batches",
     "8 micro-batches|||would leave a bubble of 3.1% of the work; needs 196,608 tokens a step, "
     "micro-batches of 1 × 2,048 tokens or 3 data-parallel ranks instead of 6 (half of the devices)"),
    ({"pipeline_schedule": "interleaved_zero_bubble", "pipeline": 2, "shard": 2, "micro_batch": 3},
     "pipeline bubble",
     "bounds the step beside matrix work (54.2% with the head); 2 pipeline ranks wait while 8 "
     "micro-batches fill and empty the pipeline: for interleaved_zero_bubble and equal stages (p − "
     "1)/(6 m) = 1/48 = 2.1% of a rank's work"),
    ({"pipeline_schedule": "interleaved_zero_bubble", "pipeline": 2, "shard": 2, "micro_batch": 3},
     "16 micro-batches",
     "16 micro-batches|||would leave a bubble of 1.0% of the work; needs 196,608 tokens a step or 1 "
     "data-parallel rank instead of 2 (half of the devices)"),
    (ROUND | {"shard": 1, "micro_batch": 3, "tensor": 2}, "pipeline traffic",
     "hidden states and their gradients from stage to stage inside a node, 4 times a micro-batch on "
     "each rank (2 stages); 40% is not hidden"),
    (ROUND | {"shard": 3, "tensor": 1}, "pipeline traffic",
     "hidden states and their gradients from stage to stage over the network, 4 times a micro-batch "
     "on each rank (2 stages); 40% is not hidden"),
    (ROUND | {"pipeline_stages_per_rank": 4}, "memory",
     "fits: 30.7 of 48.0 usable GB on the fullest, rank 0 (stages 0, 2, 4, 6): activations 10.2, "
     "optimiser state 8.0, gradients 4.5, weights 4.0, gathered parameters 3.0, workspace 1.0"),
    ({"zero": 3, "replicate": 2, "shard": 2, "pipeline": 2, "micro_batch": 4}, "data traffic",
     "between 4 ranks parameters are gathered and gradients scattered for each of 3 micro-batches; "
     "another 0.45 s are hidden, as 90% of the passes over it can hide traffic, which slows it by 20%"
     " of the hidden seconds"),
    ({"zero": 3, "replicate": 2, "shard": 1, "pipeline": 2, "micro_batch": 4}, "data traffic",
     "between 2 ranks gradients and parameters are exchanged once a step, so larger steps make its "
     "share smaller; another 0.45 s are hidden, as 60% of a backward pass can hide traffic, which "
     "slows it by 20% of the hidden seconds"),
    ({"zero": 3, "shard": 1, "context": 2, "pipeline": 2, "micro_batch": 48}, "data traffic",
     "between 2 ranks parameters are gathered and gradients scattered for each of 1 micro-batch; "
     "another 0.45 s are hidden, as 90% of the passes over it can hide traffic, which slows it by 20%"
     " of the hidden seconds"),
    ({"zero": 3}, "norms and activations",
     "norms, residuals, rotation and activations through memory"),
    ({"zero": 2, "shard": 6, "pipeline": 2, "seconds": {"data_traffic": 0.0}}, "data traffic",
     "data traffic|0.00|0.000%|between 6 ranks parameters are gathered once a step, and gradients "
     "scattered for each of 4 micro-batches; another 0.45 s are hidden, as 60% of the passes over it "
     "can hide traffic, which slows it by 20% of the hidden seconds"),
    ({"zero": 2, "shard": 2, "pipeline": 2, "pipeline_schedule": "zbv"}, "data traffic",
     "between 2 ranks gradients and parameters are exchanged once a step, so larger steps make its "
     "share smaller; another 0.45 s are hidden, as 60% of a backward pass can hide traffic, which "
     "slows it by 20% of the hidden seconds"),
    ({"zero": 2, "shard": 3, "context": 2, "pipeline": 1}, "optimiser",
     "46 bytes a parameter through memory once a step, of 1/6 of the rank's parameters"),
    ({"tensor": 8, "pipeline": 1, "shard": 1, "sequence_parallel": False}, "tensor traffic",
     "8 ranks over several nodes of 4 devices, at the network's speed; 4 all-reduces a layer and "
     "micro-batch, each of 2 (t − 1)/t × the hidden states; 70% is not hidden"),
    ({"tensor": 4, "pipeline": 1}, "tensor traffic",
     "4 ranks inside a node of 4 devices; 5 all-reduces a layer and micro-batch, two halves of one to"
     " gather inputs again for the gradients of weights, each of 2 (t − 1)/t × the hidden states; 70%"
     " is not hidden"),
    ({"recompute": "full", "recompute_every_layers": 4}, "tensor traffic",
     "2 ranks inside a node of 4 devices; 5.5 all-reduces a layer and micro-batch, 0.5 of them for "
     "recomputation, two halves of one to gather inputs again for the gradients of weights, each of 2"
     " (t − 1)/t × the hidden states; 70% is not hidden"),
    ({"tensor_overlap": "chunked"}, "tensor traffic",
     "2 ranks inside a node of 4 devices; 5 all-reduces a layer and micro-batch, two halves of one to"
     " gather inputs again for the gradients of weights, each of 2 (t − 1)/t × the hidden states; 70%"
     " is not hidden; gathers before products and sums after them run in 2 chunks beside products, "
     "which wait for the first or the last chunk, by assumption: a product beside a collective keeps "
     "90% of its rate. It was not measured on a GPU"),
    ({"tensor": 8, "pipeline": 1, "shard": 1, "sequence_parallel": False}, "norms and activations",
     "norms, residuals, rotation and activations through memory; gradients added up 24 times a step "
     "(less often with larger micro-batches); sequence parallelism would split norms and residuals "
     "over 8 tensor ranks"),
    ({"context": 2, "seconds": {"context_traffic": 0.005}}, "context traffic",
     "context traffic|0.0050|0.042%|keys and values to all 2 context ranks, their gradients back"),
    ({"seconds": {"context_traffic": 0.024}}, "context traffic",
     "context traffic|0.024|0.2%|keys and values to all 1 context ranks, their gradients back"),
    ({"seconds": {"head": 2.0}}, "pipeline bubble",
     "pipeline bubble|1.25|9.3%|bounds the step beside matrix work (59.3% with the head); 4 pipeline "
     "ranks wait while 8 micro-batches fill and empty the pipeline: for 1f1b and equal stages (p − "
     "1)/m = 3/8 = 37.5% of a rank's work"),
    # products are made again by a half, attention not, and norms as a whole
    ({"recompute": "operators"}, "matrix products",
     "2 FLOPs a weight and token forward (1 more for recomputation), 4 backward, at 20.0% of the "
     "device's peak; products of any size reach at most 20.0%, larger micro-batches make larger "
     "products"),
    ({"recompute": "operators"}, "of these, recomputation",
     "operators: matrix products 0.86 s, norms and activations 0.20 s, kernel launches −0.0029 s; 11%"
     " more FLOPs than the model's"),
    ({"recompute": "attention"}, "of these, recomputation",
     "attention: attention 0.22 s, kernel launches −0.00076 s; 4% more FLOPs than the model's"),
    # half of 16,777,216 FLOPs of attention, of two a weight, by 913.8 million
    ({"recompute": "full", "recompute_every_layers": 2}, "of these, recomputation",
     "full in one layer of 2: matrix products 0.86 s, attention 0.12 s, norms and activations 0.11 s,"
     " kernel launches 0.0029 s, tensor traffic 0.15 s; 13% more FLOPs than the model's"),
    ({"recompute": "full", "recompute_every_layers": 2}, "no recomputation",
     "no recomputation|11.50|95.8%|pipeline bubble (−1.00 s), matrix products (+0.50 s), the rest "
     "+0.00 s; 56.7 instead of 30.7 GB, which does not fit into 48.0 GB"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "start", "end"), SAID)
def test_a_reason_has_the_numbers_of_its_layout(keys, start, end):
    one = planned(**keys)
    (row,) = [row for row in (row.cells(one) for row in explain(one)) if row[0] == start]
    assert "|".join(row).endswith(end), row


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
    rows = {row.part: row for row in explain(planned(run("fp8", train=MIXED | {"fp8": fp8})))}
    assert rows["precision"][2:] == (0.7, "planned for fp8, the precision of 7 of 10 steps (3 in bf16)")
    assert rows["FP8 (rowwise_with_gw_hp)"].share == pytest.approx(4_194_304 / 12_845_056)
    assert rows["FP8 (rowwise_with_gw_hp)"].reason == (
        "of the layers' matrices; products for weights' gradients in bf16; the head's weight gradient, "
        "attention and kept activations in bf16"
    )
    assert (
        "at 5.0% of the device's peak in FP8; products of any size reach at most 6.2%,"
        in rows["matrix products"].reason
    )
    plain = {"tokens": 983_040, "tokens_per_step": 98_304, "precision": "fp8"}
    rows = {row.part: row for row in explain(planned(run("fp8", train=plain)))}
    assert "precision" not in rows and rows["FP8 (tensorwise)"][2:] == (
        1,
        "of the layers' matrices, which are also gathered in 8 bits; the head, attention and kept "
        "activations in bf16",
    )
    assert "7.8% of its peak" in rows["step"].reason


def test_memory_of_a_node_is_told():
    """Offloaded, a device's 52.5 GB of state lie there too, and files of two ranks twice: 48 GB each, beside
    the 48 of a save. A processor has 12 and all its 30.7 GB there.
    """
    keeps = run(checkpoint={"memory_every_steps": 5})
    rows = {
        row.part: row
        for row in explain(planned(keeps, bytes_={"weights": 40e9, "activations": 0.0}, cpu_offload=True))
    }
    assert rows["memory"].share == pytest.approx(56.5 / 48)
    assert rows["memory"].reason == (
        "does not fit: 56.5 of 48.0 usable GB on the fullest, rank 0 (stage 0): weights 40.0, optimiser "
        "state 8.0, gradients 4.5, gathered parameters 3.0, workspace 1.0"
    )
    assert rows["host memory"].reason == (
        "does not fit: at most 1170.0 of 107.4 GB a node: weights, gradients and optimiser state, and the "
        "copies that a save makes of weights and optimiser state, and the copies that stay in "
        "memory (checkpoint.memory_every_steps)"
    )
    on_processor = {row.part: row.reason for row in explain(planned(run(card={"device": "cpu"})))}
    assert on_processor["host memory"] == (
        "does not fit: at most 170.8 of 107.4 GB a node: all of the above and the copies that a save makes "
        "of weights and optimiser state"
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

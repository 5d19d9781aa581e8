"""Seconds of a layer's kernels, added up by hand for a machine of round numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from kielo.plan.collective_seconds import (
    context_layer_seconds,
    expert_layer_seconds,
    gather_logits_seconds,
    ring_bandwidth,
    stage_seconds,
    tensor_halves,
    tensor_layer_seconds,
)
from kielo.plan.layer_seconds import (
    LayerSeconds,
    exposed_tensor_seconds,
    head_seconds,
    layer_seconds,
    product_seconds,
)
from tests.plan.workloads import workload

# 1,000 FLOP/s, half of which products reach, and 100 bytes/s; links of 10 in a node and 4 between nodes.
MACHINE = {
    "peak": 1000.0, "peak_recipe": 2000.0, "power_share": 1.0, "memory_bandwidth": 100.0,
    "node_bandwidth": 10.0, "network_bandwidth": 4.0, "node_devices": 8, "architecture": 2,
}  # fmt: skip
# A layer of 8 columns: 4 heads of 2, 2 of keys, a gated MLP of 16; 32 tokens; 64 rows of the vocabulary.
SMALL = MACHINE | {
    "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "ffn": 16, "mlp_matrices": 3, "vocabulary": 64,
    "sequence": 16, "micro_batch": 2, "layers": 3, "engine": 2, "micro_batches": 1,
}  # fmt: skip
TOKENS = 32


def rates(**changes) -> SimpleNamespace:
    """Nothing is wasted and nothing is free: shares of a half, and no seconds beside the work."""
    return SimpleNamespace(**{
        "matrix": 0.5, "matrix_fp8": 0.25, "flash": 0.5, "matrix_engine": 1.0, "elementwise": 1.0,
        "rocm_engine": 0.5,
        "accumulate": 1.0, "layer_seconds": 0.0, "tensor_exposed": 1.0, "memory": 1.0, "network": 0.5,
        "node": 0.5, "latency_seconds": 0.0, "tensor_launch": 1.0, "eager_launch": 1.0, "tile": 0.0,
        "wave_elements": 0.0, "misaligned": 1.0, "flash_1": 0.5, "flash_cudnn": 2.0, "softmax_bytes": 30.0,
        "unfused_attention": 2.0, "small_heads": 0.0, "quantise": 0.0, "odd_heads": 1.0, "fp8_rowwise": 0.8,
        "mxfp8": 0.9, "nvfp4": 0.7, "power": 0.5, "hop_seconds": 0.0, "gather": 1.0,
    } | changes)  # fmt: skip


FREE = {"memory_bandwidth": 1e30}  # memory that takes no time


@pytest.mark.parametrize(
    ("row", "rate", "seconds"),
    [
        ({}, {}, np.hypot(2 * 4 * 64 * 128 / 500, 2 * (4 * 128 + 128 * 64 + 4 * 64) / 100)),
        (FREE, {"memory": 0.5}, 131.072),
        (FREE, {"wave_elements": 128.0}, 131.072 * 1.5),
        (FREE, {"tile": 32.0}, 131.072 * 1.25),
        (FREE, {"misaligned": 1.5}, 131.072),
        (FREE, {"matrix_engine": 0.5}, 131.072 * 2),
        # on AMD's devices engines differ by another factor
        (FREE | {"architecture": 4}, {"matrix_engine": 0.25}, 131.072 * 2),
        (FREE | {"power_share": 0.25}, {}, 131.072 * 2),
        (FREE | {"recipe": 1}, {}, 131.072),  # 2,000 × 0.25
        (FREE | {"recipe": 2}, {}, 131.072 / 0.8), (FREE | {"recipe": 3}, {}, 131.072 / 0.9),
        (FREE | {"recipe": 4}, {}, 131.072 / 0.7),
        ({"peak": 1e30}, {"memory": 0.5}, 2 * (4 * 128 + 128 * 64 + 4 * 64) / 50),
    ],
)  # fmt: skip
def test_a_product_takes_its_flops_beside_its_bytes(row, rate, seconds):
    """[4, 128] × [128, 64] at 500 FLOP/s; half a wave of 128 of 256 elements, a tile's start of 32 of 128."""
    work = workload(SMALL | row)
    found = product_seconds(work, rates(**rate), 4.0, 64.0, 128.0, work.recipe > 0)
    assert found == pytest.approx(seconds)
    wide = product_seconds(work, rates(**rate), 4.0, 64.0, 128.0, np.array([False]))
    assert wide == pytest.approx(seconds if not row.get("recipe") else 131.072)


def test_crooked_sides_and_groups_of_products():
    """Sides that 64 does not divide; and three products at once, of which a wave holds the tiles of all."""
    work, crooked = workload(SMALL | FREE), rates(misaligned=1.5)
    for columns, inner, slower in ((64, 128, 1.0), (65, 128, 1.5), (64, 127, 1.5), (32, 64, 1.5)):
        found = product_seconds(work, crooked, 4.0, float(columns), float(inner), work.recipe > 0)
        assert found == pytest.approx(2 * 4 * columns * inner / 500 * slower)
    three = product_seconds(work, rates(wave_elements=256.0), 4.0, 64.0, 128.0, work.recipe > 0, 3.0)
    assert three == pytest.approx(3 * 131.072 * (1 + 1 / 3))
    moved = product_seconds(workload(SMALL | {"peak": 1e30}), rates(), 4.0, 64.0, 128.0, work.recipe > 0, 3.0)
    assert moved == pytest.approx(3 * 2 * (4 * 128 + 128 * 64 + 4 * 64) / 100)


# Weights of a layer: queries, keys and values 8 × (8 + 2 × 4), the output 8 × 8, and three of 8 × 16.
WEIGHTS = 8 * 16 + 64 + 3 * 128
FORWARD = 2 * TOKENS * WEIGHTS / 500
EXPERTS = {"experts": 4, "experts_each": 2, "expert_ffn": 8, "shared_ffn": 4, "expert_layers": 0.5}


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ({}, 3 * FORWARD), ({"layers_again": 1}, 4 * FORWARD), ({"operators_again": 1}, 3.5 * FORWARD),
        ({"layers_again": 1, "operators_again": 1}, 4 * FORWARD),
        ({"layers_again": 0.5, "operators_again": 1}, 3.75 * FORWARD),
        ({"frozen": 0.25}, 2.75 * FORWARD), ({"tensor": 2}, 1.5 * FORWARD), ({"context": 2}, 1.5 * FORWARD),
        ({"tensor": 4}, 3 * 2 * TOKENS * (WEIGHTS + 8 * 2 * (4 - 2) * 2) / 500 / 4),  # keys on every rank
        ({"mlp_matrices": 2}, 3 * 2 * TOKENS * (WEIGHTS - 128) / 500),
        ({"projection_share": 0.5}, 3 * 2 * TOKENS * (WEIGHTS - 96) / 500),
        # in 8 bits at 250 FLOP/s of 1,000: all, three quarters, and all but weights' gradients
        ({"recipe": 1, "peak_recipe": 1000.0}, 6 * FORWARD),
        ({"recipe": 1, "peak_recipe": 1000.0, "recipe_share": 0.75}, (0.75 * 6 + 0.25 * 3) * FORWARD),
        ({"recipe": 1, "peak_recipe": 1000.0, "wide_weight_gradients": 1}, 5 * FORWARD),
        ({"recipe": 1, "peak_recipe": 1000.0, "wide_weight_gradients": 1, "recipe_share": 0.5}, 4 * FORWARD),
        ({"wide_weight_gradients": 1}, 3 * FORWARD),
        # half of the layers have experts: two of four copies of a token, and a shared one of 4 columns
        (EXPERTS, 3 * 2 * TOKENS * (192 + 192 + 48 + 2 * 96) / 500),
        (EXPERTS | {"shared_ffn": 0}, 3 * 2 * TOKENS * (192 + 192 + 2 * 96) / 500),
        (EXPERTS | {"expert_ranks": 2, "data": 2}, 3 * 2 * TOKENS * (192 + 192 + 48 + 2 * 96) / 500),
        (EXPERTS | {"expert_ranks": 2, "data": 2, "tensor": 2}, 3 * TOKENS * (192 + 192 + 48 + 2 * 96) / 500),
        (EXPERTS | {"expert_ranks": 4, "data": 2, "tensor": 2}, 3 * TOKENS * (192 + 192 + 48 + 2 * 96) / 500),
    ],
)  # fmt: skip
def test_products_of_a_layer_are_its_weights(row, seconds):
    """Forward, and twice in the backward; again what is made again."""
    work = workload(SMALL | FREE | row)
    assert layer_seconds(work, rates()).matrix == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("row", "rate", "seconds"),
    [
        # 32 × 16 pairs of 4 heads, 4 × 2 FLOPs each, of which a mask leaves half: at 500 FLOP/s
        ({}, {}, 16.384 * 3.5), ({"causal": 0}, {}, 2 * 16.384 * 3.5), ({"tensor": 2}, {}, 16.384 * 1.75),
        ({"attention_again": 1}, {}, 16.384 * 4.5), ({"layers_again": 1}, {}, 16.384 * 4.5),
        ({"layers_again": 0.5, "attention_again": 0.25}, {}, 16.384 * 4),
        ({"deterministic": 1}, {}, 16.384 * (1 + 2.5 * 1.6)),
        # a bias leaves nothing out, is written and read in 2 bytes, and all of it once more in the backward
        ({"biases": 1}, {}, (2 * 16.384 + 2048 * 2 * 2 / 100) * 4.5),
        ({"kernel": 2}, {}, 2 * 16.384 * 3.5), ({"kernel": 4}, {}, 16.384 / 2 * 3.5),
        ({}, {"small_heads": 0.5}, 16.384 * 3.5 * (1 + 0.5 * 6)),  # 2 is 128 halved six times
        ({"power_share": 0.25}, {}, 2 * 16.384 * 3.5),
        # of 2,048 scores all are computed, and move 10 bytes forward, 20 in eager attention; backward as much
        ({"kernel": 1}, {}, (2048 * 8 / 500 + 2048 * 10 / 100) * 3),
        ({"kernel": 0}, {}, (2048 * 8 / 500 + 2048 * 20 / 100) * 3),
        ({"kernel": 1, "attention_again": 1}, {}, (2048 * 8 / 500 + 2048 * 10 / 100) * 4),
        ({"kernel": 1, "deterministic": 1}, {}, (2048 * 8 / 500 + 2048 * 10 / 100) * 3),
        ({"kernel": 1} | FREE, {"tile": 2.0}, 2 * 2048 * 8 / 500 * 3),
        ({"kernel": 1} | FREE, {"odd_heads": 4.0}, 4 * 2048 * 8 / 500 * 3),
        ({"kernel": 1, "head_dim": 8} | FREE, {"odd_heads": 4.0}, 2048 * 32 / 500 * 3),
        ({"kernel": 1} | FREE, {"matrix_engine": 0.5}, 2 * 2048 * 8 / 500 * 3),
    ],
)  # fmt: skip
def test_attention_takes_what_its_kernel_computes(row, rate, seconds):
    """Fused kernels leave out what is masked and take 2.5 times as long backward; others compute it all."""
    assert layer_seconds(workload(SMALL | row), rates(**rate)).attention == pytest.approx(seconds)


# Elements of a token in 2 bytes: of two norms 4 and of two additions 6 for each column; of heads twice 8 + 2
# × 4
# columns; of the activation 3 × 16.
MOVED = 2 * (8 * (4 + 6) + 2 * 16 + 48)


@pytest.mark.parametrize(
    ("row", "rate", "moved"),
    [
        ({}, {}, 3 * MOVED), ({}, {"elementwise": 1.5}, 4.5 * MOVED), ({}, {"memory": 0.5}, 6 * MOVED),
        ({"tensor": 2}, {}, 3 * (160 + 80)), ({"tensor": 2, "sequence_parallel": 1}, {}, 1.5 * MOVED),
        ({"layers_again": 1}, {}, 4 * MOVED), ({"operators_again": 1}, {}, 4 * MOVED),
        ({"layers_again": 0.5, "operators_again": 0.25}, {}, 3.5 * MOVED),
        ({"norms_again": 1}, {}, 3 * MOVED + 2 * 4 * 8), ({"activations_again": 0.5}, {}, 3 * MOVED + 48),
        ({"norms_again": 1, "tensor": 2, "sequence_parallel": 1}, {}, 1.5 * MOVED + 2 * 4 * 4),
        ({"norms_again": 1, "tensor": 2}, {"elementwise": 2.0}, 2 * (3 * (160 + 80) + 2 * 4 * 8)),
        ({"unfused_norms": 1}, {}, 3 * (MOVED + 2 * 36 * 8)), ({"unfused_norms": 0.5}, {}, 3 * MOVED),
        # of 8-bit products the inputs: three of a layer's, and the MLP's own
        ({"recipe": 1}, {"quantise": 4.0}, 3 * (MOVED + 4 * (8 + 8 + 8 + 16))),
        ({"recipe": 0}, {"quantise": 4.0}, 3 * MOVED),
        # a micro-batch's gradients are read, and those in fp32 read and written
        ({"micro_batches": 2}, {}, 3 * MOVED + 10 * WEIGHTS / TOKENS),
        ({"micro_batches": 2}, {"accumulate": 0.5}, 3 * MOVED + 5 * WEIGHTS / TOKENS),
        (
            {"micro_batches": 2, "apart_accumulation": 1}, {"accumulate": 0.5},
            3 * MOVED + 10 * WEIGHTS / TOKENS,
        ),
        ({"micro_batches": 2, "gradient_bytes": 2}, {}, 3 * MOVED + 6 * WEIGHTS / TOKENS),
        ({"micro_batches": 2, "zero": 3}, {}, 3 * MOVED),
        ({"micro_batches": 2, "frozen": 0.75}, {}, 3 * MOVED + 2.5 * WEIGHTS / TOKENS),
        ({"micro_batches": 2, "engine": 1}, {}, 3 * MOVED + 20 * WEIGHTS / TOKENS),  # DeepSpeed's copy
        ({"micro_batches": 2, "engine": 1, "gradient_bytes": 2}, {}, 3 * MOVED + 6 * WEIGHTS / TOKENS),
        # each of 2 copies of a token is written, read and the same back
        ({"experts": 4, "experts_each": 2, "expert_ffn": 8, "ffn": 0, "expert_layers": 1}, {},
         3 * (MOVED + 2 * 2 * 4 * 8)),
    ],
)  # fmt: skip
def test_memory_bound_work_moves_what_is_counted_by_hand(row, rate, moved):
    """Bytes of a token over 100 bytes/s, three times: forward and backward."""
    found = layer_seconds(workload(SMALL | row), rates(**rate)).elementwise
    assert found == pytest.approx(TOKENS * moved / 100)


@pytest.mark.parametrize(
    ("row", "rate", "seconds"),
    [
        ({}, {}, 1.0), ({"layers_again": 1}, {}, 4 / 3), ({"tensor": 2}, {"tensor_launch": 1.5}, 1.5),
        ({}, {"tensor_launch": 1.5, "eager_launch": 2.0}, 1.0),
        ({"unfused_norms": 0.5}, {"eager_launch": 2.0}, 2.0),
        ({"overlap_chunks": 2}, {}, 1.18), ({"overlap_chunks": 3}, {}, 1.36),
        ({"experts": 4, "experts_each": 2, "expert_ffn": 8, "ffn": 0, "expert_layers": 0.5}, {}, 1.5),
        ({"experts": 1, "experts_each": 1, "expert_ffn": 8, "ffn": 0, "expert_layers": 1}, {}, 1.0),
    ],
)  # fmt: skip
def test_launches_grow_with_what_is_launched(row, rate, seconds):
    found = layer_seconds(workload(SMALL | row), rates(layer_seconds=1.0, **rate))
    assert found.launch == pytest.approx(seconds)


def test_a_layer_waits_for_its_kernels_or_their_launches():
    """Both are rarely equal on a GPU; on a processor they add up."""
    parts = [np.array([one]) for one in (1.0, 2.0, 3.0, 8.0)]
    gpu, cpu = (LayerSeconds(*parts, np.array([is_processor])) for is_processor in (False, True))
    assert gpu.total(np.zeros(1)) == 10 and cpu.total(np.zeros(1)) == 14 and cpu.total(np.ones(1)) == 15
    assert list(layer_seconds(workload(SMALL, SMALL | {"architecture": 6}), rates()).is_processor) == [0, 1]


HEAD = 2 * TOKENS * 64 * 8 / 500


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        (FREE, 3 * HEAD), ({"peak": 1e30}, 16 * TOKENS * 64 / 100), (FREE | {"tensor": 2}, 1.5 * HEAD),
        ({"peak": 1e30, "unfused_loss": 1}, 52 * TOKENS * 64 / 100),
        ({"peak": 1e30, "tensor": 2}, 16 * TOKENS * 32 / 100),
        # logits of all rows on each rank: half of 2 bytes comes over the link
        ({"peak": 1e30, "tensor": 2, "whole_logits": 1}, 16 * TOKENS * 64 / 100 + TOKENS * 64 / 5),
        ({"peak": 1e30, "whole_logits": 1}, 16 * TOKENS * 64 / 100),
        (FREE | {"recipe": 1, "peak_recipe": 1000.0}, 3 * HEAD),
        (FREE | {"recipe": 1, "peak_recipe": 1000.0, "head_in_recipe": 1}, 5 * HEAD),
        (FREE | {"head_in_recipe": 1}, 3 * HEAD),
    ],
)  # fmt: skip
def test_the_head_takes_three_products_and_the_loss(row, seconds):
    """Its weight's gradient is wide in every recipe."""
    work = workload(SMALL | row)
    products = 3 * 2 * (TOKENS * 64 + 64 * 8 + TOKENS * 8) / 100 / row.get("tensor", 1)
    found = head_seconds(work, rates())
    if "peak" in row:  # the bytes of the products beside those of the loss
        rows = 64 / row.get("tensor", 1)
        products = 3 * 2 * (TOKENS * rows + rows * 8 + TOKENS * 8) / 100
        assert found == pytest.approx(seconds + products)
    else:
        assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("row", "neighbours", "group", "bandwidth"),
    [
        ({}, 8, 8, 5.0), ({}, 8, 9, 5.0), ({}, 2, 8, 4.0), ({}, 1, 8, 2.0), ({"ring_share": 0.25}, 1, 8, 1.0),
        ({}, 16, 17, 5.0), ({"node_bandwidth": 100.0}, 16, 17, 16.0), ({"node_bandwidth": 100.0}, 4, 17, 8.0),
    ],
)  # fmt: skip
def test_a_ring_has_the_links_of_its_nodes(row, neighbours, group, bandwidth):
    """Inside a node half of 10; between nodes half of 4, or what was measured, for each neighbour, and never
    more than inside.
    """
    found = ring_bandwidth(workload(SMALL | row), rates(), np.array([neighbours]), np.array([group]))
    assert found == pytest.approx(bandwidth)


ROUTED = {"experts": 4, "experts_each": 3, "expert_layers": 1}


@pytest.mark.parametrize(
    ("row", "halves"),
    [
        ({}, 8), ({"layers_again": 1}, 12), ({"sequence_parallel": 1}, 10), ({"layers_again": 0.5}, 10),
        (ROUTED, 4), ({"experts": 1, "expert_layers": 1}, 8),
        (ROUTED | {"shared_ffn": 8}, 8),
        (ROUTED | {"expert_layers": 0.5, "shared_ffn": 8}, 8),
        (ROUTED | {"tensor": 2, "data": 2, "expert_ranks": 2}, 16),
        (ROUTED | {"tensor": 2, "data": 2, "expert_ranks": 4}, 4),
    ],
)  # fmt: skip
def test_halves_of_all_reduces_are_counted(row, halves):
    """Two after attention and after the MLP, forward and backward; of split experts one for each copy."""
    if "experts" in row and "tensor" not in row:
        row = row | {"tensor": 2, "data": 1, "expert_ranks": 2}  # whole experts
        if row["experts"] == 1:
            row = row | {"expert_ranks": 1}
    assert tensor_halves(workload(SMALL | row)) == halves


def test_messages_within_a_layer_take_their_bytes_and_begin():
    """Of tensor, context, expert and pipeline ranks, by hand, with a second for the begin of each."""
    late = rates(latency_seconds=1.0, tensor_exposed=0.5)
    work = workload(SMALL, SMALL | {"tensor": 4}, SMALL | {"tensor": 4, "sequence_parallel": 1})
    bytes_ = TOKENS * 8 * 2  # of hidden states
    each = 2 * 3 / 4 * bytes_ / 5 + 2
    assert tensor_layer_seconds(work, late) == pytest.approx([0, 4 * each / 2, 5 * each / 2])
    assert exposed_tensor_seconds(work, late) == pytest.approx([0, 4 * each / 2, 5 * each / 2])
    far = workload(SMALL | {"tensor": 16, "heads": 16, "kv_heads": 16})  # eight neighbours of 2
    assert tensor_layer_seconds(far, late) == pytest.approx(4 * (2 * 15 / 16 * bytes_ / 5 + 4) / 2)
    # keys and values of 4 columns, of all tokens, twice round and back
    context = workload(SMALL, SMALL | {"context": 2}, SMALL | {"context": 4, "tensor": 4, "node_devices": 8})
    keys = 2 * 4 * TOKENS * 2
    assert context_layer_seconds(context, late) == pytest.approx(
        [0, (3 / 2 * keys / 5 + 3) / 2, (3 * 3 / 4 * keys / 4 / 4 + 3) / 2]
    )
    routed = SMALL | {"experts": 16, "experts_each": 3, "expert_layers": 0.5, "data": 16}
    expert = workload(
        routed, routed | {"expert_ranks": 4}, routed | {"expert_ranks": 16},
        routed | {"expert_ranks": 4, "layers_again": 1},
        routed | {"expert_ranks": 4, "tensor": 4, "node_devices": 8},
        routed | {"expert_ranks": 4, "tensor": 8, "node_devices": 8},
    )  # fmt: skip
    copies = 3 * bytes_
    expected = [
        0, 2 * (3 / 4 * copies / 5 + 2), 2 * (8 / 16 * copies / 2 + 4), 3 * (3 / 4 * copies / 5 + 2),
        2 * (2 / 4 * copies / 4 / 2 + 2), 2 * (3 / 4 * copies / 8 / 2 + 2),
    ]  # fmt: skip
    assert expert_layer_seconds(expert, late) == pytest.approx([0.5 * one for one in expected])
    stages = workload(
        SMALL, SMALL | {"pipeline": 2}, SMALL | {"pipeline": 2, "tensor": 4}, SMALL | {"pipeline": 9}
    )
    assert stage_seconds(stages, late) == pytest.approx(
        [0, bytes_ / 5 + 1, bytes_ / 4 / 5 + 1, bytes_ / 2 + 1]
    )
    assert gather_logits_seconds(work, late) == pytest.approx(
        [0, 3 / 4 * TOKENS * 64 * 2 / 5, 3 / 4 * TOKENS * 64 * 2 / 5]
    )

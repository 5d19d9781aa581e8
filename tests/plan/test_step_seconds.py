"""Seconds of a step: what the parts are made of, and what they must do when a layout changes."""

from dataclasses import fields

import numpy as np
import pytest
from planner_fit import fit, spread
from planner_ranking import agreeing_pairs, expected_tau, regret

from kielo.models.families import complete
from kielo.models.parameter_shapes import token_flops
from kielo.plan.calibrate import fit_drawn_to_priors
from kielo.plan.collective_seconds import (
    context_layer_seconds,
    data_seconds,
    expert_layer_seconds,
    ring_bandwidth,
    ring_steps_seconds,
    stage_seconds,
    tensor_layer_seconds,
)
from kielo.plan.efficiency import ARCHITECTURES, CONSTANTS, Efficiency, card_text, fitted, read_card
from kielo.plan.layer_seconds import head_seconds, layer_seconds, matrix_flops
from kielo.plan.planned_layout import interval
from kielo.plan.step_seconds import hidden_data_seconds, step_seconds
from kielo.plan.workload import Workload, machine_columns, workload_row
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout, Model
from kielo.resolve.memory_row import StepSize, TrainOptions
from tests.plan.workloads import columns, workload


def seconds(*changes):
    return step_seconds(workload(*changes), fitted()[0])


def test_the_sum_is_its_parts():
    """No part is hidden and none is negative."""
    step = seconds({"tensor": 4, "pipeline": 2, "layers": 8, "data": 4}, {"zero": 3, "data": 64, "shard": 64})
    parts = [getattr(step, field.name) for field in fields(step)]
    assert np.allclose(step.total, np.sum(parts, axis=0)) and min(np.min(part) for part in parts) >= 0


def test_matrix_flops_are_the_familys_count():
    """Forward FLOPs of all layers and the head, three times over,
    are what `token_flops` says less attention.
    """
    model = complete(
        Model(
            model_type="llama", num_hidden_layers=4, hidden_size=512, num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=1536, vocab_size=32000,
        ),
        2048,
    )  # fmt: skip
    layout = Layout(shard=8, tensor=1)
    step = StepSize(2048, micro_batch=2, micro_batches=4)
    row = workload_row(model, layout, accelerator("h100_80"), cluster("dgx_h100"), step, TrainOptions())
    work = Workload.of([row])
    flops = (
        3 * float((matrix_flops(work) * work.layers / work.tokens)[0])
        + 6 * model.vocab_rows * model.hidden_size
    )
    attention = 6 * 512 * 2048 * 4
    assert flops + attention == pytest.approx(token_flops(model, 2048), rel=1e-3)
    assert work.tokens_per_step[0] == 2 * 4 * 8 * 2048 and work.devices[0] == 8


def test_an_all_reduce_moves_twice_the_bytes_once_round():
    """Four a layer of 2 (t - 1)/t × tokens × hidden × 2 bytes, over the node's links;
    six with full recomputation.
    """
    flat = Efficiency(
        {**Efficiency.start().values, "latency_seconds": np.array([1e-12]), "tensor_exposed": np.ones(4)}
    )
    work = workload({"tensor": 8}, {"tensor": 8, "layers_again": 1})
    rates = flat.of(work)
    expected = 4 * 2 * 7 / 8 * 2048 * 1024 * 2 / (450e9 * rates.node)
    assert tensor_layer_seconds(work, rates) == pytest.approx([expected, expected * 1.5], rel=1e-3)


def test_a_deterministic_backward_of_attention_is_slower():
    """By 0.6 of that pass, which is 2.5 times the forward one; unfused attention has no such choice."""
    unfused = {"kernel": 0}
    step = seconds({}, {"deterministic": 1}, unfused, unfused | {"deterministic": 1})
    assert step.attention[1] / step.attention[0] == pytest.approx((1 + 2.5 * 1.6) / (1 + 2.5))
    assert step.attention[2] == step.attention[3] and step.matrix[0] == step.matrix[1]


def test_an_encoders_attention_takes_twice_as_long():
    """A fused kernel leaves out the half that a causal mask hides, and of an encoder nothing is hidden;
    unfused kernels compute both halves anyway.
    """
    unfused = {"kernel": 0}
    step = seconds({}, {"causal": 0}, unfused, unfused | {"causal": 0})
    assert step.attention[1] == pytest.approx(2 * step.attention[0]) and step.matrix[0] == step.matrix[1]
    assert step.attention[2] == step.attention[3]
    for name, is_causal in (("ltg_bert_base", 0.0), ("norwegian_7b", 1.0)):
        declared = read_recipe(name).recipe.model.model_copy(update={"vocab_size": 32_768})
        model = complete(declared, 512)
        machine = accelerator("h100_80"), cluster("dgx_h100")
        train = TrainOptions(precision="bf16")
        row = workload_row(model, Layout(shard=8), *machine, StepSize(512, 1, 1), train)
        assert row["causal"] == is_causal


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_recipe_asks_for_determinism(is_asked):
    """`train.deterministic` reaches the row that is planned."""
    recipe = read_recipe("estonian_llama31_70b", [f"train.deterministic={str(is_asked).lower()}"]).recipe
    train = TrainOptions.of("bf16", recipe.train)
    model = complete(recipe.model, 4096)
    row = workload_row(
        model,
        Layout(shard=8, tensor=1),
        accelerator("h100_80"),
        cluster("dgx_h100"),
        StepSize(4096, 1, 1),
        train,
    )
    assert row["deterministic"] == is_asked


def test_one_expert_is_the_dense_model():
    """Each token's only expert, as wide as the MLP:
    every part and every parameter count is the dense model's.
    """
    layouts = [
        {"tensor": 4, "pipeline": 2, "data": 8}, {"data": 16, "zero": 3, "shard": 16},
        {"recipe": 1, "layers_again": 1},
    ]  # fmt: skip
    expert = {"experts": 1, "experts_each": 1, "expert_ffn": 4096, "expert_layers": 1, "ffn": 0}
    dense, routed = workload(*layouts), workload(*(layout | expert for layout in layouts))
    for field in fields(seconds()):
        parts = [getattr(step_seconds(work, fitted()[0]), field.name) for work in (dense, routed)]
        assert parts[0] == pytest.approx(parts[1], rel=1e-9), field.name
    assert dense.parameters_of_heaviest_rank == pytest.approx(routed.parameters_of_heaviest_rank)
    assert dense.active_layer_parameters == pytest.approx(routed.layer_parameters)


def test_experts_do_what_they_are_known_for():
    """A mixture computes what is active and holds what is there;
    its ranks share out weights, and over nodes take time.
    """
    mixture = {"experts": 64, "experts_each": 4, "expert_ffn": 1024, "expert_layers": 1, "data": 64}
    mixture |= {"network_bandwidth": 12.5e9}
    one, eight, many = (workload(mixture | {"expert_ranks": ranks}) for ranks in (1, 8, 64))
    q = 2 * 1024 * 2 * 1024
    assert one.active_layer_parameters[0] == q + 4 * 2 * 1024 * 1024 + 64 * 1024  # with the router
    assert one.layer_parameters[0] == q + 64 * 2 * 1024 * 1024 + 64 * 1024
    assert matrix_flops(one)[0] == pytest.approx(2 * 2048 * (q + 4 * 2 * 1024 * 1024))
    routed = [work.layer_parameters_of_rank[0] - q - 64 * 1024 for work in (one, eight, many)]
    assert routed == pytest.approx([64 * 2 * 1024**2, 8 * 2 * 1024**2, 2 * 1024**2])
    near, far = (float(expert_layer_seconds(work, fitted()[0].of(work))[0]) for work in (eight, many))
    assert expert_layer_seconds(one, fitted()[0].of(one))[0] == 0 and far > 5 * near > 0


def test_a_ring_goes_as_fast_as_was_measured():
    """Data-parallel traffic takes the figure of a fabric's rings where somebody measured it; hops between
    stages do not.
    """
    shape = {"data": 4, "pipeline": 2, "node_devices": 1, "network_bandwidth": 12.5e9}
    work = workload(shape, shape | {"ring_share": 0.2})
    rates = Efficiency.start().of(work)
    once = data_seconds(work, rates)[0] - rates.latency_seconds * 2
    assert once[1] / once[0] == pytest.approx(rates.network / 0.2)
    assert stage_seconds(work, rates)[0] == stage_seconds(work, rates)[1]


def test_data_parallel_traffic_by_zero_degree():
    """ZeRO 1 sends once a step whatever the number of micro-batches; ZeRO 3 for each of them. Gradients that
    are added up whole before parameters are gathered send three halves of a ring in place of two.
    """
    ranks = {"zero": 1, "data": 8, "shard": 8}
    work = workload(ranks, ranks | {"zero": 3}, ranks | {"whole_gradients": 1})
    rates = Efficiency.start().of(work)
    once, each = data_seconds(work, rates)
    assert once[0] > 0 and each[0] == 0 and each[1] > 0
    assert (once[2] - 3 * rates.latency_seconds) / (once[0] - 3 * rates.latency_seconds) == pytest.approx(1.5)


def test_layouts_do_what_they_are_known_for():
    """Tensor parallelism over nodes costs more than within; interleaving shrinks the bubble; recomputing
    costs a forward.
    """
    shape = {
        "layers": 32,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 64,
        "ffn": 32768,
        "data": 2,
        "network_bandwidth": 12.5e9,
    }
    inside, across = seconds(shape | {"tensor": 8}, shape | {"tensor": 16}).tensor_traffic
    assert across > inside * 1.5
    plain, interleaved, split = seconds(
        shape | {"pipeline": 4},
        shape | {"pipeline": 4, "chunks": 4},
        shape | {"pipeline": 4, "splits_backward": 1},
    ).bubble
    assert interleaved == pytest.approx(plain / 4) and split == pytest.approx(plain / 3)
    none, full = seconds(shape, shape | {"layers_again": 1}).matrix
    assert 1.25 < full / none < 1.4
    few, many = seconds({"data": 8, "micro_batches": 64}, {"data": 512, "micro_batches": 64}).total
    assert few < many < 1.2 * few


LAYER = 1024 * (2 * (1024 + 1024) + 2 * 4096)  # weights of `workload`'s layer
ENDS = 2 * 32_000 * 1024  # of its embedding and head


def test_the_optimisers_part_is_bytes_through_memory():
    """46 a parameter, or those of the row: of a rank's share, less what is frozen, and of experts by their
    own replicas. Matrix products of the update come on top.
    """
    own = {"compute_bytes": 2, "reduce_bytes": 4, "gathered_bytes": 2, "optimiser_bytes": 8}
    shards, mixture = {"data": 8, "shard": 8}, {"experts": 8, "experts_each": 2, "expert_ffn": 1024, "ffn": 0}
    mixture |= {"expert_layers": 1, "expert_ranks": 4}
    whole = 4 * LAYER + ENDS
    dense, experts = 4 * 1024 * (4 * 1024 + 8) + ENDS, 4 * 8 * 2 * 1024 * 1024 / 4
    expected = [
        ({"zero": 0, **shards}, 46 * whole), ({**shards}, 46 * whole / 8),
        ({"zero": 3, **shards}, 46 * whole / 8),
        (own, 46 * whole), (own | {"update_traffic_bytes": 70}, 70 * whole),
        (own | {"frozen": 0.25}, 46 * (3 * LAYER + ENDS)), ({"tied": 1}, 46 * (4 * LAYER + ENDS / 2)),
        ({"tensor": 2}, 46 * whole / 2), ({"pipeline": 2}, 46 * (2 * LAYER + ENDS / 2)),
        (mixture | shards, 46 * (dense / 8 + experts / 2)),
        (mixture | shards | {"zero": 0}, 46 * (dense + experts)),
    ]  # fmt: skip
    work = workload(*(change for change, _ in expected))
    moved = step_seconds(work, fitted()[0]).optimiser * work.memory_bandwidth * fitted()[0].of(work).memory
    assert moved == pytest.approx([count for _, count in expected])


def test_data_parallel_traffic_of_kielo_is_counted_by_the_byte():
    """Of 7/8: a parameter is gathered in bf16, a layer's in 8 bits where FP8 is gathered; a gradient is
    scattered in fp32 or bf16, and none of what is frozen. Degree 3: as fitted, three of both for each
    micro-batch. Copies of the shards sum theirs over the network.
    """
    own = {"compute_bytes": 2, "gathered_bytes": 2, "reduce_bytes": 4, "data": 8, "shard": 8}
    eight, frozen, narrow = {"gathered_bytes": 1}, {"frozen": 0.5}, {"reduce_bytes": 2}
    layers, whole = 4 * LAYER, 4 * LAYER + ENDS
    rows = [
        (1, {}, 6 * whole, 0), (1, eight, 6 * whole - layers, 0), (1, frozen, 6 * whole - 2 * layers, 0),
        (1, eight | frozen | narrow, 4 * whole - 2 * layers, 0),
        (2, {}, 2 * whole, 4 * whole), (2, eight | frozen, 2 * whole - layers, 4 * whole - 2 * layers),
        (3, {}, 0, 6 * whole), (3, eight, 0, 6 * whole - 2 * layers), (3, frozen, 0, 6 * whole - layers),
        (3, narrow, 0, 5 * whole),
    ]  # fmt: skip
    work = workload(*(own | {"zero": zero} | change for zero, change, *_ in rows))
    rates = fitted()[0].of(work)
    rates.latency_seconds, rates.gather = 0.0, 1.0
    bandwidth = 7 / 8 / ring_bandwidth(work, rates, work.data, work.data)
    once, each = data_seconds(work, rates)
    assert once == pytest.approx([row[2] for row in rows] * bandwidth)
    assert each == pytest.approx([row[3] for row in rows] * bandwidth)
    copies = workload(*(own | {"zero": 3, "data": 32} | change for change in ({}, frozen, narrow)))
    rates = fitted()[0].of(copies)
    rates.latency_seconds = 0.0
    # four copies of an eighth: 2 × 3/4 of 2 bytes, all but half of the layers' gradients, or in bf16
    sums = 2 * 3 / 4 * 2 / 8 * np.array([whole, whole - layers / 2, whole / 2])
    once = data_seconds(copies, rates)[0]
    assert once == pytest.approx(sums / (copies.network_bandwidth * rates.network))


def test_processors_begin_a_collective_for_each_layer():
    """Two of log2 n latencies for each layer of a rank and the rest, and at degree 3 three for each layer and
    micro-batch; devices count the steps of their rings in their place.
    """
    shape = {"data": 8, "shard": 8, "engine": 2}
    cpu = ARCHITECTURES.index("cpu")
    rows = [shape | {"zero": zero, "architecture": place} for zero in (1, 3) for place in (cpu, 2)]
    work = workload(*rows)
    rates = fitted()[0].of(work)
    rates.latency_seconds = 0.0
    bare = data_seconds(work, rates)
    rates.latency_seconds = 1.0
    once, each = (late - soon for late, soon in zip(data_seconds(work, rates), bare))
    assert once == pytest.approx([3 * 2 * 5, 3, 3 * 2, 3]) and each == pytest.approx([0, 0, 3 * 3 * 4, 0])
    once, each = ring_steps_seconds(work, rates)
    hop = rates.hop_seconds * 7
    assert once == pytest.approx([0, 2 * 4 * hop, 0, 0]) and each == pytest.approx([0, 0, 0, 3 * 4 * hop])
    others = workload(
        shape | {"engine": 0}, shape | {"zero": 0}, shape | {"data": 32}, shape | {"data": 4},
        shape | {"data": 4, "context": 2},
        shape | {"data": 8, "context": 2, "shard": 16, "layers": 8, "pipeline": 2},
    )  # fmt: skip
    once = ring_steps_seconds(others, fitted()[0].of(others))[0]
    assert once == pytest.approx([0, *[2 * 4 * rates.hop_seconds * n for n in (7, 7, 3, 7, 15)]])


def test_a_step_is_made_of_the_seconds_of_its_layers():
    """By hand from those of one layer and the head: a stage's layers, what the head adds to equal stages or
    in a layer's place, the bubble, and the hops between stages.
    """
    rows = [
        {"layers": 8}, {"layers": 8, "pipeline": 4}, {"layers": 8, "pipeline": 4, "chunks": 2},
        {"layers": 7, "pipeline": 4, "vocabulary": 500_000}, {"layers": 7, "pipeline": 4},
        {"layers": 8, "pipeline": 4, "splits_backward": 1}, {"layers": 7, "pipeline": 2, "chunks": 2},
        {"layers": 3, "pipeline": 1, "chunks": 1, "tensor": 2, "context": 2},
    ]  # fmt: skip
    work = workload(*({"micro_batches": 16} | row for row in rows))
    rates, step = fitted()[0].of(work), step_seconds(work, fitted()[0])
    layer, head, hop = layer_seconds(work, rates), head_seconds(work, rates), stage_seconds(work, rates)
    tensor, context = tensor_layer_seconds(work, rates), context_layer_seconds(work, rates)
    each = np.hypot(layer.matrix + layer.attention + layer.elementwise + tensor + context, layer.launch)
    of_rank = np.array([8, 2, 2, 2, 2, 2, 4, 3])
    assert step.matrix == pytest.approx(16 * of_rank * layer.matrix)
    assert step.attention == pytest.approx(16 * of_rank * layer.attention)
    assert step.elementwise == pytest.approx(16 * of_rank * layer.elementwise)
    assert step.tensor_traffic == pytest.approx(16 * of_rank * tensor)
    assert step.context_traffic == pytest.approx(16 * of_rank * context)
    device = step.matrix + step.attention + step.elementwise + step.tensor_traffic + step.context_traffic
    assert step.launch + device == pytest.approx(16 * of_rank * each)
    in_place = np.maximum(0, head - each * work.chunks)  # seven layers leave room for it
    extra = np.where([True, True, True, False, False, True, False, True], head, in_place)
    assert step.head == pytest.approx(16 * extra)
    assert in_place[3] > 0 == in_place[4]
    # ranks have the mean to do; what the heaviest does beyond it is no waiting
    waits = work.layers * each + head - of_rank * each - extra
    alone = np.array([0, 1, 1 / 2, 1, 1, 1 / 3, 1 / 2, 0])
    wait = np.maximum(0, waits) * alone
    assert step.bubble == pytest.approx(wait) and step.bubble[1] > 0
    passes = 2 * hop * (16 * work.chunks * rates.pipeline_exposed + work.pipeline - 1)
    assert step.pipeline_traffic == pytest.approx(passes) and passes[0] == 0 < passes[1]
    assert step.fixed == pytest.approx(rates.step_seconds)
    busy = 16 * (of_rank * each + extra) + wait
    late = np.sqrt(2 * np.log([1, 4, 4, 4, 4, 4, 2, 4]))
    assert step.slowest == pytest.approx(busy * rates.jitter * late)


def test_hidden_traffic_is_what_a_step_does_not_wait_for():
    """With nothing to hide behind, none; with much work, all of it, at the price of the overlap."""
    work = workload({"data": 8, "shard": 8, "engine": 2}, {"data": 8, "shard": 8, "zero": 3, "engine": 2})
    for share in (1e-9, 1e6):
        values = fitted()[0].values | {"data_hidden": np.full(4, share), "gather_hidden": np.full(1, share)}
        efficiency = Efficiency(values)
        rates, step = efficiency.of(work), step_seconds(work, efficiency)
        once, each = data_seconds(work, rates)
        first, more = ring_steps_seconds(work, rates)
        traffic, steps = once + 8 * each, first + 8 * more
        costs = 1.0 if share < 1 else rates.overlap_cost
        assert step.data_traffic == pytest.approx(traffic * costs + steps, rel=1e-4)
        hidden = hidden_data_seconds(work, efficiency, step.data_traffic)
        assert hidden == pytest.approx(traffic if share > 1 else [0, 0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("share", "hidden"),
    [(1.0, 2**-0.25), (10.0, (1 + 1e-4) ** -0.25), (0.1, 0.1 * (1 + 1e-4) ** -0.25)],
)
def test_of_traffic_as_long_as_the_work_beside_it_five_sixths_are_hidden(share, hidden):
    """Both begin and end apart: 2^(-1/4) of it; of shorter traffic nearly all, of longer the work's time.
    What is hidden costs its share too.
    """
    base = fitted()[0].values | {name: np.zeros(1) for name in ("latency_seconds", "hop_seconds")}
    work = workload({"data": 8, "shard": 8, "zero": 3, "micro_batches": 1})
    rates = Efficiency(base).of(work)
    once, traffic = data_seconds(work, rates)
    heaviest = 4 * layer_seconds(work, rates).total(0.0) + head_seconds(work, rates)
    values = base | {"gather_hidden": share * traffic / heaviest, "overlap_cost": np.full(1, 0.25)}
    waited = step_seconds(work, Efficiency(values)).data_traffic
    assert once == 0 and waited == pytest.approx(traffic * (1 - hidden + 0.25 * hidden))


def test_ten_thousand_layouts_are_one_call():
    """Columns: the answer for many is that for each."""
    rows = [columns(tensor=2 ** (i % 4), micro_batch=1 + i % 7, data=8) for i in range(10_000)]
    together = step_seconds(Workload.of(rows), fitted()[0]).total
    alone = step_seconds(Workload.of([rows[4321]]), fitted()[0]).total
    assert together.shape == (10_000,) and together[4321] == pytest.approx(alone[0])


def test_a_card_is_read_as_it_was_written(tmp_path):
    """Four digits of every constant, and a missing one is named."""
    path = tmp_path / "card.toml"
    path.write_text(card_text(Efficiency.start(), {"lower": -0.1, "upper": 0.2}, "for a test"))
    read, figures = read_card(path)
    assert all(
        np.allclose(read.values[name], Efficiency.start().values[name], rtol=1e-3) for name in CONSTANTS
    )
    assert figures == {"lower": -0.1, "upper": 0.2}
    path.write_text(path.read_text().replace("[tile]", "[tiles]"))
    with pytest.raises(KieloError, match="tile is missing. Fix: `benchmarks/planner/planner.py --fit`"):
        read_card(path)


def test_the_fit_finds_the_constants_that_made_the_times():
    """Times of made-up machines, with constants 20 % off, are fitted to 3 %, the same on every call."""
    rows = [
        columns(hidden=h, heads=h // 128, kv_heads=h // 128, ffn=4 * h, tensor=t, micro_batch=b)
        for h in (2048, 4096, 8192) for t in (1, 2, 8) for b in (1, 4)
    ]  # fmt: skip
    work = Workload.of(rows)
    truth = Efficiency(
        {
            name: values * (0.8 if name == "matrix" else 1.2)
            for name, values in Efficiency.start().values.items()
        }
    )
    measured = step_seconds(work, truth).total
    found = [fit(work, measured, [str(i) for i in range(len(rows))]) for _ in range(2)]
    assert np.max(np.abs(step_seconds(work, found[0]).total / measured - 1)) < 0.03
    assert all(np.array_equal(found[0].values[name], found[1].values[name]) for name in CONSTANTS)


def test_parameters_moved_at_once_end_where_those_moved_alone_do():
    """Each of five measurements depends on one of the first two parameters, and all on the third."""
    of, scale = np.array([0, 1, 0, 1, 1]), np.linspace(0.5, 1.5, 5)

    def errors(parameters):
        return scale * (parameters[of] - [0.1, 0.3, 0.2, 0.3, 0.5]) + np.sin(parameters[2] - of)

    priors = (30.0, np.zeros(3), np.ones(3), np.zeros(3))
    depends = np.stack([of == 0, of == 1, np.ones(5, bool)], axis=1)
    assert fit_drawn_to_priors(errors, *priors, depends) == pytest.approx(
        fit_drawn_to_priors(errors, *priors), rel=1e-4
    )


def test_one_wrong_row_does_not_pull_the_fit():
    """A time printed tenfold moves the others by less than 2 %."""
    rows = [
        columns(hidden=h, heads=h // 128, kv_heads=h // 128, ffn=4 * h)
        for h in (2048, 3072, 4096, 6144, 8192)
    ] * 2
    work = Workload.of(rows)
    measured = step_seconds(work, Efficiency.start()).total
    wrong = measured * np.where(np.arange(len(rows)) == 3, 10.0, 1.0)
    predicted = step_seconds(work, fit(work, wrong, ["one"] * len(rows))).total
    assert np.max(np.abs(predicted / measured - 1)) < 0.02


def test_a_family_left_out_is_forgotten():
    """A fit that goes on from one with wrong times, without them, ends where one does that never saw them:
    within 1 %.
    """
    rows = [
        columns(hidden=h, heads=h // 128, kv_heads=h // 128, ffn=4 * h, data=64, shard=64, zero=z, engine=2,
            micro_batch=b)
        for h in (1024, 2048, 4096) for z in (1, 3) for b in (1, 4)
    ]  # fmt: skip
    work, families = Workload.of(rows), ["wrong" if row["hidden"] == 1024 else "right" for row in rows]
    rest = np.array([family == "right" for family in families])
    measured = step_seconds(work, Efficiency.start()).total * np.where(rest, 1.1, 1.6)
    everything = fit(work, measured, families)
    seen = (work.take(rest), measured[rest], ["right"] * int(rest.sum()))
    without = [fit(*seen, start) for start in (everything, Efficiency.start())]
    predicted = [step_seconds(work, efficiency).total for efficiency in without]
    assert np.max(np.abs(predicted[0] / predicted[1] - 1)) < 0.01
    assert np.max(np.abs(step_seconds(work, everything).total / predicted[1] - 1)) > 0.05


def test_an_interval_holds_its_share():
    """Eight in ten of errors drawn as those that made it are inside."""
    errors = np.linspace(-0.5, 0.5, 1001)
    low, high = interval(np.ones(1), spread(errors, ["one"] * 1001))
    assert ((np.log(low) <= errors) & (errors <= np.log(high))).mean() == pytest.approx(0.8, abs=0.01)


def test_rankings_are_measured():
    """All pairs agree in order and none reversed, and a wrong first choice is paid for."""
    measured = np.array([4.0, 3.0, 2.0])
    assert agreeing_pairs(measured, measured) == (3, 3) and agreeing_pairs(-measured, measured) == (-3, 3)
    assert regret(np.array([1.0, 2.0, 0.0]), measured) == pytest.approx(0.25)


def test_noise_bounds_rankings():
    """Rates that differ by far more than they are uncertain keep their order; equal ones are a coin's."""
    assert expected_tau([np.log([1.0, 2.0, 4.0])], 0.01) == pytest.approx(1)
    assert expected_tau([np.log([1.0, 1.0])], 0.01) == 0
    # Φ(ln 1.01 / (0.01 √2))
    assert expected_tau([np.log([1.0, 1.01])], 0.01) == pytest.approx(2 * 0.759 - 1, abs=2e-3)


def test_a_machine_without_figures_is_refused():
    """Nothing is planned from a peak that nobody knows."""
    card = accelerator("a100_64").model_copy(update={"peak_tflops": {}})
    with pytest.raises(KieloError, match="a100_64.*no bf16 peak"):
        machine_columns(card, 50e9, 4, "bf16")

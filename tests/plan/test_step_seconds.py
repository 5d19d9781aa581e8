"""Seconds of a step: what the parts are made of, and what they must do when a layout changes."""

from dataclasses import fields

import numpy as np
import pytest
from planner_fit import fit, spread
from planner_ranking import agreeing_pairs, expected_tau, regret

from kielo.models.families import complete, module
from kielo.plan.collective_seconds import (
    data_seconds,
    expert_layer_seconds,
    stage_seconds,
    tensor_layer_seconds,
)
from kielo.plan.efficiency import CONSTANTS, Efficiency, card_text, fitted, read_card
from kielo.plan.layer_seconds import matrix_flops
from kielo.plan.least_squares import Members, Stop, fit_drawn_to_priors
from kielo.plan.prediction_interval import interval
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload, machine_columns
from kielo.plan.workload_row import workload_row
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
    are what `count.flops_per_token` says less attention.
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
    assert flops + attention == pytest.approx(module("llama", "count").flops_per_token(model, 2048), rel=1e-3)
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
        model = complete(read_recipe(name).recipe.model, 512).model_copy(update={"vocab_size": 32_768})
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
    """ZeRO 1 sends once a step whatever the number of micro-batches; ZeRO 3 for each of them."""
    work = workload({"zero": 1, "data": 8, "shard": 8}, {"zero": 3, "data": 8, "shard": 8})
    once, each = data_seconds(work, Efficiency.start().of(work))
    assert once[0] > 0 and each[0] == 0 and each[1] > 0


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
    with pytest.raises(KieloError, match="tile"):
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

    priors = (30.0, np.zeros(3), np.ones(3), np.zeros(3), Stop(40, 1e-9))
    members = [Members(0, 2, of), Members(2, 1, np.zeros(5, int))]
    assert fit_drawn_to_priors(errors, *priors, members) == pytest.approx(
        fit_drawn_to_priors(errors, *priors)
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
    with pytest.raises(KieloError, match="a100_64.*no bf16 peak"):
        machine_columns(accelerator("a100_64"), 50e9, 4, "bf16")

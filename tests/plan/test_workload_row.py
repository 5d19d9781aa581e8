"""The planner's figures of Kielo's own memory, against exact counts and against rehearsals of small jobs."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from kielo.models.families import complete
from kielo.plan.collective_seconds import data_seconds, ring_bandwidth
from kielo.plan.efficiency import ENGINES, Efficiency, fitted
from kielo.plan.workload import ATTENTION_KERNELS, RECIPES, Workload, workload_row
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Fp8, Layout, Model
from kielo.resolve.activation_bytes import layer_bytes, memory_columns
from kielo.resolve.memory import memory_bytes
from kielo.resolve.memory_row import StepSize, TrainOptions
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.shares import rank_of_stage
from kielo.resolve.state_bytes import state_bytes
from kielo.resolve.text import imagined_text
from tests.plan.workloads import workload

# Wide enough that norms are below the tolerance, and a vocabulary that outweighs no layer.
SMALL = [
    "model.vocab_size=8192", "model.hidden_size=1024", "model.intermediate_size=2816",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=16", "model.num_key_value_heads=8", "model.tie_word_embeddings=false",
    "dataset.sequence_length=512", "train.micro_batch_sequences=1", "train.precision=bf16",
]  # fmt: skip
PIPELINE = "layout.pipeline=2"


def planned(ranks: int, micro_batches: int, *sets: str) -> Resolved:
    """The planner's figures for a layout without context ranks."""
    axes = [
        int(word.split("=")[1]) for word in sets if word.startswith(("layout.tensor=", "layout.pipeline="))
    ]
    rows = ranks // int(np.prod(axes, initial=1)) * micro_batches
    recipe = read_recipe("demo_estonian", [*SMALL, *sets, f"train.tokens_per_step={512 * rows}"]).recipe
    return resolve(recipe, "no_such_folder", ranks, "cpu", text=imagined_text(recipe))


def planned_memory(resolved: Resolved):
    layout, phase, train = resolved.placement.layout, resolved.placement.phases[0], resolved.identity.train
    row = workload_row(
        resolved.identity.model, layout, accelerator("h100_80"), cluster("dgx_h100"),
        StepSize(512, phase.micro_batch_sequences, phase.micro_batches_per_step),
        TrainOptions(train.precision, optimiser=train.optimiser, hidden_dropout=train.hidden_dropout),
        on_processor=True,
    )  # fmt: skip
    return memory_bytes(Workload.of([row]))


@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        (1, ()),
        (8, ("layout.zero=1",)),
        (8, ("layout.zero=3", "layout.tensor=2")),
        (8, ("layout.replicate=4", "layout.shard=2")),
        (8, ("layout.tensor=4", "model.tie_word_embeddings=true")),
        (8, ("model.model_type=gpt2", "model.num_key_value_heads=16", "layout.tensor=4")),
        (8, (PIPELINE, "layout.tensor=2", "model.tie_word_embeddings=true")),
        (4, (PIPELINE, "model.num_hidden_layers=7", "layout.pipeline_schedule=interleaved_1f1b")),
        (4, (PIPELINE, "layout.pipeline_schedule=zbv", "model.tie_word_embeddings=true")),
    ],
)
def test_static_bytes_are_those_counted_parameter_by_parameter(ranks, sets):
    """Each ZeRO degree has 16 bytes a parameter over the shards, of a rank with a table,
    within half a per cent.
    """
    resolved = planned(ranks, 4, *sets)
    layout = resolved.placement.layout
    ends = {0, rank_of_stage(layout, layout.pipeline - 1)} if layout.pipeline > 1 else {0}
    exact = [state_bytes(resolved.identity.model, layout, rank).total for rank in ends]
    static = planned_memory(resolved).static[0]
    assert min(abs(static / one - 1) for one in exact) < 0.005


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "sets"),
    [
        (8, 2, ("model.num_hidden_layers=2",)),
        (8, 1, ("layout.zero=3", "layout.recompute=full", "model.num_hidden_layers=2")),
        (1, 2, ("train.precision=fp32", "layout.recompute=full", "model.num_hidden_layers=2")),
        (1, 1, ("train.optimiser=lamb", "layout.recompute=full", "model.num_hidden_layers=2")),
        pytest.param(
            4,
            2,
            (PIPELINE, "layout.tensor=2", "layout.recompute=full", "model.num_hidden_layers=2"),
            marks=pytest.mark.full,
        ),
        (2, 3, (PIPELINE, "layout.pipeline_schedule=zbv")),
        pytest.param(4, 4, (PIPELINE, "layout.zero=2", "layout.recompute=full"), marks=pytest.mark.full),
    ],
)
def test_peaks_are_those_of_rehearsals(ranks, micro_batches, sets):
    """Within a tenth; benchmarks/planner/planner_memory.py holds more of them, on wider layers."""
    from kielo.verify.rehearse import rehearse

    resolved = planned(ranks, micro_batches, *sets)
    layout = resolved.placement.layout
    ends = {0, rank_of_stage(layout, layout.pipeline - 1)} if layout.pipeline > 1 else {0}
    peak = max(rehearse(resolved, rank)["peak_bytes"] for rank in ends)
    assert planned_memory(resolved).peak("rehearsed")[0] == pytest.approx(peak, rel=0.1)


def test_layers_keep_what_autograd_keeps():
    """Bytes a token and layer that were measured by `layer_bytes.kept_bytes`, one sequence of 2,048:
    Llama's shape of hidden 4,096, MLP 11,008, 32 heads and 8 of keys.
    """
    model = read_recipe("demo_estonian", [
        "model.vocab_size=32000", "model.hidden_size=4096", "model.intermediate_size=11008",
        "model.num_attention_heads=32",
        "model.num_key_value_heads=8",
    ]).recipe.model.model_copy(update={"head_dim": 128})  # fmt: skip
    kept = partial(layer_bytes, model)
    for layout, bytes_per_element, measured in (
        ({}, 2, 119432), ({}, 4, 238728), ({"tensor": 2}, 2, 59716), ({"tensor": 4}, 2, 29858),
        ({"tensor": 4, "sequence_parallel": False}, 2, 54440), ({"recompute": "attention"}, 2, 119304),
        ({"recompute": "operators"}, 2, 89216), ({"recompute": "operators", "tensor": 4}, 2, 22304),
        ({"context": 2}, 2, 131720),
    ):  # fmt: skip
        assert kept(layout=Layout(**layout), bytes_per_element=bytes_per_element)[0] == pytest.approx(
            measured, rel=0.002
        )


def row_of(train: TrainOptions | None = None, model: Model | None = None, **layout: Any) -> dict[str, Any]:
    return workload_row(
        model or planned(1, 2).identity.model, Layout(**{"shard": 8} | layout), accelerator("h100_80"),
        cluster("dgx_h100"), StepSize(512, 1, 4), train or TrainOptions(),
    )  # fmt: skip


def test_a_row_has_the_settings_of_kielo():
    """FSDP2 with weights and gradients in fp32, FlashAttention, bf16 products; nothing dropped or cut."""
    row = row_of(replicate=2)
    expected = {
        "layers": 4, "heads": 16, "kv_heads": 8, "head_dim": 64, "data": 16, "weight_bytes": 4,
        "gradient_bytes": 4, "dropout": 0.0, "unfused_norms": 0.0, "whole_logits": 0.0, "deterministic": 0.0,
        "causal": 1.0, "recipe": RECIPES.index("bf16"), "kernel": ATTENTION_KERNELS.index("flash"),
        "engine": ENGINES.index("fsdp"), "overlap_chunks": 1, "recipe_share": 1.0,
        "wide_weight_gradients": 0.0, "ring_share": 0.0,
        # 3,200 Gbit/s a node of eight, by NVIDIA's page
        "node_devices": 8, "network_bandwidth": 50e9, "peak": 989e12, "peak_recipe": 989e12,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    bert = read_recipe("demo_estonian_bert").recipe.model.model_copy(update={"vocab_size": 8192})
    assert row_of(model=complete(bert, 512))["causal"] == 0.0


@pytest.mark.parametrize(
    ("layout", "again"),
    [
        ({}, {}),
        ({"recompute": "full"}, {"layers": 1}),
        ({"recompute": "full", "recompute_every_layers": 4}, {"layers": 0.25}),
        ({"recompute": "operators"}, {"operators": 1}), ({"recompute": "attention"}, {"attention": 1}),
        ({"recompute": "norms+activations"}, {"norms": 1, "activations": 1}),
    ],
)  # fmt: skip
def test_what_is_recomputed_has_its_share(layout, again):
    row, parts = row_of(**layout), ("layers", "operators", "attention", "norms", "activations")
    assert {part: row[f"{part}_again"] for part in parts} == dict.fromkeys(parts, 0) | again


def test_precision_and_dropout_have_their_columns():
    """Products in FP8 gather at once; a finer scaling has its own products, and the finest wide gradients."""
    fp8, rows, finest = (
        row_of(TrainOptions("fp8", Fp8(scaling=scaling)), tensor=2, tensor_overlap="chunked")
        for scaling in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    )
    names = ("recipe", "overlap_chunks", "recipe_share", "wide_weight_gradients", "peak", "peak_recipe")
    eight = [RECIPES.index(recipe) for recipe in ("fp8", "fp8_rowwise", "fp8_rowwise")]
    assert [[row[name] for name in names] for row in (fp8, rows, finest)] == [
        [recipe, 1, 1.0, wide, 989e12, 1979e12] for recipe, wide in zip(eight, (0.0, 0.0, 1.0))
    ]
    assert row_of(tensor=2, tensor_overlap="chunked")["overlap_chunks"] == 2
    kept = row_of(TrainOptions("fp8", Fp8(kept_in_bf16=("layers.0",))))
    assert kept["recipe_share"] == 0.75
    # in bf16 no product is left out of anything
    assert row_of(TrainOptions("bf16", Fp8(kept_in_bf16=("layers.0",))))["recipe_share"] == 1.0
    some = row_of(TrainOptions(hidden_dropout=0.001, deterministic=True))
    assert (some["dropout"], some["deterministic"]) == (1.0, 1.0)


def test_columns_do_not_depend_on_what_a_search_changes():
    """A search makes a form's columns once and then puts in data-parallel ranks and micro-batches."""
    model = planned(1, 2).identity.model
    columns = [
        memory_columns(model, Layout(shard=shard, replicate=copies), 512)
        for shard, copies in ((2, 1), (16, 4))
    ]
    assert columns[0] == columns[1]


def test_layouts_in_one_workload_have_the_bytes_that_each_has_alone():
    """One row has its peak on the first pipeline rank, one on the last; other engines are refused."""
    model, one = planned(1, 2).identity.model, Layout(shard=1)
    rows = [
        memory_columns(model, layout, 2048) | {"optimiser_bytes": 8, "pipeline": layout.pipeline}
        for layout in (one, one.model_copy(update={"pipeline": 2}))
    ]
    together, alone = memory_bytes(workload(*rows)), [memory_bytes(workload(row)) for row in rows]
    for kind in ("allocated", "reserved"):
        assert list(together.peak(kind)) == [each.peak(kind)[0] for each in alone]
    with pytest.raises(ValueError, match="only Kielo's trainings"):
        memory_bytes(workload({}, rows[0]))


@pytest.mark.parametrize("layout", [{}, {"zero": 2}, {"zero": 3}, {"zero": 3, "replicate": 2, "shard": 16}])
def test_bf16_halves_what_gradients_send(layout):
    """Between nodes, beside a gather of parameters in bf16 that stays; and their buffers in memory."""
    model = planned(1, 2).identity.model
    seconds, peaks = [], []
    for dtype in ("fp32", "bf16"):
        row = workload_row(
            model, Layout(**{"shard": 32} | layout), accelerator("h100_80"), cluster("dgx_h100"),
            StepSize(512, 1, 4), TrainOptions(gradient_reduce_dtype=dtype),
        )  # fmt: skip
        work = Workload.of([row])
        latency_free = Efficiency(fitted()[0].values | {"latency_seconds": np.zeros(1)})
        once, each = data_seconds(work, latency_free.of(work))
        seconds.append((once + 4 * each)[0])
        peaks.append(memory_bytes(work).peak("allocated")[0])
    # fp32 of gradients beside bf16 of parameters. ZeRO 1: 4 + 2 bytes; ZeRO 2: 4 × 4 + 2; ZeRO 3, whose
    # traffic is fitted: a third of each micro-batch, and all that replicas sum.
    left = {1: 4 / 6, 2: 10 / 18, 3: 5 / 6}[layout.get("zero", 1)]
    if "replicate" in layout:
        assert 0.5 < seconds[1] / seconds[0] < left
    else:
        assert seconds[1] / seconds[0] == pytest.approx(left, rel=1e-6)
    assert peaks[1] <= peaks[0]


def test_zero_degrees_of_kielo_differ_only_within_a_step():
    """Parameters and gradients lie whole during a step, only the gradients' shards, or one layer
    at a time.
    """
    rows = [planned_memory(planned(8, 2, f"layout.zero={zero}")) for zero in (1, 2, 3)]
    assert rows[0].static == rows[1].static == rows[2].static
    assert rows[0].gathered[0] > rows[1].gathered[0] > rows[2].gathered[0]
    for row in rows:
        assert sum(row.parts().values())[0] == pytest.approx(row.peak("reserved")[0])
        assert row.peak("rehearsed")[0] < row.peak("allocated")[0] < row.peak("reserved")[0]


def test_degrees_differ_in_what_they_send():
    """Bytes of a parameter and step, of 1/8 less: degree 1 gathers 2 and scatters 4; 2 scatters 4 for each
    micro-batch; 3 gathers for each too (6 in all, as fitted). A schedule that splits the backward pass
    scatters once.
    """

    model = planned(1, 1).identity.model

    def sent(zero: int, **pipeline: Any) -> float:
        layout = Layout(shard=8, zero=zero, **pipeline)
        work = Workload.of([
            workload_row(
                model, layout, accelerator("h100_80"), cluster("dgx_h100"),
                StepSize(512, 1, 4), TrainOptions()
            )
        ])  # fmt: skip
        rates = fitted()[0].of(work)
        rates.latency_seconds, rates.gather = 0.0, 1.0
        once, each = data_seconds(work, rates)
        bandwidth = ring_bandwidth(work, rates, np.minimum(8, work.node_devices), work.data)
        return float(((once + 4 * each) * bandwidth / work.parameters_of_heaviest_rank)[0])

    assert sent(1) == pytest.approx(7 / 8 * 6)
    assert sent(2) == pytest.approx(7 / 8 * (2 + 4 * 4))
    assert sent(3) == pytest.approx(7 / 8 * 4 * 6)
    assert sent(2, pipeline=2) == pytest.approx(sent(2))
    assert sent(3, pipeline=2) == pytest.approx(sent(3))
    assert sent(2, pipeline=2, pipeline_schedule="zbv") == pytest.approx(sent(1))

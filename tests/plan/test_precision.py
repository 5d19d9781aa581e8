"""FP8 and moments in bf16 in plans: what most steps have, faster products, fewer bytes,
and refusals that say what works.
"""

import numpy as np
import pytest

from kielo.models.families import complete
from kielo.plan.explain import explain
from kielo.plan.planned_layout import plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload, main_precision, steps_by_precision, workload_row
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Fp8, Layout, Model
from kielo.resolve.fp8_matrices import fp8_share
from kielo.resolve.memory import memory_bytes
from kielo.resolve.memory_row import StepSize, TrainOptions

SETS = ["cluster=dgx_h100", "train.tokens=41943040"]  # ten steps
SHARDED = Layout(shard=32, zero=3, recompute="full")


def run_of(*sets: str) -> RunToPlan:
    recipe = read_recipe("estonian_llama31_70b", [*SETS, *sets]).recipe
    return RunToPlan.of(recipe, complete(recipe.model, 4096))


def planned(*sets: str, zero: int = 3):
    return plan_layouts(run_of(*sets), [(SHARDED.model_copy(update={"zero": zero}), 4, 1)])[0]


def test_most_steps_say_what_a_plan_is_for():
    """Ten steps of the 70B: changes count from their first step, and what comes after the end does not."""
    changed = run_of('train.precision_changes=[[4, "fp8"], [9, "bf16"], [99, "fp32"]]')
    assert steps_by_precision(changed.recipe) == {"bf16": 5, "fp8": 5, "fp32": 0}
    assert changed.precision == main_precision(changed.recipe) == "bf16"
    late = run_of('train.precision_changes=[[4, "fp8"]]')
    assert late.precision == "fp8"
    rows = explain(plan_layouts(late, [(SHARDED, 4, 1)])[0])
    assert any("7 of 10 steps" in row.reason and "3 in bf16" in row.reason for row in rows)


def test_fp8_is_for_the_products_of_layers_alone():
    """Their seconds fall by less than the peaks do; attention and the head take what they took; a finer
    scaling gains less; what is gathered is smaller; and model FLOPs are held against the peak in FP8.
    """
    wide, narrow = planned(), planned("train.precision=fp8")
    assert 0.4 < narrow.seconds["matrix"] / wide.seconds["matrix"] < 0.9
    assert (
        narrow.seconds["attention"] == wide.seconds["attention"]
        and narrow.seconds["head"] == wide.seconds["head"]
    )
    assert narrow.seconds["elementwise"] > wide.seconds["elementwise"]
    # At degree 3 the peak is at the loss, when no layer is gathered.
    whole = planned(zero=2), planned("train.precision=fp8", zero=2)
    assert whole[1].bytes["gathered"] < whole[0].bytes["gathered"]
    assert whole[1].peak_bytes < whole[0].peak_bytes
    assert narrow.mfu == pytest.approx(narrow.tflops_per_device / 1979)
    rows, wide_gradients, half = (
        planned("train.precision=fp8", f"train.fp8.{key}").seconds["matrix"]
        for key in ("scaling=rowwise", "scaling=rowwise_with_gw_hp", 'kept_in_bf16=["layers.*.mlp"]')
    )
    assert narrow.seconds["matrix"] < rows < wide_gradients < wide.seconds["matrix"]
    assert narrow.seconds["matrix"] < half < wide.seconds["matrix"]


def test_the_share_in_fp8_is_by_weights():
    model = complete(
        Model(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=100
        ),
        128,
    )
    attention, mlp = 4 * 64 * 64, 3 * 64 * 128
    assert fp8_share(model, Fp8()) == 1
    assert fp8_share(model, Fp8(kept_in_bf16=("layers.0",))) == pytest.approx(3 / 4)
    kept = Fp8(kept_in_bf16=("layers.*.attention",))
    assert fp8_share(model, kept) == pytest.approx(mlp / (attention + mlp))


def test_a_card_without_fp8_is_refused():
    with pytest.raises(KieloError, match='a100_80.*Fix: train.precision = "bf16"'):
        run_of("cluster=dgx_a100", "train.precision=fp8")


def test_moments_in_bf16_halve_the_optimiser_and_cost_time():
    """4 bytes a parameter less between steps, and 24 more through memory in the optimiser's part."""
    wide, narrow = planned(), planned("train.optimiser_state=bf16")
    assert narrow.bytes["optimiser"] == pytest.approx(wide.bytes["optimiser"] / 2)
    assert narrow.peak_bytes < wide.peak_bytes
    assert narrow.seconds["optimiser"] == pytest.approx(wide.seconds["optimiser"] * 70 / 46)
    assert any("70 bytes a parameter" in row.reason for row in explain(narrow))


def test_the_head_in_fp8_is_faster_and_has_its_weight_twice_in_8_bits():
    """Two of its three products are faster. The peak has the allocator's loss too, a sixteenth."""
    wide, narrow = (planned("train.precision=fp8", f"train.fp8.head={head}") for head in ("false", "true"))
    model = wide.run.model
    more = 2 * model.vocab_rows * model.hidden_size / SHARDED.tensor
    assert narrow.peak_bytes - wide.peak_bytes == pytest.approx(more, rel=0.1)
    assert sum(narrow.seconds.values()) < sum(wide.seconds.values())
    assert any("the head's weight gradient, attention" in row.reason for row in explain(narrow))


def test_rows_of_either_stand_in_one_workload():
    """Each has the seconds and bytes that it has alone."""
    recipe = read_recipe("estonian_llama31_70b", SETS).recipe
    model, step = complete(recipe.model, 4096), StepSize(4096, micro_batch=1, micro_batches=8)
    rows = [
        workload_row(model, SHARDED, accelerator("h100_80"), cluster("dgx_h100"), step, train)
        for train in (
            TrainOptions(), TrainOptions("fp8"), TrainOptions("fp8", Fp8(scaling="rowwise_with_gw_hp")),
            TrainOptions("fp8", Fp8(kept_in_bf16=("layers.0",), head=True)),
            TrainOptions(optimiser_state="bf16"),
        )
    ]  # fmt: skip
    efficiency = run_of().efficiency
    together, apart = Workload.of(rows), [Workload.of([row]) for row in rows]
    assert step_seconds(together, efficiency).total == pytest.approx(
        np.concatenate([step_seconds(one, efficiency).total for one in apart])
    )
    assert memory_bytes(together).peak("reserved") == pytest.approx(
        np.concatenate([memory_bytes(one).peak("reserved") for one in apart])
    )

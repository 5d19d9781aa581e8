"""A layout's explanation: its numbers add up, what it promises is what the clock and the planner say."""

import re
from dataclasses import fields, replace
from functools import cache

import pytest

from kielo.models.families import complete
from kielo.plan.collective_seconds import data_seconds, ring_steps_seconds
from kielo.plan.compare import BYTES, SECONDS, compare, differences, verdict
from kielo.plan.explain import Row, bubble_share, explain, recomputed_seconds
from kielo.plan.pipeline_simulation import StageSeconds, simulated_seconds
from kielo.plan.planned_layout import PlannedLayout, plan_layouts, workload
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import StepSeconds
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout

NODES = 16  # of 8 devices


@cache
def run() -> RunToPlan:
    """Llama-3.1-70B on LUMI with a newer torch, which has all schedules; 512 sequences of 4,096 a step."""
    recipe = read_recipe("estonian_llama31_70b", ["train.tokens_per_step=2097152"]).recipe
    of = RunToPlan.of(recipe, complete(recipe.model, 4096))
    return replace(of, site=of.site.model_copy(update={"torch": "2.13"}))


def planned(micro_batch: int = 1, simulate: bool = True, **layout) -> PlannedLayout:
    shape = {"tensor": 8, "pipeline": 4} | layout
    model_ranks = shape["tensor"] * shape["pipeline"] * shape.get("context", 1) * shape.get("replicate", 1)
    full = Layout(**{"shard": NODES * 8 // model_ranks} | shape)
    return plan_layouts(run(), [(full, NODES, micro_batch)], simulate=simulate)[0]


LAYOUTS = [
    {}, {"recompute": "full"}, {"pipeline_schedule": "interleaved_1f1b"},
    {"pipeline_schedule": "zbv", "micro_batch": 2},
    {"tensor": 2, "pipeline": 1, "zero": 3, "context": 2},
    {"tensor": 16, "pipeline": 1, "sequence_parallel": False},
    {"tensor": 1, "pipeline": 1, "replicate": 16, "zero": 3, "recompute": "operators"}, {"simulate": False},
    {"tensor": 4, "recompute": "full", "recompute_every_layers": 2},
]  # fmt: skip


def row_of(one: PlannedLayout, part: str) -> Row:
    return next(row for row in explain(one) if row.part == part)


def test_every_part_has_a_name():
    assert set(SECONDS) == {field.name for field in fields(StepSeconds)}
    assert set(planned().bytes) <= set(BYTES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_add_up(layout):
    """Seconds to the step, shares to one, GB to the peak; largest first."""
    one = planned(**layout)
    rows = explain(one)
    parts = [row for row in rows if row.part in SECONDS.values()]
    seconds, shares = zip(*((row.seconds, row.share) for row in parts))
    assert sum(seconds) == pytest.approx(one.step_seconds) and rows[0].seconds == one.step_seconds
    assert sum(shares) == pytest.approx(1)
    assert list(seconds) == sorted(seconds, reverse=True)
    bound = next(row for row in parts if row.part not in ("matrix products", "output head and loss"))
    assert [row for row in parts if "bounds the step" in row.reason] == [bound]
    memory = row_of(one, "memory").reason
    sizes = re.findall(r"[a-z] ([\d.]+)(?:,|$)", memory.partition("fullest")[2])
    assert sum(map(float, sizes)) == pytest.approx(one.peak_bytes / 1e9, abs=0.3)
    assert memory.startswith("fits") == one.fits


@pytest.mark.parametrize(
    ("schedule", "each"),
    [
        ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
    ],
)  # fmt: skip
def test_the_bubbles_formula_is_the_clocks(schedule, each):
    """Equal stages, no hops: within 2 % of the step, and half of it with twice as many micro-batches."""
    stages = StageSeconds.equal(4 * each, 1.0 / each)
    for many in (8, 16):
        clock = simulated_seconds(schedule, stages, 4, many) / (3 * many)
        assert clock == pytest.approx(1 + bubble_share(schedule, 4, each, many), rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_what_more_micro_batches_promise_the_clock_keeps(schedule):
    one = planned(pipeline_schedule=schedule, micro_batch=2)
    many = 2 * one.micro_batches
    text = row_of(one, f"{many} micro-batches").reason
    left = re.search(r"would leave a bubble of ([\d.]+)%", text)[1]

    def idle(micro_batches: int) -> float:
        whole, ranks = one.stages.whole(), one.layout.pipeline
        heaviest = max(sum(whole[rank::ranks]) for rank in range(ranks))
        return simulated_seconds(schedule, one.stages, ranks, micro_batches) / (micro_batches * heaviest) - 1

    assert float(left) / 100 == pytest.approx(idle(many), abs=6e-4)
    assert idle(many) == pytest.approx(idle(one.micro_batches) / 2, rel=0.1)
    # Each way to get as many: they are the same step with twice the micro-batches.
    assert (
        f"{2 * one.tokens_per_step:,} tokens a step, "
        "micro-batches of 1 × 4,096 tokens or 2 data-parallel ranks" in text
    )


def test_the_other_schedules_bubble_is_as_the_planner_plans_it():
    one, other = planned(), planned(pipeline_schedule="interleaved_1f1b")
    row = row_of(one, "interleaved_1f1b")
    assert row.seconds == other.step_seconds
    assert f"2 stages a rank: pipeline bubble {other.seconds['bubble']:.2f} s" in row.reason
    assert other.seconds["bubble"] < 0.6 * one.seconds["bubble"]
    parts = [{row.part for row in explain(each)} for each in (one, planned(recompute="full"))]
    assert ["zbv" in some for some in parts] == [True, False]


@pytest.mark.parametrize(
    "recompute", [{"recompute": "full"}, {"recompute": "operators"}, {"recompute": "attention"}]
)
def test_recomputation_is_what_its_absence_saves(recompute):
    with_it, without = planned(**recompute), planned()
    for part, seconds in recomputed_seconds(with_it).items():
        assert with_it.seconds[part] - seconds == pytest.approx(without.seconds[part], rel=1e-9, abs=1e-9)
    if recompute["recompute"] == "full":  # a forward pass by a pass of three, less the head's
        reason = row_of(with_it, "of these, recomputation").reason
        assert 30 <= int(re.search(r"(\d+)% more FLOPs", reason)[1]) <= 33
    assert row_of(with_it, "no recomputation").seconds == without.step_seconds


def test_hidden_traffic_is_told_with_the_exposed():
    """Both together are all the traffic that there is."""
    one = planned(tensor=1, pipeline=1, zero=3)
    hidden = float(re.search(r"another ([\d.]+) s are hidden", row_of(one, "data traffic").reason)[1])
    work = workload(one.run, [(one.layout, one.micro_batch, one.run.phase)])
    rates = one.run.efficiency.of(work)
    (once, each), (steps_once, steps_each) = data_seconds(work, rates), ring_steps_seconds(work, rates)
    whole = float((once + steps_once + (each + steps_each) * one.micro_batches)[0])
    assert hidden > 0
    # what is hidden slows the work, which counts as data traffic too
    assert hidden * (1 - rates.overlap_cost) + one.seconds["data_traffic"] == pytest.approx(whole, rel=1e-2)


def test_differences_between_layouts_add_up():
    one, two, elsewhere = planned(), planned(recompute="full"), replace(planned(pipeline=2), nodes=2)
    assert sum(differences(one, two).values()) == pytest.approx(one.step_seconds - two.step_seconds)
    (other,) = [row for row in explain(one, [one, two, elsewhere]) if row.part == "other layout"]
    assert other.reason.startswith(f"{two.name}: matrix products (+") and other.seconds == two.step_seconds
    numbers = [
        float(text.replace("−", "-")) for text in re.findall(r"(?:\(|rest )([−+][\d.]+) s", other.reason)
    ]
    # Each is rounded to the step's fourth figure.
    assert sum(numbers) == pytest.approx(two.step_seconds - one.step_seconds, abs=0.05 * len(numbers))
    assert other.share > 1


def test_the_verdict_names_the_faster_and_why():
    one, two = planned(), planned(recompute="full")
    fast, slow = (replace(each, bytes={"weights": 1e9}) for each in (one, two))
    gain = f"{fast.tokens_per_second / slow.tokens_per_second - 1:.1%} faster"
    for several in ([fast, slow], [slow, fast]):
        assert verdict(several).startswith(f"{fast.name} is {gain} than {slow.name} (")
        assert "mostly by matrix products (−" in verdict(several)
    large = replace(one, bytes={"weights": 1e12})
    assert verdict([large]) == f"{one.name} (1000.0 of {one.run.usable_bytes / 1e9:.1f} GB) does not fit."
    assert verdict([large, slow]).startswith(f"{slow.name} alone fits") and "does not fit" in verdict(
        [large, slow]
    )
    elsewhere = replace(slow, nodes=2 * NODES)
    assert f"than {slow.name} on {2 * NODES} nodes" in verdict([fast, elsewhere])


def test_the_table_has_a_column_a_layout_that_adds_up():
    several = [planned(), planned(recompute="full"), planned(tensor=2, pipeline=1, zero=3)]
    titles, rows = compare(several)
    assert titles == ("", *(each.name for each in several)) and {len(row) for row in rows} == {len(titles)}
    table = {row[0]: row[1:] for row in rows}
    assert "context traffic, s" not in table
    parts = [row for row in rows if row[0].endswith(", s") and not row[0].startswith(("step", "80%"))]
    for column, each in enumerate(several):
        assert sum(float(row[column + 1]) for row in parts) == pytest.approx(
            each.step_seconds, abs=0.05 * len(parts)
        )
        assert table["fits"][column] == ("yes" if each.fits else "no")

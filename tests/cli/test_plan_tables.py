"""Tables and sentences of `kielo plan`, of two layouts with numbers that are easy to count with."""

from types import SimpleNamespace
from typing import Any

import pytest

from kielo.cli import plan_tables as tables
from kielo.plan.cost import Cost
from kielo.plan.failures import Failures, Rate
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.published_engine import PublishedEngine
from kielo.plan.search import Choice, Found
from kielo.recipe.sections import Layout, Recipe
from tests.plan.hand_made import a_phase

SITE = SimpleNamespace(
    name="hall", billing_unit="node-hours", billed_per_node_hour=0.5, devices_per_node=4, max_wall_hours=36.0,
    max_nodes_per_job=7,
)  # fmt: skip


def a_run(**site: Any) -> Any:
    return SimpleNamespace(
        site=SimpleNamespace(**(vars(SITE) | site)), card=SimpleNamespace(name="gpu", memory_source="its "
        "page"),
        usable_bytes=60e9, usable_host_bytes=400e9, peak_tflops=200.0, precision="bf16",
        host_bytes_per_node=lambda bytes_, offload: 30e9, flops_per_token=lambda length: 8e12,
        is_measured=False,
        recipe=Recipe(
            name="mine", language="et", corpus={"sources": ["a"]}, checkpoint={"every_steps": 250}
        ),
    )  # fmt: skip


def a_layout(
    run: Any, nodes: int = 3, seconds: float = 2.0, gigabytes: float = 40.0, **axes: Any
) -> PlannedLayout:
    layout = Layout(**({"tensor": 1, "pipeline": 1, "shard": 4 * nodes} | axes))
    parts = {"matrix": 0.75 * seconds, "bubble": 0.25 * seconds, "tensor_traffic": 0.0}
    return PlannedLayout(
        run, layout, nodes, 4 * nodes, a_phase(512, 512 * 6 * 4 * nodes), 2, 3, parts,
        0.9 * seconds, 1.2 * seconds,
        {"weights": 0.25e9 * gigabytes, "logits": 0.75e9 * gigabytes}, 0.125,
    )  # fmt: skip


def a_cost(days: float = 3.0, device_hours: float = 2400.0, **more: Any) -> Cost:
    return Cost(1000, 2e5, 3e3, 1.5, 4, 70e9, 21.0, 5, days * 86400, device_hours, **more)


RUN = a_run()
FAST, SLOW = a_layout(RUN), a_layout(RUN, seconds=4.0, gigabytes=50.0, shard=6, replicate=2)


def test_the_layouts_have_these_names() -> None:
    """As docs/layouts.md reads them; all figures of this file are of these two."""
    assert (FAST.name, SLOW.name) == ("dp12-mb2-zero1", "dp12-hsdp6-mb2-zero1")
    assert FAST.tokens_per_second == 36_864 / 2 and SLOW.tokens_per_second == 36_864 / 4


def test_rows_of_the_best() -> None:
    """A node-hour is four device-hours, and costs half a unit; the recipe's own is marked, and once there."""
    listed = [(FAST, a_cost()), (SLOW, a_cost(days=1234.56, device_hours=4800.0))]
    titles, rows = tables.best_rows(RUN, listed, [(FAST, a_cost())])
    assert titles == ("nodes", "tokens/s", "GB", "days", "device-hours", "node-hours", "layout")
    assert rows == [
        (3, "18,432", "40.0", "3.0", "2,400", "300", "dp12-mb2-zero1 *"),
        (3, "9,216", "50.0", "1,234.6", "4,800", "600", "dp12-hsdp6-mb2-zero1"),
    ]
    free = a_run(billing_unit="", billed_per_node_hour=None)
    titles, rows = tables.best_rows(free, [(a_layout(free), a_cost())], [])
    assert titles == ("nodes", "tokens/s", "GB", "days", "device-hours", "layout")
    assert rows == [(3, "18,432", "40.0", "3.0", "2,400", "dp12-mb2-zero1")]
    assert tables.billed_hours(RUN, 2400) == 300 and tables.billed_hours(free, 2400) is None


def test_hours_are_safe_first_and_in_both_units() -> None:
    """Another engine takes 1.5 times as long; a range of 1.8 to 2.4 s is 0.9 to 1.2 times the planned 2."""
    beside = PublishedEngine("Nemo", "all layers recomputed", 1.5)
    slower = PlannedLayout(**(vars(FAST) | {"published": beside, "high_seconds": 3.6}))
    titles, rows = tables.hours_rows(RUN, [(slower, a_cost()), (SLOW, a_cost(device_hours=4800.0))])
    assert titles == ("nodes", "unit", "safe", "planned", "80% of runs")
    assert rows == [
        (3, "device-hours", "3,600", "2,400", "2,160 to 4,320"),
        (3, "node-hours", "450", "300", "270 to 540"),
    ]  # fmt: skip
    assert tables.hours_rows(RUN, [(FAST, a_cost())])[1][0] == (
        3, "device-hours", "2,400", "2,400", "2,160 to 2,880",
    )  # fmt: skip
    said = tables.engine_note(RUN, slower)
    assert said == (
        "Kielo was not measured on gpu. Safe hours are of the same layout by Nemo, as in its published runs "
        "on such devices (all layers recomputed). The range holds both. Fix: `kielo plan calibrate` with "
        "your own runs, which narrows it."
    )
    measured = a_run()
    measured.is_measured, measured.recipe = True, RUN.recipe.model_copy(update={"machine": "my.toml"})
    assert tables.engine_note(measured, FAST) == "Hours by my.toml, measured with Kielo on gpu."


def test_a_long_name_goes_on_in_the_next_line() -> None:
    """A term goes on there, so that 24 columns hold each line."""
    long = a_layout(RUN, tensor=2, pipeline=3, shard=2, recompute="full", recompute_every_layers=2)
    ((*_, shown),) = tables.best_rows(RUN, [(long, a_cost())], [])[1]
    assert shown.replace("\n", "") == long.name and max(map(len, shown.split("\n"))) <= 24
    assert all(line.endswith("-") for line in shown.split("\n")[:-1])
    # With a blank after each -, as a person who breaks a line counts: 23 columns, and 25 with the mark.
    assert [row[-1] for row in tables.best_rows(RUN, [(FAST, a_cost())], [(SLOW, a_cost())])[1]] == [
        "dp12-mb2-zero1", "dp12-hsdp6-mb2-zero1\n*",
    ]  # fmt: skip
    assert tables.best_rows(RUN, [(SLOW, a_cost())], [])[1][0][-1] == "dp12-hsdp6-mb2-zero1"


TITLES = (
    "nodes", "layout", "tokens/s", "s a step", "80% interval", "TFLOP/s a device", "MFU", "GB a device",
    "device hours", "days", "jobs", "checkpoint", "matrix products, s", "pipeline bubble, s",
    "data traffic hidden, s", "why not",
)  # fmt: skip


def test_rows_of_all_figures() -> None:
    """The recipe's own is marked, and once there."""
    costs = [(FAST, a_cost()), (SLOW, a_cost(days=4, device_hours=3200.0))]
    titles, rows = tables.layout_rows(costs, costs[1:], Found(), False)
    assert titles == TITLES
    # 18,432 tokens/s × 8 TFLOP / 12 devices; of 200 TFLOP/s
    assert rows == [
        (3, "dp12-mb2-zero1", "18,432", "2", "1.8–2.4", "12288.0", "6144.0%", "40.0", "2,400", "3.0", 5,
         "70 GB in 21 s", "1.5", "0.5", "0.125", ""),
        (3, "dp12-hsdp6-mb2-zero1 *", "9,216", "4", "3.6–4.8", "6144.0", "3072.0%", "50.0", "3,200", "4.0", 5,
         "70 GB in 21 s", "3", "1", "0.125", ""),
    ]  # fmt: skip
    large = a_layout(RUN, gigabytes=61.0)
    assert tables.layout_rows([], [(large, a_cost())], Found(), False)[1][0][-1] == "does not fit"


def test_parts_that_one_layout_has_are_shown() -> None:
    """Print seconds from half a microsecond on."""
    parts = {"matrix": 2.0, "bubble": 0.0, "tensor_traffic": 5e-7, "head": 4.9e-7}
    several = [
        (PlannedLayout(**(vars(FAST) | {"seconds": parts | {"bubble": each}, "nodes": nodes})), a_cost())
        for nodes, each in ((3, 0.0), (4, 1.0))
    ]
    titles, rows = tables.layout_rows(several, [], Found(), False)
    assert titles[12:-2] == ("matrix products, s", "pipeline bubble, s", "tensor traffic, s")
    assert [row[12:] for row in rows] == [("2", "0", "5e-07", "0.125", ""), ("2", "1", "5e-07", "0.125", "")]


ONE = Choice(Layout(tensor=2, pipeline=3), 4, 1, 2)
NONE = Choice(Layout(tensor=2, pipeline=3, context=5), 1, 1, 2)
FOUND = Found(
    ranked={3: [FAST]}, refused={3: {"too large": [ONE], "too small": [ONE, ONE, ONE, ONE]}},
    impossible={"heads": [NONE, NONE]}, looked_at=1234,
)  # fmt: skip


def test_rows_of_what_is_not_listed() -> None:
    """The reason with most layouts first; a layout that is never possible is named by its axes."""
    assert tables.name(NONE) == "tp2-pp3-cp5" and tables.name(ONE) == ONE.name != "tp2-pp3"
    assert tables.name(Choice(Layout(), 1, 1, 2)) == Choice(Layout(), 1, 1, 2).name
    square = Choice(Layout(tensor=2, shard=2, replicate=2), 4, 1, 2)
    assert tables.name(square) == square.name != "tp2"

    def refused(is_all: bool) -> list[tuple]:
        rows = tables.layout_rows([(FAST, a_cost())], [], FOUND, is_all)[1][1:]
        assert all(len(row) == len(TITLES) and not any(row[2:-1]) for row in rows)
        return [(row[0], row[1], row[-1]) for row in rows]

    assert refused(False) == [
        ("any", "tp2-pp3-cp5 and 1 more", "heads"),
        (3, f"{ONE.name} and 3 more", "too small"),
        (3, ONE.name, "too large"),
    ]
    assert refused(True) == [("any", "tp2-pp3-cp5", "heads")] * 2 + [(3, ONE.name, "too small")] * 4 + [
        (3, ONE.name, "too large")
    ]


def test_notes(monkeypatch) -> None:
    """How the recipe's own layout compares, on one number of nodes and on several."""
    monkeypatch.setattr(tables, "verdict", lambda several: f"{several[0].name} before {several[1].name}.")

    def told(own: dict, listed: tuple = (FAST,)) -> list[str]:
        return tables.notes(RUN, list(listed), own)

    assert told({3: FAST}) == ["The recipe's own layout (*) is the fastest."]
    assert told({3: SLOW}) == [
        "* the recipe's own layout. dp12-mb2-zero1 before dp12-hsdp6-mb2-zero1.",
    ]  # fmt: skip
    assert told({3: "too few heads"}) == ["The recipe's own layout cannot run: too few heads"]
    assert told({5: FAST}) == ["No layout fits."]
    other = a_layout(RUN, nodes=5, seconds=1.0)
    assert told({3: FAST, 5: other}, (FAST, other)) == [
        "The recipe's own layout is the fastest on 3 nodes.", "The recipe's own layout is the fastest on 5 "
        "nodes.",
    ]  # fmt: skip
    slower = a_layout(RUN, nodes=5, seconds=1.25, shard=10, replicate=2)
    assert told({3: SLOW, 5: slower}, (FAST, other)) == [
        "The recipe's own layout is slower than the fastest by 50% on 3 nodes, 20% on 5 nodes."
    ]
    lines = told({3: FAST, 5: other}, (SLOW, other))
    assert lines[0] == "The recipe's own layout is faster than the layouts that were searched on 3 nodes."
    assert told({3: "no", 6: FAST}) == [
        "The recipe's own layout cannot run on 3 nodes: no", "No layout fits on 6 nodes."
    ]  # fmt: skip
    assert told({3: FAST, 7: "no"}, (FAST,))[1:] == ["No layout fits on 7 nodes."]
    assert told({3: FAST, 8: "no"}, (FAST,))[2:] == [
        "hall allows a job 7 nodes in its usual queue. More need an agreement with the site."
    ]


def test_notes_of_what_does_not_fit(monkeypatch) -> None:
    monkeypatch.setattr(tables, "in_words", lambda planned: "what would: less")
    large = a_layout(RUN, nodes=5, gigabytes=60.5, shard=10, replicate=2)
    best = a_layout(RUN, nodes=5)
    lines = tables.notes(RUN, [FAST, best], {3: FAST, 5: large})
    assert lines[1:3] == [
        "The recipe's own layout does not fit on 5 nodes.",
        "On 5 nodes the recipe's own layout needs 60.5 GB on rank 0 (as every rank), of 60.0 usable; what "
        "would: "
        "less.",
    ]
    # 69 sequences on 20 ranks, 6 of each
    uneven = PlannedLayout(**(vars(best) | {"phase": a_phase(512, 35_328)}))
    said = [line for line in tables.notes(RUN, [uneven, uneven], {5: uneven}) if "counts" in line]
    assert said == [f"{uneven.name} on 5 nodes: {uneven.shares}; its speed counts them."]


def test_what_the_figures_assume() -> None:
    assert tables.assumptions(RUN, FAST, False) == (
        "60.0 GB a device are usable (its page). 'dp12-mb2-zero1' takes 30.0 of 400.0 GB of host memory a "
        "node. Hours are of jobs of at most 36 hours, 10 minutes to start each, a save every 250 steps and "
        "held-out text; no queue, no failures. MFU is of model FLOPs at 200 TFLOP/s."
    )
    endless = a_run(max_wall_hours=None)
    endless.card.memory_source = ""
    line = tables.assumptions(endless, FAST, True)
    assert line.startswith("60.0 GB a device are usable. 'dp12") and ". Hours are of 10 minutes to" in line
    assert "held-out text; no queue. MFU" in line


def test_the_offer_is_of_the_first_layout_with_tensor_ranks(monkeypatch) -> None:
    monkeypatch.setattr(tables, "overlap_offer", lambda planned: f"offered: {planned.name}")
    two, four = a_layout(RUN, tensor=2, shard=6), a_layout(RUN, tensor=4, shard=3)
    for listed, offered in (([FAST, two, four], [two]), ([four, two], [four]), ([FAST, SLOW], [])):
        lines = tables.notes(RUN, listed, {3: FAST})
        assert [line for line in lines if "offered" in line] == [f"offered: {one.name}" for one in offered]


def test_costs_of_all_languages() -> None:
    """Each language costs as much; the layout that is named twice is told once."""
    beside = PublishedEngine("Nemo", "all layers recomputed", 1.5)
    safer = PlannedLayout(**(vars(FAST) | {"published": beside}))
    costs = [(safer, a_cost()), (SLOW, a_cost(days=4, device_hours=3200.0)), (safer, a_cost())]
    of_all = tables.of_all_languages(["et", "fi", "sv"], costs)
    assert of_all == {
        "codes": ["et", "fi", "sv"], "planned": "et",
        "layouts": [
            {"name": "dp12-mb2-zero1", "nodes": 3, "hours_each": 72.0, "days_in_a_row": 9.0,
             "safe_device_hours": 10800.0, "device_hours": 7200.0, "billed_hours": 900.0},
            {"name": "dp12-hsdp6-mb2-zero1", "nodes": 3, "hours_each": 96.0, "days_in_a_row": 12.0,
             "safe_device_hours": 9600.0, "device_hours": 9600.0, "billed_hours": 1200.0},
        ],
    }  # fmt: skip
    assert tables.languages_rows(RUN, of_all) == (
        ("nodes", "hours each", "days in a row", "safe hours", "device-hours", "node-hours", "layout"),
        [(3, "72.0", "9.0", "10,800", "7,200", "900", "dp12-mb2-zero1"),
         (3, "96.0", "12.0", "9,600", "9,600", "1,200",
         "dp12-hsdp6-mb2-zero1")],
    )  # fmt: skip


def test_json_of_a_layout() -> None:
    said = tables.planned_json(FAST, a_cost())
    layout, cost = said.pop("layout"), said.pop("cost")
    assert layout["shard"] == 12 and layout["zero"] == 1
    assert said.pop("tflops_per_device") == pytest.approx(12288) and said.pop("mfu") == pytest.approx(61.44)
    assert said == {
        "name": "dp12-mb2-zero1", "nodes": 3, "devices": 12, "micro_batch_sequences": 2,
        "micro_batches_per_step": 3, "sequence_length": 512, "tokens_per_step": 36_864, "fits": True,
        "bytes": {"weights": 10e9, "logits": 30e9}, "peak_bytes": 40e9, "usable_bytes": 60e9,
        "host_bytes_per_node": 30e9, "usable_host_bytes_per_node": 400e9,
        "seconds": {"matrix": 1.5, "bubble": 0.5, "tensor_traffic": 0.0}, "hidden_data_seconds": 0.125,
        "step_seconds": 2.0, "interval_seconds": [1.8, 2.4], "tokens_per_second": 18_432.0,
        "is_measured": False, "published_engine": None,
    }  # fmt: skip
    assert cost == {
        "steps": 1000, "training_seconds": 2e5, "heldout_seconds": 3e3, "stop_seconds": 1.5, "checkpoints": 4,
        "checkpoint_bytes": 70e9, "checkpoint_seconds": 21.0, "jobs": 5, "wall_seconds": 259_200.0,
        "device_hours": 2400.0, "failures": None, "days": 3.0, "billed_hours": 300.0,
        "safe_device_hours": 2400.0,
    }  # fmt: skip
    told = tables.planned_json(FAST, a_cost(failures=failures()))["cost"]["failures"]
    assert (
        told["rate"] == {"per_1000_device_days": 0.25, "source": "a page", "silent_share": 0.2}
        and told["spare_nodes"] == 2
    )


def test_json_of_the_plan(monkeypatch) -> None:
    """Three names of refused layouts for a reason, unless all are asked for."""
    run = a_run()
    run.model, run.phases = None, ()
    monkeypatch.setattr(
        tables, "overview_of_phases", lambda *_: SimpleNamespace(figures=lambda: {"steps": 5})
    )
    said = tables.plan_json(run, FOUND, [(FAST, a_cost())], {3: SLOW, 4: "no"}, False)
    assert [(said[key]) for key in ("recipe", "cluster", "looked_at", "run", "billing_unit")] == [
        "mine", "hall", 1234, {"steps": 5}, "node-hours"
    ]  # fmt: skip
    assert [one["name"] for one in said["layouts"]] == ["dp12-mb2-zero1"]
    assert said["own"] == {
        3: {"name": "dp12-hsdp6-mb2-zero1", "tokens_per_second": 9216.0, "step_seconds": 4.0,
            "peak_bytes": 50e9,
            "fits": True},
        4: "no",
    }  # fmt: skip
    assert said["not_listed"]["any"] == [{"why": "heads", "layouts": 2, "names": ["tp2-pp3-cp5"] * 2}]
    assert said["not_listed"]["3"][1] == {"why": "too small", "layouts": 4, "names": [ONE.name] * 3}
    said = tables.plan_json(run, FOUND, [(FAST, a_cost())], {}, True)
    assert said["not_listed"]["3"][1]["names"] == [ONE.name] * 4


def test_a_layout_as_lines_of_a_recipe() -> None:
    chosen = a_layout(RUN, tensor=2, shard=2, sequence_parallel=False, recompute="full")
    assert tables.layout_toml(chosen) == (
        '[layout]\ntensor = 2\nsequence_parallel = false\nrecompute = "full"\n\n[train]\n'
        "micro_batch_sequences = 2"
    )


def failures(**more: Any) -> Failures:
    values = {
        "rate": Rate(0.25, "a "
        "page", 0.2), "mean_seconds": 48 * 3600.0, "down": {"found": 30.0, "start": 90.0, "x": 0.4},
        "frozen_seconds": 150.0, "stuck_seconds": 170.0, "own_seconds": 7200.0, "young_seconds": 2500.0,
        "daly_seconds": 2400.0, "best_steps": 80, "effective_share": 0.875, "best_share": 0.9375,
        "job_seconds": 49 * 3600.0, "spare_nodes": 2,
    }  # fmt: skip
    return Failures(**(values | more))


def test_what_failures_cost() -> None:
    """Of the fastest layout on each number of nodes; hours up to two days."""
    other = a_layout(RUN, nodes=5)
    costs = [a_cost(failures=failures()), a_cost(failures=failures(best_steps=1)), a_cost(), a_cost(
        failures=failures(mean_seconds=72 * 3600.0, best_steps=1234, spare_nodes=3)
    )]  # fmt: skip
    listed = [FAST, SLOW, a_layout(RUN, nodes=4), other]
    table, _ = tables.failure_table(RUN, list(zip(listed, costs)))
    assert table == (
        ("nodes", "failure in", "down", "save every", "effective", "as it saves", "spares"),
        [
            (3, "2.0 days", "120 s", "80 steps", "93.8%", "87.5%", 2),
            (5, "3.0 days", "120 s", "1,234 steps", "93.8%", "87.5%", 3),
        ],
    )
    assert tables.failure_table(RUN, [(FAST, a_cost(failures=failures()))])[1] == [
        "Failures: 0.25 of a device in 1,000 days (a page). effective: share of time for steps that are "
        "kept, with the saves of the table; as it saves: with the recipe's saves. spares: nodes for 95 % of "
        "jobs of 2.0 days to replace all failed nodes.",
        "On 12 devices a save stops training for 1.5 s. The best time between two saves is 2,500 s (Young "
        "1974) or 2,400 s (Daly 2006). After a failure training resumes in 120 s (found 30, start 90); if a "
        "node is silent in 150 s, if a rank is stuck in 170 s. It repeats 3,621 s of steps.",
        "checkpoint.every_steps = 250 is a save every 2 h 00 min, with 87.5% of the time effective. Fix: "
        "checkpoint.every_steps = 80, with 93.8%.",
    ]
    copying = a_run()
    copies = copying.recipe.checkpoint.model_copy(update={"memory_every_steps": 30})
    copying.recipe = copying.recipe.model_copy(update={"checkpoint": copies})
    good = failures(best_share=0.8799, own_seconds=7201.0)
    lines = tables.failure_table(copying, [(FAST, a_cost()), (other, a_cost(failures=good))])[1]
    assert len(lines) == 3 and lines[2] == (
        "checkpoint.memory_every_steps = 30: the failure of one node costs 30 s of steps besides writing, of "
        "several nodes all steps since the last save."
    )
    assert lines[1].startswith("On 20 devices ")
    # what is below half a second is no part; from half a per cent on another interval is worth a word
    near = failures(best_share=0.8801, down={"found": 30.0, "start": 90.0, "x": 0.4, "y": 0.5})
    lines = tables.failure_table(RUN, [(FAST, a_cost(failures=near))])[1]
    assert len(lines) == 3 and "(found 30, start 90, y 0)" in lines[1]
    exactly = failures(best_share=0.005, effective_share=0.0)
    assert len(tables.failure_table(RUN, [(FAST, a_cost(failures=exactly))])[1]) == 2
    for seconds, said in ((47.951 * 3600, "47 h 57 min"), (48 * 3600 + 1, "2.0 days")):
        listed = [(FAST, a_cost(failures=failures(mean_seconds=seconds)))]
        assert tables.failure_table(RUN, listed)[0][1][0][1] == said

"""The planner's pictures: as many bars, points and labels as there are pieces of work, layouts and parts."""

from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
from matplotlib.collections import PolyCollection

from kielo.models.families import complete
from kielo.plan.compare import SECONDS
from kielo.plan.pipeline_simulation import timeline
from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout
from kielo.report.plan_figures import (
    PARTS,
    by_nodes,
    drawn_micro_batches,
    parts_figure,
    parts_svg,
    scaling_figure,
    scaling_svg,
    timeline_figure,
    timeline_svg,
)


@cache
def run(sequences: int) -> RunToPlan:
    recipe = read_recipe("estonian_llama31_70b", [f"train.tokens_per_step={4096 * sequences}"]).recipe
    return RunToPlan.of(recipe, complete(recipe.model, 4096))


def planned(nodes: int = 16, sequences: int = 512, **layout) -> PlannedLayout:
    shape = {"tensor": 8, "pipeline": 4} | layout
    shard = nodes * 8 // (shape["tensor"] * shape["pipeline"])
    return plan_layouts(run(sequences), [(Layout(shard=shard, **shape), nodes, 1)])[0]


def texts(path) -> list[str]:
    """Returns the text of an SVG file, which stands as text in it."""
    tree = ElementTree.parse(path)
    return ["".join(node.itertext()).strip() for node in tree.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_a_timeline_has_a_bar_for_every_piece_of_work(schedule, tmp_path):
    one = planned(pipeline_schedule=schedule)
    drawn = drawn_micro_batches(one)
    assert 2 * one.layout.pipeline <= drawn <= 2 * one.layout.pipeline + 4 < one.micro_batches
    spans = timeline(schedule, one.stages, one.layout.pipeline, drawn)
    (axes,) = timeline_figure(one).axes
    bars = [
        path for found in axes.collections if isinstance(found, PolyCollection) for path in found.get_paths()
    ]
    assert len(bars) == len(spans)
    assert sum(bar.get_extents().width for bar in bars) == pytest.approx(
        sum(span.end - span.start for span in spans)
    )
    assert len(axes.get_legend().get_texts()) == len({span.kind for span in spans})
    timeline_svg(one, tmp_path / "timeline.svg")
    written = texts(tmp_path / "timeline.svg")
    assert f"{one.name}: bubble {one.seconds['bubble'] / one.step_seconds:.1%} of the step" in written
    assert any(
        f"a step of {drawn} micro-batches" in text and f"has {one.micro_batches} " in text for text in written
    )
    assert {"1", "8"} <= set(written)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.svg"]


def test_a_short_step_is_drawn_whole():
    one = planned(sequences=32)
    assert drawn_micro_batches(one) == one.micro_batches == 8
    rounds_of_five = replace(
        one, layout=planned(pipeline_schedule="interleaved_1f1b").layout, micro_batches=15
    )
    assert drawn_micro_batches(rounds_of_five) == 10
    assert timeline_figure(one).axes[0].get_xlabel() == "seconds"


def test_without_a_pipeline_the_timeline_is_one_bar_of_parts(tmp_path):
    one = planned(pipeline=1)
    timeline_svg(one, tmp_path / "one.svg")
    assert {"seconds of a step", one.name, "matrix products"} <= set(texts(tmp_path / "one.svg"))


def test_parts_are_stacked_to_the_step(tmp_path):
    several = [planned(), planned(recompute="full"), replace(planned(nodes=32), bytes={"weights": 1e12})]
    figure = parts_figure(several)
    (axes,) = figure.axes
    for position, one in enumerate(several):
        bars = [bar for bar in axes.patches if abs(bar.get_y() + bar.get_height() / 2 - position) < 0.1]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(one.step_seconds)
    present = [part for part in PARTS if any(one.seconds[part] > 0 for one in several)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [SECONDS[part] for part in present]
    assert set(PARTS) == set(SECONDS)
    parts_svg(several, tmp_path / "parts.svg")
    written = texts(tmp_path / "parts.svg")
    assert sum("does not fit" in text for text in written) == sum(not one.fits for one in several) > 0
    assert {"16 nodes", "32 nodes"} <= set(written)


def test_scaling_has_a_point_for_each_number_of_nodes(tmp_path):
    strong = [planned(nodes=nodes, recompute=word) for nodes in (4, 8, 16) for word in ("none", "full")]
    weak = [planned(nodes=nodes, sequences=32 * nodes) for nodes in (16, 8, 4)]
    best = by_nodes(strong)
    assert [one.nodes for one in best] == [4, 8, 16] and {one.layout.recompute for one in best} == {"none"}
    speed, share, _ = scaling_figure(strong, weak).axes
    ideal, fixed, _, grown = speed.lines
    assert list(fixed.get_ydata()) == [one.tokens_per_second for one in best]
    assert list(grown.get_ydata()) == [one.tokens_per_second for one in reversed(weak)]
    assert ideal.get_ydata()[2] == pytest.approx(4 * best[0].tokens_per_second)
    assert share.lines[0].get_ydata()[2] == pytest.approx(
        25 * best[2].tokens_per_second / best[0].tokens_per_second
    )
    bands = [found.get_paths()[0].get_extents() for found in speed.collections]
    assert bands[0].y1 == pytest.approx(best[2].tokens_per_step / best[2].low_seconds)
    assert bands[0].y0 == pytest.approx(best[0].tokens_per_step / best[0].high_seconds)
    scaling_svg(strong, weak, tmp_path / "scaling.svg")
    written = texts(tmp_path / "scaling.svg")
    for one in [*best, *weak]:
        assert one.name in written
    scaling_svg([], weak, tmp_path / "weak.svg")
    assert not any("fixed" in text for text in texts(tmp_path / "weak.svg"))

"""A ladder's table, notes, page and figures, from six rungs whose numbers are counted by hand."""

from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kielo.artifact.launch_files import Ladder, MeasuredSpeed, PlannedSpeed, ReferenceSpeed, Rung
from kielo.report import ladder_page as room
from kielo.report.figures import DROPPED, OTHER, OURS, QUIET, RULE
from kielo.report.ladder_page import (
    base_rung,
    fastest,
    is_expected,
    markdown,
    notes,
    page,
    share_of_linear,
    table,
)


def rung(nodes: int, layout: str, speed: float | None, tflops: float = 0.0, *planned: float) -> Rung:
    """planned: the plan's tokens a second, and the ends of its interval."""
    plan = dict(zip(("tokens_per_second", "low_tokens_per_second", "high_tokens_per_second"), planned))
    measured = {"steps": 8, "step_seconds": 1.0, "tokens_per_second": speed, "tflops_per_device": tflops}
    return Rung(
        nodes=nodes, devices=8 * nodes, layout=layout, folder="",
        planned=PlannedSpeed(**plan, tflops_per_device=1.0) if plan else None,
        measured=None if speed is None else MeasuredSpeed(**measured),
        state="measured" if speed else "it | broke",
    )  # fmt: skip


RUNGS = [
    rung(2, "tp2", 1000.0, 100.4, 1100.0, 900.0, 1200.0),
    rung(2, "tp4", 800.0, 80.2, 700.0, 600.0, 750.0),
    rung(4, "dp", 1500.0, 75.0, 1500.0, 1500.0, 1500.0),
    rung(4, "tp2", 1800.0, 90.0),
    rung(8, "tp4", None, 0.0, 4400.4, 4000.0, 5000.0),
    rung(16, "tp8", None),
]
REFERENCE = ReferenceSpeed(
    nodes=6, tflops_per_device=50.0, tolerance=0.1, software="Others' code, 7B", source="a page, 2025-01"
)


def ladder(rungs: list[Rung] = RUNGS, **changes: Any) -> Ladder:
    usual = {
        "name": "a<b", "cluster": "site", "machine": "", "parameters": 7_300_000_000,
        "tokens_per_step": 4_194_304, "sequence_length": 8192, "rungs": rungs, "references": [REFERENCE],
        "kielo_version": "9.8", "written_at": "2025-01-02 03:04",
    }  # fmt: skip
    return Ladder(**(usual | changes))


def test_rows_of_the_table() -> None:
    """The plan's interval has its ends in it; % of linear is by the fastest on the fewest nodes."""
    titles, rows = table(ladder())
    assert titles == (
        "nodes", "layout", "tokens/s", "TFLOP/s a device", "% of linear", "planned", "difference",
    )  # fmt: skip
    assert rows == [
        ("2", "tp2", "1,000", "100", "100%", "1,100", "-9%"),
        ("2", "tp4", "800", "80.2", "80%", "700", "+14% (outside of the interval)"),
        ("4", "dp", "1,500", "75", "75%", "1,500", "+0%"),
        ("4", "tp2", "1,800", "90", "90%", "–", "–"),
        ("8", "tp4", "it | broke", "–", "–", "4,400", "–"),
        ("16", "tp8", "it | broke", "–", "–", "–", "–"),
    ]


@pytest.mark.parametrize(("speed", "is_inside"), [(89, False), (90, True), (120, True), (121, False)])
def test_the_interval_of_the_plan(speed: float, is_inside: bool) -> None:
    assert is_expected(rung(2, "x", speed, 1.0, 100.0, 90.0, 120.0)) is is_inside


def test_the_base_and_the_fastest() -> None:
    """Of equal ones the first; without a measurement there is neither."""
    many, slow, fast, same = rung(4, "a", 90), rung(3, "b", 20), rung(3, "c", 30), rung(3, "d", 30)
    assert base_rung([many, slow, fast, same]) is fast and base_rung([many, rung(1, "e", None)]) is many
    assert fastest([many, slow, fast, same]) == [fast, many]
    assert base_rung(RUNGS[4:]) is None and fastest(RUNGS[4:]) == []
    assert share_of_linear(many, fast) == pytest.approx(90 / 4 / 10)


def test_notes_say_how_it_was_measured_and_planned() -> None:
    how, linear, planned, others, use = notes(ladder())
    assert how == (
        "a<b: 7.30 billion parameters, steps of 4,194,304 tokens on any number of nodes, sequences of 8,192, "
        "on site. Each figure is the median of a rung's steps without the first two."
    )
    assert linear.startswith("% of linear: tokens/s of a node, by those of the fastest layout on the fewest")
    assert planned == "Planned by constants fitted on published runs, before the measurement."
    assert others == "Others on 6 nodes: 50 TFLOP/s a device ± 10%, Others' code, 7B (a page, 2025-01)."
    assert use.startswith("To plan with what was measured: kielo plan calibrate")
    assert notes(ladder(machine="mine.toml"))[2] == "Planned by the card mine.toml, before the measurement."
    assert len(notes(ladder(references=[]))) == 4
    unmeasured = notes(ladder(RUNGS[4:]))
    assert len(unmeasured) == 4 and unmeasured[3] == others
    assert len(notes(ladder(RUNGS[5:], references=[]))) == 2  # nor planned


def test_the_table_as_markdown() -> None:
    """A bar within a cell would end it."""
    text = markdown(ladder([RUNGS[1], RUNGS[4]], references=[]))
    lines = text.split("\n")
    assert lines[:6] == [
        "# a<b on site: measured and planned", "",
        "| nodes | layout | tokens/s | TFLOP/s a device | % of linear | planned | difference |",
        "|--:|---|--:|--:|--:|--:|--:|",
        "| 2 | tp4 | 800 | 80.2 | 100% | 700 | +14% (outside of the interval) |",
        "| 8 | tp4 | it / broke | – | – | 4,400 | – |",
    ]  # fmt: skip
    assert lines[6::2] == ["", "", "", "", ""] and lines[7:14:2] == notes(ladder(RUNGS[:5], references=[]))


def test_the_page_marks_what_is_not_as_planned() -> None:
    """Rows that were not measured or are outside of the interval; figures only of what was measured."""
    html = page(ladder())
    rows = html.partition("<tbody>")[2].split("<tr")[1:]
    assert [row.startswith(" class=differs>") for row in rows] == [False, True, False, False, True, True]
    assert '<td class="text">tp2</td><td class="number">1,000</td>' in html
    assert "<h1>a&lt;b on site: scaling</h1>" in html and "Kielo 9.8 · 2025-01-02 03:04</p>" in html
    assert "<title>a&lt;b · Kielo ladder</title>" in html and "<p class='note'>a&lt;b: 7.30 billion" in html
    assert html.count("<figure>") == 2
    assert "TFLOP/s of a device, and what others measured.</figcaption>" in html
    assert "<figcaption>TFLOP/s of a device.</figcaption>" in page(ladder(references=[]))
    assert "<figure>" not in page(ladder(RUNGS[4:]))


@pytest.fixture
def drawn(monkeypatch) -> dict[str, Figure]:
    """Name → the figure, which is not rendered."""
    found: dict[str, Figure] = {}
    monkeypatch.setattr(room, "page_svg", lambda figure, name: found.setdefault(name, figure) and name)
    return found


def look(line: Line2D) -> tuple:
    """Returns (points, colour, width, style, marker, its size)."""
    points = list(zip(line.get_xdata().tolist(), line.get_ydata().tolist()))
    marker = line.get_marker()
    size = None if marker == "None" else line.get_markersize()
    width = None if line.get_linestyle() == "None" else line.get_linewidth()
    return points, to_hex(line.get_color()), width, line.get_linestyle(), marker, size


def span(container) -> list[list[list[float]]]:
    """Returns the two ends of each error bar, whose caps are 3 points to either side."""
    _, caps, (bars,) = container
    assert {cap.get_markersize() for cap in caps} == {6}
    return [segment.tolist() for segment in bars.get_segments()]


def assert_axis_of_nodes(axes, nodes: list[int]) -> None:
    """Every number of nodes is named on an axis by powers of two; speed begins at zero."""
    assert axes.get_xscale() == "log" and axes.xaxis.get_transform().base == 2
    assert axes.get_xticks().tolist() == nodes
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"{count:,}" for count in nodes]
    assert len(axes.xaxis.get_minorticklocs()) == 0 and axes.get_xlabel() == "nodes"
    assert axes.get_ylim()[0] == 0 and not axes.get_legend().get_frame_on()
    assert {line.get_color() for line in axes.yaxis.get_gridlines()} == {RULE}


def test_speed_over_nodes(drawn) -> None:
    assert room.scaling_figure(ladder()) == "scaling"
    (axes,) = drawn["scaling"].axes
    assert drawn["scaling"].get_size_inches().tolist() == [8.4, 3.6]
    linear, planned, _, _, measured = axes.lines
    assert look(linear) == ([(2, 1000), (4, 2000)], QUIET, 1, "--", "None", None)
    assert linear._dash_pattern == (0, [4.0, 3.0])
    assert look(planned) == ([(2, 1100)], OTHER, 1.2, "-", "s", 4)
    assert span(axes.containers[0]) == [[[2, 900], [2, 1200]]]
    assert look(measured) == ([(2, 1000), (4, 1800)], OURS, 1.8, "-", "o", 5)
    assert [(one.get_text(), tuple(one.xy), tuple(one.xyann), one.get_color()) for one in axes.texts] == [
        ("100%", (2, 1000), (0, -14), OURS), ("90%", (4, 1800), (0, -14), OURS),
    ]  # fmt: skip
    assert {one.get_ha() for one in axes.texts} == {"center"}
    assert axes.get_ylim()[1] > 2000 and axes.get_ylabel() == "tokens per second"
    assert axes.yaxis.get_major_formatter()(12345.6, 0) == "12,346"
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {"linear", "planned", "measured"}
    assert_axis_of_nodes(axes, [2, 4])
    drawn.clear()
    room.scaling_figure(ladder(RUNGS[3:]))
    assert len(drawn["scaling"].axes[0].lines) == 2  # nothing of it was planned


def test_speed_of_a_device(drawn) -> None:
    assert room.device_figure(ladder()) == "device"
    (axes,) = drawn["device"].axes
    assert drawn["device"].get_size_inches().tolist() == [8.4, 3.0]
    every, best, others, _, _ = axes.lines
    assert look(every) == ([(2, 100.4), (2, 80.2), (4, 75), (4, 90)], OTHER, None, "None", "o", 4)
    assert look(best) == ([(2, 100.4), (4, 90)], OURS, 1.8, "-", "o", 5)
    assert look(others) == ([(6, 50)], DROPPED, None, "None", "D", 4)
    ((low, high),) = span(axes.containers[0])
    assert (low, high) == ([6, 45], [6, 55]) and axes.get_ylabel() == "TFLOP/s of a device"
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {"other layouts", "the fastest layout", "Others' code, 7B"}
    assert axes.get_ylim()[1] > 100.4
    assert_axis_of_nodes(axes, [2, 4, 6])
    drawn.clear()
    room.device_figure(ladder(references=[]))
    assert len(drawn["device"].axes[0].lines) == 2
    assert_axis_of_nodes(drawn["device"].axes[0], [2, 4])

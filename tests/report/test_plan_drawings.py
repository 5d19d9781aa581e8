"""Positions, colours and words of the planner's scaling and parts, from layouts of a few numbers."""

import re
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kielo.report import plan_figures as room
from kielo.report.plan_figures import (
    INK,
    PAPER,
    PARTS,
    QUIET,
    RULE,
    STRONG,
    STYLE,
    WEAK,
    by_nodes,
    parts_figure,
    scaling_figure,
)


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context(STYLE):
        yield


def size(figure: Figure) -> tuple[float, float]:
    return tuple(figure.get_size_inches().round(4).tolist())


def points(line) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata()))


def look(line) -> tuple:
    """Returns (colour, width, style, marker, its size)."""
    marker = line.get_marker()
    size_of_marker = None if marker == "None" else line.get_markersize()
    return line.get_color(), line.get_linewidth(), line.get_linestyle(), marker, size_of_marker


def hidden(axes) -> set[str]:
    return {side for side in ("top", "right", "bottom", "left") if not axes.spines[side].get_visible()}


def has_ticks(axes) -> bool:
    ticks = [*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks()]
    return any(tick.tick1line.get_markersize() for tick in ticks)


def layout(nodes: int, speed: float, name: str, low: float = 0.8, high: float = 1.25) -> SimpleNamespace:
    """Makes a layout of 1,000 tokens a step; low and high: seconds of the interval, by the planned ones."""
    taken = 1000 / speed
    return SimpleNamespace(
        nodes=nodes, tokens_per_second=speed, tokens_per_step=1000, name=name, low_seconds=low * taken,
        high_seconds=high * taken,
    )  # fmt: skip


FIXED = [
    layout(8, 3000.0, "c"), layout(2, 500.0, "slow"), layout(2, 1000.0, "a"), layout(2, 1000.0, "same"),
    layout(5, 2000.0, "b"),
]  # fmt: skip
GROWN = [layout(5, 2400.0, "d", 0.5, 2.0), layout(40, 16_000.0, "e", 0.5, 2.0)]


def test_speeds_over_nodes() -> None:
    """The fastest of each number of nodes, with the interval as a band, and ideal from the fewest nodes."""
    assert [one.name for one in by_nodes(FIXED)] == ["a", "b", "c"]
    figure = scaling_figure(FIXED, GROWN)
    speed, share, _ = figure.axes
    assert size(figure) == (11, 4.95)  # 3.9, and 0.21 for each of four numbers of nodes and a title
    assert speed.get_gridspec().get_height_ratios() == [3.9, pytest.approx(1.05)]
    places = [axes.get_subplotspec() for axes in figure.axes]
    places = [(list(place.rowspan), list(place.colspan)) for place in places]
    assert places == [([0], [0]), ([0], [1]), ([1], [0, 1])]
    assert speed.xaxis.label.get_size() == 10 and not speed.xaxis.label.get_parse_math()
    first, fixed, second, grown = speed.lines
    ideal = (QUIET, 1, "--", "None", None)
    assert look(first) == look(second) == ideal and first._dash_pattern == second._dash_pattern == (0, [4, 3])
    assert points(first) == [(2, 1000), (5, 2500), (8, 4000)]
    assert points(second) == [(5, 2400), (40, 19_200)]
    assert points(fixed) == [(2, 1000), (5, 2000), (8, 3000)]
    assert look(fixed) == (STRONG, 1.8, "-", "o", 4) and look(grown) == (WEAK, 1.8, "-", "o", 4)
    for band, colour, low, high in zip(
        speed.collections, (STRONG, WEAK), (800, 1200), (3750, 32_000), strict=True
    ):
        box = band.get_paths()[0].get_extents()
        assert (box.y0, box.y1) == (pytest.approx(low), pytest.approx(high))
        assert to_hex(band.get_facecolor()[0]) == colour and band.get_alpha() == 0.14
        assert band.get_linewidth().tolist() == [0]
    one, other, whole = share.lines
    assert points(one) == [(2, 100), (5, 80), (8, 75)] and look(one) == look(fixed)
    assert points(other) == [(5, 100), (40, pytest.approx(100 * 16_000 / 19_200))]
    assert look(other) == look(grown) and list(whole.get_ydata()) == [100, 100] and look(whole) == ideal
    assert share.get_ylim() == (0, 110) and share.yaxis.get_major_formatter()(79.6, 0) == "80%"
    assert share.lines[2]._dash_pattern == (0, [4, 3])


def test_efficiency_above_the_fewest_nodes_has_room() -> None:
    """The axis ends above the highest one."""
    _, share, _ = scaling_figure([layout(2, 1000.0, "a"), layout(4, 3000.0, "b")], []).axes
    assert points(share.lines[0]) == [(2, 100), (4, 150)] and share.get_ylim()[1] > 150


def test_axes_and_legend_of_scaling() -> None:
    speed, share, names = scaling_figure(FIXED, GROWN).axes
    assert speed.get_yscale() == "log" and len(speed.yaxis.get_minorticklocs()) == 0
    ticks = [tick for tick in speed.yaxis.get_major_locator().tick_values(100, 3000) if 100 <= tick <= 3000]
    assert ticks == [100, 200, 500, 1000, 2000]
    assert speed.yaxis.get_major_formatter()(12_345.0, 0) == "12.35K"
    assert speed.get_title("left") == "tokens/s, with the 80% interval"
    assert share.get_title("left") == "efficiency: tokens/s a node, compared with the fewest nodes"
    assert {axes._left_title.get_size() for axes in (speed, share)} == {11}
    legend = speed.get_legend()
    assert not legend.get_frame_on()
    assert [text.get_text() for text in legend.get_texts()] == [
        "ideal", "fixed batch", "batch grows with the nodes",
    ]  # fmt: skip
    for axes in (speed, share):
        assert axes.get_xscale() == "log" and axes.xaxis.get_transform().base == 2
        assert axes.get_xticks().tolist() == [2, 5, 8, 40] and axes.get_xlabel() == "nodes"
        assert len(axes.xaxis.get_minorticklocs()) == 0 and not has_ticks(axes)
        grid = axes.yaxis.get_gridlines()[0]
        assert (grid.get_visible(), grid.get_color(), grid.get_linewidth()) == (True, RULE, 0.7)
        assert axes.get_axisbelow() is True and hidden(axes) == {"top", "right", "left"}
    assert not names.axison


@pytest.mark.parametrize(
    ("nodes", "ticks"), [([4, 5, 6, 8, 1024], [4, 6, 1024]), ([20, 27], [20, 27]), ([20, 26], [20])]
)
def test_ticks_of_nodes_stand_apart(nodes: list[int], ticks: list[int]) -> None:
    """By a factor of 1.35 at least."""
    speed, *_ = scaling_figure([layout(count, 10.0 * count, "x") for count in nodes], []).axes
    assert speed.get_xticks().tolist() == ticks
    assert [label.get_text() for label in speed.get_xticklabels()] == [f"{count:,}" for count in ticks]


def test_the_list_of_names_below() -> None:
    """A row for each number of nodes, a column for each kind of batch."""
    *_, names = scaling_figure(FIXED, GROWN).axes
    assert names.get_xlim() == (0, 1) and names.get_ylim() == (4.5, -0.5)
    found = []
    for one in names.texts:
        x, y = one.get_position()
        found.append((one.get_text(), round(x, 6), y, one.get_ha(), to_hex(one.get_color())))
    assert found == [
        ("nodes", 0.045, 0, "right", QUIET), ("2", 0.045, 1, "right", INK), ("5", 0.045, 2, "right", INK),
        ("8", 0.045, 3, "right", INK), ("40", 0.045, 4, "right", INK),
        ("best layout, fixed batch", 0.08, 0, "left", STRONG), ("a", 0.08, 1, "left", INK),
        ("b", 0.08, 2, "left", INK), ("c", 0.08, 3, "left", INK),
        ("best layout, batch grows with the nodes", 0.54, 0, "left", WEAK), ("d", 0.54, 2, "left", INK),
        ("e", 0.54, 4, "left", INK),
    ]  # fmt: skip
    assert {(one.get_size(), one.get_va()) for one in names.texts} == {(9, "center")}


def parted(name: str, nodes: int = 2, fits: bool = True, **seconds: float) -> SimpleNamespace:
    whole = sum(seconds.values())
    return SimpleNamespace(
        name=name, nodes=nodes, fits=fits, seconds=seconds, step_seconds=whole,
        tokens_per_second=50_000 / whole,
    )  # fmt: skip


# The longest step takes 10 seconds: parts of more than 0.55 have room for their number.
TWO = [
    parted("a", matrix=6.0, launch=0.56, bubble=3.44),
    parted("b", matrix=4.0, launch=0.54, odd=0.96, head=2.5),
]


def test_bars_of_parts() -> None:
    """One after the other from zero, in the order of the parts; light numbers on dark bars."""
    figure = parts_figure(TWO)
    (axes,) = figure.axes
    assert size(figure) == (11, 2.69)  # 0.62 inches a layout, and 1.45
    found = []
    for bar in axes.patches:
        place = (bar.get_y() + 0.3, bar.get_x(), bar.get_width())
        found.append((*(round(float(one), 6) for one in place), to_hex(bar.get_facecolor())))
    found = [bar for bar in found if bar[2]]
    green, pale, dark, orange = (PARTS[part] for part in ("matrix", "launch", "head", "bubble"))
    assert found == [
        (0, 0, 6.0, green), (0, 6.0, 0.56, pale), (0, 6.56, 3.44, orange),
        (1, 0, 4.0, green), (1, 4.0, 2.5, dark), (1, 6.5, 0.54, pale), (1, 7.04, 0.96, QUIET),
    ]  # fmt: skip
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.6] * len(axes.patches))
    assert {(to_hex(bar.get_edgecolor()), bar.get_linewidth()) for bar in axes.patches} == {(PAPER, 0.6)}
    numbers = [one for one in axes.texts if not hasattr(one, "xyann")]
    assert [(one.get_text(), *one.get_position(), to_hex(one.get_color())) for one in numbers] == [
        ("6", 3, 0, PAPER), ("0.56", pytest.approx(6.28), 0, INK), ("3.44", pytest.approx(8.28), 0, INK),
        ("4", 2, 1, PAPER), ("2.5", pytest.approx(5.25), 1, PAPER), ("0.96", pytest.approx(7.52), 1, PAPER),
    ]  # fmt: skip
    assert {(one.get_size(), one.get_ha(), one.get_va()) for one in numbers} == {(8, "center", "center")}
    ends = [one for one in axes.texts if hasattr(one, "xyann")]
    assert [(one.get_text(), tuple(one.xyann), to_hex(one.get_color())) for one in ends] == [
        ("10 s, 5K tokens/s", (6, 0), INK), ("8 s, 6.25K tokens/s", (6, 0), INK),
    ]  # fmt: skip
    assert [tuple(one.xy) for one in ends] == [(pytest.approx(10), 0), (pytest.approx(8), 1)]


def test_frame_of_parts() -> None:
    figure = parts_figure(TWO)
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, pytest.approx(13)) and axes.get_ylim() == (1.5, -0.5)
    assert axes.get_yticks().tolist() == [0, 1] and axes.get_xticks().tolist() == []
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert {label.get_color() for label in axes.get_yticklabels()} == {INK} and not has_ticks(axes)
    assert hidden(axes) == {"top", "right", "bottom", "left"}
    assert axes.get_title("left") == "seconds of a step" and axes._left_title.get_size() == 11
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "matrix products", "output head and loss", "kernel launches", "pipeline bubble", "odd",
    ]  # fmt: skip
    kinds = [PARTS["matrix"], PARTS["head"], PARTS["launch"], PARTS["bubble"], QUIET]
    assert [to_hex(one.get_facecolor()) for one in legend.get_patches()] == kinds
    assert not legend.get_frame_on() and {text.get_size() for text in legend.get_texts()} == {9}
    figure.draw_without_rendering()
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == 1  # five columns
    six = parts_figure([parted("x", **dict.fromkeys(list(PARTS)[:6], 1.0))])
    six.draw_without_rendering()
    rows = {round(text.get_window_extent().y0) for text in six.legends[0].get_texts()}
    assert len(rows) == 2


def test_a_layout_that_does_not_fit_has_more_room_for_words() -> None:
    """Nodes are named where they differ."""
    (axes,) = parts_figure([TWO[0], parted("b", 1024, False, matrix=10.0)]).axes
    assert axes.get_xlim() == (0, pytest.approx(14.8))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["a\n2 nodes", "b\n1,024 nodes"]
    assert axes.texts[-1].get_text() == "10 s, 5K tokens/s, does not fit"


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (999.4, "999"), (1000.0, "1K"), (1e6, "1M"), (1.5e9, "1.5B"), (12_345.0, "12.35K"), (2e12, "2T"),
        (0.25, "0.25"),
    ],
)  # fmt: skip
def test_speeds_as_short_amounts(speed: float, text: str) -> None:
    one: Any = parted("a", matrix=2.0)
    one.tokens_per_second = speed
    (axes,) = parts_figure([one]).axes
    assert axes.texts[-1].get_text() == f"2 s, {text} tokens/s"


def test_the_same_figure_is_the_same_file(tmp_path) -> None:
    """White paper, plain text, and nothing of the time or the program in it."""
    room.parts_svg(TWO, tmp_path / "one.svg")
    room.parts_svg(TWO, tmp_path / "two.svg")
    svg = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert svg == (tmp_path / "two.svg").read_text(encoding="utf-8").replace("two.svg", "one.svg")
    assert "fill: #ffffff" in svg and ">matrix products</text>" in svg
    assert re.search(r"font(-family)?: [^\"]*'?DejaVu Sans", svg)
    assert "<dc:date>" not in svg and "matplotlib.org/" not in svg.partition("<metadata>")[2]

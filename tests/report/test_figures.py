"""What the page's figures draw, where and how, from results of a few numbers: positions, widths, colours."""

import math
import re
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kielo.artifact.metrics import HeldOutLoss, TrainingStep
from kielo.artifact.scores import BitsPerByte
from kielo.artifact.stage_counts import FunnelRow
from kielo.report import figures
from kielo.report.figures import DROPPED, INK, OTHER, OURS, QUIET, RULE

DASHES = [4.0, 3.0]  # in widths of the line


@pytest.fixture
def drawn(monkeypatch) -> dict[str, Figure]:
    """Name → the figure, which is not rendered."""
    found: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "page_svg", lambda figure, name, _: found.setdefault(name, figure) and name)
    return found


def size(figure: Figure) -> tuple[float, float]:
    return tuple(figure.get_size_inches().round(4).tolist())


def look(line: Line2D) -> tuple:
    """Returns (colour, width, marker, its size)."""
    marker = line.get_marker()
    return line.get_color(), line.get_linewidth(), marker, line.get_markersize() if marker != "None" else None


def words(axes: Axes) -> list[tuple]:
    """Returns (text, place, offset in points, colour) of each annotation."""
    return [(one.get_text(), tuple(one.xy), tuple(one.xyann), to_hex(one.get_color())) for one in axes.texts]


def assert_bars_alone(axes: Axes) -> None:
    """Names stand at the left of the bars; there are no lines of axes and no ticks."""
    assert not axes.xaxis.get_visible()
    assert not any(axes.spines[side].get_visible() for side in ("top", "right", "bottom", "left"))
    assert all(tick.tick1line.get_markersize() == 0 for tick in axes.yaxis.get_major_ticks())
    assert {label.get_color() for label in axes.get_yticklabels()} == {INK}


def assert_axes_of_steps(axes: Axes) -> None:
    """Whole steps in at most eight parts, and thin horizontal lines behind the curves."""
    locator = axes.xaxis.get_major_locator()
    assert locator.tick_values(0, 88).tolist() == [0, 15, 30, 45, 60, 75, 90]
    assert locator.tick_values(0, 2).tolist() == [0, 1, 2]
    assert_grid(axes)


def assert_grid(axes: Axes) -> None:
    grid = axes.yaxis.get_gridlines()
    assert {(line.get_visible(), line.get_linewidth(), line.get_color()) for line in grid} == {
        (True, 0.7, RULE)
    }
    assert not any(line.get_visible() for line in axes.xaxis.get_gridlines())
    assert axes.get_axisbelow() is True
    visible = {side: axes.spines[side].get_visible() for side in ("top", "right", "bottom", "left")}
    assert visible == {"top": False, "right": False, "bottom": True, "left": False}
    ticks = [*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks()]
    assert all(tick.tick1line.get_markersize() == 0 for tick in ticks)


def scores(**changes: Any) -> SimpleNamespace:
    usual = {
        "bits_per_byte": BitsPerByte(model=1.5, unigram=2.5, xz=2.0, ngram=1.75), "ngram_order": 6,
        "heldout_documents": 1300, "heldout_documents_in_all": 1300, "heldout_bytes": 95_000,
        "convention": "bits by bytes", "sequence_length": 256, "stride": 128, "training_bytes": 2_000_000,
        "training_bytes_of_byte_baselines": 2_000_000,
    }  # fmt: skip
    return SimpleNamespace(**(usual | changes))


def test_bars_of_bits(drawn) -> None:
    figures.bits_per_byte_bars(SimpleNamespace(scores=scores()))
    figure = drawn["bits"]
    (axes,) = figure.axes
    assert size(figure) == (8.4, 2.18) and figure.dpi == 96  # 0.42 inches a bar, and half an inch
    bars = axes.patches
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [OURS, OTHER, OTHER, OTHER]
    assert [bar.get_height() for bar in bars] == pytest.approx([0.62] * 4)
    assert [bar.get_y() + 0.31 for bar in bars] == pytest.approx([3, 2, 1, 0])
    values = (1.5, 2.5, 2.0, 1.75)
    assert words(axes) == [
        (f"{value:.3f}", (value, place), (6, 0), INK) for value, place in zip(values, (3, 2, 1, 0))
    ]
    assert {one.get_va() for one in axes.texts} == {"center"} and {one.get_size() for one in axes.texts} == {
        11
    }
    assert not any(one.get_parse_math() for one in axes.texts)
    assert axes.get_xlim() == (0, pytest.approx(2.8))
    assert_bars_alone(axes)


def test_caption_of_bits() -> None:
    """It says so where documents, or what the byte baselines were given, are a part."""
    whole = (
        "Fewer is better. 1,300 held-out documents, 95.0 kB: bits by bytes (sequence_length 256, stride "
        "128). The baselines were given the same training text."
    )
    assert figures.bits_per_byte_caption(SimpleNamespace(scores=scores())) == whole
    part = scores(heldout_documents_in_all=1301, training_bytes_of_byte_baselines=1_999_999)
    assert figures.bits_per_byte_caption(SimpleNamespace(scores=part)) == (
        f"{whole} An even sample of 1,301 held-out documents. xz and the n-gram were given an even sample of "
        "it: 2.00 MB of 2.00 MB."
    )


def funnel(*steps: tuple[str, int, int]) -> SimpleNamespace:
    """Makes a funnel of (step, bytes dropped, bytes left), of 9,000 bytes."""

    def row(name: str, dropped: int, left: int) -> FunnelRow:
        return FunnelRow(
            name=name, reason="", documents=0, lines=0, bytes=dropped, documents_left=0, bytes_left=left
        )

    rows = SimpleNamespace(steps=[row(*step) for step in steps])
    return SimpleNamespace(funnel=rows, corpus={"bytes_in": 9000})


def test_bars_of_the_funnel(drawn) -> None:
    """Reasons of a step are one bar; a first step that drops something stands below the text as it was."""
    figures.funnel_bars(funnel(("a", 1000, 7500), ("a", 500, 7500), ("b", -200, 7700), ("c", 2700, 5000)))
    (axes,) = drawn["funnel"].axes
    assert size(drawn["funnel"]) == (8.4, 1.74)  # 0.36 inches for each of three steps and one more, and 0.3
    bars = [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor())) for bar in axes.patches]
    left, gone = [9000, 7500, 7700, 5000], [0, 1500, 0, 2700]
    assert bars == [*((0, one, OURS) for one in left), *((a, b, DROPPED) for a, b in zip(left, gone))]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.62] * 8)
    assert words(axes) == [
        ("9.00 kB", (9000, 3), (6, 0), QUIET), ("7.50 kB  (−1.50 kB)", (9000, 2), (6, 0), QUIET),
        ("7.70 kB", (7700, 1), (6, 0), QUIET), ("5.00 kB  (−2.70 kB)", (7700, 0), (6, 0), QUIET),
    ]  # fmt: skip
    assert axes.get_xlim() == (0, pytest.approx(11_160))
    assert_bars_alone(axes)


@pytest.mark.parametrize(
    ("steps", "names", "most"),
    [
        ((), ["as read"], 9000), ((("a", 0, 9000),), ["a"], 9000), ((("a", 0, 0),), ["a"], 1),
        ((("a", 1, 8999),), ["as read", "a"], 9000),
    ],
)  # fmt: skip
def test_the_first_bar_of_the_funnel(drawn, steps: tuple, names: list[str], most: int) -> None:
    """It is the text as it was read, which a first step that drops nothing shows too."""
    figures.funnel_bars(funnel(*steps))
    (axes,) = drawn["funnel"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert axes.get_xlim() == (0, pytest.approx(1.24 * most))


def step(number: int, loss: float | None, speed: float = 10.0) -> TrainingStep:
    return TrainingStep(step=number, loss=loss, tokens_per_second=speed, seconds=1.0)


def test_curves_of_loss(drawn) -> None:
    """Held-out loss in the accent colour with points; names at the ends, the lower one below."""
    rows = [step(1, 9.0), step(2, math.inf), step(3, None), step(40, 5.0)]
    heldout = [HeldOutLoss(step=20, heldout_loss=4.0), HeldOutLoss(step=30, heldout_loss=math.nan)]
    figures.loss_curves(SimpleNamespace(training=SimpleNamespace(steps=rows, heldout=heldout)))
    (axes,) = drawn["loss"].axes
    assert size(drawn["loss"]) == (8.4, 3.2)
    first, second = axes.lines
    assert (first.get_xdata().tolist(), first.get_ydata().tolist()) == ([1, 40], [9, 5])
    assert (second.get_xdata().tolist(), second.get_ydata().tolist()) == ([20], [4])
    assert look(first) == (OTHER, 1.2, "None", None) and look(second) == (OURS, 1.8, "o", 4)
    assert words(axes) == [
        ("held-out 4.000", (20, 4.0), (8, -8), OURS), ("training 5.000", (40, 5.0), (8, 8), QUIET),
    ]  # fmt: skip
    assert {(one.get_va(), one.get_annotation_clip()) for one in axes.texts} == {("center", False)}
    assert_axes_of_steps(axes)
    assert axes.xaxis.label.get_color() == QUIET and axes.xaxis.label.get_size() == 11
    drawn.clear()
    figures.loss_curves(SimpleNamespace(training=SimpleNamespace(steps=rows, heldout=[])))
    assert words(drawn["loss"].axes[0]) == [("training 5.000", (40, 5.0), (8, 0), QUIET)]


def test_the_curve_of_speed(drawn) -> None:
    rows = [step(1, 2.0, 100.0), step(2, 2.0, 400.0), step(3, 2.0, 300.0)]
    assert (
        figures.speed_curve(SimpleNamespace(training=SimpleNamespace(steps=rows, tokens_per_second=300.0)))
        == "speed"
    )
    (axes,) = drawn["speed"].axes
    assert size(drawn["speed"]) == (8.4, 2.0) and look(axes.lines[0]) == (OURS, 1.4, "None", None)
    assert axes.get_ylim() == (0, pytest.approx(460)) and axes.get_ylabel() == "tokens per second"
    assert_axes_of_steps(axes)
    drawn.clear()
    figures.speed_curve(SimpleNamespace(training=SimpleNamespace(steps=[], tokens_per_second=300.0)))
    assert drawn["speed"].axes[0].get_ylim() == (0, pytest.approx(1.15))


def parity(ours: list[float], theirs: list[float], rounding: list[float] | None = None) -> SimpleNamespace:
    losses = SimpleNamespace(ours=ours, theirs=theirs, rounding_differences=rounding)
    return SimpleNamespace(parity=SimpleNamespace(losses=losses, tolerance=1e-5))


def test_how_the_curves_of_parity_look(drawn) -> None:
    """A wide pale line below a thin dashed one; a limit that is named at its end."""
    figures.parity_curves(parity([4.0, 3.0, 2.2], [2.0, 3.0, 2.0]))
    figure = drawn["parity"]
    above, below = figure.axes
    assert size(figure) == (8.4, 4.4)
    assert above.get_gridspec().get_height_ratios() == [3, 2] and above.get_shared_x_axes().joined(
        above, below
    )
    wide, dashed = above.lines
    assert look(wide) == (OURS, 4, "None", None) and wide.get_alpha() == 0.45
    assert wide.get_solid_capstyle() == "round" and wide.get_linestyle() == "-"
    assert look(dashed) == (INK, 1.2, "None", None) and dashed.get_linestyle() == "--"
    assert dashes_of(dashed) == (0, DASHES)
    curve, limit = below.lines
    assert look(curve) == (OURS, 1.4, "o", 3.5) and look(limit) == (DROPPED, 1.2, "None", None)
    assert words(below) == [("tolerance 1e-05", (3, 1e-5), (0, 8), DROPPED)]
    assert {(one.get_ha(), one.get_annotation_clip()) for one in below.texts} == {("right", False)}
    legend = above.get_legend()
    anchor = legend.get_bbox_to_anchor().transformed(above.transAxes.inverted())
    assert (anchor.x0, anchor.y0) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
    assert not legend.get_frame_on() and [line.get_color() for line in legend.get_lines()] == [OURS, INK]
    assert_grid(above)
    assert_axes_of_steps(below)
    assert below.get_title("left") == "equal to the last bit in 1 of 3 steps"
    assert {text.get_size() for text in [below._left_title]} == {11}
    assert len(below.yaxis.get_minorticklocs()) == 0
    assert len(set(legend_columns(legend))) == 2


def dashes_of(line: Line2D) -> tuple[float, list[float]]:
    """Returns a line's dashes in widths of the line."""
    offset, dashes = line._dash_pattern
    return offset, [one / line.get_linewidth() for one in dashes]


def legend_columns(legend) -> list[float]:
    """Returns the left ends of the legend's texts, as they are drawn."""
    legend.figure.draw_without_rendering()
    return [round(text.get_window_extent().x0) for text in legend.get_texts()]


@pytest.mark.parametrize(
    ("ours", "theirs", "rounding", "ends"),
    [
        ([2.0, 2.0], [4.0, 2.0], None, (5e-9, 2.0)),  # the difference is a half
        ([4.0, 4.0], [4.0, 4.0], None, (5e-9, 4e-5)),  # no difference: the limit is the highest
        ([4.0, 3.0], [4.0, 0.0], [1e-7, 3e-2], (5e-9, 1.2)),  # ten times what rounding makes
        ([4.0, math.inf], [4.0, 4.0], None, (5e-9, 4e-5)),  # what is infinite has no place
        ([4.0 + 4e-10], [4.0], None, (5e-11, 4e-5)),
    ],
)
def test_the_axis_of_parity_holds_differences_and_limits(drawn, ours, theirs, rounding, ends) -> None:
    """From the half of the least to four times the largest; at least from 5e-9, half of 1e-8."""
    figures.parity_curves(parity(ours, theirs, rounding))
    assert drawn["parity"].axes[1].get_ylim() == pytest.approx(ends, rel=1e-6)


def test_other_numbers_of_steps_are_not_drawn(drawn) -> None:
    assert figures.parity_curves(parity([], [])) is None
    assert figures.parity_curves(parity([1.0], [1.0, 2.0])) is None
    assert figures.parity_curves(parity([1.0, 2.0], [1.0, 2.0], [0.1])) is None
    assert drawn == {}


def test_an_svg_of_the_page() -> None:
    """Its own ids, the page's colours as variables, no paper, and no wider than it was drawn."""
    with matplotlib.rc_context(figures.STYLE):
        figure, axes = figures.page_figure(2.0)
        axes.plot([0, 1], [0, 1], color=OURS)
        axes.set_title("5 $x$", color=QUIET)
        svg = figures.page_svg(figure, "name", "5 < 6")
        narrow = figures.page_svg(figures.page_figure(2.0, figures.NARROW)[0], "name", "")
    assert svg.startswith("<svg ") and svg.rstrip().endswith("</svg>")
    opening = svg.partition(">")[0]
    assert 'style="max-width: 604.8pt" width="100%"' in opening and 'viewBox="0 0 604.8 144"' in opening
    assert "height=" not in opening and "<metadata" not in svg
    assert "stroke: var(--ours)" in svg and "fill: var(--quiet)" in svg and ">5 $x$</text>" in svg
    assert "#ffffff" not in svg and not re.search("#0[1-8]0[1-8]0[1-8]", svg)
    identifiers = re.findall(r'\bid="([^"]*)"', svg)
    assert identifiers and all(one.startswith("name-wide-") for one in identifiers)
    assert 'class="wide" role="img" aria-label="5 &lt; 6"' in opening
    assert 'class="narrow"' in narrow and 'id="name-narrow-' in narrow and "max-width: 331.2pt" in narrow
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)
    assert used and {one or other for one, other in used} <= set(identifiers)
    assert matplotlib.rcParams["font.size"] == 10  # the style holds for the page's figures alone

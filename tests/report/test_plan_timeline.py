"""Bars, numbers and words of a pipeline's timeline, from a few tasks that are placed by hand."""

from types import SimpleNamespace

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kielo.plan.pipeline_simulation import Span
from kielo.report import plan_figures as room
from kielo.report.plan_figures import INK, KINDS, PAPER, STYLE, drawn_micro_batches, timeline_figure


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context(STYLE):
        yield


END = 69.696  # seconds: at 11 inches of which 0.88 are bars, a second is 10 points wide


def pipelined(ranks: int = 2, many: int = 99, schedule: str = "1f1b") -> SimpleNamespace:
    return SimpleNamespace(
        layout=SimpleNamespace(pipeline=ranks, pipeline_schedule=schedule), micro_batches=many, stages="st",
        seconds={"bubble": 3.0}, step_seconds=24.0, name="pp2",
    )  # fmt: skip


# A digit is 4.6 points wide, and 2 points are room around it: 6.6 points for one, 11.2 for two.
SPANS = [
    Span(0, 0, 0, "forward", 0.0, 0.67), Span(0, 0, 1, "forward", 1.0, 1.65),
    Span(1, 1, 9, "forward", 2.0, 3.13), Span(1, 1, 11, "forward", 4.0, 5.11),
    Span(0, 2, 2, "forward", 10.0, 20.0), Span(1, 3, 3, "backward", 30.0, 50.0),
    Span(1, 1, 4, "weights", 50.0, END),
]  # fmt: skip


def drawn(monkeypatch, planned: SimpleNamespace, spans: list[Span]) -> Figure:
    """Draws the timeline of these spans; the simulation is asked for them with the plan's own numbers."""
    asked = []
    monkeypatch.setattr(room, "timeline", lambda *given: asked.append(given) or spans)
    figure = timeline_figure(planned)
    layout = planned.layout
    few = drawn_micro_batches(planned)
    assert asked == [(layout.pipeline_schedule, "st", layout.pipeline, few)]
    return figure


def paler(colour: str, share: float) -> str:
    """Returns a colour that is moved to white by a share."""
    return to_hex([1 - (1 - part) * (1 - share) for part in matplotlib.colors.to_rgb(colour)])


def test_bars_of_a_timeline(monkeypatch) -> None:
    """A bar of 0.84 rows for each task; of two stages on a rank the second one is paler."""
    figure = drawn(monkeypatch, pipelined(), SPANS)
    (axes,) = figure.axes
    assert tuple(figure.get_size_inches().round(4)) == (11, 2.43)  # two rows of 0.34 inches, and 1.75
    assert axes.get_xlim() == (0, END) and axes.get_ylim() == (1.5, -0.5)
    found = []
    for bars in axes.collections:
        assert bars.get_linewidth().tolist() == [0.4] and to_hex(bars.get_edgecolor()[0]) == PAPER
        for path in bars.get_paths():
            box = path.get_extents()
            corners = [round(one, 6) for one in (box.x0, box.x1, box.y0, box.y1)]
            found.append((*corners, to_hex(bars.get_facecolor()[0])))
    green = KINDS["forward"]
    assert sorted(found) == [
        (0, 0.67, -0.42, 0.42, green), (1, 1.65, -0.42, 0.42, green), (2, 3.13, 0.58, 1.42, green),
        (4, 5.11, 0.58, 1.42, green), (10, 20, -0.42, 0.42, paler(green, 0.275)),
        (30, 50, 0.58, 1.42, paler(KINDS["backward"], 0.275)), (50, END, 0.58, 1.42, KINDS["weights"]),
    ]  # fmt: skip


def test_numbers_stand_where_they_have_room(monkeypatch) -> None:
    """Counted from 1, in the middle of the bar; light on dark bars."""
    (axes,) = drawn(monkeypatch, pipelined(), SPANS).axes
    assert [(one.get_text(), *one.get_position(), to_hex(one.get_color())) for one in axes.texts] == [
        ("1", pytest.approx(0.335), 0, PAPER), ("10", pytest.approx(2.565), 1, PAPER), ("3", 15, 0, INK),
        ("4", 40, 1, INK), ("5", pytest.approx((50 + END) / 2), 1, INK),
    ]  # fmt: skip
    assert {(one.get_size(), one.get_ha(), one.get_va()) for one in axes.texts} == {
        (7, "center", "center_baseline")
    }


def test_frame_and_words_of_a_timeline(monkeypatch) -> None:
    figure = drawn(monkeypatch, pipelined(), SPANS)
    (axes,) = figure.axes
    assert axes.get_yticks().tolist() == [0, 1] and axes.get_ylabel() == "pipeline rank"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["bottom"]
    ticks = [*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks()]
    assert not any(tick.tick1line.get_markersize() for tick in ticks)
    assert axes.get_title("left") == "pp2: bubble 12.5% of the step"
    assert axes.titleOffsetTrans.get_matrix()[1, 2] == pytest.approx(26 * figure.dpi / 72)
    # busy: 0.67 + 0.65 + 1.13 + 1.11 + 10 + 20 + 19.696 of 2 × 69.696 seconds
    idle = round(100 * (1 - 53.256 / (2 * END)))
    assert axes.get_xlabel() == (
        f"seconds\nDrawn: a step of 8 micro-batches, of which {idle}% is idle; the real one has 99 and "
        "continues in the same way before it empties.\nPaler: the later stages of a rank."
    )
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward", "gradients of inputs", "gradients of weights",
    ]  # fmt: skip
    assert [to_hex(one.get_facecolor()) for one in legend.get_patches()] == list(KINDS.values())
    assert not legend.get_frame_on() and legend.borderaxespad == 0.2
    anchor = legend.get_bbox_to_anchor().transformed(axes.transAxes.inverted())
    assert (anchor.x0, anchor.y0) == (pytest.approx(-0.01), pytest.approx(1))
    figure.draw_without_rendering()
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == 1  # three columns


def test_a_whole_step_without_later_stages_says_less(monkeypatch) -> None:
    spans = [Span(0, 0, 0, "forward", 0.0, 1.0), Span(1, 1, 0, "backward", 1.0, 2.0)]
    (axes,) = drawn(monkeypatch, pipelined(many=8), spans).axes
    assert axes.get_xlabel() == "seconds"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward"]
    colours = [to_hex(bars.get_facecolor()[0]) for bars in axes.collections]
    assert colours == [KINDS["forward"], KINDS["backward"]]
    (axes,) = drawn(monkeypatch, pipelined(many=9), spans).axes
    assert "Drawn: a step of 8 micro-batches, of which 50% is idle" in axes.get_xlabel()


@pytest.mark.parametrize(("ranks", "height", "is_numbered"), [(35, 13.65, True), (86, 13.75, True),
                                                               (87, 13.75, False)])  # fmt: skip
def test_many_ranks_share_twelve_inches(monkeypatch, ranks: int, height: float, is_numbered: bool) -> None:
    """Numbers of 7 points are left out where a row has less than 10."""
    spans = [Span(rank, rank, 0, "forward", 0.0, 2.0) for rank in range(ranks)]
    figure = drawn(monkeypatch, pipelined(ranks), spans)
    assert figure.get_size_inches()[1] == pytest.approx(height) and bool(figure.axes[0].texts) is is_numbered


@pytest.mark.parametrize(
    ("schedule", "ranks", "many", "number"),
    [
        ("1f1b", 4, 99, 12), ("1f1b", 4, 12, 12), ("1f1b", 4, 11, 11), ("gpipe", 2, 99, 8),
        ("interleaved_1f1b", 4, 512, 8), ("interleaved_1f1b", 4, 9, 8), ("interleaved_1f1b", 4, 6, 6),
        ("interleaved_zero_bubble", 5, 3, 3), ("interleaved_1f1b", 2, 7, 4),
    ],
)  # fmt: skip
def test_micro_batches_that_are_drawn(schedule: str, ranks: int, many: int, number: int) -> None:
    """2p + 4, or two rounds of those that run in rounds of about p, as far as there are so many."""
    assert drawn_micro_batches(pipelined(ranks, many, schedule)) == number

"""The planner's figures as SVG files: a pipeline's timeline, scaling over nodes, and steps by their parts.

They stand alone, outside the report page, so they have white paper and their own colours. Text stays text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from kielo.artifact.durable import write_own_text
from kielo.plan.compare import SECONDS, parts_of
from kielo.plan.pipeline_simulation import Span, timeline
from kielo.plan.planned_layout import SHARE, PlannedLayout
from kielo.recipe.amounts import short_amount
from kielo.report.figures import page_grid, style_of, svg_file

PAPER, INK, QUIET, RULE = "#ffffff", "#1b211d", "#5a645d", "#d9ded5"
STRONG, WEAK = "#2f7d4f", "#b8651b"
KINDS = {"forward": "#2f7d4f", "backward": "#e2a95c", "weights": "#6f93c4"}  # of a timeline's spans
PARTS = {  # greens work, orange waits, blues move bytes between devices, greys are the rest
    "matrix": "#2f7d4f",
    "attention": "#5fa577",
    "elementwise": "#94c5a4",
    "head": "#1f5436",
    "launch": "#c7ddcd",
    "bubble": "#e0913a",
    "slowest": "#f3cf9f",
    "tensor_traffic": "#3f6ba8",
    "context_traffic": "#6f93c4",
    "pipeline_traffic": "#9db8dc",
    "data_traffic": "#c6d6ec",
    "optimiser": "#7f8a83",
    "fixed": "#b9c1bb",
}
STYLE = style_of(INK, QUIET, RULE) | {
    "svg.hashsalt": "kielo",  # the same picture is the same file
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
}
_CURVE: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 4}
_IDEAL: dict[str, Any] = {"color": QUIET, "linewidth": 1, "linestyle": (0, (4, 3))}
_WIDTH_INCHES = 11.0
_POINTS_OF_DIGIT = 4.6  # a digit's width at the size of the micro-batches' numbers
_NUMBER_SIZE = 7


@matplotlib.rc_context(STYLE)
def timeline_svg(planned: PlannedLayout, path: Path | str) -> None:
    """Draw the pipeline's ranks over time, with idle time blank.

    Without a simulated pipeline, draw a bar of the step's parts.
    """
    figure = timeline_figure(planned) if planned.stages is not None else parts_figure([planned])
    write_own_text(path, svg_file(figure))


@matplotlib.rc_context(STYLE)
def scaling_svg(strong: Sequence[PlannedLayout], weak: Sequence[PlannedLayout], path: Path | str) -> None:
    """Draw tokens a second and efficiency over nodes.

    `strong`: one batch on all numbers of nodes. `weak`: the batch grows with the nodes.
    """
    write_own_text(path, svg_file(scaling_figure(strong, weak)))


@matplotlib.rc_context(STYLE)
def parts_svg(several: Sequence[PlannedLayout], path: Path | str) -> None:
    """Draw seconds of a step by part, a bar for each layout."""
    write_own_text(path, svg_file(parts_figure(several)))


def timeline_figure(planned: PlannedLayout) -> Figure:
    if planned.stages is None:
        raise ValueError(f"{planned.layout}: its pipeline was not simulated")
    ranks, drawn = planned.layout.pipeline, drawn_micro_batches(planned)
    spans = timeline(planned.layout.pipeline_schedule, planned.stages, ranks, drawn)
    row = min(0.34, 12 / ranks)
    figure = Figure(figsize=(_WIDTH_INCHES, row * ranks + 1.75), layout="constrained")
    axes = figure.subplots()
    end = max(span.end for span in spans)
    axes.set_xlim(0, end)
    axes.set_ylim(ranks - 0.5, -0.5)
    _bars(axes, spans, ranks)
    _numbers(axes, spans, _WIDTH_INCHES * 72 * 0.88 / end, row * 72)
    axes.set_yticks(range(ranks), [str(rank) for rank in range(ranks)])
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylabel("pipeline rank")
    axes.set_xlabel(_caption(planned, spans, drawn))
    bubble = planned.seconds["bubble"] / planned.step_seconds
    axes.set_title(f"{planned.name}: bubble {bubble:.1%} of the step", loc="left", pad=26, color=INK)
    kinds = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    names = {"forward": "forward", "backward": "backward", "weights": "gradients of weights"}
    if "weights" in kinds:
        names["backward"] = "gradients of inputs"
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
    patches = [Patch(color=KINDS[kind]) for kind in kinds]
    axes.legend(patches, [names[kind] for kind in kinds], frameon=False, ncols=3, **above)
    return figure


def drawn_micro_batches(planned: PlannedLayout) -> int:
    """Return the micro-batches that show how the pipeline fills, runs and empties.

    Schedules that run in rounds get two of the step's rounds.
    """
    ranks, many = planned.layout.pipeline, planned.micro_batches
    if planned.layout.pipeline_schedule.startswith("interleaved"):
        return min(many, 2 * (many // max(1, many // ranks)))
    return min(many, 2 * ranks + 4)


def scaling_figure(strong: Sequence[PlannedLayout], weak: Sequence[PlannedLayout]) -> Figure:
    curves = [("fixed batch", STRONG, by_nodes(strong)), ("batch grows with the nodes", WEAK, by_nodes(weak))]
    curves = [(name, colour, points) for name, colour, points in curves if points]
    all_nodes = sorted({planned.nodes for _, _, points in curves for planned in points})
    lines = 0.21 * (len(all_nodes) + 1)
    figure = Figure(figsize=(_WIDTH_INCHES, 3.9 + lines), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3.9, lines])
    speed, share, names = (figure.add_subplot(at) for at in (grid[0, 0], grid[0, 1], grid[1, :]))
    for number, (name, colour, points) in enumerate(curves):
        nodes = [planned.nodes for planned in points]
        speeds = [planned.tokens_per_second for planned in points]
        first = points[0].tokens_per_second / points[0].nodes
        slowest = [planned.tokens_per_step / planned.high_seconds for planned in points]
        fastest = [planned.tokens_per_step / planned.low_seconds for planned in points]
        speed.fill_between(nodes, slowest, fastest, color=colour, alpha=0.14, linewidth=0)
        ideal = [first * count for count in nodes]
        shares = [100 * each / of_ideal for each, of_ideal in zip(speeds, ideal, strict=True)]
        speed.plot(nodes, ideal, label="ideal" if number == 0 else None, **_IDEAL)
        speed.plot(nodes, speeds, label=name, color=colour, **_CURVE)
        share.plot(nodes, shares, color=colour, **_CURVE)
    speed.set_yscale("log")
    speed.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_amount(value)))
    speed.yaxis.set_minor_formatter(NullFormatter())
    speed.yaxis.set_minor_locator(NullLocator())
    share.axhline(100, **_IDEAL)
    share.set_ylim(0, max(110, share.get_ylim()[1]))
    share.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    speed.set_title(f"tokens/s, with the {SHARE:.0%} interval", loc="left", size=11)
    share.set_title("efficiency: tokens/s a node, compared with the fewest nodes", loc="left", size=11)
    for axes in (speed, share):
        _nodes_axis(axes, all_nodes)
    speed.legend(frameon=False, loc="upper left")
    _name_list(names, curves, all_nodes)
    return figure


def by_nodes(several: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Return the fastest layout on each number of nodes, fewest nodes first."""
    best: dict[int, PlannedLayout] = {}
    for planned in several:
        if planned.nodes not in best or planned.tokens_per_second > best[planned.nodes].tokens_per_second:
            best[planned.nodes] = planned
    return [best[nodes] for nodes in sorted(best)]


def parts_figure(several: Sequence[PlannedLayout]) -> Figure:
    parts = parts_of([planned.seconds for planned in several], PARTS)
    figure = Figure(figsize=(_WIDTH_INCHES, 0.62 * len(several) + 1.45), layout="constrained")
    axes = figure.subplots()
    longest = max(planned.step_seconds for planned in several)
    for position, planned in enumerate(several):
        start = 0.0
        for part in parts:
            seconds = planned.seconds.get(part, 0.0)
            colour = PARTS.get(part, QUIET)
            axes.barh(position, seconds, left=start, height=0.6, color=colour, edgecolor=PAPER, linewidth=0.6)
            if seconds > 0.055 * longest:
                middle = start + seconds / 2
                axes.text(
                    middle, position, f"{seconds:.3g}", ha="center", va="center", size=8, color=_on(colour)
                )
            start += seconds
        unfit = "" if planned.fits else ", does not fit"
        said = f"{planned.step_seconds:.4g} s, {short_amount(planned.tokens_per_second)} tokens/s{unfit}"
        axes.annotate(said, (start, position), (6, 0), textcoords="offset points", va="center", color=INK)
    axes.set_xlim(0, longest * (1.48 if not all(planned.fits for planned in several) else 1.3))
    axes.set_ylim(len(several) - 0.5, -0.5)
    with_nodes = len({planned.nodes for planned in several}) > 1
    nodes = [f"\n{planned.nodes:,} nodes" if with_nodes else "" for planned in several]
    titles = [planned.name + of for planned, of in zip(several, nodes, strict=True)]
    axes.set_yticks(range(len(several)), titles, color=INK)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xticks([])
    axes.set_title("seconds of a step", loc="left", size=11)
    patches = [Patch(color=PARTS.get(part, QUIET)) for part in parts]
    names = [SECONDS.get(part, part) for part in parts]
    figure.legend(patches, names, frameon=False, ncols=5, loc="outside lower left", fontsize=9)
    return figure


def _bars(axes: Axes, spans: Sequence[Span], ranks: int) -> None:
    chunks = 1 + max(span.stage for span in spans) // ranks
    groups: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    for span in spans:
        groups.setdefault((span.rank, span.kind, span.stage // ranks), []).append(
            (span.start, span.end - span.start)
        )
    for (rank, kind, chunk), tasks in groups.items():
        paler = 0.55 * chunk / chunks
        colour = tuple(channel + (1 - channel) * paler for channel in to_rgb(KINDS[kind]))
        axes.broken_barh(tasks, (rank - 0.42, 0.84), facecolors=colour, edgecolors=PAPER, linewidth=0.4)


def _numbers(axes: Axes, spans: Sequence[Span], points_a_second: float, row_points: float) -> None:
    """Write each micro-batch's number, from 1, if its bar has room."""
    if row_points < _NUMBER_SIZE + 3:
        return
    for span in spans:
        number, middle = str(span.micro_batch + 1), (span.start + span.end) / 2
        if (span.end - span.start) * points_a_second > _POINTS_OF_DIGIT * len(number) + 2:
            text = axes.text(middle, span.rank, number, ha="center", va="center_baseline", size=_NUMBER_SIZE)
            text.set_color(PAPER if span.kind == "forward" and span.stage < _ranks(spans) else INK)


def _ranks(spans: Sequence[Span]) -> int:
    return 1 + max(span.rank for span in spans)


def _caption(planned: PlannedLayout, spans: Sequence[Span], drawn: int) -> str:
    """Return the name of the axis, the drawn part of the step, and the meaning of shades."""
    text = "seconds"
    if drawn < planned.micro_batches:
        busy, ranks = sum(span.end - span.start for span in spans), _ranks(spans)
        idle = 1 - busy / (ranks * max(span.end for span in spans))
        text += (
            f"\nDrawn: a step of {drawn} micro-batches, of which {idle:.0%} is idle; the real one has "
            f"{planned.micro_batches} and continues in the same way before it empties."
        )
    if max(span.stage for span in spans) >= _ranks(spans):
        text += "\nPaler: the later stages of a rank."
    return text


def _nodes_axis(axes: Axes, nodes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    # Ticks stand at least a factor of 1.35 apart, so that their numbers do not meet.
    ticks = [nodes[0]]
    for count in nodes[1:]:
        if count >= 1.35 * ticks[-1]:
            ticks.append(count)
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("nodes")
    page_grid(axes, RULE)


def _name_list(
    axes: Axes, curves: Sequence[tuple[str, str, Sequence[PlannedLayout]]], nodes: Sequence[int]
) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(nodes) + 0.5, -0.5)
    axes.text(0.045, 0, "nodes", ha="right", va="center", color=QUIET, size=9)
    for row, count in enumerate(nodes, start=1):
        axes.text(0.045, row, f"{count:,}", ha="right", va="center", size=9)
    for column, (name, colour, points) in enumerate(curves):
        left = 0.08 + column * 0.92 / len(curves)
        axes.text(left, 0, f"best layout, {name}", va="center", color=colour, size=9)
        for planned in points:
            axes.text(left, 1 + nodes.index(planned.nodes), planned.name, va="center", size=9)


def _on(colour: str) -> str:
    """Return the colour of text on `colour`, by luminance (ITU-R BT.601's weights)."""
    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else PAPER

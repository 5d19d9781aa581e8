"""Figures of learning and forgetting: curves over tokens beside the base model, and scores with errors."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kielo.artifact.scores import Scores
from kielo.recipe.amounts import short_amount
from kielo.report import figures
from kielo.report.gather import Gathered
from kielo.report.progress import (
    Z_95,
    Curve,
    TaskKey,
    bits_curves,
    latest_scores,
    masked_curve,
    pair_error,
    pair_share,
    score_names,
    task_curves,
)

COLOURS = figures.OURS, figures.DROPPED, figures.BLUE, figures.PURPLE
DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_BASE_DASHES = (0, (2, 3))
MOST_CURVES = len(COLOURS) * len(DASHES)
MOST_SCORES = 24
_LEGEND_ROW = 0.22  # inches
_CHARACTERS_OF_AN_INCH = 13
_CHARACTERS_OF_A_LINE = 9  # before a name in a legend, with the gap between columns


@matplotlib.rc_context(figures.STYLE)
def bits_over_tokens(gathered: Gathered, width: float = figures.WIDE) -> str | None:
    """Draw held-out bits per byte of each language, with a dotted line for the base model."""
    return _curves_svg(bits_curves(gathered), "progress", "bits per byte", width)


@matplotlib.rc_context(figures.STYLE)
def masked_over_tokens(gathered: Gathered, width: float = figures.WIDE) -> str | None:
    curve = masked_curve(gathered)
    return _curves_svg([curve] if curve else [], "masked-progress", "share predicted", width)


@matplotlib.rc_context(figures.STYLE)
def tasks_over_tokens(gathered: Gathered, width: float = figures.WIDE) -> str | None:
    """Draw each task's score with its 95 % interval, with a dotted line for the base model."""
    return _curves_svg(task_curves(gathered), "task-progress", "score", width)


@matplotlib.rc_context(figures.STYLE)
def score_dots(gathered: Gathered, width: float = figures.WIDE) -> str | None:
    """Draw a dot for each task and kind of minimal pairs, with its 95 % interval and a tick at chance."""
    scores = latest_scores(gathered)
    dots = _dots(scores)[:MOST_SCORES] if scores else []
    if not dots:
        return None
    figure, axes = figures.page_figure(0.36 * len(dots) + 0.6, width)
    positions = range(len(dots))[::-1]
    for position, dot in zip(positions, dots, strict=True):
        half = Z_95 * (dot.error or 0.0)
        axes.plot([dot.value - half, dot.value + half], [position] * 2, color=figures.OURS, linewidth=1.6)
        axes.plot([dot.value], [position], "o", color=figures.OURS, markersize=6)
        if dot.chance is not None:
            axes.plot([dot.chance], [position], "|", color=figures.DROPPED, markersize=12, markeredgewidth=2)
    axes.set_yticks(list(positions), [dot.name for dot in dots], color=figures.INK)
    figures.page_grid(axes)
    axes.grid(axis="x", color=figures.RULE, linewidth=0.7)
    axes.set_ylim(-0.6, len(dots) - 0.4)
    said = (f"{dot.name}: {dot.value:.3f} ± {Z_95 * (dot.error or 0):.3f}" for dot in dots)
    return figures.page_svg(figure, "scores", f"Scores with 95 % intervals. {'; '.join(said)}.")


def draw_curves(axes: Axes, curves: Mapping[int, Curve]) -> None:
    """Draw curves over tokens. curves: number of the colour → its curve."""
    drawn = [value for curve in curves.values() for value in curve.values]
    span = max(drawn) - min(drawn)
    for number, curve in curves.items():
        colour, dashes = _style(number)
        axes.plot(curve.tokens, curve.values, dashes, color=colour, linewidth=1.6, marker="o", markersize=3.5)
        for tokens, value, error in zip_longest(curve.tokens, curve.values, curve.errors):
            if error is not None:
                half = Z_95 * error
                axes.plot([tokens, tokens], [value - half, value + half], color=colour, linewidth=1.0)
        # A base model that is far away would press the curves flat.
        if curve.base is not None and min(drawn) - span <= curve.base <= max(drawn) + span:
            axes.axhline(curve.base, color=colour, linewidth=1.2, linestyle=_BASE_DASHES)


def name_curves(axes: Axes, names: Sequence[str], has_base: bool, columns: int = 3) -> None:
    """Put a legend above: a line for each name, and the dotted line of the base model."""
    styles = map(_style, range(len(names)))
    handles = [
        Line2D([], [], color=colour, linestyle=dashes, marker="o", markersize=3.5)
        for colour, dashes in styles
    ]
    if has_base:
        handles.append(Line2D([], [], color=figures.QUIET, linestyle=_BASE_DASHES))
        names = [*names, "base model"]
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    axes.legend(handles, names, frameon=False, ncols=columns, **place)


def tokens_axis(axes: Axes, width: float) -> None:
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(4 if width <= figures.NARROW else 8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_amount(value)))


def curves_in_words(curves: Sequence[Curve]) -> str:
    said = []
    for curve in curves:
        base = "" if curve.base is None else f" The base model has {curve.base:.3f}."
        said.append(figures.range_of(curve.name, curve.values) + base)
    return " ".join(said)


def _style(number: int) -> tuple[str, Literal["-", "--", ":", "-."]]:
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _curves_svg(curves: Sequence[Curve], name: str, label: str, width: float) -> str | None:
    if not curves:
        return None
    names = [_name_with_base(curve) for curve in curves[:MOST_CURVES]]
    has_base = any(curve.base is not None for curve in curves)
    columns = min(2 if width <= figures.NARROW else 4, _legend_columns(names, width))
    rows = -(-(len(names) + has_base) // columns)
    figure = Figure(figsize=(width, 3.0 + _LEGEND_ROW * max(0, rows - 2)), layout="constrained")
    axes = figure.subplots()
    draw_curves(axes, dict(enumerate(curves[:MOST_CURVES])))
    name_curves(axes, names, has_base, columns)
    axes.set_ylabel(label)
    figures.page_grid(axes)
    tokens_axis(axes, width)
    return figures.page_svg(figure, name, f"Curves by tokens. {curves_in_words(curves)}")


def _legend_columns(names: Sequence[str], width: float) -> int:
    """Return the columns of a legend for which a figure of this width (inches) has room."""
    return max(1, int(_CHARACTERS_OF_AN_INCH * width) // (max(map(len, names)) + _CHARACTERS_OF_A_LINE))


def _name_with_base(curve: Curve) -> str:
    return curve.name if curve.base is None else f"{curve.name} (base {curve.base:.3f})"


class _Dot(NamedTuple):
    name: str
    value: float
    error: float | None
    chance: float | None


def _dots(scores: Scores) -> list[_Dot]:
    keys = [TaskKey.of(one) for one in scores.tasks]
    names = score_names(keys)
    dots = [
        _Dot(names[key], of.value, of.standard_error, of.chance)
        for key, of in zip(keys, scores.tasks, strict=True)
    ]
    for title, pairs in (("minimal pairs", scores.minimal_pairs), ("pairs by rules", scores.made_pairs)):
        if pairs is not None:
            groups = pairs.groups if len(pairs.groups) <= 12 else {}
            for name, one in {**groups, title: pairs.all}.items():
                chance = 0.5 if one.fewer_tokens is None else one.fewer_tokens
                dots.append(_Dot(name, pair_share(one), pair_error(one), chance))
    return dots


def _bits_caption(gathered: Gathered) -> str:
    if gathered.history:
        return (
            "Held-out bits per byte of each scored checkpoint; fewer is better. Dotted: the model from which "
            "the run started, with its own tokenizer, on the same text; far away it is in the legend alone."
        )
    return (
        "Held-out bits per byte while training; fewer is better. `kielo evaluate RUN --watch` adds the base "
        "model, tasks and samples of each checkpoint."
    )


def _dots_caption(gathered: Gathered) -> str:
    scores = latest_scores(gathered)
    more = len(_dots(scores)) - MOST_SCORES if scores else 0
    others = f" {more} more are in the table." if more > 0 else ""
    tick = "Tick: guessing, of pairs the shorter sentence."
    return f"Scores of the last checkpoint with their 95 % intervals. {tick}{others}"


def _tasks_caption(gathered: Gathered) -> str:
    more = len(task_curves(gathered)) - MOST_CURVES
    others = f" {more} more are in the table." if more > 0 else ""
    return f"Tasks over the training with their 95 % intervals. Dotted: the base model.{others}"


PROGRESS = (  # in the order of the section
    figures.ReportFigure("progress", bits_over_tokens, _bits_caption),
    figures.ReportFigure(
        "progress", masked_over_tokens, "Hidden tokens predicted by each scored checkpoint."
    ),
    figures.ReportFigure("progress", score_dots, _dots_caption),
    figures.ReportFigure("progress", tasks_over_tokens, _tasks_caption),
)

"""The page's figures: what `gather` found -> inline SVG with the page's colours, for light and dark.

Each figure is drawn twice, for a wide and a narrow screen, so that its text is never smaller than 11 px. The
style sheet shows one of the drawings. matplotlib draws with placeholder colours, and each then becomes a CSS
variable. Text stays text: it can be selected, and has the page's font.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kielo.artifact.metrics import Row
from kielo.artifact.stage_counts import FunnelRow
from kielo.artifact.verify_results import loss_limits
from kielo.report.gather import Gathered
from kielo.report.units import baseline_name, format_bytes

# Placeholder colour -> the variable that frame.html.jinja defines for both schemes.
INK, QUIET, RULE, OURS, OTHER, DROPPED = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
BLUE, PURPLE = "#070707", "#080808"
VARIABLES = {
    INK: "--ink",
    QUIET: "--quiet",
    RULE: "--rule",
    OURS: "--ours",
    OTHER: "--other",
    DROPPED: "--dropped",
    BLUE: "--blue",
    PURPLE: "--purple",
}


def style_of(ink: str, quiet: str, rule: str) -> dict[Any, Any]:
    """Return matplotlib's settings of a figure without frame, whose text stays text."""
    return {
        "svg.fonttype": "none",
        "text.color": ink,
        "text.parse_math": False,  # a "$" in somebody's step name is a dollar
        "axes.edgecolor": rule,
        "axes.labelcolor": quiet,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": rule,
        "ytick.color": rule,
        "xtick.labelcolor": quiet,
        "ytick.labelcolor": quiet,
    }


STYLE = style_of(INK, QUIET, RULE) | {"font.size": 11, "figure.dpi": 96}
_BESIDE: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False}
WIDE, NARROW = 8.4, 4.6  # inches: columns of 52rem and of a phone


@matplotlib.rc_context(STYLE)
def bits_per_byte_bars(gathered: Gathered, width: float = WIDE) -> str | None:
    """Draw a bar for the model, in the accent colour, and for each baseline. Fewer bits are better."""
    if (scores := gathered.scores) is None:
        return None
    baselines = scores.bits_per_byte.baselines()
    labels = ["This model", *(baseline_name(name, scores) for name in baselines)]
    values = [scores.bits_per_byte.model, *baselines.values()]
    figure, axes = page_figure(0.42 * len(labels) + 0.5, width)
    positions = range(len(labels))[::-1]
    axes.barh(positions, values, color=[OURS] + [OTHER] * (len(values) - 1), height=0.62)
    texts = [f"{value:.3f}" for value in values]
    for position, value, text in zip(positions, values, texts, strict=True):
        axes.annotate(text, (value, position), (6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(values) * 1.12)
    _bars_alone(axes, positions, labels)
    return page_svg(figure, "bits", f"Bars of bits per byte. {_pairs(labels, texts)}")


def bits_per_byte_caption(gathered: Gathered) -> str:
    if (scores := gathered.scores) is None:
        return ""
    facts = (
        f"Fewer is better. {scores.heldout_documents:,} held-out documents, "
        f"{format_bytes(scores.heldout_bytes)}: "
        f"{scores.convention} (sequence_length {scores.sequence_length}, stride {scores.stride}). "
        "The baselines were given the same training text."
    )
    if scores.heldout_documents < scores.heldout_documents_in_all:
        facts += f" An even sample of {scores.heldout_documents_in_all:,} held-out documents."
    given, whole = scores.training_bytes_of_byte_baselines, scores.training_bytes
    if given < whole:
        facts += (
            f" xz and the n-gram were given an even sample of it: {format_bytes(given)} of "
            f"{format_bytes(whole)}."
        )
    return facts


@matplotlib.rc_context(STYLE)
def funnel_bars(gathered: Gathered, width: float = WIDE) -> str | None:
    """Draw the bytes left after each step, and beside them the bytes that the step dropped."""
    if gathered.funnel is None or gathered.corpus is None:
        return None
    steps, bytes_in = _by_step(gathered.funnel.steps), gathered.corpus["bytes_in"]
    figure, axes = page_figure(0.36 * (len(steps) + 1) + 0.3, width)
    labels = [step.name for step in steps]
    left = [step.bytes_left for step in steps]
    dropped = [max(0, step.bytes) for step in steps]
    if not steps or dropped[0]:  # else the first step's own bar shows the text as it was read
        labels, left, dropped = ["as read", *labels], [bytes_in, *left], [0, *dropped]
    positions = range(len(labels))[::-1]
    axes.barh(positions, left, color=OURS, height=0.62)
    axes.barh(positions, dropped, left=left, color=DROPPED, height=0.62)
    texts = []
    for position, kept, gone in zip(positions, left, dropped, strict=True):
        texts.append(format_bytes(kept) + (f"  (−{format_bytes(gone)})" if gone else ""))
        end = (kept + gone, position)
        axes.annotate(texts[-1], end, (6, 0), textcoords="offset points", va="center", color=QUIET)
    axes.set_xlim(0, max(*left, 1) * 1.24)
    _bars_alone(axes, positions, labels)
    return page_svg(figure, "funnel", f"Bars of the text left (and dropped). {_pairs(labels, texts)}")


@matplotlib.rc_context(STYLE)
def loss_curves(gathered: Gathered, width: float = WIDE) -> str | None:
    """Draw training and held-out loss in nats per token, over optimiser steps."""
    if (training := gathered.training) is None:
        return None
    figure, axes = page_figure(3.2, width)
    steps, losses = finite(training.steps, "loss")
    axes.plot(steps, losses, color=OTHER, linewidth=1.2)
    heldout_steps, heldout_losses = finite(training.heldout, "heldout_loss")
    axes.plot(heldout_steps, heldout_losses, color=OURS, linewidth=1.8, marker="o", markersize=4)
    _ends(axes, [("training", steps, losses, OTHER), ("held-out", heldout_steps, heldout_losses, OURS)])
    _axes_names(axes, "step", "loss (nats per token)")
    alt = f"Curves of the loss by step. {range_of('Training', losses)} "
    return page_svg(figure, "loss", alt + range_of("Held-out", heldout_losses))


@matplotlib.rc_context(STYLE)
def speed_curve(gathered: Gathered, width: float = WIDE) -> str | None:
    """Draw tokens per second over optimiser steps, from zero."""
    training = gathered.training
    if training is None or not training.tokens_per_second:
        return None
    figure, axes = page_figure(2.0, width)
    steps, speeds = finite(training.steps, "tokens_per_second")
    axes.plot(steps, speeds, color=OURS, linewidth=1.4)
    axes.set_ylim(0, max(speeds, default=1) * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _axes_names(axes, "step", "tokens per second")
    return page_svg(figure, "speed", f"Curve of tokens per second. {range_of('Speed', speeds, ',.0f')}")


@matplotlib.rc_context(STYLE)
def parity_curves(gathered: Gathered, width: float = WIDE) -> str | None:
    """Draw both losses at each step, and their relative difference on a log scale with its limit."""
    if (parity := gathered.parity) is None:
        return None
    ours, theirs = parity.losses.ours, parity.losses.theirs
    rounding = parity.losses.rounding_differences
    limits = loss_limits(parity.tolerance, rounding or [0.0] * len(ours))
    if not ours or not len(ours) == len(theirs) == len(limits):
        return None
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = range(1, len(ours) + 1)
    above.plot(steps, ours, color=OURS, linewidth=4, alpha=0.45, solid_capstyle="round")
    above.plot(steps, theirs, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    legend_above(above, ["Kielo", "Hugging Face transformers"], columns=2)
    above.set_ylabel("loss")
    page_grid(above)
    differences = [
        abs(mine - their) / abs(their) if their else 0.0 for mine, their in zip(ours, theirs, strict=True)
    ]
    # Equal losses have no logarithm: their steps are left out, and counted.
    drawn = [(step, value) for step, value in zip(steps, differences, strict=True) if value > 0]
    x, y = [step for step, _ in drawn], [value for _, value in drawn]
    below.semilogy(x, y, color=OURS, linewidth=1.4, marker="o", markersize=3.5)
    if equal := len(differences) - len(drawn):
        title = f"equal to the last bit in {equal} of {len(differences)} steps"
        below.set_title(title, loc="left", fontsize=11)
    below.plot(steps, limits, color=DROPPED, linewidth=1.2)
    limit = "limit by rounding" if rounding else f"tolerance {parity.tolerance:.0e}"
    end = (len(ours), limits[-1])
    below.annotate(limit, end, (0, 8), ha="right", color=DROPPED, **_BESIDE)
    finite = [value for value in y if isfinite(value)]
    below.set_ylim(min([*finite, 1e-8]) / 2, max([*finite, *limits]) * 4)
    below.minorticks_off()
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    _axes_names(below, "step", "relative difference")
    alt = f"Curves of the loss in Kielo and in transformers, and below how far they are apart. {limit}. "
    return page_svg(figure, "parity", alt + range_of("Relative difference", finite, ".0e"))


@dataclass(frozen=True)
class ReportFigure:
    """A figure of the page. A further figure is a function that draws it and an entry of `FIGURES`."""

    section: str  # id of the page's section that shows it
    draw: Callable[[Gathered, float], str | None]  # width in inches → SVG, None if there is nothing to draw
    caption: str | Callable[[Gathered], str]

    def drawn(self, gathered: Gathered) -> tuple[str, str] | None:
        """Return the SVG of both widths and the caption, which may depend on the run."""
        if (wide := self.draw(gathered, WIDE)) is None:
            return None
        caption = self.caption if isinstance(self.caption, str) else self.caption(gathered)
        return wide + (self.draw(gathered, NARROW) or ""), caption


FIGURES = (  # in the order of each section
    ReportFigure("bits-per-byte", bits_per_byte_bars, bits_per_byte_caption),
    ReportFigure("parity", parity_curves, "Both losses at each step, and how far they are apart."),
    ReportFigure("training", loss_curves, "Loss of the training and of the held-out text."),
    ReportFigure("training", speed_curve, "Training speed."),
    ReportFigure("corpus", funnel_bars, "Text left after each step, and what the step dropped."),
)


def _by_step(rows: Sequence[FunnelRow]) -> list[FunnelRow]:
    """Add up the bytes of the funnel's rows, which are by reason, to one row for each step."""
    steps: dict[str, FunnelRow] = {}
    for row in rows:
        before = steps.get(row.name)
        dropped = row.bytes if before is None else before.bytes + row.bytes
        steps[row.name] = row.model_copy(update={"bytes": dropped})
    return list(steps.values())


def page_figure(height_inches: float, width_inches: float = WIDE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    return figure, figure.subplots()


def _bars_alone(axes: Axes, positions: Sequence[int], labels: Sequence[str]) -> None:
    axes.set_yticks(list(positions), labels, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _axes_names(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure = axes.get_figure(root=True)
    is_narrow = figure is not None and figure.get_figwidth() <= NARROW
    axes.xaxis.set_major_locator(MaxNLocator(4 if is_narrow else 8, integer=True))
    page_grid(axes)


def page_grid(axes: Axes, colour: str = RULE) -> None:
    axes.grid(axis="y", color=colour, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def legend_above(axes: Axes, names: Sequence[str], columns: int) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    axes.legend(axes.lines, names, frameon=False, ncols=columns, **place)


def _ends(axes: Axes, curves: Sequence[tuple[str, list, list, str]]) -> None:
    """Write a name and the last value at the end of each curve, apart where the ends meet."""
    ends = sorted((curve for curve in curves if curve[1]), key=lambda curve: curve[2][-1])
    for rank, (name, steps, values, colour) in enumerate(ends):
        lift = 0 if len(ends) == 1 else (-8, 8)[rank]
        end, of_text = (steps[-1], values[-1]), colour if colour != OTHER else QUIET
        axes.annotate(f"{name} {values[-1]:.3f}", end, (8, lift), va="center", color=of_text, **_BESIDE)


def finite(rows: Sequence[Row], key: str, by: str = "step") -> tuple[list[int], list[float]]:
    """Return `by` and `key` of the rows that have both. A skipped step may have no finite `key`."""
    pairs = [(getattr(row, by), getattr(row, key)) for row in rows]
    pairs = [(x, y) for x, y in pairs if x is not None and y is not None and isfinite(y)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _pairs(labels: Sequence[str], texts: Sequence[str]) -> str:
    return "; ".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=True)) + "."


def range_of(name: str, values: Sequence[float], spec: str = ".3f") -> str:
    """Return the first and the last value of a curve as a sentence, for readers that see no figure."""
    return f"{name}: from {values[0]:{spec}} to {values[-1]:{spec}}." if values else f"{name}: no values."


def svg_file(figure: Figure, **how: Any) -> str:
    """Return the figure as the text of an SVG file, which the same figure always gives."""
    buffer, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing, **how)
    return buffer.getvalue()


def page_svg(figure: Figure, name: str, alt: str) -> str:
    """Return the figure as an <svg> element without prologue and metadata.

    Its ids are unique on the page and its colours are CSS variables. `alt` is the text of a screen reader.
    """
    kind = "narrow" if figure.get_figwidth() <= NARROW else "wide"
    svg = svg_file(figure, transparent=True)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-{kind}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-{kind}-", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    # The page scales a figure down on a narrow screen, but never up.
    opening, _, rest = svg.partition(">")
    opening = re.sub(
        r'width="([\d.]+)pt" height="[\d.]+pt"', r'style="max-width: \1pt" width="100%"', opening
    )
    return f'{opening} class="{kind}" role="img" aria-label="{escape(alt)}">{rest}'

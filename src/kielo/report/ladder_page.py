"""A ladder's measurements beside the plan: `Ladder` → a table, `ladder.md`, and a page for an application.

The page is one HTML file, as the report of a run: nothing is fetched when it is opened.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kielo.artifact.durable import disk_problems_reported
from kielo.artifact.launch_files import (
    PAGE_NAME,
    TABLE_NAME,
    Ladder,
    MeasuredSpeed,
    PlannedSpeed,
    Rung,
)
from kielo.artifact.own_text import refuse_other_text, write_own_text
from kielo.artifact.stage_json import write_json
from kielo.report.figures import DROPPED, OTHER, OURS, QUIET, WIDTH_INCHES, page_grid, page_style, page_svg
from kielo.report.page import fill_template
from kielo.resolve.overview import amount

TITLES = ("nodes", "layout", "tokens/s", "TFLOP/s a device", "% of linear", "planned", "difference")


def write_ladder_report(folder: Path, ladder: Ladder) -> list[Path]:
    """Writes ladder.json, ladder.md and ladder.html into the ladder's folder; returns the paths."""
    paths = [folder / Ladder.FILE_NAME, folder / TABLE_NAME, folder / PAGE_NAME]
    for path in paths[1:]:
        refuse_other_text(path)
    with disk_problems_reported(f"{folder}: the report"):
        write_json(folder, ladder)
        write_own_text(paths[1], markdown(ladder))
        write_own_text(paths[2], page(ladder))
    return paths


def table(ladder: Ladder) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns titles and rows: measured, and beside it planned; a rung that is not measured says why."""
    base, rows = base_rung(ladder.rungs), list[tuple[str, ...]]()
    for rung in ladder.rungs:
        planned = f"{planned_of(rung).tokens_per_second:,.0f}" if rung.planned else "–"
        if rung.measured is None:
            rows.append((str(rung.nodes), rung.layout, rung.state, "–", "–", planned, "–"))
            continue
        measured, difference = rung.measured, "–"
        if rung.planned:
            share = measured.tokens_per_second / planned_of(rung).tokens_per_second - 1
            difference = f"{share:+.0%}" + ("" if is_expected(rung) else " (outside of the interval)")
        linear = f"{share_of_linear(rung, base or rung):.0%}"
        rows.append((
            str(rung.nodes), rung.layout, f"{measured.tokens_per_second:,.0f}",
            f"{measured.tflops_per_device:.3g}", linear, planned, difference,
        ))  # fmt: skip
    return TITLES, rows


def measured_of(rung: Rung) -> MeasuredSpeed:
    """Returns the measured speed. Raises ValueError for a rung that is not measured."""
    if rung.measured is None:
        raise ValueError(f"{rung.layout} on {rung.nodes} nodes: not measured")
    return rung.measured


def planned_of(rung: Rung) -> PlannedSpeed:
    """Returns the planned speed. Raises ValueError for a rung without a plan."""
    if rung.planned is None:
        raise ValueError(f"{rung.layout} on {rung.nodes} nodes: not planned")
    return rung.planned


def base_rung(rungs: Sequence[Rung]) -> Rung | None:
    """Returns the fastest measured rung on the fewest nodes, the measure of linear; None: there is none."""
    measured = [rung for rung in rungs if rung.measured]
    return min(measured, key=lambda rung: (rung.nodes, -measured_of(rung).tokens_per_second), default=None)


def share_of_linear(rung: Rung, base: Rung) -> float:
    """Computes tokens a second of a node, by those of the base's nodes."""
    each = measured_of(rung).tokens_per_second / rung.nodes
    return each / (measured_of(base).tokens_per_second / base.nodes)


def is_expected(rung: Rung) -> bool:
    """Returns True where the measured speed is inside of the plan's interval."""
    low, high = planned_of(rung).low_tokens_per_second, planned_of(rung).high_tokens_per_second
    return low <= measured_of(rung).tokens_per_second <= high


def notes(ladder: Ladder) -> list[str]:
    """Returns sentences on how it was measured, what others measured there, and what to do with it."""
    lines = [
        f"{ladder.name}: {amount(ladder.parameters)} parameters, steps of {ladder.tokens_per_step:,} tokens "
        f"on any number of nodes, sequences of {ladder.sequence_length:,}, on {ladder.cluster}. Each figure "
        "is the median of a rung's steps without the first two.",
        "% of linear: tokens/s of a node, by those of the fastest layout on the fewest nodes. TFLOP/s: the "
        "model's FLOPs, without recomputation.",
    ]
    if any(rung.planned for rung in ladder.rungs):
        card = f"the card {ladder.machine}" if ladder.machine else "constants fitted on published runs"
        lines.append(f"Planned by {card}, before the measurement.")
    lines += [
        f"Others on {one.nodes} nodes: {one.tflops_per_device:g} TFLOP/s a device ± {one.tolerance:.0%}, "
        f"{one.software} ({one.source})."
        for one in ladder.references
    ]
    if base_rung(ladder.rungs) is not None:
        lines.append(
            "To plan with what was measured: kielo plan calibrate LADDER --to measured.toml, then kielo plan "
            "RECIPE --machine measured.toml."
        )
    return lines


def markdown(ladder: Ladder) -> str:
    """Returns the table and the notes as Markdown."""
    titles, rows = table(ladder)
    head = [f"# {ladder.name} on {ladder.cluster}: measured and planned", ""]
    lines = [f"| {' | '.join(titles)} |", "|--:|---|" + "--:|" * (len(titles) - 2)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    sentences = [line for note in notes(ladder) for line in ("", note)]
    return "\n".join([*head, *lines, *sentences]) + "\n"


def page(ladder: Ladder) -> str:
    """Returns the whole page as HTML."""
    titles, rows = table(ladder)
    apart = [
        number for number, rung in enumerate(ladder.rungs)
        if rung.measured is None or (rung.planned and not is_expected(rung))
    ]  # fmt: skip
    figures = []
    if base_rung(ladder.rungs) is not None:
        others = ", and what others measured" if ladder.references else ""
        figures = [
            (
                scaling_figure(ladder),
                "Measured speed of the fastest layout on each number of nodes, the plan of the same layout "
                "with its interval, and linear scaling from the fewest nodes.",
            ),
            (device_figure(ladder), f"TFLOP/s of a device{others}."),
        ]
    return fill_template(
        "ladder.html.jinja", ladder=ladder, titles=titles, rows=rows, marked=apart, figures=figures,
        notes=notes(ladder),
    )  # fmt: skip


def fastest(rungs: Sequence[Rung]) -> list[Rung]:
    """Returns the fastest measured rung on each number of nodes, few nodes first."""
    best: dict[int, Rung] = {}
    for rung in (rung for rung in rungs if rung.measured):
        before = best.get(rung.nodes)
        if before is None or measured_of(rung).tokens_per_second > measured_of(before).tokens_per_second:
            best[rung.nodes] = rung
    return [best[nodes] for nodes in sorted(best)]


def scaling_figure(ladder: Ladder) -> str:
    """Draws tokens a second over nodes: measured, planned with its interval, and linear."""
    best, base = fastest(ladder.rungs), base_rung(ladder.rungs)
    nodes = [rung.nodes for rung in best]
    if base is None:
        return ""
    with page_style():
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axes = figure.subplots()
        each = measured_of(base).tokens_per_second / base.nodes
        axes.plot(
            nodes, [each * count for count in nodes], color=QUIET, linewidth=1, linestyle=(0, (4, 3)),
            label="linear",
        )  # fmt: skip
        planned = [(rung.nodes, rung.planned) for rung in best if rung.planned]
        if planned:
            expected = [one.tokens_per_second for _, one in planned]
            low = [one.tokens_per_second - one.low_tokens_per_second for _, one in planned]
            high = [one.high_tokens_per_second - one.tokens_per_second for _, one in planned]
            axes.errorbar(
                [count for count, _ in planned], expected, yerr=[low, high], color=OTHER, linewidth=1.2,
                marker="s", markersize=4, capsize=3, label="planned",
            )  # fmt: skip
        speeds = [measured_of(rung).tokens_per_second for rung in best]
        axes.plot(nodes, speeds, color=OURS, linewidth=1.8, marker="o", markersize=5, label="measured")
        for rung, speed in zip(best, speeds):
            axes.annotate(
                f"{share_of_linear(rung, base):.0%}", (rung.nodes, speed), (0, -14),
                textcoords="offset points", ha="center", color=OURS,
            )  # fmt: skip
        axes.set_ylim(0, axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylabel("tokens per second")
        axes.legend(frameon=False, loc="upper left")
        _nodes_axis(axes, nodes)
        return page_svg(figure, "scaling")


def device_figure(ladder: Ladder) -> str:
    """Draws TFLOP/s of a device over nodes, for every measured layout, beside what others measured."""
    measured = [rung for rung in ladder.rungs if rung.measured]
    best = fastest(ladder.rungs)
    with page_style():
        figure = Figure(figsize=(WIDTH_INCHES, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [rung.nodes for rung in measured], [measured_of(rung).tflops_per_device for rung in measured],
            color=OTHER, linestyle="", marker="o", markersize=4, label="other layouts",
        )  # fmt: skip
        axes.plot(
            [rung.nodes for rung in best], [measured_of(rung).tflops_per_device for rung in best], color=OURS,
            linewidth=1.8, marker="o", markersize=5, label="the fastest layout",
        )  # fmt: skip
        if ladder.references:
            others = ladder.references
            axes.errorbar(
                [one.nodes for one in others], [one.tflops_per_device for one in others],
                yerr=[one.tflops_per_device * one.tolerance for one in others], color=DROPPED, linestyle="",
                marker="D", markersize=4, capsize=3, label=others[0].software,
            )  # fmt: skip
        axes.set_ylim(0, axes.get_ylim()[1])
        axes.set_ylabel("TFLOP/s of a device")
        axes.legend(frameon=False, loc="lower left")
        _nodes_axis(
            axes, sorted({rung.nodes for rung in measured} | {one.nodes for one in ladder.references})
        )
        return page_svg(figure, "device")


def _nodes_axis(axes: Axes, nodes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(nodes), [f"{count:,}" for count in nodes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("nodes")
    page_grid(axes)

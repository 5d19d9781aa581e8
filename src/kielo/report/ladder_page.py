"""A ladder's measurements beside the plan: `Ladder` → a table and `ladder.md`, for an application."""

from collections.abc import Sequence
from pathlib import Path

from kielo.artifact.durable import disk_problems_reported, refuse_other_text, write_own_text
from kielo.artifact.launch_files import TABLE_NAME, Ladder, MeasuredSpeed, PlannedSpeed, Rung
from kielo.artifact.stage_json import write_json
from kielo.resolve.overview import amount

TITLES = ("nodes", "layout", "tokens/s", "TFLOP/s a device", "% of linear", "planned", "difference")


def write_ladder_report(folder: Path, ladder: Ladder) -> list[Path]:
    """Write ladder.json and ladder.md into the ladder's folder. Return the paths."""
    path = folder / TABLE_NAME
    refuse_other_text(path)
    with disk_problems_reported(f"{folder}: the report"):
        write_json(folder, ladder)
        write_own_text(path, markdown(ladder))
    return [folder / Ladder.FILE_NAME, path]


def table(ladder: Ladder) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return titles and rows, measured beside planned. A rung without a measurement has its state."""
    rows: list[tuple[str, ...]] = []
    base = linear_speed(ladder.rungs)
    for rung in ladder.rungs:
        planned = f"{rung.planned.tokens_per_second:,.0f}" if rung.planned else "–"
        if rung.measured is None:
            rows.append((str(rung.nodes), rung.layout, rung.state, "–", "–", planned, "–"))
            continue
        measured, difference = rung.measured, "–"
        if rung.planned:
            share = measured.tokens_per_second / rung.planned.tokens_per_second - 1
            is_expected = is_in_interval(measured, rung.planned)
            difference = f"{share:+.0%}" + ("" if is_expected else " (outside of the interval)")
        cells = (f"{measured.tokens_per_second:,.0f}", f"{measured.tflops_per_device:.3g}")
        linear = f"{measured.tokens_per_second / rung.nodes / base:.0%}"
        rows.append((str(rung.nodes), rung.layout, *cells, linear, planned, difference))
    return TITLES, rows


def linear_speed(rungs: Sequence[Rung]) -> float:
    """Return tokens/s of a node, of the fastest measured rung on the fewest nodes, or 0 without a rung."""
    speeds = [(rung.nodes, rung.measured.tokens_per_second / rung.nodes) for rung in rungs if rung.measured]
    return min(speeds, key=lambda speed: (speed[0], -speed[1]), default=(0, 0.0))[1]


def is_in_interval(measured: MeasuredSpeed, planned: PlannedSpeed) -> bool:
    low, high = planned.low_tokens_per_second, planned.high_tokens_per_second
    return low <= measured.tokens_per_second <= high


def notes(ladder: Ladder) -> list[str]:
    lines = [
        f"{ladder.name}: {amount(ladder.parameters)} parameters, steps of {ladder.tokens_per_step:,} tokens "
        f"on any number of nodes, sequences of {ladder.sequence_length:,}, on {ladder.cluster}. Each figure "
        "is the median of a rung's steps without the first two.",
        "% of linear: tokens/s of a node, as a share of the fastest layout's on the fewest nodes. TFLOP/s: "
        "the model's FLOPs, without recomputation.",
    ]
    if any(rung.planned for rung in ladder.rungs):
        card = f"the card {ladder.machine}" if ladder.machine else "constants fitted on published runs"
        lines.append(f"Planned by {card}, before the measurement.")
    lines += [
        f"Others on {one.nodes} nodes: {one.tflops_per_device:g} TFLOP/s a device ± {one.tolerance:.0%}, "
        f"{one.software} ({one.source})."
        for one in ladder.references
    ]
    if linear_speed(ladder.rungs):
        lines.append(
            "To plan with what was measured: kielo plan calibrate LADDER --to measured.toml, then kielo plan "
            "RECIPE --machine measured.toml."
        )
    return lines


def markdown(ladder: Ladder) -> str:
    titles, rows = table(ladder)
    head = [f"# {ladder.name} on {ladder.cluster}: measured and planned", ""]
    lines = [f"| {' | '.join(titles)} |", "|--:|---|" + "--:|" * (len(titles) - 2)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    sentences = [line for note in notes(ladder) for line in ("", note)]
    return "\n".join([*head, *lines, *sentences]) + "\n"

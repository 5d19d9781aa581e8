"""The range that a plan prints: made of families left out, and how many of their rows it holds.

A plan is of fused attention, so the range is that of runs with fused attention. Predictions of others are
told beside it. Each family is judged by the range of the other families.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from planner_fit import spread
from published_runs import PublishedRun

from kielo.plan.planned_layout import SHARE
from kielo.report.plan_figures import STYLE

Column = np.ndarray
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_FIRST_FUSED = 2  # in workload.ATTENTION_KERNELS


def errors_by_kernel(runs: Sequence[PublishedRun], left_out: Column) -> dict[str, dict[str, list[float]]]:
    """Returns {"fused" or "unfused": {family: log(published / predicted) of its rows}}, rounded."""
    found: dict[str, dict[str, list[float]]] = {"fused": {}, "unfused": {}}
    for run, seconds in zip(runs, left_out, strict=True):
        kind = "fused" if run.columns["kernel"] >= _FIRST_FUSED else "unfused"
        error = round(float(np.log(run.seconds / seconds)), 4)
        found[kind].setdefault(run.family, []).append(error)
    return found


def range_of(errors: dict[str, list[float]], share: float = SHARE) -> dict[str, float]:
    """Returns the card's [interval] by all families."""
    return spread(*_flat(errors), share)


def coverage(errors: dict[str, list[float]], share: float) -> dict[str, float]:
    """Returns the share of rows, and the mean share of families' rows, inside the range of the others."""
    inside = {}
    for family, mine in errors.items():
        others = range_of({name: rows for name, rows in errors.items() if name != family}, share)
        inside[family] = [others["lower"] <= error <= others["upper"] for error in mine]
    rows = [each for family in inside.values() for each in family]
    families = [float(np.mean(family)) for family in inside.values()]
    return {"share": share, "rows": float(np.mean(rows)), "families": float(np.mean(families))}


def calibration(errors: dict[str, list[float]]) -> list[dict[str, float]]:
    """Returns the coverage of each of `SHARES`."""
    return [coverage(errors, share) for share in SHARES]


def calibration_table(found: list[dict[str, float]]) -> str:
    """Returns Markdown: what a range says, and what it holds."""
    lines = ["| the range says | rows of families left out inside | mean over families |", "|--:|--:|--:|"]
    lines += [f"| {row['share']:.0%} | {row['rows']:.0%} | {row['families']:.0%} |" for row in found]
    return "\n".join(lines)


def draw_calibration(found: list[dict[str, float]], path: Path) -> None:
    """Draws what ranges hold over what they say, as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 3.6), layout="constrained")
        axes = figure.subplots()
        said = [row["share"] for row in found]
        axes.plot([0.4, 1], [0.4, 1], color="#9aa39c", linewidth=1, linestyle="--")
        axes.plot(said, [row["rows"] for row in found], marker="o", color="#2f7d4f", label="rows")
        axes.plot(said, [row["families"] for row in found], marker="s", color="#b8651b", label="families")
        axes.set_xlabel("the range says")
        axes.set_ylabel("is inside, of families left out")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _flat(errors: dict[str, list[float]]) -> tuple[Column, list[str]]:
    names = [family for family, rows in errors.items() for _ in rows]
    return np.array([error for rows in errors.values() for error in rows]), names

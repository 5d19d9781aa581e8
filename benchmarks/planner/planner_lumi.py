"""Signed errors of the planner on MI250X, of families left out and of rows that no fit has seen.

`held_out_runs.csv` has runs on LUMI and Frontier beside the table: other node counts of the 175B's logs, 65B,
GPT-NeoX and torchtitan. They are never fitted.
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from published_runs import PublishedRun, read_published_runs

from kielo.plan.efficiency import Efficiency
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload

HELD_OUT = Path(__file__).with_name("held_out_runs.csv")
# As this script found them with the constants and formulas until 2026-11-27.
BEFORE = {
    "lumi175-16n": -0.015, "lumi175-64n": -0.032, "lumi-reframe-7b-2n": -0.048, "lumi-reframe-7b-8n": -0.056,
    "lumi-reframe-7b-16n": -0.059, "lumi-megds-7b": 0.019, "lumi-megds-33b": 0.065,
    "lumi-megds-175b-readme": 0.027, "lumi175-32n": -0.011, "lumi175-128n": -0.030, "lumi175-256n": -0.101,
    "lumi-megds-65b": -0.018, "lumi-neox-6.7b": 0.035, "frontier-torchtitan-8b": 0.077,
}  # fmt: skip


def signed_errors(
    runs: list[PublishedRun], left_out: np.ndarray, efficiency: Efficiency
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {"left out" or "never fitted": {family: {row: predicted / published - 1}}}, on MI250X."""
    found: dict[str, dict[str, dict[str, float]]] = {"left out": {}, "never fitted": {}}
    for run, seconds in zip(runs, left_out, strict=True):
        if run.card.name == "mi250x_gcd":
            error = float(seconds / run.seconds - 1)
            found["left out"].setdefault(run.family, {})[run.name.split("#")[0]] = error
    held = read_published_runs(HELD_OUT)
    predicted = step_seconds(Workload.of([run.columns for run in held]), efficiency).total
    for run, seconds in zip(held, predicted, strict=True):
        error = float(seconds / run.seconds - 1)
        found["never fitted"].setdefault(run.family, {})[run.name.split("#")[0]] = error
    return found


def lumi_table(errors: dict[str, Any]) -> str:
    """Returns Markdown: each row before and now, and the medians over families."""
    lines = ["| run | | before | now |", "|---|---|--:|--:|"]
    for kind, families in errors.items():
        for rows in families.values():
            lines += [
                f"| {row} | {kind} | {BEFORE[row]:+.1%} | {error:+.1%} |" for row, error in rows.items()
            ]
    for kind, families in errors.items():
        then = statistics.median(statistics.median(BEFORE[row] for row in rows) for rows in families.values())
        lines.append(f"| median over families | {kind} | {then:+.1%} | {bias(families):+.1%} |")
    return "\n".join(lines)


def bias(families: dict[str, dict[str, float]]) -> float:
    """Returns the median over families of the median signed error of their rows."""
    return statistics.median(statistics.median(rows.values()) for rows in families.values())

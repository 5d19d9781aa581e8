"""The planner's errors by what the runs share, the worst of them, and how far reports themselves disagree."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from published_runs import PublishedRun

from kielo.plan.efficiency import ENGINES
from kielo.plan.workload import RECIPES

Column = np.ndarray
# What a table is broken down by: its name → the word for a run.
KINDS: Mapping[str, Callable[[PublishedRun], str]] = {
    "device": lambda run: run.card.name,
    "engine": lambda run: ENGINES[int(run.columns["engine"])],
    "precision": lambda run: RECIPES[int(run.columns["recipe"])],
    "layout": lambda run: _layout_kind(run.columns),
    "model": lambda run: _model_kind(run.columns),
}


def errors_by_kind(runs: list[PublishedRun], seconds: Column, predicted: Column) -> dict[str, dict[str, Any]]:
    """Returns {kind: {member: {rows, families, signed, median, p90}}} of predicted / published - 1."""
    errors = predicted / seconds - 1
    found: dict[str, dict[str, Any]] = {}
    for kind, word in KINDS.items():
        members: dict[str, list[int]] = defaultdict(list)
        for row, run in enumerate(runs):
            members[word(run)].append(row)
        found[kind] = {
            member: {
                "rows": len(rows),
                "families": len({runs[row].family for row in rows}),
                "signed": float(np.median(errors[rows])),
                "median": float(np.median(np.abs(errors[rows]))),
                "p90": float(np.quantile(np.abs(errors[rows]), 0.9)),
            }
            for member, rows in sorted(members.items())
        }
    return found


def worst_runs(
    runs: list[PublishedRun], seconds: Column, predicted: Column, number: int = 30
) -> list[dict[str, Any]]:
    """Returns the `number` rows with the largest error, with the facts that the prediction took of them."""
    errors = predicted / seconds - 1
    facts = ("hidden", "layers", "sequence", "tensor", "pipeline", "data", "micro_batch", "micro_batches")
    return [
        {"run": runs[row].name.split("#")[0], "error": float(errors[row])}
        | {kind: word(runs[row]) for kind, word in KINDS.items()}
        | {fact: float(runs[row].columns[fact]) for fact in facts}
        for row in np.argsort(-np.abs(errors))[:number]
    ]


def disagreement(runs: list[PublishedRun]) -> dict[str, dict[str, float]]:
    """Returns how far the seconds of one configuration differ between runs: |log ratio| of pairs.

    Pairs "of other families" are from other reports: no planner that knows only the configuration can
    predict both of them better than by half of it.
    """
    same: dict[tuple, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        same[tuple(sorted(run.columns.items()))].append(run)
    pairs: dict[str, list[float]] = {"of one family": [], "of other families": []}
    for group in same.values():
        for one, other in itertools.combinations(group, 2):
            kind = "of one family" if one.family == other.family else "of other families"
            pairs[kind].append(abs(float(np.log(one.seconds / other.seconds))))
    return {
        kind: {
            "pairs": len(logs),
            "median": float(np.median(logs)),
            "p90": float(np.quantile(logs, 0.9)),
        }
        for kind, logs in pairs.items()
        if logs
    }


def error_lines(result: dict[str, Any]) -> list[str]:
    """Returns the breakdown for people: a line for each kind's member, and the worst rows."""
    lines = ["", f"{'errors by':34} {'rows':>5} {'families':>9} {'signed':>8} {'median':>8} {'p90':>8}"]
    for kind, members in result["by_kind"].items():
        for member, row in members.items():
            figures = " ".join(f"{row[name]:8.1%}" for name in ("signed", "median", "p90"))
            lines.append(f"{kind + ' ' + member:34} {row['rows']:5} {row['families']:9} {figures}")
    lines += ["", "worst rows"]
    for row in result["worst"]:
        facts = ", ".join(f"{name} {value:g}" for name, value in row.items() if isinstance(value, float)
            and name != "error")  # fmt: skip
        lines.append(f"{row['error']:+8.1%} {row['run'][:60]:60} {row['device']} {row['precision']}, {facts}")
    lines += ["", "runs of one configuration differ (|log ratio| of seconds)"]
    lines += [
        f"{kind:34} {row['pairs']:5} pairs, median {row['median']:.1%}, p90 {row['p90']:.1%}"
        for kind, row in result["disagreement"].items()
    ]
    return lines


def _layout_kind(columns: Mapping[str, Any]) -> str:
    sharded = "ZeRO 3" if columns["zero"] == 3 else "ZeRO 0 to 2"
    parts = [
        word
        for word, degree in (
            ("tensor", columns["tensor"]), ("pipeline", columns["pipeline"]), ("context", columns["context"]),
        ) if degree > 1
    ]  # fmt: skip
    return " and ".join(parts) or sharded


def _model_kind(columns: Mapping[str, Any]) -> str:
    parameters = columns["layers"] * columns["hidden"] ** 2 * 12
    size = next(word for word, most in (
        ("below 2B", 2e9), ("2B to 20B", 20e9), ("20B to 100B", 100e9), ("100B and more", np.inf),
    ) if parameters < most)  # fmt: skip
    return size + (", sequence 16k or more" if columns["sequence"] >= 16384 else "")

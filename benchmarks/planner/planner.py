"""Accuracy of the planner on published runs, and the fit of its constants to them.

    python benchmarks/planner/planner.py  # the shipped constants on the committed table
    python benchmarks/planner/planner.py --runs FILE.csv --json  # another table with the same columns
    python benchmarks/planner/planner.py --fit  # fit again, cross-validate, write card and tables

--fit writes the constants to the shipped card, the score to results/planner.json and its tables to
results/planner.md and, in short, docs/planning.md.

Errors are |predicted / published - 1| in seconds a step (or tokens a second): a family's figure is the median
of its rows, the summary's are the median and the 90th percentile over families. Mixtures of experts and rows
without a complete layout stand apart. Repeats of one layout count once where layouts are ranked. One thread;
no randomness. With --cross-validate errors by device, engine, precision and layout, and the 30 worst rows,
are those of families left out.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from planner_errors import disagreement, error_lines, errors_by_kind, worst_runs
from planner_fit import fit
from planner_lumi import lumi_table, signed_errors
from planner_range import (
    calibration,
    calibration_table,
    coverage,
    draw_calibration,
    errors_by_kernel,
    range_of,
)
from planner_ranking import agreeing_pairs, expected_tau, regret
from published_memory import formula_memory_bytes
from published_runs import PublishedRun, read_published_runs

from kielo.plan.efficiency import (
    ARCHITECTURES,
    CONSTANTS,
    ENGINES,
    Efficiency,
    card_text,
    fitted,
    members,
    read_card,
)
from kielo.plan.planned_layout import SHARE
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import ATTENTION_KERNELS, Workload
from kielo.resolve.memory import usable_bytes

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from page_tables import put_tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CARD = ROOT / "src" / "kielo" / "cards" / "efficiency" / "published_runs.toml"
DOCUMENT = RESULTS / "planner.md"
LEFT_OUT = RESULTS / "planner_left_out.json"
PICTURE = ROOT / "docs" / "pictures" / "planner_calibration.svg"
PAGE = ROOT / "docs" / "planning.md"
SWEEPS = ("vtrain-3.6", "vtrain-18.4", "vtrain-39.1", "vtrain-175", "aa-13B", "aa-65B", "bs-a100")
# Isaev et al. 2023 (doi:10.1145/3581784.3607102): mean error of their model on eight step times of
# Korthikanti et al. 2022.
CALCULON, CALCULON_ERROR = "korthikanti", 0.0365
GIB = 2**30


def main() -> None:
    options = _options()
    runs = read_published_runs(options.runs)
    timed = one_time_each(runs)
    scored = [run for run in timed if is_scored(run)]
    if options.fit or options.cross_validate:
        efficiency = fit(*columns([run for run in scored if is_fitted(run)]))
        left_out = left_out_seconds(scored, efficiency)
        by_kernel = errors_by_kernel(scored, left_out)
        figures = range_of(by_kernel["fused"])
        if options.fit:
            content = card_text(efficiency, figures, _CARD_HEADER) + published_engines(scored)
            CARD.write_text(content, encoding="utf-8")
            efficiency, figures = read_card(CARD)  # as everybody will
    else:
        (efficiency, figures), left_out = fitted(), None
    result = score(scored, efficiency)
    shown = left_out if left_out is not None else step_seconds(columns(scored)[0], efficiency).total
    result["by_kind"] = errors_by_kind(scored, columns(scored)[1], shown)
    result["worst"] = worst_runs(scored, columns(scored)[1], shown)
    result["disagreement"] = disagreement(scored)
    if left_out is not None:
        result["cross_validation"] = cross_validation(scored, left_out, by_kernel)
        result["lumi"] = signed_errors(scored, left_out, efficiency)
        rows = _rows(scored, columns(scored)[1], left_out_seconds(scored, efficiency, by_project=True))
        result["projects_left_out"] = summary_of(rows)
        result["left_out_without_engine_profiles"] = without_engine_profiles(scored, is_left_out=True)
    result["calculon"] = calculon(scored, step_seconds(columns(scored)[0], efficiency).total, left_out)
    result["without_engine_profiles"] = without_engine_profiles(scored)
    result["apart"] = {name: summary_of(rows) for name, rows in apart(timed, efficiency).items()}
    result["not_predicted"] = not_predicted(runs)
    result["sweeps"] = sweeps(scored, efficiency)
    result["memory"] = memory(runs)
    result["interval"] = figures
    if options.fit:
        kept = {name: value for name, value in result.items() if name != "rows"}
        (RESULTS / "planner.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        errors = {"log(published / predicted) of families left out, by attention's kernel": by_kernel}
        LEFT_OUT.write_text(json.dumps(errors) + "\n", encoding="utf-8")
        draw_calibration(result["cross_validation"]["calibration"], PICTURE)
        put_tables(DOCUMENT, tables(result, efficiency))
        put_tables(PAGE, {"accuracy": short_table(result)})
    print(json.dumps(result, indent=1) if options.json else text(result))


def one_time_each(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Returns one figure of each run with a time: as printed, or from TFLOP/s of a stated convention."""
    best: dict[str, PublishedRun] = {}
    for run in runs:
        name = run.name.split("#")[0]
        if run.seconds and (name not in best or (best[name].converted and not run.converted)):
            best[name] = run
    return list(best.values())


def is_scored(run: PublishedRun) -> bool:
    """Returns True for a dense, usual model with a complete layout, from a row that its reader trusts."""
    return not run.is_moe and not run.missing and run.trust != "C" and "NON-standard" not in run.notes


def is_fitted(run: PublishedRun) -> bool:
    """Returns True for a run that may tell of constants: its page does not call it slower than a tuned one.

    Such rows are predicted and scored all the same.
    """
    return "deterministic" not in run.notes


def columns(runs: list[PublishedRun]) -> tuple[Workload, np.ndarray, list[str]]:
    """Returns (workload, seconds [n], families)."""
    work = Workload.of([run.columns for run in runs])
    return work, np.array([run.seconds for run in runs]), [run.family for run in runs]


def score(runs: list[PublishedRun], efficiency: Efficiency) -> dict[str, Any]:
    """Returns {rows, families, summary} of predictions."""
    if not runs:
        return {"rows": [], "families": {}, "summary": {"rows": 0, "families": 0}}
    work, seconds, _ = columns(runs)
    rows = _rows(runs, seconds, step_seconds(work, efficiency).total)
    return {"rows": rows, "families": _families(rows), "summary": summary_of(rows)}


def left_out_seconds(runs: list[PublishedRun], start: Efficiency, by_project: bool = False) -> np.ndarray:
    """Predicts each family by constants fitted without it, or without its whole project (the first word)."""
    work, seconds, families = columns(runs)
    groups = np.array([family.split("-")[0] if by_project else family for family in families])
    names, predicted = np.array(families), np.zeros(len(runs))
    may_tell = np.array([is_fitted(run) for run in runs])
    for group in sorted(set(groups)):
        mine, rest = groups == group, (groups != group) & may_tell
        constants = fit(work.take(rest), seconds[rest], list(names[rest]), start)
        predicted[mine] = step_seconds(work.take(mine), constants).total
    return predicted


def cross_validation(
    runs: list[PublishedRun], left_out: np.ndarray, by_kernel: dict[str, dict[str, list[float]]]
) -> dict[str, Any]:
    """Returns the score of families left out, and what the ranges of the other families hold."""
    rows = _rows(runs, columns(runs)[1], left_out)
    return {
        "summary": summary_of(rows), "families": _families(rows),
        "calibration": calibration(by_kernel["fused"]), "unfused": coverage(by_kernel["unfused"], SHARE),
    }  # fmt: skip


def published_engines(runs: list[PublishedRun]) -> str:
    """Returns a card's [published]: engines with runs on each architecture, as most families ran them."""
    lines = ["", "# engines with runs on an architecture, and what most families of them computed with"]
    for number, architecture in enumerate(ARCHITECTURES):
        lines += ["", f"[published.{architecture}]"]
        for index, engine in enumerate(ENGINES):
            ways: dict[str, list[tuple[str, float]]] = defaultdict(list)
            for run in runs:
                if (run.columns["architecture"], run.columns["engine"]) == (number, index):
                    way = ATTENTION_KERNELS[run.columns["kernel"]], run.columns["layers_again"]
                    ways[run.family].append(way)
            if ways:
                usual = statistics.mode(statistics.mode(some) for some in ways.values())
                lines.append(f'{engine} = {{ kernel = "{usual[0]}", layers_again = {usual[1]:g} }}')
    return "\n".join(lines) + "\n"


def calculon(runs: list[PublishedRun], predicted: np.ndarray, left_out: np.ndarray | None) -> dict[str, Any]:
    """Returns signed errors on Calculon's eight runs, also by constants fitted without them."""
    mine = np.array([run.family == CALCULON for run in runs])
    if not mine.any():
        return {}
    names = [run.name.split("#")[0].removeprefix(f"{CALCULON}-") for run in runs if run.family == CALCULON]
    seconds = columns(runs)[1][mine]
    found = {"calculon_mean_absolute_error": CALCULON_ERROR}
    for name, figures in (("fitted", predicted), ("left_out", left_out)):
        if figures is not None:
            errors = figures[mine] / seconds - 1
            found[name] = {
                "errors": dict(zip(names, errors.tolist())),
                "mean_absolute_error": float(np.abs(errors).mean()),
            }  # fmt: skip
    return found


def without_engine_profiles(runs: list[PublishedRun], is_left_out: bool = False) -> dict[str, float]:
    """Returns the score of constants fitted as if there were one engine, of families left out if asked."""
    one = [replace(run, columns=run.columns | {"engine": 0}) for run in runs]
    work, seconds, _ = columns(one)
    constants = fit(*columns([run for run in one if is_fitted(run)]))
    predicted = left_out_seconds(one, constants) if is_left_out else step_seconds(work, constants).total
    return summary_of(_rows(one, seconds, predicted))


def apart(timed: list[PublishedRun], efficiency: Efficiency) -> dict[str, list[dict[str, Any]]]:
    """Returns rows outside the summary that can still be predicted, by reason."""
    groups: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in timed:
        if not is_scored(run):
            kind = "mixtures of experts" if run.is_moe else "another kind of model"
            why = "layout incomplete" if run.missing else "doubted" if run.trust == "C" else kind
            groups[why].append(run)
    return {why: score(runs, efficiency)["rows"] for why, runs in groups.items()}


def not_predicted(runs: list[PublishedRun]) -> dict[str, int]:
    """Runs with a time that have no prediction, by why."""
    found: dict[str, set[str]] = {
        "mixtures of experts of unknown shape": set(),
        "shape or machine incomplete": set(),
    }
    for run in runs:
        if run.columns is None and run.metric in ("sec_per_step", "tokens_per_s_per_gpu", "tflops_per_gpu"):
            why = "mixtures of experts of unknown shape" if run.is_moe else "shape or machine incomplete"
            found[why].add(run.name.split("#")[0])
    return {why: len(names) for why, names in found.items()}


def sweeps(runs: list[PublishedRun], efficiency: Efficiency) -> dict[str, dict[str, float]]:
    """Returns Kendall's τ and the regret of each sweep.

    τ is over the pairs of one model, machine and batch; the regret is that of the planner's choice among
    layouts that fit by its memory model. `repeat_spread` is the standard deviation of repeats of one layout
    (of logarithms), `ceiling` the τ that a planner without errors could expect if all figures were off by as
    much.
    """
    found = {}
    for family in SWEEPS:
        groups: dict[tuple, list[PublishedRun]] = defaultdict(list)
        for run in runs:
            if run.family == family:
                groups[_question(run)].append(run)
        agreeing, pairs, regrets, repeats, logs = 0.0, 0, [], [], []
        for group in groups.values():
            group, seconds, deviations = _without_repeats(group)
            work = Workload.of([run.columns for run in group])
            rate = work.tokens_per_step / work.devices
            predicted, measured = rate / step_seconds(work, efficiency).total, rate / seconds
            more, of = agreeing_pairs(predicted, measured)
            agreeing, pairs, repeats = agreeing + more, pairs + of, repeats + deviations
            logs.append(np.log(measured))
            if len(group) >= 5:
                fits = _fits(group)
                regrets.append(regret(np.where(fits, predicted, predicted * 1e-3), measured))
        if not pairs:
            continue
        found[family] = {
            "kendall_tau": agreeing / pairs, "regret": max(regrets, default=0.0),
            "layouts": sum(len(log) for log in logs),
        }  # fmt: skip
        if len(repeats) >= 3:
            found[family]["repeat_spread"] = float(np.sqrt(np.mean(repeats)))
            found[family]["ceiling"] = expected_tau(logs, found[family]["repeat_spread"])
    return found


def _without_repeats(runs: list[PublishedRun]) -> tuple[list[PublishedRun], np.ndarray, list[float]]:
    """Returns (a run of each layout, geometric mean of its seconds, log-variances of repeats)."""
    same: dict[tuple, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        same[tuple(sorted(run.columns.items()))].append(run)
    logs = [np.log([run.seconds for run in group]) for group in same.values()]
    variances = [float(log.var(ddof=1)) for log in logs if len(log) > 1]
    return [group[0] for group in same.values()], np.exp([log.mean() for log in logs]), variances


def _question(run: PublishedRun) -> tuple:
    """Returns what is fixed while a person chooses a layout: model, machine, batch, and the day if noted."""
    values = run.columns
    devices = values["tensor"] * values["pipeline"] * values["data"]
    batch = values["data"] * values["micro_batch"] * values["micro_batches"]
    day = re.search(r"dated (\S+)[;]", run.notes)
    fixed = (values["layers"], values["hidden"], values["heads"], values["sequence"], devices)
    return fixed + ((day.group(1), round(batch / 64)) if day else ())


def _fits(runs: list[PublishedRun]) -> np.ndarray:
    peak = formula_memory_bytes(Workload.of([run.columns for run in runs])).peak("reserved")
    # All that the driver gives: by other engines' formulas, some that ran need more than a context leaves.
    return peak <= np.array([usable_bytes(run.card) + run.card.context_bytes for run in runs])


def memory(runs: list[PublishedRun]) -> dict[str, Any]:
    """Compares verdicts (fits or not), and static and peak GiB, with the same kind of figure."""
    known = [
        run
        for run in runs
        if run.columns is not None and run.card.memory_bytes and "offload" not in run.missing
    ]
    known = [run for run in known if not run.is_moe]
    verdicts = [run for run in known if run.metric in ("fits", "oom")]
    right = (
        np.array([run.metric == "fits" for run in verdicts]) == _fits(verdicts) if verdicts else np.array([])
    )
    peaks: dict[str, list[dict[str, Any]]] = {"static": [], "peak": []}
    for run in known:
        kind = memory_kind(run.notes)
        if run.metric != "mem_gib_per_gpu" or kind == "analytic" or run.missing or run.trust == "C":
            continue
        bytes_ = formula_memory_bytes(Workload.of([run.columns]))
        predicted = float((bytes_.static if kind == "static" else bytes_.peak(kind))[0]) / GIB
        peaks["static" if kind == "static" else "peak"].append(
            _row(run, run.value, predicted) | {"kind": kind}
        )
    return {
        "verdicts": len(verdicts),
        "verdicts_right": float(right.mean()) if len(right) else None,
        "wrong": [f"{run.name} {run.metric}" for run, is_right in zip(verdicts, right) if not is_right],
        "static": [row | {"error": row["predicted"] / row["published"] - 1} for row in peaks["static"]],
        "peak": summary_of(peaks["peak"]) | {"by_family": _families(peaks["peak"])},
    }


def memory_kind(notes: str) -> str:
    """Returns the kind of a row's GiB by its notes: static, analytic, or a `memory.Kind`."""
    patterns = (
        (r"STATIC|= static state", "static"), (r"ANALYTIC", "analytic"), (r"nvidia-smi", "device"),
        (r"reserved|% of 95", "reserved"),
    )  # fmt: skip
    return next((kind for word, kind in patterns if re.search(word, notes)), "allocated")


def _rows(runs: list[PublishedRun], seconds: np.ndarray, predicted: np.ndarray) -> list[dict[str, Any]]:
    return [_row(run, float(s), float(p)) for run, s, p in zip(runs, seconds, predicted)]


def _row(run: PublishedRun, published: float, predicted: float) -> dict[str, Any]:
    error = abs(predicted / published - 1)
    return {
        "row": run.name,
        "family": run.family,
        "published": published,
        "predicted": predicted,
        "error": error,
    }


def _families(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    errors = defaultdict(list)
    for row in rows:
        errors[row["family"]].append(row["error"])
    return {
        f: {"rows": len(e), "median_absolute_error": statistics.median(e)} for f, e in sorted(errors.items())
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    figures = [family["median_absolute_error"] for family in _families(rows).values()]
    if not figures:
        return {"rows": 0, "families": 0}
    return {
        "rows": len(rows),
        "families": len(figures),
        "median_absolute_error": float(np.median(figures)),
        "p90_absolute_error": float(np.quantile(figures, 0.9)),
    }


def text(result: dict[str, Any]) -> str:
    """Returns the tables for people."""
    lines = [f"{'row':74} {'published':>10} {'predicted':>10} {'error':>7}   seconds a step"]
    for row in result["rows"]:
        name = row["row"].split("#")[0][:74]
        lines.append(f"{name:74} {row['published']:10.3f} {row['predicted']:10.3f} {row['error']:7.1%}")
    lines += ["", f"{'family':26} {'rows':>5} {'median error':>13} {'left out':>10}"]
    left_out = result.get("cross_validation", {}).get("families", {})
    for name, family in result["families"].items():
        other = f"{left_out[name]['median_absolute_error']:10.1%}" if name in left_out else " " * 10
        lines.append(f"{name:26} {family['rows']:5} {family['median_absolute_error']:13.1%} {other}")
    summaries = {"summary": result["summary"], "without engine profiles": result["without_engine_profiles"]}
    if left_out:
        summaries["each family left out"] = result["cross_validation"]["summary"]
        summaries["  without engine profiles"] = result["left_out_without_engine_profiles"]
        summaries["each project left out"] = result["projects_left_out"]
    summaries |= {f"apart: {why}": summary for why, summary in result["apart"].items()}
    lines += ["", f"{'':32} {'rows':>5} {'families':>9} {'median':>8} {'p90':>8}"]
    for name, summary in summaries.items():
        if summary["rows"]:
            errors = f"{summary['median_absolute_error']:8.1%} {summary['p90_absolute_error']:8.1%}"
            lines.append(f"{name:32} {summary['rows']:5} {summary['families']:9} {errors}")
    lines += [f"not predicted: {count} {why}" for why, count in result["not_predicted"].items() if count]
    if left_out:
        lines += [
            f"a range of {row['share']:.0%} holds {row['rows']:.0%} of left-out families' rows"
            for row in result["cross_validation"]["calibration"]
        ]
        lines += ["", lumi_table(result["lumi"])]
    lines += error_lines(result)
    lines += [
        "",
        f"{'sweep':14} {'layouts':>7} {'Kendall tau':>12} {'regret':>8} {'repeats differ':>15} "
        f"{'best tau':>9}",
    ]
    for name, sweep in result["sweeps"].items():
        noise = f" {sweep['repeat_spread']:15.1%} {sweep['ceiling']:9.2f}" if "ceiling" in sweep else ""
        lines.append(
            f"{name:14} {sweep['layouts']:7} {sweep['kendall_tau']:12.2f} {sweep['regret']:8.1%}{noise}"
        )
    lines += _calculon_lines(result["calculon"])
    memory_ = result["memory"]
    if memory_["verdicts"]:
        right, verdicts = memory_["verdicts_right"], memory_["verdicts"]
        lines += ["", f"memory: {right:.1%} of {verdicts} rows that fit or do not are predicted correctly"]
        lines += [f"    wrong: {name}" for name in memory_["wrong"]]
    lines += [f"    static {row['error']:+.1%}: {row['row']}" for row in memory_["static"]]
    if memory_["peak"]["rows"]:
        lines.append(f"    peak: median error {memory_['peak']['median_absolute_error']:.1%} over families")
    return "\n".join(lines)


def _calculon_lines(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    columns_ = [name for name in ("fitted", "left_out") if name in found]
    lines = ["", f"{'Calculon':14}" + "".join(f" {name:>9}" for name in columns_)]
    for row in found["fitted"]["errors"]:
        lines.append(f"    {row:10}" + "".join(f" {found[name]['errors'][row]:+9.1%}" for name in columns_))
    means = "".join(f" {found[name]['mean_absolute_error']:9.2%}" for name in columns_)
    return lines + [f"    {'mean':10}{means}   Calculon's own {found['calculon_mean_absolute_error']:.2%}"]


def tables(result: dict[str, Any], efficiency: Efficiency) -> dict[str, str]:
    """Returns Markdown tables by the name of their place in the document."""
    left_out = result["cross_validation"]
    rows = {
        "all constants": result["summary"],
        "without engine profiles": result["without_engine_profiles"],
        "each family left out": left_out["summary"],
        "each family left out, without engine profiles": result["left_out_without_engine_profiles"],
        "each project left out": result["projects_left_out"],
    } | {f"apart: {why}": summary for why, summary in result["apart"].items()}
    summary = ["| | rows | families | median error | 90th percentile |", "|---|--:|--:|--:|--:|"]
    summary += [
        f"| {name} | {row['rows']} | {row['families']} | "
        f"{row['median_absolute_error']:.1%} | {row['p90_absolute_error']:.1%} |"
        for name, row in rows.items() if row["rows"]
    ]  # fmt: skip
    counts = " and ".join(f"{count} runs ({why})" for why, count in result["not_predicted"].items())
    summary += ["", f"Not predicted: {counts}."]
    families = ["| family | rows | median error | left out |", "|---|--:|--:|--:|"]
    families += [
        f"| {name} | {row['rows']} | {row['median_absolute_error']:.1%} | "
        f"{left_out['families'][name]['median_absolute_error']:.1%} |"
        for name, row in result["families"].items()
    ]
    sweep_rows = [
        "| sweep | layouts | Kendall's τ | largest regret | spread of repeats | τ of a planner without "
        "errors |"
    ]
    sweep_rows += ["|---|--:|--:|--:|--:|--:|"]
    sweep_rows += [
        f"| {name} | {row['layouts']} | {row['kendall_tau']:.2f} | {row['regret']:.1%} | "
        + (f"{row['repeat_spread']:.1%} | {row['ceiling']:.2f} |" if "ceiling" in row else "| |")
        for name, row in result["sweeps"].items()
    ]
    mine, others = result["calculon"]["fitted"], result["calculon"]["left_out"]
    calculon_rows = ["| run | error | left out |", "|---|--:|--:|"]
    calculon_rows += [
        f"| {name} | {error:+.1%} | {others['errors'][name]:+.1%} |" for name, error in mine["errors"].items()
    ]
    means = f"{mine['mean_absolute_error']:.2%} | {others['mean_absolute_error']:.2%}"
    calculon_rows.append(f"| mean of absolute errors | {means} |")
    constants = ["| constant | value | meaning |", "|---|---|---|"]
    for name, constant in CONSTANTS.items():
        values = ", ".join(
            f"{value:.3g}" if member == "all" else f"{member} {value:.3g}"
            for member, value in zip(members(name), efficiency.values[name])
        )
        constants.append(f"| `{name}` | {values} | {constant.meaning} |")
    return {
        "summary": "\n".join(summary), "families": "\n".join(families), "sweeps": "\n".join(sweep_rows),
        "calculon": "\n".join(calculon_rows), "constants": "\n".join(constants),
        "calibration": calibration_table(left_out["calibration"]), "lumi": lumi_table(result["lumi"]),
    }  # fmt: skip


def short_table(result: dict[str, Any]) -> str:
    """Returns the three rows of the summary that a user decides by, as Markdown."""
    rows = {
        "fitted on all families": result["summary"],
        "fitted without the predicted family": result["cross_validation"]["summary"],
        "fitted without the predicted project": result["projects_left_out"],
    }
    lines = ["| constants | median error | 90th percentile |", "|---|--:|--:|"]
    lines += [
        f"| {name} | {row['median_absolute_error']:.1%} | {row['p90_absolute_error']:.1%} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


_CARD_HEADER = """What machines and engines reach: fitted on benchmarks/planner/published_runs.csv.
Written by `python benchmarks/planner/planner.py --fit`. benchmarks/results/planner.md explains each constant.
Do not edit by hand.
An architecture or engine without published runs keeps the value that the fit starts from."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs",
        default=Path(__file__).with_name("published_runs.csv"),
        help="a CSV with the committed table's columns",
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants to --runs and write the shipped card"
    )
    parser.add_argument(
        "--cross-validate", action="store_true", help="fit to --runs and predict each family without it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The planner against the committed table of published runs: the score that the shipped constants reach."""

import json
from collections import Counter

import numpy as np
import planner
import planner_errors
import planner_fit
import planner_lumi
import planner_range
import pytest
from planner_questions import GROUPED_140B, Question
from published_runs import read_published_runs

from kielo.plan.efficiency import fitted
from kielo.plan.step_seconds import step_seconds
from kielo.recipe.errors import KieloError
from tests.house.checks import ROOT

TABLE = ROOT / "benchmarks" / "planner" / "published_runs.csv"


@pytest.fixture(scope="module")
def runs():
    return read_published_runs(TABLE)


@pytest.fixture(scope="module")
def scored(runs):
    return [run for run in planner.one_time_each(runs) if planner.is_scored(run)]


def test_step_times_are_within_the_bars(scored):
    """Families of dense runs with a complete layout:
    median error ≤ 4.7 %, 90th percentile ≤ 8 % (4.2 and 7.1).
    """
    summary = planner.score(scored, fitted()[0])["summary"]
    assert summary["rows"] > 1000 and summary["families"] >= 35
    assert summary["median_absolute_error"] <= 0.047 and summary["p90_absolute_error"] <= 0.08


def test_the_committed_score_is_that_of_the_committed_constants(runs, scored):
    """Of each family, mixture, sweep and figure of memory, to the last digit; and families left out are
    within the issue's bars, 5 and 10 %, as it was written.
    """
    written = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text())
    efficiency = fitted()[0]
    now = planner.score(scored, efficiency)
    apart = planner.apart(planner.one_time_each(runs), efficiency)
    now |= {"apart": {name: planner.summary_of(rows) for name, rows in apart.items()}}
    now |= {"sweeps": planner.sweeps(scored, efficiency), "memory": planner.memory(runs)}
    fitted_seconds = step_seconds(planner.columns(scored)[0], efficiency).total
    now |= {"calculon": planner.calculon(scored, fitted_seconds, None)}
    written["calculon"].pop("left_out")
    for name in ("summary", "families", "apart", "sweeps", "memory", "calculon"):
        assert dict(_figures(now[name])) == pytest.approx(dict(_figures(written[name])), rel=1e-9), name
    left_out = written["cross_validation"]["summary"]
    assert left_out["rows"] == now["summary"]["rows"]
    assert left_out["median_absolute_error"] <= 0.05 and left_out["p90_absolute_error"] <= 0.10


def _figures(found, place=()):
    """Yields (place, number) of each number in nested dictionaries and lists."""
    if isinstance(found, int | float):
        yield place, found
        return
    items = found.items() if isinstance(found, dict) else enumerate(found if isinstance(found, list) else ())
    for key, value in items:
        yield from _figures(value, (*place, key))


def test_the_shipped_constants_are_where_the_fit_ends(scored):
    """A fit from there, drawn to the same priors, moves none by 1.5 %, and
    no prediction by 0.1 %.
    """
    work, seconds, families = planner.columns([run for run in scored if planner.is_fitted(run)])
    found = planner_fit.fit(work, seconds, families, fitted()[0])
    for name, values in fitted()[0].values.items():
        assert found.values[name] == pytest.approx(values, rel=0.015), name
    now, then = (step_seconds(work, constants).total for constants in (found, fitted()[0]))
    assert now == pytest.approx(then, rel=1e-3)


def test_a_range_holds_what_it_says(scored):
    """80 % of rows of families left out, counted here: quantiles of the other families' errors, each family
    with the fourth root of its rows. The committed errors are of these rows.
    """
    (errors,) = json.loads((ROOT / "benchmarks" / "results" / "planner_left_out.json").read_text()).values()
    counts = Counter(run.family for run in scored)
    kinds = [Counter({family: len(rows) for family, rows in kind.items()}) for kind in errors.values()]
    assert sum(kinds, Counter()) == counts
    fused, inside = errors["fused"], []
    for family, mine in fused.items():
        others = sorted(
            (error, len(rows) ** -0.75) for name, rows in fused.items() if name != family for error in rows
        )
        weights = np.array([weight for _, weight in others])
        reached = (np.cumsum(weights) - weights / 2) / weights.sum()
        low, high = np.interp([0.1, 0.9], reached, [error for error, _ in others])
        inside += [low <= error <= high for error in mine]
    assert len(inside) > 500 and 0.78 <= np.mean(inside) <= 0.86
    assert planner_range.range_of(fused) == pytest.approx(fitted()[1], abs=1e-4)
    # Broken on purpose: errors twice as large are inside less often.
    twice = {"one": [2 * error for error in fused.pop("aa-13B")]} | fused
    assert planner_range.coverage(twice, 0.8)["rows"] < np.mean(inside)


def test_lumi_is_planned_without_bias():
    """Median signed errors over families within 3 %: of families left out, as committed, and of runs that no
    fit has seen, of which 256 nodes waited for a slow rank.
    """
    errors = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text())["lumi"]
    assert abs(planner_lumi.bias(errors["left out"])) <= 0.03
    now = planner_lumi.signed_errors([], np.array([]), fitted()[0])["never fitted"]
    assert now == {name: pytest.approx(rows) for name, rows in errors["never fitted"].items()}
    assert abs(planner_lumi.bias(now)) <= 0.03 and now["frontier-torchtitan"].keys() == {
        "frontier-torchtitan-8b"
    }
    rows = [error for family in now.values() for error in family.values()]
    assert sum(abs(error) <= 0.04 for error in rows) >= len(rows) - 1


@pytest.mark.full
def test_families_left_out_are_within_the_bars(scored):
    """Each family by constants fitted without it: median ≤ 5 %, 90th percentile ≤ 10 %. The fit of all ends
    near the shipped constants.
    """
    work, seconds, families = planner.columns([run for run in scored if planner.is_fitted(run)])
    constants = planner_fit.fit(work, seconds, families)
    for name, values in fitted()[0].values.items():
        assert constants.values[name] == pytest.approx(values, rel=0.015), name
    left_out = planner.left_out_seconds(scored, constants)
    by_kernel = planner_range.errors_by_kernel(scored, left_out)
    summary = planner.cross_validation(scored, left_out, by_kernel)["summary"]
    assert summary["median_absolute_error"] <= 0.05 and summary["p90_absolute_error"] <= 0.10


def test_errors_are_told_by_what_runs_share(scored):
    """Members of each kind are all rows, and the worst rows are those furthest off; both of made errors."""
    seconds = np.array([run.seconds for run in scored])
    is_h100 = np.array([run.card.name == "h100_80" for run in scored])
    predicted = seconds * np.where(is_h100, 1.2, 0.95)
    predicted[3] = 3 * seconds[3]
    by_kind = planner_errors.errors_by_kind(scored, seconds, predicted)
    assert all(sum(row["rows"] for row in kind.values()) == len(scored) for kind in by_kind.values())
    assert by_kind["device"]["h100_80"]["signed"] == pytest.approx(0.2)
    assert planner_errors.worst_runs(scored, seconds, predicted, 5)[0]["run"] == scored[3].name.split("#")[0]


def test_reports_disagree_about_one_configuration(scored):
    """The floor of any planner's error: pairs of reports differ by 4 % at the median and 9 % at the 90th
    percentile (of the logarithm); a report that repeats itself does not.
    """
    found = planner_errors.disagreement(scored)["of other families"]
    assert found["pairs"] >= 50 and 0.02 < found["median"] < 0.08 and 0.05 < found["p90"] < 0.15
    twice = planner_errors.disagreement([scored[0], scored[0]])
    assert twice["of one family"] == {"pairs": 1, "median": 0.0, "p90": 0.0}


def test_a_planner_that_knows_no_bubbles_is_caught(scored):
    """Broken on purpose: with every pipeline's stages run at once, families with pipelines are off by more
    than the bar.
    """
    deep = [run for run in scored if run.columns["pipeline"] >= 8 and run.columns["micro_batches"] <= 16]
    blind = [run.__class__(**{**vars(run), "columns": run.columns | {"chunks": 10_000}}) for run in deep]
    score, efficiency = planner.score, fitted()[0]
    errors = [score(some, efficiency)["summary"]["median_absolute_error"] for some in (deep, blind)]
    assert errors[0] < 0.2 < errors[1]


def test_memory_is_told_right(runs):
    """Predictions are right for 95 % of the rows that fit or do not;
    static bytes are within 1 %, peaks within 12 % at the median.
    """
    memory = planner.memory(runs)
    assert memory["verdicts"] > 800 and memory["verdicts_right"] >= 0.95
    assert len(memory["static"]) >= 3 and all(abs(row["error"]) < 0.01 for row in memory["static"])
    assert memory["peak"]["median_absolute_error"] < 0.12


def test_layouts_of_one_model_are_ranked(scored):
    """Kendall's τ ≥ 0.75 and a choice that loses at most 5 %;
    of vtrain-39.1, the rows that nothing disturbed.
    """
    sweeps = planner.sweeps(scored, fitted()[0])
    assert all(sweeps[name]["kendall_tau"] >= 0.75 for name in ("vtrain-3.6", "aa-13B", "aa-65B", "bs-a100"))
    assert all(
        sweeps[name]["regret"] <= 0.05
        for name in ("vtrain-3.6", "vtrain-39.1", "aa-13B", "aa-65B", "bs-a100")
    )
    calm = [run for run in scored if run.family == "vtrain-39.1" and run.columns["tensor"] == 8]
    assert len(calm) > 25 and planner.sweeps(calm, fitted()[0])["vtrain-39.1"]["kendall_tau"] >= 0.75


def test_as_near_as_calculon(scored):
    """The mean error on the eight runs that Calculon (Isaev et al.
    2023) was compared with is as small: 3.65 %.
    """
    found = planner.calculon(scored, step_seconds(planner.columns(scored)[0], fitted()[0]).total, None)
    assert len(found["fitted"]["errors"]) == 8 and found["fitted"]["mean_absolute_error"] <= 0.0365


@pytest.mark.parametrize("chunks", [1, 11])
def test_the_140b_on_lumi_would_print_what_was_printed(chunks):
    """161.2 TFLOP/s a module of two devices, by the formula of the program that printed them: within 5 %."""
    found = Question(GROUPED_140B, "lumi_g", 384, 8, 8, 768, "megatron_deepspeed", chunks).answer()
    assert 2 * found["printed"] == pytest.approx(161.2, rel=0.05)
    assert found["printed"] / found["tflops"] == pytest.approx(12 / (2 + 2 * 8 / 96 + 8), rel=0.03)


def test_mixtures_of_experts_are_predicted(runs):
    """Constants that no mixture took part in give a median error of families below 15 %,
    over a hundred runs and more (12.7).
    """
    timed = planner.one_time_each(runs)
    rows = planner.apart(timed, fitted()[0])["mixtures of experts"]
    summary = planner.summary_of(rows)
    assert summary["rows"] > 100 and summary["median_absolute_error"] < 0.15


def test_the_shipped_interval_holds_most_runs(scored):
    """An 80 % interval is made for runs that the fit has not seen;
    of those it has seen it holds at least as many.
    """
    efficiency, figures = fitted()
    rows = planner.score(scored, efficiency)["rows"]
    logs = np.log([row["published"] / row["predicted"] for row in rows])
    assert ((figures["lower"] <= logs) & (logs <= figures["upper"])).mean() > 0.75


def test_other_tables_are_read_or_refused(tmp_path):
    """A file without a column is refused by the column's name; one that is not there by its path."""
    path = tmp_path / "runs.csv"
    path.write_text("id,family\nx,y\n")
    with pytest.raises(KieloError, match="has no column"):
        read_published_runs(path)
    with pytest.raises(KieloError, match="nothing.csv: cannot be read"):
        read_published_runs(tmp_path / "nothing.csv")

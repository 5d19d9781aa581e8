"""`kielo launch` of a recipe of several languages or variants: a chain of jobs for each run, and one table.

A run that cannot be planned, is not ready or is refused does not stop the others. A run that has trained, or
whose jobs are in the queue, stays as it is, so the same command launches the missing runs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kielo.artifact.launch_files import Forecast
from kielo.artifact.manifest import read_manifest
from kielo.artifact.scores import STAGE_FOLDERS
from kielo.cli.plan_tables import safe_and_planned
from kielo.cli.run_languages import chosen_in, kind_of
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.launch.job_plan import MOST_ASKED_JOBS, JobPlan, Wishes, check_job_count, check_ready, plan_jobs
from kielo.launch.launch_folder import (
    one_launch_at_a_time,
    refuse_second_chain,
    refuse_without_scheduler,
    submit,
    write_launch,
)
from kielo.launch.start_times import Starts, starts_of
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder

_ALONE = ("corpus", "pack", "ladder", "evaluate", "watch")  # flags of one run


@dataclass
class _Launched:
    """The launch of one run. `said`: why it has no jobs."""

    plan: JobPlan | None = None
    folder: Path | None = None
    ids: Sequence[str] = ()
    state: str = ""
    said: str = ""


def launch_languages(
    options: argparse.Namespace, sets: Sequence[str], choices: Sequence[str], wishes: Wishes
) -> int:
    """Launch the run of each choice (`recipe_choices`). Return 1 if one failed, else 0.

    Raises KieloError if all fail for the same reason.
    """
    for flag in _ALONE:
        if getattr(options, flag) not in (None, False):
            several = f"{len(choices)} {kind_of(choices)}"
            raise KieloError(f"--{flag}: is for a single run of {several}. Fix: --set {choices[0]}")
    runs = {choice: _planned(options.recipe, [*sets, choice], wishes) for choice in choices}
    reasons = {run.said for run in runs.values()}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise KieloError(reason)
    plans = [run.plan for run in runs.values() if run.plan is not None]
    if plans and not options.dry_run:
        refuse_without_scheduler(plans[0])
    _share_queue(runs, options.jobs)
    for run in runs.values():
        if run.plan is not None and not run.said:
            _launch(run, run.plan, options.dry_run)
    _print(runs, options.json, _starts(runs) if options.dry_run else {})
    return int(any(run.state in ("failed", "refused") for run in runs.values()))


def _planned(reference: str, sets: Sequence[str], wishes: Wishes) -> _Launched:
    try:
        return _Launched(plan_jobs(read_recipe(reference, sets).recipe, wishes))
    except KieloError as error:
        return _Launched(state="failed", said=str(error))


def _share_queue(runs: dict[str, _Launched], asked: int | None) -> None:
    """Shorten the chains so that all fit what the queue takes of one person. Runs beyond that wait."""
    chosen = [run for run in runs.values() if run.plan is not None and not _has_trained(run)]
    if not chosen:
        return
    first = chosen[0].plan
    assert first is not None
    most = min(first.partition.max_jobs or MOST_ASKED_JOBS, MOST_ASKED_JOBS)
    if asked is not None:
        check_job_count("--jobs", asked * len(chosen), first.partition, first.site)
    each = max(1, most // len(chosen))
    for number, run in enumerate(chosen):
        assert run.plan is not None
        run.plan = replace(run.plan, chain_length=min(run.plan.chain_length, each))
        if number >= most:
            run.state, run.said = "later", f"the queue takes {most} jobs of a person"


def _has_trained(run: _Launched) -> bool:
    assert run.plan is not None
    if read_manifest(run_folder(run.plan.recipe) / STAGE_FOLDERS["train"]) is None:
        return False
    run.state, run.said = "trained", "trained already"
    return True


def _launch(run: _Launched, plan: JobPlan, is_dry: bool) -> None:
    try:
        if is_dry:
            run.folder, run.state = write_launch(plan), "written"
            return
        with one_launch_at_a_time(plan):
            if _is_queued(run, plan):
                return
            check_ready(plan)
            run.folder = write_launch(plan)
            run.ids, run.said = submit(run.folder, plan.site.scheduler)
            run.state = "submitted"
    except KieloError as error:
        run.state, run.said = "refused" if run.folder else "failed", str(error)


def _is_queued(run: _Launched, plan: JobPlan) -> bool:
    try:
        refuse_second_chain(plan)
    except KieloError as error:
        run.state, run.said = "queued", str(error).partition(" Fix: ")[0]
        return True
    return False


def _starts(runs: dict[str, _Launched]) -> dict[int, Starts]:
    """Ask for the start of the first run on each number of nodes, until there is no answer."""
    found: dict[int, Starts] = {}
    for run in runs.values():
        plan = run.plan
        if plan is not None and run.state == "written" and plan.nodes not in found:
            found[plan.nodes] = starts_of(plan, ())
            if found[plan.nodes].no_answer:
                break
    return found


def _print(runs: dict[str, _Launched], is_json: bool, starts: dict[int, Starts]) -> None:
    """Print a table of all runs, the hours of all together, starts by nodes, and the reasons by run."""
    if is_json:
        content = {chosen_in(choice): _content(run) for choice, run in runs.items()}
        of_nodes = {"starts": {nodes: asdict(each) for nodes, each in starts.items()}} if starts else {}
        return print_json({kind_of(runs): content} | of_nodes)
    print_table(
        (
            kind_of(runs).removesuffix("s"),
            "launch",
            "jobs",
            "nodes",
            "hours",
            "safe hours",
            "device-hours",
            "layout",
        ),
        [_row(chosen_in(choice), run) for choice, run in runs.items()],
    )
    plans = [run.plan for run in runs.values() if run.plan is not None]
    forecasts = [plan.forecast for plan in plans if plan.forecast is not None]
    if forecasts:
        billed = sum(of.billed or 0 for of in forecasts) or None
        safe, total = sum(map(safe_hours, forecasts)), sum(of.device_hours for of in forecasts)
        told = safe_and_planned(safe, total, billed, forecasts[0].billing_unit)
        print_text(f"all {len(forecasts)} together: {told}")
    for nodes, each in starts.items():
        print_text(f"start of a job on {nodes} nodes: {each.in_words()}")
    folders = [run.folder for run in runs.values() if run.folder is not None]
    if folders:
        more = f" and {len(folders) - 1} more, each in its run's folder" if len(folders) > 1 else ""
        print_text(f"wrote {folders[0]}{more}")
    for choice, run in runs.items():
        if run.said:
            print_text(f"{chosen_in(choice)}: {run.said}")
    if any(run.state not in ("submitted", "written", "trained", "queued") for run in runs.values()):
        print_text("The same command launches the missing runs.")


def safe_hours(of: Forecast) -> float:
    return of.device_hours if of.safe_device_hours is None else of.safe_device_hours


def _row(name: str, run: _Launched) -> tuple[object, ...]:
    if run.plan is None:
        return (name, run.state, "", "", "", "", "", "")
    of, jobs = run.plan.forecast, ", ".join(run.ids) or run.plan.chain_length
    if of is None:
        return (name, run.state, jobs, run.plan.nodes, "", "", "", "")
    return (
        name,
        run.state,
        jobs,
        run.plan.nodes,
        f"{of.wall_hours:,.1f}",
        f"{safe_hours(of):,.0f}",
        f"{of.device_hours:,.0f}",
        of.layout,
    )


def _content(run: _Launched) -> dict[str, object]:
    of = run.plan.forecast if run.plan is not None else None
    return {
        "state": run.state,
        "said": run.said or None,
        "folder": None if run.folder is None else str(run.folder),
        "submitted": list(run.ids),
        "jobs": None if run.plan is None else run.plan.chain_length,
        "nodes": None if run.plan is None else run.plan.nodes,
        "forecast": None if of is None else of.content(),
    }

"""`kielo launch`: a recipe on a cluster → a folder with the scripts of a chain of jobs, submitted."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from kielo.artifact.launch_files import Work
from kielo.cli.flags import takes
from kielo.cli.launch_languages import launch_languages, safe_hours
from kielo.cli.plan_tables import safe_and_planned
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.launch.bash import start_of
from kielo.launch.evaluation_jobs import check_evaluation, plan_evaluation
from kielo.launch.job_paths import job_paths
from kielo.launch.job_plan import JobPlan, Wishes, check_job_count, check_ready, network_needed, plan_jobs
from kielo.launch.ladder import NodesPlan, in_folder_of, plan_ladder, waiting_job, write_ladder
from kielo.launch.launch_folder import (
    launch_of,
    one_launch_at_a_time,
    refuse_second_chain,
    refuse_without_scheduler,
    submit,
    write_launch,
    write_share_jobs,
)
from kielo.launch.schedulers import clock
from kielo.launch.share_jobs import check_shareable, plan_share_jobs
from kielo.launch.start_times import Starts, starts_of
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, recipe_choices
from kielo.recipe.sections import Recipe


@takes("""
    $ kielo launch poro_34b --cluster lumi_g --nodes 64 --account project_462000000 --dry-run
    $ kielo launch my_recipe.toml --account project_462000000 --hours 24 --jobs 5
    $ kielo launch my_recipe.toml --account project_462000000 --ladder 1,2,4,8
    $ kielo launch my_recipe.toml --account project_462000000 --corpus 16
    $ kielo launch my_recipe.toml --account project_462000000 --pack 16
    $ kielo launch my_recipe.toml --account project_462000000 --evaluate --nodes 1
    $ kielo launch seventy_five_berts --account project_462000000 --dry-run
    RECIPE
    --cluster CLUSTER      cluster card (see `kielo clusters`), or your own file; default: the recipe's
    --nodes N:int          number of nodes; default: the first of the recipe's nodes
    --ladder N,N           measure ten steps of the best layouts on each of these numbers of nodes: 1,2,4,8
    --corpus N:count       clean the text in N jobs of one node each; --jobs: arrays of them in a chain
    --pack N:count         pack the text in N jobs of one node each, and join it in another job; train nothing
    --evaluate             score the newest checkpoint, in the layout of the recipe; train nothing
    --watch                with --evaluate: score each new checkpoint beside the training
    --account PROJECT      project that the site bills
    --dry-run              write the folder, and submit nothing
    --partition NAME       queue (or its QOS); default: the site's usual queue
    --hours H:float        time of a job; default: the queue's longest
    --jobs N:count         jobs in the chain; default: a fifth more than forecast, at most 20
    --layout LAYOUT        (part of) a layout's name by `kielo plan`; default: the recipe's
    --spares N:int=0       additional nodes, to replace nodes that are left out
    --grace SECONDS:count  time to save before the end of a job; default: by the forecast
    --torchrun             start one torchrun a node, in place of one task a device
    --preflight            check the nodes first in each job (see `kielo preflight`)
    --container IMAGE      container image with torch, or none; default: the site's
    --venv DIR             virtual environment with Kielo, inside the container if there is one
    --site DIR             folder with the image and environment of `kielo site`; default: sites/CLUSTER
    --json                 print the launch as JSON
""")
def launch(options: argparse.Namespace) -> int:
    sets = [*options.sets, *([f"cluster={options.cluster}"] if options.cluster else [])]
    wishes = Wishes(
        nodes=options.nodes,
        account=options.account,
        partition=options.partition,
        hours=options.hours,
        jobs=options.jobs,
        layout=options.layout,
        grace_seconds=options.grace,
        spares=options.spares,
        is_torchrun=options.torchrun,
        is_preflight=options.preflight,
        image=options.container,
        venv=options.venv,
        site=options.site,
    )
    if choices := recipe_choices(options.recipe, sets):
        return launch_languages(options, sets, choices, wishes)
    recipe = read_recipe(options.recipe, sets).recipe
    if options.corpus is not None or options.pack is not None:
        return _share(recipe, wishes, options)
    if options.ladder is not None:
        return _ladder(recipe, wishes, options)
    if options.evaluate:
        return _evaluate(recipe, wishes, options)
    if options.watch:
        raise KieloError("--watch: scores checkpoints. Fix: --evaluate --watch")
    plan = plan_jobs(recipe, wishes)

    def check() -> None:
        refuse_second_chain(plan)
        check_ready(plan)

    folder, ids, answer = _written(plan, options.dry_run, check, lambda: write_launch(plan))
    paths, starts = _paths([plan]), starts_of(plan, recipe.nodes) if options.dry_run else None
    if options.json:
        outcome = {"folder": str(folder), "submitted": ids, "answer": answer, "paths": paths}
        print_json(launch_of(plan).content() | outcome | ({"starts": asdict(starts)} if starts else {}))
        return 0
    print_table(("", ""), _rows(plan) if starts is None else [*_rows(plan), ("start", starts.in_words())])
    if starts is not None:
        _show_starts(starts)
        _show_paths(paths)
    print_text(f"wrote {folder}")
    if said := network_needed(plan):
        print_text(f"note: {said}")
    _report_jobs(folder, ids, answer, f"on a login node of {plan.site.name}")
    return 0


def _share(recipe: Recipe, wishes: Wishes, options: argparse.Namespace) -> int:
    """Launch jobs that share the corpus or the pack stage."""
    stage: Work = "pack" if options.corpus is None else "corpus"
    shares = getattr(options, stage)
    flag, others = f"--{stage}", ("jobs",) if stage == "pack" else ("pack",)
    not_shared = ("nodes", "layout", *others, "grace", "ladder", "spares", "torchrun", "preflight")
    for other in (*not_shared, "evaluate", "watch"):
        if getattr(options, other):
            why = f"jobs that {'pack' if stage == 'pack' else 'clean text'} have one node each"
            raise KieloError(f"--{other}: {why}. Fix: leave it out beside {flag}")
    if not recipe.corpus.of_raw_text.sources:
        raise KieloError(f"{flag}: all sources are ready tokens, which are read in place. Fix: leave it out")
    plan = plan_share_jobs(recipe, replace(wishes, nodes=1), stage)
    jobs = plan.chain_length * shares + 1
    check_job_count(flag, jobs, plan.partition, plan.site, more=1)
    folder, ids, answer = _written(
        plan, options.dry_run, lambda: check_shareable(plan, shares), lambda: write_share_jobs(plan, shares)
    )
    paths = _paths([plan])
    if options.json:
        outcome = {"folder": str(folder), "shares": shares, "submitted": ids, "answer": answer}
        print_json(outcome | {"paths": paths})
        return 0
    limits = f"{plan.recipe.corpus.workers} workers, at most {clock(plan.wall_seconds)}"
    rows = [
        ("text", f"of {recipe.name}, in {shares} shares and a join"),
        ("jobs", f"a node of {plan.site.name} each, {limits} in {plan.partition.label}"),
        *_billed(plan, jobs),
    ]
    print_table(("", ""), rows)
    if options.dry_run:
        _show_paths(paths)
    print_text(f"wrote {folder}; kielo status {folder} counts the finished parts")
    _report_jobs(folder, ids, answer, "to submit")
    return 0


def _evaluate(recipe: Recipe, wishes: Wishes, options: argparse.Namespace) -> int:
    plan = plan_evaluation(recipe, wishes, "watch" if options.watch else "evaluate")
    folder, ids, answer = _written(
        plan, options.dry_run, lambda: check_evaluation(plan), lambda: write_launch(plan)
    )
    paths = _paths([plan])
    if options.json:
        print_json(
            launch_of(plan).content()
            | {"folder": str(folder), "submitted": ids, "answer": answer, "paths": paths}
        )
        return 0
    subject = "each new checkpoint" if options.watch else "the newest checkpoint"
    tasks = ", ".join(recipe.evaluate.tasks)
    rows = [
        ("scores", f"{subject} of {recipe.name}" + (f", with the tasks {tasks}" if tasks else "")),
        ("jobs", f"a chain of {plan.chain_length} on {plan.nodes} nodes of {plan.site.name}, {plan.devices} "
                 f"ranks, at most {clock(plan.wall_seconds)} each in {plan.partition.label}"),
    ]  # fmt: skip
    print_table(("", ""), rows)
    if options.dry_run:
        _show_paths(paths)
    print_text(f"wrote {folder}; kielo status {folder} says what is scored")
    _report_jobs(folder, ids, answer, f"on a login node of {plan.site.name}")
    return 0


def _written(
    plan: JobPlan, is_dry: bool, check: Callable[[], None], write: Callable[[], Path]
) -> tuple[Path, Sequence[str], str]:
    """Write the folder of the jobs, and submit them unless `is_dry`. Return it, their ids and the answer."""
    if is_dry:
        return write(), (), ""
    refuse_without_scheduler(plan)
    with one_launch_at_a_time(plan):
        check()
        folder = write()
        return folder, *submit(folder, plan.site.scheduler)


def _billed(plan: JobPlan, jobs: int) -> list[tuple[str, str]]:
    """Return a row on the bill of jobs that share a stage, if the card has its rate, and on devices."""
    rate, rows = plan.site.billed_per_node_hour, []
    if rate is not None:
        most = jobs * plan.wall_seconds / 3600 * rate
        rows = [("billed", f"at most {most:,.0f} {plan.site.billing_unit}")]
    cpu = plan.jobs_of_site.cpu
    if cpu is None:
        rows.append(("nodes", f"with devices: the card of {plan.site.name} has no [jobs.cpu]"))
    elif plan.partition not in cpu.partitions:
        rows.append(("nodes", f"with devices: {plan.partition.label} has no other nodes"))
    return rows


def _report_jobs(folder: Path, ids: Sequence[str], answer: str, where: str) -> None:
    if ids:
        print_text(f"submitted {', '.join(ids)}" + (f"; {answer}" if answer else ""))
    else:
        print_text(f"nothing is submitted; {where}: {start_of(folder / 'submit.sh')}")


def _ladder(recipe: Recipe, wishes: Wishes, options: argparse.Namespace) -> int:
    """Write and submit a job for each number of nodes. A refused job does not stop the others."""
    if options.evaluate or options.watch:
        raise KieloError("--evaluate: a ladder only trains. Fix: leave it out beside --ladder")
    for flag in ("nodes", "layout", "jobs", "grace"):
        if getattr(options, flag) is not None:
            raise KieloError(f"--{flag}: a ladder chooses it itself. Fix: leave it out beside --ladder")
    ladder = plan_ladder(recipe, wishes, _numbers(options.ladder))
    if not options.dry_run:
        refuse_without_scheduler(ladder[0].job)
        for rung in (rung for on_nodes in ladder for rung in on_nodes.to_run):
            check_ready(in_folder_of(rung, recipe))
    with nullcontext() if options.dry_run else one_launch_at_a_time(ladder[0].job):
        folder, jobs = write_ladder(recipe, ladder)
        rows, refusals = _submitted(ladder, folder, jobs, options.dry_run)
    paths = _paths([rung.plan for on_nodes in ladder for rung in on_nodes.to_run])
    if options.json:
        titles = ("nodes", "layouts", "hours", "job")
        jobs_told = [dict(zip(titles, row, strict=True)) for row in rows]
        print_json({"folder": str(folder), "jobs": jobs_told, "paths": paths})
    else:
        print_table(("nodes", "layouts", "hours at most", ""), rows)
        if options.dry_run:
            _show_paths(paths)
        print_text(f"wrote {folder}; kielo status {folder} shows the measurements")
    if refusals:
        raise KieloError("; ".join(refusals))
    return 0


def _submitted(
    ladder: Sequence[NodesPlan], folder: Path, jobs: dict[int, Path], is_dry: bool
) -> tuple[list[tuple], list[str]]:
    """Submit the jobs (nodes → folder). Return a row for each number of nodes, and the refusals."""
    rows, refusals = [], []
    for on_nodes in ladder:
        layouts = ", ".join(rung.layout for rung in on_nodes.to_run) or "all measured"
        if on_nodes.nodes not in jobs:
            of_nodes, scheduler = folder / f"{on_nodes.nodes}_nodes", on_nodes.job.site.scheduler
            waiting = on_nodes.to_run and waiting_job(of_nodes, scheduler)
            rows.append((on_nodes.nodes, layouts, "", f"job {waiting} has not ended" if waiting else ""))
            continue
        said = "not submitted"
        if not is_dry:
            try:
                ids, answer = submit(jobs[on_nodes.nodes], on_nodes.job.site.scheduler)
                said = f"job {', '.join(ids)}" + (f"; {answer}" if answer else "")
            except KieloError as error:
                refusals.append(str(error))
                said = "refused"
        rows.append((on_nodes.nodes, layouts, f"{on_nodes.job.wall_seconds / 3600:.1f}", said))
    return rows, refusals


def _paths(plans: Sequence[JobPlan]) -> list[dict[str, str]]:
    """Return the paths that the jobs read and write, each with its use and reason."""
    return [asdict(path) for path in dict.fromkeys(path for plan in plans for path in job_paths(plan))]


def _show_starts(starts: Starts) -> None:
    """Print a table of queues and sizes, if there are several."""
    if len(starts.known) > 1 and any(one.at for one in starts.known):
        rows = [
            (one.partition, one.nodes, f"{one.hours:g}", one.at.replace("T", " ") or one.why)
            for one in starts.known
        ]
        print_table(("queue", "nodes", "hours", "a job would start"), rows)


def _show_paths(paths: Sequence[dict[str, str]]) -> None:
    print_table(("use", "path", "for"), [(one["use"], one["path"], one["reason"]) for one in paths])


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise KieloError(f"--ladder {text}: not understood. Fix: numbers of nodes such as 1,2,4,8")
    return sorted({int(part) for part in parts})


def _rows(plan: JobPlan) -> list[tuple[str, str]]:
    nodes = f"{plan.nodes} nodes" + (f" and {plan.wishes.spares} spare nodes" if plan.wishes.spares else "")
    limit = f"at most {clock(plan.wall_seconds)} each in {plan.partition.label}"
    ending = f"each saves and stops {plan.grace_seconds} s before its end"
    rows = [
        ("run", f"{plan.recipe.name}, on {nodes} of {plan.site.name}, {plan.devices} ranks"),
        ("jobs", f"a chain of {plan.chain_length}, {limit}; {ending}"),
    ]
    if plan.forecast is None:
        return [*rows, ("forecast", f"none: {plan.no_forecast}")]
    of = plan.forecast
    speed = f"{of.tokens_per_second:,.0f} tokens/s"
    hours = safe_and_planned(safe_hours(of), of.device_hours, of.billed, of.billing_unit)
    return [
        *rows,
        ("layout", f"{of.layout}, {of.peak_gigabytes:.1f} of {of.usable_gigabytes:.1f} GB a device"),
        (
            "forecast",
            f"{speed}; {of.wall_hours / 24:,.1f} days in {of.jobs} jobs, {hours}",
        ),
    ]

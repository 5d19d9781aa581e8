"""Jobs that evaluate on a cluster: a recipe and flags → their plan, and their progress.

RUN/launch/evaluate_0001 has jobs that score the newest checkpoint, RUN/launch/watch_0001 jobs that score each
new checkpoint beside the training. Both are chains: what a job has scored stays, and the next job continues.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from kielo.artifact.checkpoint_folder import newest_written
from kielo.artifact.launch_files import Launch, Work
from kielo.artifact.manifest import hash_manifest, read_manifest
from kielo.artifact.prefetched import VARIABLE
from kielo.artifact.score_history import read_history
from kielo.artifact.scores import Scores
from kielo.artifact.stage_json import read_json, read_stage_json
from kielo.artifact.task_result import TASKS_FOLDER, TaskResult
from kielo.evaluate.tasks_data import refuse_without_harness
from kielo.launch.decide import lines_of
from kielo.launch.forecast import planned_run
from kielo.launch.job_plan import (
    JobPlan,
    Wishes,
    check_environment,
    check_job_count,
    check_request,
    made_for,
)
from kielo.launch.launch_folder import LAUNCH_FOLDER, card_file
from kielo.launch.prefetch import missing_tasks
from kielo.launch.schedulers import job_ids, states
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve_to_score
from kielo.resolve.software import planned

_GRACE_SECONDS = 60  # what was scored is written already
_USUAL_JOBS = 3  # jobs of a chain; a job that finds all scored cancels the others


def plan_evaluation(recipe: Recipe, wishes: Wishes, work: Work) -> JobPlan:
    """Check the wishes against the recipe's cluster. The model is scored in the layout of the recipe.

    A layout that fits the scoring can be too small for the training, so no plan is asked if it fits.
    """
    site, of_site, partition, nodes, hours = check_request(recipe, wishes)
    site_folder, made = made_for(wishes, site)
    recipe = recipe.model_copy(update={"nodes": (nodes,)})
    if wishes.layout is not None:
        recipe, *_ = planned_run(recipe, nodes, wishes.layout)
    jobs = wishes.jobs or min(_USUAL_JOBS, partition.max_jobs or _USUAL_JOBS)
    check_job_count("--jobs", jobs, partition, site)
    place = recipe, site, of_site, partition, wishes, nodes
    wall, grace = round(hours * 3600), wishes.grace_seconds or _GRACE_SECONDS
    if wall <= 2 * grace:
        raise KieloError(f"--hours {hours:g}: a job stops {grace} s before its end. Fix: --hours 1")
    plan = JobPlan(*place, wall, grace, 0, jobs, None, "the jobs evaluate", site_folder, made)
    return replace(plan, work=work)


def check_evaluation(plan: JobPlan) -> None:
    """Refuse jobs that would end at once, and a second chain of the same work beside queued jobs."""
    run = run_folder(plan.recipe)
    if not plan.site.internet_on_compute_nodes and (lacking := missing_tasks(plan.recipe)):
        raise KieloError(
            f"{plan.site.name}'s nodes reach no network, and not here yet: {', '.join(lacking)}. "
            f"Fix: kielo prefetch RECIPE --to DIR on a machine with a network, and {VARIABLE}=DIR here"
        )
    if read_manifest(run / "tokens") is None:
        raise KieloError(
            f"{run / 'tokens'}: not made yet, and has the held-out text. Fix: kielo run RECIPE --to pack"
        )
    if plan.work == "evaluate":
        if not newest_written(run / "train" / "checkpoints"):
            raise KieloError(f"{run}: no checkpoint yet. Fix: --watch, whose jobs wait for the first")
        for folder, jobs in _queued(plan, "[0-9]*"):
            raise KieloError(
                f"{folder}: its jobs train this run ({jobs}), and hold its lease. Fix: --watch, whose jobs "
                "score checkpoints beside the training"
            )
    for folder, jobs in _queued(plan, f"{plan.prefix}[0-9]*"):
        raise KieloError(
            f"{folder}: jobs of this work are in the queue already ({jobs}). Fix: kielo cancel {folder}"
        )
    card = accelerator(plan.site.accelerator)
    software = planned(cluster(plan.recipe.cluster))
    resolve_to_score(plan.recipe, run, plan.devices, card.device, card.name, software)  # as each rank does
    check_environment(plan)
    if plan.recipe.evaluate.tasks and not plan.image and not plan.venv:
        refuse_without_harness()


def _queued(plan: JobPlan, pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield the run's launches on this site that have jobs in the queue, and these jobs."""
    for folder in sorted((run_folder(plan.recipe).absolute() / LAUNCH_FOLDER).glob(pattern)):
        launch = read_json(folder, Launch)
        if launch is None or launch.cluster != card_file(plan):
            continue
        if found := states(launch.scheduler, job_ids(folder / "chain" / "jobs")):
            yield folder, ", ".join(f"{job} {state.split()[0]}" for job, state in found.items())


def scored_in_words(launch: Path, work: Work) -> str:
    """Return what the jobs of this launch have scored so far. They take older scores over at their end."""
    run = launch.parents[1]
    if work == "watch":
        rows = read_history(run)
        last = f", the last of step {rows[-1].step:,}" if rows else ""
        return f"{len(rows):,} scores of checkpoints{last}"
    checkpoint = newest_written(run / "train" / "checkpoints") or ""
    folders = sorted((run / TASKS_FOLDER / checkpoint).glob("[!.]*"))
    results = (
        read_stage_json(folder, TaskResult) for folder in folders if _is_of(launch, folder, checkpoint)
    )
    found = list(dict.fromkeys(result.task for result in results if result is not None))
    said = [f"of {checkpoint}, tasks {', '.join(found)}" if found else f"no task of {checkpoint} yet"]
    is_scored = _is_of(launch, run / "evaluate", checkpoint)
    if is_scored and (scores := read_stage_json(run / "evaluate", Scores)) is not None:
        said.append(f"all scored, bits per byte {scores.bits_per_byte.model:.3f}")
        said += [f"no score of {name}: {reason}" for name, reason in scores.unscored_tasks.items()]
    return "; ".join(said)


def _is_of(launch: Path, stage: Path, checkpoint: str) -> bool:
    """Return True if the stage scores this checkpoint, and is newer than the launch or what it ended with."""
    manifest, asked = read_manifest(stage), read_json(launch, Launch)
    if manifest is None or asked is None or not checkpoint:
        return False
    folder = launch.parents[1] / "train" / "checkpoints" / checkpoint
    if manifest.inputs.get("checkpoint") != hash_manifest(folder):
        return False
    written, launched = (datetime.fromisoformat(at) for at in (manifest.written_at, asked.created_at))
    return written >= launched or any(
        line.startswith("finished") for line in lines_of(launch / "chain" / "stopped")
    )

"""A ladder: a recipe and numbers of nodes → a few steps on each, of the best layouts, as jobs in a folder.

A rung is one layout on one number of nodes. Its recipe is the run's, with that layout, on the steps of the
phase with most tokens; earlier steps are skipped. It is a run of its own, which saves nothing and changes
nothing of the run. A person can read the folder, and start its jobs again:

RUN/launch/ladder_SITE
  ladder.json                 planned and measured (artifact/launch_files.py)
  NODES_nodes/LAYOUT/         a run folder of its own for each rung, with links to the run's text
    launch/0001/              the rung's launch, as launch_folder.py writes it
  NODES_nodes/job_0001/       the job that runs the rungs of this number of nodes, one after another
"""

import math
import os
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from kielo import __version__
from kielo.artifact.launch_files import Ladder, MeasuredSpeed, PlannedSpeed, ReferenceSpeed, Rung
from kielo.artifact.stage_json import read_json, write_json
from kielo.dataset.heldout_sets import EVALUATION_TEXTS
from kielo.launch.decide import attempts
from kielo.launch.job_plan import JobPlan, Wishes, check_job_count, check_request, longest_hours, plan_jobs
from kielo.launch.launch_folder import LAUNCH_FOLDER, recipe_text, write_ladder_job, write_launch
from kielo.launch.schedulers import job_ids, states
from kielo.launch.script import card_file
from kielo.launch.status import newest_launch
from kielo.plan.choose_layout import different_axes, nothing_runs
from kielo.plan.cost import START_SECONDS
from kielo.plan.layout_name import layout_name
from kielo.plan.measured_run import has_measured, measured_speed
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.cards import Cluster, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Identity, PlannedPhase, Resolved
from kielo.resolve.text import imagined_text

# Sections of the recipe that a measured rung must share with the present recipe. Its layout is in its name.
_SECTIONS = ("model", "train", "dataset", "phases", "tokenizer")
STEPS = 10  # of a rung; the first two are not counted (plan/measured_run.py)
_LAYOUTS = 3  # on each number of nodes
_SLOWER = 2.0  # times the slow end of the plan's interval that a rung's steps may take
_UNPLANNED_SECONDS = 3600  # of a rung without a plan
_SPARE_SECONDS = 300  # of a job beside its rungs: versions, leftovers, ends
_GRACE_SECONDS = 60  # nothing is saved
_TEXT_FOLDERS = ("tokens", "tokenizer", "packing", EVALUATION_TEXTS)
_OF_SIMILAR_SIZE = 1.25  # ratio of parameters up to which a reference is shown


def is_measured(plan: JobPlan) -> bool:
    """Return True for a measured rung. Raises KieloError if it was measured with another recipe."""
    folder = run_folder(plan.recipe)
    if not has_measured(folder):
        return False
    file = newest_launch(folder) / "recipe.toml"
    before, now = tomllib.loads(file.read_text(encoding="utf-8")), tomllib.loads(recipe_text(plan))
    for content in (before, now):
        for table in (content.get("train", {}), *content.get("phases", [])):
            table.pop("micro_batch_sequences", None)  # it is in the layout's name
    changed = [name for name in _SECTIONS if before.get(name) != now.get(name)]
    if changed:
        raise KieloError(
            f"{file}: was measured with another [{changed[0]}] than the recipe has now. Fix: move "
            f"{folder.parents[1]} away to measure again"
        )
    return True


def state(folder: Path) -> str:
    """Return "measured", "not run yet", or what became of the rung's last attempt."""
    if has_measured(folder):
        return "measured"
    found = []
    with suppress(KieloError):  # no launch yet
        found = attempts(newest_launch(folder) / "chain" / "attempts")
    if not found:
        return "not run yet"
    last = found[-1]
    if not last.outcome:
        return "runs, or was ended from outside"
    return f"{last.outcome}: {last.message}".rstrip(": ")


@dataclass(frozen=True)
class RungPlan:
    """One layout on one number of nodes. `planned` is None if no card has the devices' speed."""

    plan: JobPlan
    planned: PlannedLayout | None
    layout: str
    folder: Path


@dataclass(frozen=True)
class NodesPlan:
    """The rungs on one number of nodes. `job` runs `to_run`, which are not measured yet."""

    nodes: int
    rungs: list[RungPlan]
    to_run: list[RungPlan]
    job: JobPlan


def ladder_folder(recipe: Recipe) -> Path:
    return run_folder(recipe).absolute() / LAUNCH_FOLDER / f"ladder_{cluster(recipe.cluster).name}"


def plan_ladder(recipe: Recipe, wishes: Wishes, numbers: Sequence[int]) -> list[NodesPlan]:
    """Plan the best layouts on each number of nodes; without the devices' speed, the recipe's layout."""
    run = None
    with suppress(KieloError):  # plan_jobs raises it again, unless it is a card without speeds
        run = RunToPlan.of_recipe(recipe)
    return [_on_nodes(recipe, replace(wishes, nodes=number), run, len(numbers)) for number in numbers]


def _on_nodes(recipe: Recipe, wishes: Wishes, run: RunToPlan | None, jobs: int) -> NodesPlan:
    assert wishes.nodes is not None
    nodes, above = wishes.nodes, ladder_folder(recipe) / f"{wishes.nodes}_nodes"
    try:
        site, of_site, partition, *_ = check_request(recipe, wishes)  # before the search
    except KieloError as error:
        raise KieloError(str(error).replace("--nodes", "--ladder")) from None
    check_job_count("--ladder", jobs, partition, site)
    longest = longest_hours(partition, of_site, site)
    asked = replace(wishes, hours=wishes.hours if longest is None else None)  # --hours is of the ladder's job
    layouts = [None] if run is None else best_layouts(run, nodes)
    rungs = [_rung(plan_jobs(recipe, asked, one), one, above) for one in layouts]
    to_run = [rung for rung in rungs if not is_measured(rung.plan)]
    return NodesPlan(nodes, rungs, to_run, _job(recipe, wishes.hours, to_run or rungs))


def best_layouts(run: RunToPlan, nodes: int) -> list[PlannedLayout]:
    """Return the fastest layouts of the plan: different axes first, then further layouts of these axes."""
    found = search(run, [nodes])
    ranked = found.ranked.get(nodes, [])
    if not ranked:
        raise nothing_runs(run, [nodes], found)
    best = different_axes(ranked)[:_LAYOUTS]
    names = {one.name for one in best}
    return best + [one for one in ranked if one.name not in names][: _LAYOUTS - len(best)]


def _rung(plan: JobPlan, planned: PlannedLayout | None, above: Path) -> RungPlan:
    layout = planned.name if planned else _own_name(plan)
    folder = above / layout.replace("/", "_")
    seconds = _UNPLANNED_SECONDS
    if planned is not None:
        seconds = math.ceil((START_SECONDS + _SLOWER * STEPS * planned.high_seconds) / 60) * 60
    recipe, bound = rung_recipe(plan, planned, folder), (run_folder(plan.recipe).absolute(),)
    plan = replace(plan, recipe=recipe, wall_seconds=seconds, grace_seconds=_GRACE_SECONDS, bound=bound)
    return RungPlan(replace(plan, chain_length=1, measured_steps=STEPS), planned, layout, folder)


def in_folder_of(rung: RungPlan, recipe: Recipe) -> JobPlan:
    """Return the rung's jobs as if they trained in the run's own folder, where the text is."""
    there = rung.plan.recipe.model_copy(update={"folder": str(run_folder(recipe).absolute())})
    return replace(rung.plan, recipe=there)


def _own_name(plan: JobPlan) -> str:
    resolved = resolved_of_plan(plan)
    index = resolved.identity.phases.index(main_phase(resolved.identity))
    return layout_name(resolved.placement.layout, resolved.placement.phases[index].micro_batch_sequences)


def rung_recipe(plan: JobPlan, planned: PlannedLayout | None, folder: Path) -> Recipe:
    """Return the rung's recipe: the phase with most tokens, all logged. Raises KieloError if too short."""
    recipe, main = plan.recipe, main_phase(resolved_of_plan(plan).identity)
    if main.steps < STEPS:
        raise KieloError(
            f"the run has {main.steps} steps of {main.tokens_per_step:,} tokens, and a ladder takes {STEPS}. "
            "Fix: more train.tokens"
        )
    skipped = ((1, main.first_step - 1),) if main.first_step > 1 else ()
    train: dict[str, object] = {"log_every_steps": 1, "heldout_every_steps": main.last_step + 1}
    train |= {"skip_steps": skipped, "tensorboard": False, "wandb": ""}
    if recipe.train.precision_changes:
        precision = planned.run.precision if planned else recipe.train.precision
        train |= {"precision": precision, "precision_changes": ()}
    changed = {"train": train, "evaluate": {"every_steps": 0}}
    sections = {name: getattr(recipe, name).model_copy(update=one) for name, one in changed.items()}
    return recipe.model_copy(update={"folder": str(folder), **sections})


def main_phase(identity: Identity) -> PlannedPhase:
    """Return the phase with most tokens, by which layouts are ranked too."""
    return max(identity.phases, key=lambda phase: phase.tokens_per_step * phase.steps)


def resolved_of_plan(plan: JobPlan) -> Resolved:
    """Resolve the recipe of these jobs as if all its text existed."""
    card = accelerator(plan.site.accelerator)
    text = imagined_text(plan.recipe)
    return resolve(plan.recipe, "", plan.devices, card.device, card.name, text=text)


def _job(recipe: Recipe, hours: float | None, rungs: Sequence[RungPlan]) -> JobPlan:
    plan = rungs[0].plan
    seconds = sum(rung.plan.wall_seconds for rung in rungs) + _SPARE_SECONDS
    most = hours or longest_hours(plan.partition, plan.jobs_of_site, plan.site)
    if most is not None and seconds > most * 3600:
        limit, fix = ("--hours", "more --hours") if hours else (plan.partition.label, "another --partition")
        raise KieloError(
            f"{len(rungs)} layouts on {plan.nodes} nodes may take {seconds / 3600:.1f} hours, and {limit} "
            f"gives {most:g}. Fix: {fix}"
        )
    update = {"name": f"{recipe.name}_{plan.nodes}_nodes", "folder": str(run_folder(recipe).absolute())}
    return replace(plan, recipe=recipe.model_copy(update=update), wall_seconds=seconds, measured_steps=0)


def write_ladder(recipe: Recipe, ladder: Sequence[NodesPlan]) -> tuple[Path, dict[int, Path]]:
    """Write launches and jobs of unmeasured rungs, unless a job waits. Return the folder, and nodes → job."""
    folder, jobs = ladder_folder(recipe), {}
    for on_nodes in ladder:
        above = folder / f"{on_nodes.nodes}_nodes"
        if not on_nodes.to_run or waiting_job(above, on_nodes.job.site.scheduler):
            continue
        rungs = []
        for rung in on_nodes.to_run:
            _link_text(rung.folder, run_folder(recipe).absolute())
            rungs.append((write_launch(rung.plan), rung.plan.wall_seconds))
        jobs[on_nodes.nodes] = write_ladder_job(on_nodes.job, above, rungs)
    write_json(folder, _ladder(recipe, ladder, folder))
    return folder, jobs


def read_ladder(folder: Path) -> Ladder:
    """Read the ladder with its rungs' measurements until now. Raises KieloError if it does not exist."""
    found = read_json(folder, Ladder)
    if found is None:
        raise KieloError(f"{folder}: has no {Ladder.FILE_NAME}. Fix: kielo launch RECIPE --ladder 1,2")
    rungs = [rung.model_copy(update=_outcome(folder / rung.folder)) for rung in found.rungs]
    return found.model_copy(update={"rungs": rungs})


def _outcome(rung: Path) -> dict[str, MeasuredSpeed | str | None]:
    return {"measured": measured_speed(rung), "state": state(rung)}


def waiting_job(above: Path, scheduler: str) -> str:
    """Return a job of the ladder's `above`, NODES_nodes, that the scheduler still has, or "" for none."""
    ids = [job for file in sorted(above.glob("job_*/chain/jobs")) for job in job_ids(file)]
    return next(iter(states(scheduler, ids) or {}), "")


def _link_text(rung: Path, run: Path) -> None:
    """Link the run's text into the rung's folder. An existing link stays."""
    rung.mkdir(parents=True, exist_ok=True)
    for name in _TEXT_FOLDERS:
        if not os.path.lexists(rung / name):
            (rung / name).symlink_to(os.path.relpath(run / name, rung), target_is_directory=True)


def _ladder(recipe: Recipe, ladder: Sequence[NodesPlan], folder: Path) -> Ladder:
    """Return the current ladder.json. Rungs of earlier calls stay in it."""
    before = read_json(folder, Ladder)
    rungs = {rung.folder: rung for rung in before.rungs} if before else {}
    for rung in (rung for on_nodes in ladder for rung in on_nodes.rungs):
        name = rung.folder.relative_to(folder).as_posix()
        rungs[name] = _described(rung, name)
    job, plan = ladder[0].job, ladder[0].rungs[0].plan
    resolved = resolved_of_plan(plan)
    main, parameters = main_phase(resolved.identity), resolved.placement.parameters
    return Ladder(
        name=recipe.name,
        cluster=card_file(job),
        machine=recipe.machine,
        parameters=parameters,
        tokens_per_step=main.tokens_per_step,
        sequence_length=main.sequence_length,
        rungs=sorted(rungs.values(), key=lambda rung: rung.nodes),
        references=references(job.site, parameters),
        kielo_version=__version__,
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _described(rung: RungPlan, name: str) -> Rung:
    planned, speed = rung.planned, None
    if planned is not None:
        speed = PlannedSpeed(
            tokens_per_second=planned.tokens_per_second,
            low_tokens_per_second=planned.tokens_per_step / planned.high_seconds,
            high_tokens_per_second=planned.tokens_per_step / planned.low_seconds,
            tflops_per_device=planned.tflops_per_device,
        )
    size = {"nodes": rung.plan.nodes, "devices": rung.plan.devices, "layout": rung.layout}
    return Rung.model_validate({**size, "folder": name, "planned": speed, **_outcome(rung.folder)})


def references(site: Cluster, parameters: int) -> list[ReferenceSpeed]:
    """Return the card's references of models of about this size."""
    found = []
    for one in site.references:
        if 1 / _OF_SIMILAR_SIZE <= parameters / one.parameters <= _OF_SIMILAR_SIZE:
            same = {key: getattr(one, key) for key in ("nodes", "tflops_per_device", "tolerance", "source")}
            software = f"{one.software}, {one.parameters / 1e9:.3g} billion parameters"
            found.append(ReferenceSpeed(**same, software=software))
    return found

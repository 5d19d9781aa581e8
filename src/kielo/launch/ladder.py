"""The plan of a ladder: a recipe and numbers of nodes → a few steps on each, of the best layouts, as jobs.

A rung is one layout on one number of nodes. Its recipe is the run's, with that layout, on the steps of the
phase with most tokens; earlier ones are skipped. It is a run of its own, which saves nothing, so nothing of
it comes into the run. `ladder_folder.py` writes it all.
"""

import math
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kielo.launch.job_plan import (
    JobPlan,
    Wishes,
    check_number_of_jobs,
    check_request,
    longest_hours,
    plan_jobs,
)
from kielo.launch.launch_folder import LAUNCH_FOLDER, recipe_text
from kielo.launch.status import attempts, newest_launch
from kielo.plan.choose_layout import different_axes, nothing_runs
from kielo.plan.cost import START_SECONDS
from kielo.plan.layout_name import layout_name
from kielo.plan.measured_run import has_measured
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Identity, PlannedPhase, Resolved
from kielo.resolve.text import imagined_text

# The outcome of a rung of a ladder: its run folder → measured or not, and why not; no torch.


# Sections of the recipe of which a measured rung must have the present values. Its layout is in its name.
_SECTIONS = ("model", "train", "dataset", "phases", "tokenizer")


def is_measured(plan: JobPlan) -> bool:
    """Return True for a rung that is measured. Raises KieloError if that was with another recipe."""
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
            f"{file}: was measured with another [{changed[0]}] than the recipe has now; move "
            f"{folder.parents[1]} away to measure anew"
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


STEPS = 10  # of a rung; the first two are not counted (plan/measured_run.py)
_LAYOUTS = 3  # on each number of nodes
_SLOWER = 2.0  # times the slow end of the plan's interval, that a rung's steps may take
_UNPLANNED_SECONDS = 3600  # of a rung without a plan
_SPARE_SECONDS = 300  # of a job beside its rungs: versions, leftovers, ends
_GRACE_SECONDS = 60  # nothing is saved


@dataclass(frozen=True)
class RungPlan:
    """One layout on one number of nodes; `planned` is None where no card says how fast the devices are."""

    plan: JobPlan
    planned: PlannedLayout | None
    layout: str
    folder: Path


@dataclass(frozen=True)
class NodesPlan:
    """The rungs on one number of nodes; `to_run` are not measured yet, and `job` runs those."""

    nodes: int
    rungs: list[RungPlan]
    to_run: list[RungPlan]
    job: JobPlan


def ladder_folder(recipe: Recipe) -> Path:
    return run_folder(recipe).absolute() / LAUNCH_FOLDER / f"ladder_{cluster(recipe.cluster).name}"


def plan_ladder(recipe: Recipe, wishes: Wishes, numbers: Sequence[int]) -> list[NodesPlan]:
    """Plans the best layouts on each number of nodes.

    Everything is refused here, before a file is written. Without a card that says how fast the devices are,
    the recipe's own layout is the only one.
    """
    run = None
    with suppress(KieloError):  # plan_jobs says what it was, if it is more than a card without speeds
        run = RunToPlan.of_recipe(recipe)
    return [_on_nodes(recipe, replace(wishes, nodes=number), run, len(numbers)) for number in numbers]


def _on_nodes(recipe: Recipe, wishes: Wishes, run: RunToPlan | None, jobs: int) -> NodesPlan:
    assert wishes.nodes is not None
    nodes, above = wishes.nodes, ladder_folder(recipe) / f"{wishes.nodes}_nodes"
    try:
        site, of_site, partition, *_ = check_request(recipe, wishes)  # before a search for so many nodes
    except KieloError as error:
        raise KieloError(str(error).replace("--nodes", "--ladder")) from None
    check_number_of_jobs("--ladder", jobs, partition, site)
    longest = longest_hours(partition, of_site, site)
    asked = replace(wishes, hours=wishes.hours if longest is None else None)  # --hours is of the ladder's job
    layouts = [None] if run is None else best_layouts(run, nodes)
    rungs = [_rung(plan_jobs(recipe, asked, one), one, above) for one in layouts]
    to_run = [rung for rung in rungs if not is_measured(rung.plan)]
    return NodesPlan(nodes, rungs, to_run, _job(recipe, wishes.hours, to_run or rungs))


def best_layouts(run: RunToPlan, nodes: int) -> list[PlannedLayout]:
    """Return the fastest layouts by plan: of different axes first, then others of the same axes."""
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
    changed = replace(
        plan, recipe=rung_recipe(plan, planned, folder), wall_seconds=seconds, grace_seconds=_GRACE_SECONDS,
        chain_length=1, measured_steps=STEPS, bound=(run_folder(plan.recipe).absolute(),),
    )  # fmt: skip
    return RungPlan(changed, planned, layout, folder)


def in_folder_of(rung: RungPlan, recipe: Recipe) -> JobPlan:
    """Return the rung's jobs as if they trained in the run's own folder, where the text is."""
    there = rung.plan.recipe.model_copy(update={"folder": str(run_folder(recipe).absolute())})
    return replace(rung.plan, recipe=there)


def _own_name(plan: JobPlan) -> str:
    resolved = resolved_of_plan(plan)
    index = resolved.identity.phases.index(main_phase(resolved.identity))
    return layout_name(resolved.placement.layout, resolved.placement.phases[index].micro_batch_sequences)


def rung_recipe(plan: JobPlan, planned: PlannedLayout | None, folder: Path) -> Recipe:
    """Return the recipe of a rung: on the steps of the phase with most tokens, all of them logged.

    In the precision of most steps. Raises KieloError for a phase of fewer steps than are measured.
    """
    recipe, main = plan.recipe, main_phase(resolved_of_plan(plan).identity)
    if main.steps < STEPS:
        raise KieloError(
            f"the run has {main.steps} steps of {main.tokens_per_step:,} tokens, and a ladder takes {STEPS}. "
            "Fix: more train.tokens"
        )
    train = {
        "log_every_steps": 1, "heldout_every_steps": main.last_step + 1, "tensorboard": False, "wandb": "",
        "skip_steps": ((1, main.first_step - 1),) if main.first_step > 1 else (),
    }  # fmt: skip
    if recipe.train.precision_changes:
        precision = planned.run.precision if planned else recipe.train.precision
        train |= {"precision": precision, "precision_changes": ()}
    return recipe.model_copy(update={"folder": str(folder), "train": recipe.train.model_copy(update=train)})


def main_phase(identity: Identity) -> PlannedPhase:
    """Return the phase with most tokens, by which layouts are ranked too."""
    return max(identity.phases, key=lambda phase: phase.tokens_per_step * phase.steps)


def resolved_of_plan(plan: JobPlan) -> Resolved:
    """Resolve the recipe of these jobs as if there were all the text that it needs."""
    card = accelerator(plan.site.accelerator)
    text = imagined_text(plan.recipe)
    return resolve(plan.recipe, "", plan.devices, card.device, card.name, text=text)


def _job(recipe: Recipe, hours: float | None, rungs: Sequence[RungPlan]) -> JobPlan:
    plan = rungs[0].plan
    seconds = sum(rung.plan.wall_seconds for rung in rungs) + _SPARE_SECONDS
    most = hours or longest_hours(plan.partition, plan.jobs_of_site, plan.site)
    if most is not None and seconds > most * 3600:
        queue = plan.partition.label
        raise KieloError(
            f"{len(rungs)} layouts on {plan.nodes} nodes may take {seconds / 3600:.1f} hours, and "
            f"{'--hours' if hours else queue} gives {most:g}. Fix: "
            f"{'more --hours' if hours else 'another --partition'}"
        )
    named = recipe.model_copy(
        update={"name": f"{recipe.name}_{plan.nodes}_nodes", "folder": str(run_folder(recipe).absolute())}
    )
    return replace(plan, recipe=named, wall_seconds=seconds, measured_steps=0)

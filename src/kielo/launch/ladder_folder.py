"""The folder of a ladder, which a person can read and start again.

RUN/launch/ladder_SITE
  ladder.json                 planned and measured (artifact/launch_files.py)
  NODES_nodes/LAYOUT/         a run folder of its own for each rung, with links to the run's text
    launch/0001/              the rung's launch, as launch_folder.py writes one
  NODES_nodes/job_0001/       the job that runs the rungs of this number of nodes, one after another
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kielo import __version__
from kielo.artifact.launch_files import Ladder, PlannedSpeed, ReferenceSpeed, Rung
from kielo.artifact.stage_json import read_json, write_json
from kielo.dataset.heldout_sets import EVALUATION_TEXTS
from kielo.launch.ladder import NodesPlan, RungPlan, ladder_folder, main_phase, resolved_of_plan, state
from kielo.launch.launch_folder import write_ladder_job, write_launch
from kielo.launch.schedulers import job_ids, states
from kielo.launch.script import card_file
from kielo.plan.measured_run import measured_speed
from kielo.recipe.cards import Cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe

_TEXT_FOLDERS = ("tokens", "tokenizer", "packing", EVALUATION_TEXTS)
_OF_SIMILAR_SIZE = 1.25  # ratio of parameters up to which a reference is shown


def write_ladder(recipe: Recipe, ladder: Sequence[NodesPlan]) -> tuple[Path, dict[int, Path]]:
    """Write launches and jobs of what is not measured yet; return the folder, and nodes → a job's folder.

    Nothing is written for nodes of which a job still waits or runs.
    """
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
    """Read the ladder, with what its rungs have measured by now. Raises KieloError where there is none."""
    found = read_json(folder, Ladder)
    if found is None:
        raise KieloError(f"{folder}: has no {Ladder.FILE_NAME}. Fix: kielo launch RECIPE --ladder 1,2")
    rungs = []
    for rung in found.rungs:
        place = folder / rung.folder
        rungs.append(rung.model_copy(update={"measured": measured_speed(place), "state": state(place)}))
    return found.model_copy(update={"rungs": rungs})


def waiting_job(above: Path, scheduler: str) -> str:
    """Return a job of the ladder's `above`, NODES_nodes, that the scheduler still has; "" for none."""
    ids: list[str] = []
    for file in sorted(above.glob("job_*/chain/jobs")):
        ids += job_ids(file)
    return next(iter(states(scheduler, ids) or {}), "")


def _link_text(rung: Path, run: Path) -> None:
    """Links the run's text into the rung's folder; a link that is there already stays."""
    rung.mkdir(parents=True, exist_ok=True)
    for name in _TEXT_FOLDERS:
        if not os.path.lexists(rung / name):
            (rung / name).symlink_to(os.path.relpath(run / name, rung), target_is_directory=True)


def _ladder(recipe: Recipe, ladder: Sequence[NodesPlan], folder: Path) -> Ladder:
    """Return what ladder.json says now. Rungs of earlier calls stay in it."""
    before = read_json(folder, Ladder)
    rungs = {rung.folder: rung for rung in before.rungs} if before else {}
    for on_nodes in ladder:
        for rung in on_nodes.rungs:
            name = rung.folder.relative_to(folder).as_posix()
            rungs[name] = _rung(rung, name)
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


def _rung(rung: RungPlan, name: str) -> Rung:
    planned, speed = rung.planned, None
    if planned is not None:
        speed = PlannedSpeed(
            tokens_per_second=planned.tokens_per_second,
            low_tokens_per_second=planned.tokens_per_step / planned.high_seconds,
            high_tokens_per_second=planned.tokens_per_step / planned.low_seconds,
            tflops_per_device=planned.tflops_per_device,
        )
    return Rung(
        nodes=rung.plan.nodes,
        devices=rung.plan.devices,
        layout=rung.layout,
        folder=name,
        planned=speed,
        measured=measured_speed(rung.folder),
        state=state(rung.folder),
    )


def references(site: Cluster, parameters: int) -> list[ReferenceSpeed]:
    """Return the card's references of models of about this size."""
    return [
        ReferenceSpeed(
            nodes=one.nodes,
            tflops_per_device=one.tflops_per_device,
            tolerance=one.tolerance,
            software=f"{one.software}, {one.parameters / 1e9:.3g} billion parameters",
            source=one.source,
        )
        for one in site.references
        if 1 / _OF_SIMILAR_SIZE <= parameters / one.parameters <= _OF_SIMILAR_SIZE
    ]

"""The folder of a launch, RUN/launch/0001 and so on, which a person can read, keep, and submit again:

job.sh, submit.sh (the chain, which `kielo launch` submits), rank.sh (what job.sh starts on each node and
device), environment.sh (of the ranks), recipe.toml (with every flag, and the layout), launch.json (flags,
forecast, versions), logs/ and chain/ (what jobs write).
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from kielo import __version__
from kielo.artifact.durable import make_folder
from kielo.artifact.launch_files import Launch
from kielo.artifact.lease import Lease
from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.stage_json import read_json, write_json
from kielo.launch.bash import comment, start_of
from kielo.launch.job_plan import SHARED_STAGES, JobPlan
from kielo.launch.schedulers import SCHEDULERS, SCRIPTS, hides_jobs, job_ids, states
from kielo.launch.script import (
    card_file,
    environment_script,
    job_script,
    ladder_script,
    share_script,
    submit_script,
    submit_shares_script,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.toml_text import toml_table

LAUNCH_FOLDER = "launch"
SHARE_SCRIPT = "share.sh"  # of the templates; what each such job starts, as corpus.sh or pack.sh
_COMMAND_LIMIT_SECONDS = 60


def write_launch(plan: JobPlan) -> Path:
    """Write the folder, whole or not at all, under the next free number. Return its path."""
    with _next_folder(run_folder(plan.recipe).absolute() / LAUNCH_FOLDER, plan.prefix) as (folder, aside):
        _write(aside, job_script(plan, folder), submit_script(plan, folder))
        _write_for_tasks(aside, plan, "rank.sh")
        write_json(aside, launch_of(plan))
    return folder


def _write(folder: Path, job: str, submission: str) -> None:
    write_text_atomically(folder / "job.sh", job)
    write_text_atomically(folder / "submit.sh", submission)


def _write_for_tasks(folder: Path, plan: JobPlan, script: str) -> None:
    write_text_atomically(folder / script, (SCRIPTS / script).read_text(encoding="utf-8"))
    write_text_atomically(folder / "environment.sh", environment_script(plan))
    write_text_atomically(folder / "recipe.toml", recipe_text(plan))


def write_ladder_job(plan: JobPlan, above: Path, rungs: Sequence[tuple[Path, int]]) -> Path:
    """Write the folder of a job that runs `rungs`, (a launch's folder, its limit in seconds), in `above`."""
    with _next_folder(above, "job_") as (folder, aside):
        _write(aside, ladder_script(plan, folder, rungs), submit_script(plan, folder))
    return folder


def write_share_jobs(plan: JobPlan, shares: int) -> Path:
    """Write the folder of the jobs that share the plan's stage, as RUN/launch/pack_0001."""
    with _next_folder(run_folder(plan.recipe).absolute() / LAUNCH_FOLDER, plan.prefix) as (folder, aside):
        _write(aside, share_script(plan, folder, shares), submit_shares_script(plan, folder, shares))
        _write_for_tasks(aside, plan, SHARE_SCRIPT)
        (aside / SHARE_SCRIPT).rename(aside / f"{plan.shared_stage}.sh")
    return folder


def shared_stage_of(folder: Path) -> str | None:
    """Return the stage that the jobs of a launch's folder share, or None if they train."""
    return next((stage for stage in SHARED_STAGES if (folder / f"{stage}.sh").is_file()), None)


@contextmanager
def _next_folder(above: Path, prefix: str = "") -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the next free number in `above`, and a folder that is renamed to it at the end."""
    above.mkdir(parents=True, exist_ok=True)
    names = [name.removeprefix(prefix) for name in os.listdir(above) if name.startswith(prefix)]
    number = max((int(name) for name in names if name.isdecimal()), default=0) + 1
    folder = above / f"{prefix}{number:04d}"
    aside = above / f".{folder.name}.{os.getpid()}.kielo"
    make_folder(aside)
    try:
        for name in ("chain", "logs"):
            (aside / name).mkdir()
        yield folder, aside
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def recipe_text(plan: JobPlan) -> str:
    """Return every value of the recipe that is no default, with the layout. Paths are as given."""
    update = {"cluster": card_file(plan), "folder": str(run_folder(plan.recipe).absolute())}
    recipe = plan.recipe.model_copy(update=update)
    header = comment(f"The recipe of this launch, for the jobs of this folder, which start in {Path.cwd()}.")
    return header + "\n" + toml_table("", recipe.model_dump(mode="json", exclude_defaults=True))


def launch_of(plan: JobPlan) -> Launch:
    site = plan.site
    same = ("nodes", "devices", "wall_seconds", "grace_seconds", "forecast", "no_forecast")
    return Launch(
        **{key: getattr(plan, key) for key in same},
        cluster=card_file(plan),
        scheduler=site.scheduler,
        job_name=plan.job_name,
        work=plan.work,
        spares=plan.wishes.spares,
        partition=plan.partition.label,
        jobs=plan.chain_length,
        versions=_versions(site.scheduler, f"{site.name}, {site.date}"),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def one_launch_at_a_time(plan: JobPlan) -> Iterator[None]:
    """Hold the run's launches: a second launch would not see the jobs that the first is about to submit."""
    run = run_folder(plan.recipe).absolute()
    if not run.is_dir():  # the launch will be refused, and no job of it can be in a queue
        yield
        return
    above = run / LAUNCH_FOLDER
    above.mkdir(exist_ok=True)
    with Lease.take(above).beating():
        yield


def submit(folder: Path, scheduler: str) -> tuple[list[str], str]:
    """Submit the chain. Return the jobs' ids, and other words. Raises KieloError without a first job."""
    script, none = folder / "submit.sh", subprocess.DEVNULL
    done = subprocess.run(
        ["bash", script], stdin=none, capture_output=True, text=True, errors="replace", check=False
    )
    answer = " ".join(done.stderr.split())
    if done.returncode:
        raise KieloError(
            f"{SCHEDULERS[scheduler].submit} refused the job, and nothing is queued: {answer}. Fix: change "
            f"{folder}, which stays, and submit it by `{start_of(script)}`, or launch again"
        )
    return done.stdout.split(), answer


def refuse_without_scheduler(plan: JobPlan) -> None:
    command = SCHEDULERS[plan.site.scheduler].submit
    if shutil.which(command) is None:
        raise KieloError(
            f"{command} is not on this machine's PATH, and {plan.site.name} takes jobs by it. "
            "Fix: the same command on a login node there, or --dry-run, which writes the folder alone"
        )


def refuse_second_chain(plan: JobPlan) -> None:
    """Refuse a launch of a run whose jobs wait or run: two chains would only wait for each other."""
    above = run_folder(plan.recipe).absolute() / LAUNCH_FOLDER
    for folder in sorted(above.glob("[0-9]*")):
        launch, jobs = read_json(folder, Launch), folder / "chain" / "jobs"
        if launch is None or launch.cluster != card_file(plan) or not jobs.exists():
            continue
        ids = job_ids(jobs)
        found = states(launch.scheduler, ids)
        if not found and jobs.stat().st_uid != os.getuid() and hides_jobs(launch.scheduler):
            _refuse_hidden_chain(folder, ids)
        if found:
            queued = ", ".join(f"{job} {state.split()[0]}" for job, state in found.items())
            raise KieloError(
                f"{folder}: jobs of this run are in the queue already ({queued}). Fix: "
                f"`{start_of(folder / 'submit.sh')} 5` adds five jobs to their chain, or `kielo cancel "
                f"{run_folder(plan.recipe)}` and launch again when they are over"
            )


def _refuse_hidden_chain(folder: Path, ids: Sequence[str]) -> None:
    """Refuse another person's chain that may still have jobs, which the scheduler would not show."""
    chain = folder / "chain"
    if (chain / "stopped").exists() or not (left := [job for job in ids if not _has_ended(chain, job)]):
        return
    raise KieloError(
        f"{folder}: its chain is {_owner(chain / 'jobs')}'s, the scheduler shows you no jobs of other "
        f"persons, and no end of {', '.join(left)} is noted. Fix: `kielo cancel` by that person, or if the "
        f"jobs are over `echo over > {chain / 'stopped'}`"
    )


def _has_ended(chain: Path, job: str) -> bool:
    """Return True if job.sh noted the job's end, and the job does not wait again."""
    file = chain / "attempts"
    rows = [line.split("\t") for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    own = [row for row in rows if len(row) == 7 and row[1] == job]
    return bool(own) and own[-1][0] == "end" and own[-1][5] != "requeue"


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def _versions(scheduler: str, card: str) -> dict[str, str]:
    found = {"kielo": __version__, "python": platform.python_version(), "card": card}
    source = Path(__file__).resolve().parents[3]
    if (source / ".git").exists():
        found["commit"] = _answer(["git", "-C", str(source), "describe", "--always", "--dirty"])
    command = SCHEDULERS[scheduler].submit
    if scheduler == "slurm" and shutil.which(command):
        found[command] = _answer([command, "--version"])
    return found


def _answer(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not known"
    return done.stdout.strip() or "not known"

"""The request to a cluster: a recipe and flags → `JobPlan`, or one line on what the site does not have.

Everything is refused here, before a file is written or a job is queued.
"""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.launch_files import Forecast, MadeSite, Work
from kielo.artifact.manifest import read_manifest
from kielo.artifact.prefetched import VARIABLE
from kielo.launch.bash import start_of
from kielo.launch.forecast import forecast_of, planned_run
from kielo.launch.prefetch import missing, missing_tasks
from kielo.launch.site import SITES_FOLDER, jobs_of, made_site
from kielo.plan.cost import START_SECONDS, with_layout
from kielo.plan.planned_layout import PlannedLayout
from kielo.recipe.cards import Cluster, Jobs, Partition, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.software import start_timeout_seconds

_USUAL_GRACE_SECONDS = 600  # to save before a job's end, without a forecast, as in `kielo train`
_LEAST_GRACE_SECONDS = 300  # with a forecast: a file system's slow hour costs more than five minutes of a job
_MOST_SIGNAL_SECONDS = 65_535  # of sbatch --signal
# The chain is longer than forecast: jobs fail, and a job that finds the run finished ends in seconds.
_SPARE_JOBS = 1.2
SHARED_STAGES: tuple[Work, ...] = ("corpus", "pack")  # of jobs that share a stage, each on a node
_MOST_JOBS = 20  # sites limit waiting jobs; submit.sh adds more
MOST_ASKED_JOBS = 1000  # each is a call of the scheduler


@dataclass(frozen=True)
class Wishes:
    """The flags of `kielo launch`. None: the card's value, or the forecast's."""

    nodes: int | None = None
    account: str | None = None
    partition: str | None = None
    hours: float | None = None
    jobs: int | None = None
    layout: str | None = None
    grace_seconds: int | None = None
    spares: int = 0
    is_torchrun: bool = False
    is_preflight: bool = False
    image: str | None = None
    venv: str | None = None
    site: str | None = None


@dataclass(frozen=True)
class JobPlan:
    """A chain of jobs that the site can run. `recipe` has the chosen layout and nodes."""

    recipe: Recipe
    site: Cluster
    jobs_of_site: Jobs
    partition: Partition
    wishes: Wishes
    nodes: int
    wall_seconds: int
    grace_seconds: int
    silence_seconds: int
    chain_length: int
    forecast: Forecast | None
    no_forecast: str
    site_folder: Path | None = None
    made: MadeSite | None = None  # image and environment by the script of `kielo site`
    measured_steps: int = 0  # of a ladder's rung, which saves nothing; 0: the jobs train
    bound: tuple[Path, ...] = ()  # folders that the container needs beside every job's
    work: Work = "train"

    @property
    def prefix(self) -> str:
        """The beginning of the name of the launch's folder, before its number."""
        return "" if self.work == "train" else f"{self.work}_"

    @property
    def job_name(self) -> str:
        return self.recipe.name + ("" if self.work == "train" else f"_{self.work}")

    @property
    def evaluates(self) -> bool:
        return self.work in ("evaluate", "watch")

    @property
    def asks_tasks(self) -> bool:
        """True if the jobs ask the model the tasks of the recipe."""
        evaluate = self.recipe.evaluate
        return bool(evaluate.tasks) and (self.evaluates or evaluate.every_steps > 0)

    @property
    def shared_stage(self) -> str:
        """The stage that the jobs share, with a process on each node, or "" if they use devices."""
        return self.work if self.work in SHARED_STAGES else ""

    @property
    def devices(self) -> int:
        return self.nodes * self.site.devices_per_node

    @property
    def cores_per_device(self) -> int:
        return max(1, self.site.cpu_cores_per_node // self.site.devices_per_node)

    @property
    def image(self) -> str:
        """The container's image, or "" for none."""
        if self.wishes.image is None:
            return self.jobs_of_site.image if self.made is None else self.made.image
        return "" if self.wishes.image == "none" else self.wishes.image

    @property
    def venv(self) -> str:
        """The virtual environment as ranks see it, or "" for none."""
        if self.wishes.venv is not None:
            return str(Path(self.wishes.venv).absolute())
        return self.made.venv if self.made else ""


def plan_jobs(recipe: Recipe, wishes: Wishes, chosen: PlannedLayout | None = None) -> JobPlan:
    """Check the wishes, plan the run, and compute the jobs. chosen: a layout on `wishes.nodes` nodes."""
    site, of_site, partition, nodes, hours = check_request(recipe, wishes)
    site_folder, made = made_for(wishes, site)
    if chosen is None:
        recipe, planned, no_forecast = planned_run(recipe, nodes, wishes.layout)
    else:
        recipe = with_layout(recipe.model_copy(update={"nodes": (nodes,)}), chosen)
        planned, no_forecast = chosen, ""
    forecast = None if planned is None else forecast_of(planned, hours)
    wall = round(hours * 3600)
    grace = _grace(wishes.grace_seconds, forecast, wall)
    chain = _chain_length(wishes.jobs, forecast, partition, site)
    place, silence = (recipe, site, of_site, partition, wishes, nodes), _silence(recipe, forecast)
    return JobPlan(*place, wall, grace, silence, chain, forecast, no_forecast, site_folder, made)


def check_request(
    recipe: Recipe, wishes: Wishes, site: Cluster | None = None
) -> tuple[Cluster, Jobs, Partition, int, float]:
    """Return the site, its table of jobs, the queue, nodes and hours. Refuse what the site does not have."""
    site = site or cluster(recipe.cluster)
    of_site = jobs_of(site)
    nodes = _nodes(wishes.nodes, recipe, site)
    partition = _partition(wishes.partition, nodes + wishes.spares, of_site, site)
    _check_account(wishes.account, of_site, site)
    _check_size(nodes + wishes.spares, wishes.spares, partition, of_site, site)
    return site, of_site, partition, nodes, _hours(wishes.hours, partition, of_site, site)


def network_needed(plan: JobPlan) -> str:
    """Return a sentence on missing downloads that the nodes cannot reach, or "" if there are none."""
    lacking = [] if plan.site.internet_on_compute_nodes else missing(plan.recipe)
    if not plan.site.internet_on_compute_nodes and plan.asks_tasks:
        lacking += missing_tasks(plan.recipe)
    if not lacking:
        return ""
    return (
        f"{plan.site.name}'s nodes reach no network, and not here yet: {', '.join(lacking)}. "
        f"Fix: kielo prefetch RECIPE --to DIR on a machine with a network, and {VARIABLE}=DIR here"
    )


def check_ready(plan: JobPlan) -> None:
    """Refuse jobs that would end at once: they only train, so the stages before training must be done."""
    if said := network_needed(plan):
        raise KieloError(said)
    folder = run_folder(plan.recipe)
    if read_manifest(folder / "tokens") is None:
        raise KieloError(
            f"{folder / 'tokens'}: not made yet, and the jobs only train. Fix: kielo run RECIPE "
            "--to pack first, or --dry-run to write the scripts alone"
        )
    card = accelerator(plan.site.accelerator)
    resolve(plan.recipe, folder, plan.devices, card.device, card.name)  # refuses what each rank would refuse
    check_environment(plan)


def check_environment(plan: JobPlan) -> None:
    """Refuse an image or an environment that does not exist here, or has no Kielo."""
    image = plan.image
    if image and not Path(image).exists():
        raise KieloError(f"{image}: no such container image here. Fix: --container IMAGE, or none")
    if image and image == plan.jobs_of_site.image and not plan.venv:
        raise KieloError(
            f"{image} has torch and not Kielo. Fix: kielo site {plan.site.name}, whose script "
            "makes an environment inside it, or --venv DIR with one"
        )
    if plan.made is not None and plan.made.squash and not Path(plan.made.squash).is_file():
        raise KieloError(f"{plan.made.squash}: is gone. Fix: {plan.site_folder}/site.sh makes it again")
    if plan.wishes.venv and not (Path(plan.wishes.venv) / "bin" / "activate").exists():
        raise KieloError(f"--venv {plan.wishes.venv}: has no bin/activate. Fix: the folder of an environment")


def made_for(wishes: Wishes, site: Cluster) -> tuple[Path | None, MadeSite | None]:
    """Return the site's folder and what its script made there; (None, None) if it does not exist."""
    if wishes.image is not None or wishes.venv is not None:
        if wishes.site is not None:
            raise KieloError("--site brings its own image and environment. Fix: no --container and no --venv")
        return None, None
    folder = Path(wishes.site or Path(SITES_FOLDER) / site.name).absolute()
    made = made_site(folder, site)
    if made is None and wishes.site is not None:
        raise KieloError(
            f"--site {wishes.site}: has no {MadeSite.FILE_NAME}, which site.sh writes last. Fix: "
            f"kielo site {site.name} --to {shlex.quote(wishes.site)}, then "
            f"{start_of(Path(wishes.site) / 'site.sh')} there"
        )
    return (folder, made) if made else (None, None)


def _nodes(wanted: int | None, recipe: Recipe, site: Cluster) -> int:
    usual = [number for number in recipe.nodes if number <= site.nodes]
    nodes = wanted if wanted is not None else usual[0] if usual else None
    if nodes is None:
        raise KieloError(f"no number of nodes of {site.name}, which has {site.nodes}. Fix: --nodes 16")
    return nodes


def _partition(wanted: str | None, nodes: int, of_site: Jobs, site: Cluster) -> Partition:
    """Return the first queue of the wanted name that gives `nodes`, else the first of that name."""
    label = of_site.partitions[0].label if wanted is None else wanted
    named = [one for one in of_site.partitions if one.label == label]
    named = named or [one for one in of_site.partitions if one.name == label][:1]
    if not named:
        known = ", ".join(dict.fromkeys(one.label for one in of_site.partitions))
        raise KieloError(f"--partition {wanted}: not in the card of {site.name}. Fix: {known}")
    return next((one for one in named if _gives(nodes, one, of_site, site)), named[0])


def _gives(nodes: int, partition: Partition, of_site: Jobs, site: Cluster) -> bool:
    return partition.min_nodes <= nodes <= most_nodes(partition, of_site, site)


def _check_account(account: str | None, of_site: Jobs, site: Cluster) -> None:
    if not of_site.account or (account and re.fullmatch(of_site.account, account)):
        return
    given = f"--account {account}: not the form of a project there" if account else "no --account"
    example = f"give your project, such as --account {of_site.account_example}"
    raise KieloError(f"{given}, but {site.name} bills a project. Fix: {example}")


def most_nodes(partition: Partition, of_site: Jobs, site: Cluster) -> int:
    """Return the most nodes of a job in this partition. The first partition has the card's own limit."""
    usual = site.max_nodes_per_job if partition is of_site.partitions[0] else None
    return min(partition.max_nodes or usual or site.nodes, site.nodes)


def longest_hours(partition: Partition, of_site: Jobs, site: Cluster) -> float | None:
    """Return the longest job in this partition, in hours, or None if no card says it."""
    usual = site.max_wall_hours if partition is of_site.partitions[0] else None
    return partition.max_hours or usual


def _check_size(nodes: int, spares: int, partition: Partition, of_site: Jobs, site: Cluster) -> None:
    """Refuse a number of `nodes` (with spares) that the partition does not give."""
    if spares < 0:
        raise KieloError(f"--spares {spares}: is negative. Fix: 0 or more")
    trains = nodes - spares
    if trains >= 1 and _gives(nodes, partition, of_site, site):
        return
    least, most = partition.min_nodes, most_nodes(partition, of_site, site)
    others = [one.label for one in of_site.partitions if trains >= 1 and _gives(nodes, one, of_site, site)]
    other = f", or --partition {others[0]}" if others else ""
    extra = f" with {spares} spares" if spares else ""
    nearest = max(1, (least if trains < least else most) - spares)
    gives = f"{partition.label} of {site.name} gives {least} to {most}"
    raise KieloError(f"--nodes {trains}{extra}: {gives}. Fix: --nodes {nearest}{other}")


def _chain_length(wanted: int | None, forecast: Forecast | None, partition: Partition, site: Cluster) -> int:
    if wanted is not None:
        check_job_count("--jobs", wanted, partition, site)
        return wanted
    most = min(_MOST_JOBS, partition.max_jobs or _MOST_JOBS)
    return min(most, math.ceil(forecast.jobs * _SPARE_JOBS)) if forecast else 1


def check_job_count(flag: str, jobs: int, partition: Partition, site: Cluster, more: int = 0) -> None:
    """Refuse more jobs than the queue takes of one person.

    flag: the flag that asked for them. more: how many of them are beside the flag's own number.
    """
    if jobs > MOST_ASKED_JOBS:
        raise KieloError(f"{flag}: makes {jobs} jobs. Fix: at most {MOST_ASKED_JOBS - more} at once")
    most = partition.max_jobs
    if most is not None and jobs > most:
        fewer = f"{most} jobs, or " if not more else f"{flag} {most - more}, or " if more < most else ""
        raise KieloError(
            f"{flag}: makes {jobs} jobs, and {partition.label} of {site.name} takes {most} of a person, "
            f"waiting and running together. Fix: {fewer}another --partition"
        )


def _hours(wanted: float | None, partition: Partition, of_site: Jobs, site: Cluster) -> float:
    most = longest_hours(partition, of_site, site)
    hours = wanted if wanted is not None else most
    if hours is None:
        raise KieloError(f"the card of {site.name} has no longest time of a job. Fix: --hours H")
    if not 0 < hours < math.inf or (most is not None and hours > most):
        limit = f"{partition.label} of {site.name} gives at most {most:g} hours a job"
        raise KieloError(f"--hours {hours:g}: {limit}. The run continues in the chain's next job (--jobs)")
    return hours


def _grace(wanted: int | None, forecast: Forecast | None, wall: int) -> int:
    """Return how many seconds before its end a job is asked to stop."""
    seconds = _USUAL_GRACE_SECONDS
    if forecast:
        # twice a slow step and a save, and 60 s: a GPU's ranks agree one step late, Slurm counts in minutes
        save = forecast.save_stop_seconds + forecast.checkpoint_seconds
        seconds = max(_LEAST_GRACE_SECONDS, math.ceil(2 * (forecast.interval_seconds[1] + save) + 60))
    elif wall < 4 * seconds:
        seconds = wall // 4
    seconds = wanted if wanted is not None else min(seconds, _MOST_SIGNAL_SECONDS)
    start = START_SECONDS if forecast else 0
    if not 0 < seconds <= _MOST_SIGNAL_SECONDS or wall <= start + seconds:
        least = math.ceil((start + seconds) / 360 + 1) / 10
        raise KieloError(
            f"a job of {wall / 3600:g} hours has no time to train: {start:.0f} s to start, and it is asked "
            f"to stop {seconds} s before its end. Fix: --hours {least:g} or more, or another --grace"
        )
    return seconds


def _silence(recipe: Recipe, forecast: Forecast | None) -> int:
    """Return the seconds of silence after which an attempt counts as dead, beyond the ranks' own limits."""
    step = forecast.interval_seconds[1] if forecast else recipe.train.step_timeout_seconds
    limits = start_timeout_seconds(recipe) + recipe.train.step_timeout_seconds
    return math.ceil(START_SECONDS + limits + 3 * recipe.train.log_every_steps * step)

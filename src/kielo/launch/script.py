"""The files of a launch as text: job.sh, submit.sh and environment.sh, from a plan and the site's card.

What is the same for every job is bash in `scripts/`, and is copied as it stands: a request to the scheduler,
settings, the scheduler's own functions, and the attempt.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from kielo.artifact.prefetched import VARIABLE, prefetched_folder
from kielo.launch.bash import array, assign, comment, exports, quoted
from kielo.launch.job_paths import binds, hub_cache
from kielo.launch.job_plan import JobPlan
from kielo.launch.schedulers import SCHEDULERS, SCRIPTS
from kielo.recipe.cards import is_own_card
from kielo.recipe.read import run_folder

# Attempts in a row without a new checkpoint, after which a chain ends.
MOST_WITHOUT_NEW = 3
# Packages in ~/.local would shadow the environment's, and not be there for another person.
_NO_PACKAGES_OF_HOME = {"PYTHONNOUSERSITE": "1"}
# Those of the person who submits; the site's modules, which come after it, may set it.
_NO_PYTHON_OF_SHELL = "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline",
}  # fmt: skip


def job_script(plan: JobPlan, folder: Path) -> str:
    """Return job.sh, which is in `folder` (an absolute path)."""
    scheduler = SCHEDULERS[plan.site.scheduler]
    parts = [
        "#!/bin/bash -l",
        *_about(plan),
        "#",
        *scheduler.request_lines(plan, folder),
        "",
        *_settings(plan, folder),
        "",
    ]
    parts += [*_setup(plan), ""]
    own = [*scheduler.for_jobs(), _text("left_out"), _text("body")]
    return "\n".join(parts) + "\n".join(own)


def ladder_script(plan: JobPlan, folder: Path, rungs: Sequence[tuple[Path, int]]) -> str:
    """Return job.sh of a ladder's rungs on one number of nodes: (folder of a launch, limit in seconds)."""
    scheduler = SCHEDULERS[plan.site.scheduler]
    parts = [
        "#!/bin/bash -l", *_about(plan), "#", *scheduler.request_lines(plan, folder), "",
        assign("WORKING_FOLDER", str(Path.cwd())), array("RUNGS", [str(launch) for launch, _ in rungs]),
        f"LIMITS=({' '.join(str(seconds) for _, seconds in rungs)})", "",
    ]  # fmt: skip
    return "\n".join(parts) + "\n" + _text("ladder")


def pack_script(plan: JobPlan, folder: Path, shares: int) -> str:
    """Return job.sh of the jobs that pack a run's text: the shares, and the one that joins their parts."""
    scheduler = SCHEDULERS[plan.site.scheduler]
    parts = [
        "#!/bin/bash -l", *_about(plan), "#", *scheduler.request_lines(plan, folder, packs=True), "",
        assign("WORKING_FOLDER", str(Path.cwd())), assign("FOLDER", str(folder)), f"SHARES={shares}",
        *(comment(line) for line in _sources(plan, "container", "image")),
        array("CONTAINER", _container(plan, packs=True)), "",
        *_setup(plan), "",
    ]  # fmt: skip
    return "\n".join(parts) + "\n" + _text("pack_job")


def submit_pack_script(plan: JobPlan, folder: Path, shares: int) -> str:
    """Return submit.sh, which submits the shares, and the job that joins them when all of them are over."""
    return _submission(plan, folder, [f"SHARES={shares}"], [], "submit_pack")


def submit_script(plan: JobPlan, folder: Path) -> str:
    """Return submit.sh, which submits the chain of job.sh."""
    settings = [assign("RUN", str(run_folder(plan.recipe).absolute())), f"JOBS={plan.chain_length}"]
    return _submission(plan, folder, settings, ["left_out"], "submit")


def _submission(
    plan: JobPlan, folder: Path, settings: Sequence[str], before: Sequence[str], main: str
) -> str:
    """Return bash that knows what job.sh asks for, as `submitted.sh` compares it.

    before, main: names of scripts before and after the scheduler's.
    """
    lines = [
        "#!/bin/bash", assign("WORKING_FOLDER", str(Path.cwd())), assign("FOLDER", str(folder)), *settings,
        "# what job.sh asks for", assign("ACCOUNT", plan.wishes.account or ""),
        assign("PARTITION", plan.partition.name), assign("QOS", plan.partition.qos),
        f"JOB_NODES={plan.nodes + plan.wishes.spares}", f"WALL_SECONDS={plan.wall_seconds}", "",
    ]  # fmt: skip
    own = SCHEDULERS[plan.site.scheduler].for_submission()
    return "\n".join([*lines, *map(_text, before), own, _text("submitted"), _text(main)])


def environment_script(plan: JobPlan) -> str:
    """Return environment.sh: what each rank has in its environment, and the commands that it starts."""
    of_site = plan.jobs_of_site
    lines = [
        comment(f"Environment of every rank on {plan.site.name}; rank.sh reads it."),
        "# shellcheck shell=bash disable=SC2034 # variables that rank.sh uses",
        *exports({"OMP_NUM_THREADS": str(plan.cores_per_device), "PYTHONUNBUFFERED": "1"}),
        *exports({"PYTHONSAFEPATH": "1"}),  # the working folder is no place of modules
        *exports({} if _is_own_python(plan) else _NO_PACKAGES_OF_HOME),
        "ulimit -c 0 # cores of thousands of ranks fill a quota",
        *(comment(line) for line in _sources(plan, "environment")),
        *exports(of_site.environment),
    ]
    if of_site.environment_between_nodes and plan.nodes > 1:
        lines += [comment(line) for line in _sources(plan, "environment_between_nodes")]
        lines += exports(of_site.environment_between_nodes)
    if not plan.site.internet_on_compute_nodes:
        lines += [comment(f"{plan.site.name}'s compute nodes reach no network outside."), *exports(_OFFLINE)]
    if (prefetched := prefetched_folder()) is not None:
        lines += exports({VARIABLE: str(prefetched)})
    if (cache := hub_cache(plan.recipe)) is not None:
        lines += [
            "# weights or tokenizer of the hub, as this launch found them",
            *exports({"HF_HUB_CACHE": str(cache)}),
        ]
    elif plan.site_folder is not None:
        lines += [
            "# weights of the hub go beside the environment, not into the home",
            f'export HF_HOME="${{HF_HOME:-{plan.site_folder / "caches" / "huggingface"}}}"',
        ]
    python = [sys.executable] if _is_own_python(plan) else ["python"]
    lines += [
        assign("VENV", plan.venv),
        array("PYTHON", python), array("KIELO", [*python, "-m", "kielo"]),
        array("TORCHRUN", [*python, "-m", "torch.distributed.run"]),
        array("DECIDE", [*python, "-m", "kielo.launch.decide"]),
        array("TRAIN_FLAGS", ["--measure", str(plan.measured_steps)] if plan.measured_steps else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _setup(plan: JobPlan) -> list[str]:
    own = [] if _is_own_python(plan) else [_NO_PYTHON_OF_SHELL]
    return [*own, *(comment(line) for line in _sources(plan, "setup")), *plan.jobs_of_site.setup]


def _is_own_python(plan: JobPlan) -> bool:
    """Return True where ranks run in the Python of `kielo launch`, with all packages that it finds."""
    return not plan.image and not plan.venv


def _about(plan: JobPlan) -> list[str]:
    site = plan.site
    lines = [
        f"{plan.recipe.name} on {plan.nodes} nodes of {site.description}, written by `kielo launch`.",
        f"Network: {site.network}. Card: {site.source}, {site.date}.",
        *([site.notes] if site.notes else []),
        *_sources(plan, "partitions", "devices", "options", "account"),
    ]
    return [comment(line) for line in lines]


def _container(plan: JobPlan, packs: bool = False) -> list[str]:
    """Return the command in which Kielo starts, with the paths that it sees; [] without a container."""
    if not plan.image:
        return []
    return [*plan.jobs_of_site.container, "--bind", ",".join(binds(plan, packs)), plan.image]


def _with_node_folder(container: list[str]) -> str:
    """Return CONTAINER with the node's own folder, whose name is known only in the job."""
    line = array("CONTAINER", container)
    if not container:
        return line
    image = quoted(container[-1])
    return f'{line.removesuffix(f"{image})")}--bind "$NODE_FOLDER" {image})'


def _settings(plan: JobPlan, folder: Path) -> list[str]:
    of_site, run = plan.jobs_of_site, run_folder(plan.recipe).absolute()
    here = Path.cwd()
    return [
        assign("SITE", plan.site.name), assign("WORKING_FOLDER", str(here)), assign("RUN", str(run)),
        assign("FOLDER", str(folder)),
        f"NODES={plan.nodes}", f"SPARES={plan.wishes.spares}",
        f"DEVICES_PER_NODE={plan.site.devices_per_node}", f"CORES_PER_DEVICE={plan.cores_per_device}",
        f"WALL_SECONDS={plan.wall_seconds}",
        f"GRACE_SECONDS={plan.grace_seconds} # the ranks are asked to save so long before the end",
        f"SILENCE_SECONDS={plan.silence_seconds} # without a line in the log, the attempt is taken for dead",
        f"MOST_WITHOUT_NEW={MOST_WITHOUT_NEW} # attempts in a row without a new checkpoint",
        f"TORCHRUN={'yes' if plan.wishes.is_torchrun else 'no'} # in place of one task a device",
        f"PREFLIGHT={'yes' if plan.wishes.is_preflight else 'no'} # the nodes are checked before they train",
        *(comment(line) for line in _sources(plan, "architecture", "cpu_bind", "host_suffix", "node_folder")),
        f"ARCHITECTURE={of_site.architecture}", assign("CPU_BIND", of_site.cpu_bind),
        assign("HOST_SUFFIX", of_site.host_suffix), f'NODE_FOLDER="{of_site.node_folder}"',
        *(comment(line) for line in _sources(plan, "container", "image", "network_log", "stripe")),
        assign("IMAGE", plan.image), _with_node_folder(_container(plan)),
        assign("NETWORK_LOG", of_site.network_log), array("STRIPE", shlex.split(of_site.stripe)),
    ]  # fmt: skip


def _sources(plan: JobPlan, *fields: str) -> list[str]:
    """Return the origin of these fields of the card's table [jobs], those that it sets."""
    sources = plan.jobs_of_site.sources
    return [f"{field}: {sources[field]}" for field in fields if field in sources]


def card_file(plan: JobPlan) -> str:
    """Return where the card is, as the recipe names it; own cards by an absolute path."""
    name = plan.recipe.cluster
    return str(Path(name).absolute()) if is_own_card(name) else name


def _text(name: str) -> str:
    return (SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")

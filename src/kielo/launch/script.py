"""The files of a launch as text: job.sh, submit.sh and environment.sh, from a plan and the site's card.

Bash that is the same for every job is copied from `scripts/`. job.sh: a request to the scheduler, settings,
the scheduler's functions, and the attempt.
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

MOST_WITHOUT_NEW = 3  # attempts in a row without a new checkpoint, after which a chain ends
# Packages in ~/.local would shadow the environment's, and be missing for another person.
_NO_PACKAGES_OF_HOME = {"PYTHONNOUSERSITE": "1"}
# Variables of the submitting shell. The site's modules, which come later, may set them.
_NO_PYTHON_OF_SHELL = "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE"
_OFFLINE = {f"{name}_OFFLINE": "1" for name in ("HF_HUB", "HF_DATASETS", "TRANSFORMERS")}
_OFFLINE["WANDB_MODE"] = "offline"


def job_script(plan: JobPlan, folder: Path) -> str:
    """Return job.sh for `folder` (an absolute path)."""
    parts = [*_head(plan, folder), *_settings(plan, folder), "", *_setup(plan), ""]
    own = [SCHEDULERS[plan.site.scheduler].parts()[0], _text("left_out"), _text("body")]
    return "\n".join(parts) + "\n".join(own)


def _head(plan: JobPlan, folder: Path) -> list[str]:
    request = SCHEDULERS[plan.site.scheduler].request_lines(plan, folder)
    return ["#!/bin/bash -l", *_about(plan), "#", *request, ""]


def ladder_script(plan: JobPlan, folder: Path, rungs: Sequence[tuple[Path, int]]) -> str:
    """Return job.sh of a ladder's rungs on one number of nodes: (folder of a launch, limit in seconds)."""
    limits = f"LIMITS=({' '.join(str(seconds) for _, seconds in rungs)})"
    settings = [_working_folder(), array("RUNGS", [str(launch) for launch, _ in rungs]), limits]
    return "\n".join([*_head(plan, folder), *settings, "", _text("ladder")])


def _working_folder() -> str:
    return assign("WORKING_FOLDER", str(Path.cwd()))


def share_script(plan: JobPlan, folder: Path, shares: int) -> str:
    """Return job.sh of jobs that share a stage: the shares, and the job that joins what they made."""
    settings = [_working_folder(), assign("FOLDER", str(folder)), f"SHARES={shares}"]
    settings.append(f"STAGE={plan.shared_stage}")
    settings += [*_sources(plan, "container", "image"), array("CONTAINER", _container(plan)), ""]
    return "\n".join([*_head(plan, folder), *settings, *_setup(plan), "", _text("share_job")])


def submit_shares_script(plan: JobPlan, folder: Path, shares: int) -> str:
    """Return submit.sh: a chain of arrays of the shares, and a job that joins them when all are over."""
    settings = [f"SHARES={shares}", f"ARRAYS={plan.chain_length}"]
    return _submission(plan, folder, settings, [], "submit_shares")


def submit_script(plan: JobPlan, folder: Path) -> str:
    settings = [assign("RUN", str(run_folder(plan.recipe).absolute())), f"JOBS={plan.chain_length}"]
    return _submission(plan, folder, settings, ["left_out"], "submit")


def _submission(
    plan: JobPlan, folder: Path, settings: Sequence[str], before: Sequence[str], main: str
) -> str:
    """Return bash that compares what job.sh asks for. before, main: scripts around the scheduler's."""
    facts = {
        "ACCOUNT": plan.wishes.account or "",
        "PARTITION": plan.partition.name,
        "QOS": plan.partition.qos,
    }
    facts |= {"JOB_NODES": str(plan.nodes + plan.wishes.spares), "WALL_SECONDS": str(plan.wall_seconds)}
    lines = ["#!/bin/bash", _working_folder(), assign("FOLDER", str(folder)), *settings]
    lines += ["# what job.sh asks for", *(assign(name, value) for name, value in facts.items()), ""]
    own = SCHEDULERS[plan.site.scheduler].parts()[1]
    return "\n".join([*lines, *map(_text, before), own, _text("submitted"), _text(main)])


def environment_script(plan: JobPlan) -> str:
    """Return environment.sh: each rank's environment variables, and the commands that it starts."""
    of_site = plan.jobs_of_site
    lines = [
        comment(f"Environment of every rank on {plan.site.name}; rank.sh reads it."),
        "# shellcheck shell=bash disable=SC2034,SC2154 # variables of rank.sh",
        *exports({"OMP_NUM_THREADS": str(plan.cores_per_device), "PYTHONUNBUFFERED": "1"}),
        *exports({"PYTHONSAFEPATH": "1"}),  # the working folder is no place of modules
        *exports({} if _is_own_python(plan) else _NO_PACKAGES_OF_HOME),
        "ulimit -c 0 # cores of thousands of ranks fill a quota",
        *_sources(plan, "environment"),
        *exports(of_site.environment),
    ]
    if of_site.environment_between_nodes and plan.nodes > 1:
        lines += [*_sources(plan, "environment_between_nodes"), *exports(of_site.environment_between_nodes)]
    if not plan.site.internet_on_compute_nodes:
        lines += [comment(f"{plan.site.name}'s compute nodes reach no network outside."), *exports(_OFFLINE)]
    if (prefetched := prefetched_folder()) is not None:
        lines += exports({VARIABLE: str(prefetched)})
    if (cache := hub_cache(plan.recipe)) is not None:
        lines.append("# weights or tokenizer of the hub, as this launch found them")
        lines += exports({"HF_HUB_CACHE": str(cache)})
    elif plan.site_folder is not None:
        lines.append("# weights of the hub go beside the environment, not into the home")
        lines.append(f'export HF_HOME="${{HF_HOME:-{plan.site_folder / "caches" / "huggingface"}}}"')
    python = [sys.executable] if _is_own_python(plan) else ["python"]
    lines += [assign("VENV", plan.venv), array("PYTHON", python)]
    decide = "decide_evaluation" if plan.evaluates else "decide"
    programs = {"KIELO": "kielo", "TORCHRUN": "torch.distributed.run", "DECIDE": f"kielo.launch.{decide}"}
    lines += [array(name, [*python, "-m", module]) for name, module in programs.items()]
    verb = "evaluate" if plan.evaluates else "train"
    flags = f" --measure {plan.measured_steps}" if plan.measured_steps else ""
    flags += " --watch" if plan.work == "watch" else ""
    lines.append(f'COMMAND=({verb} "$FOLDER/recipe.toml"{flags}) # of kielo, on each rank')
    return "\n".join(lines) + "\n"


def _setup(plan: JobPlan) -> list[str]:
    own = [] if _is_own_python(plan) else [_NO_PYTHON_OF_SHELL]
    return [*own, *_sources(plan, "setup"), *plan.jobs_of_site.setup]


def _is_own_python(plan: JobPlan) -> bool:
    """Return True if ranks run in the Python of `kielo launch`, with all packages that it finds."""
    return not plan.image and not plan.venv


def _about(plan: JobPlan) -> list[str]:
    site = plan.site
    lines = [
        f"{plan.recipe.name} on {plan.nodes} nodes of {site.description}, written by `kielo launch`.",
        f"Network: {site.network}. Card: {site.source}, {site.date}.",
        *([site.notes] if site.notes else []),
    ]
    return [*map(comment, lines), *_sources(plan, "partitions", "devices", "options", "account")]


def _container(plan: JobPlan) -> list[str]:
    """Return the command in which Kielo starts, with the paths that it sees, or [] without a container."""
    if not plan.image:
        return []
    return [*plan.jobs_of_site.container, "--bind", ",".join(binds(plan)), plan.image]


def _with_node_folder(container: list[str]) -> str:
    """Return CONTAINER with the node's own folder, whose name is known only in the job."""
    line = array("CONTAINER", container)
    if not container:
        return line
    image = quoted(container[-1])
    return f'{line.removesuffix(f"{image})")}--bind "$NODE_FOLDER" {image})'


def _settings(plan: JobPlan, folder: Path) -> list[str]:
    of_site, run = plan.jobs_of_site, run_folder(plan.recipe).absolute()
    return [
        assign("SITE", plan.site.name),
        _working_folder(),
        assign("RUN", str(run)),
        assign("FOLDER", str(folder)),
        assign("WORK", plan.work),
        f"NODES={plan.nodes}\nSPARES={plan.wishes.spares}",
        f"DEVICES_PER_NODE={plan.site.devices_per_node}\nCORES_PER_DEVICE={plan.cores_per_device}",
        f"WALL_SECONDS={plan.wall_seconds}",
        f"GRACE_SECONDS={plan.grace_seconds} # the ranks are asked to save this long before the end",
        f"SILENCE_SECONDS={plan.silence_seconds} # without a line in the log, the attempt counts as dead",
        f"MOST_WITHOUT_NEW={MOST_WITHOUT_NEW} # attempts in a row without a new checkpoint",
        f"TORCHRUN={'yes' if plan.wishes.is_torchrun else 'no'} # in place of one task a device",
        f"PREFLIGHT={'yes' if plan.wishes.is_preflight else 'no'} # the nodes are checked before they train",
        *_sources(plan, "architecture", "cpu_bind", "host_suffix", "node_folder"),
        f"ARCHITECTURE={of_site.architecture}",
        assign("CPU_BIND", of_site.cpu_bind),
        assign("HOST_SUFFIX", of_site.host_suffix),
        f'NODE_FOLDER="{of_site.node_folder}"',
        *_sources(plan, "container", "image", "network_log", "stripe"),
        assign("IMAGE", plan.image),
        _with_node_folder(_container(plan)),
        assign("NETWORK_LOG", of_site.network_log),
        array("STRIPE", shlex.split(of_site.stripe)),
    ]


def _sources(plan: JobPlan, *fields: str) -> list[str]:
    """Return comments on the origin of these fields of the card's table [jobs], if it sets them."""
    sources = plan.jobs_of_site.sources
    return [comment(f"{field}: {sources[field]}") for field in fields if field in sources]


def card_file(plan: JobPlan) -> str:
    """Return the card's path or name, as the recipe names it. Own cards have an absolute path."""
    name = plan.recipe.cluster
    return str(Path(name).absolute()) if is_own_card(name) else name


def _text(name: str) -> str:
    return (SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")

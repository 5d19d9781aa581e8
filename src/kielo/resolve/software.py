"""Properties of a run's software and CPU: versions, precision and limits; torch-free."""

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from kielo.artifact.checkpoint_folder import step_folders
from kielo.recipe.cards import Cluster, cluster
from kielo.recipe.sections import Layout, Precision, Recipe, Train
from kielo.resolve.resolved import OWN_FILE_STALL_SECONDS, read
from kielo.resolve.stages import SCHEDULES

# What each version of torch runs, as tried. The resolver, the planner, the pipeline schedules and
# docs/layouts.md read it. An untried version counts as the newest tried version before it.

TRIED = ("2.10", "2.11", "2.13")
NEWEST = TRIED[-1]


class Limit(NamedTuple):
    """A feature that fails on some versions of torch."""

    what: str
    works_on: tuple[str, ...]  # of TRIED
    otherwise: str
    instead: str


_OTHER_SCHEDULES = "1f1b or interleaved_1f1b"
_FAULTS = {"zbv": "fails at the start", "dualpipev": "fails at the start"}
SCHEDULE_LIMITS = {
    name: Limit(f'layout.pipeline_schedule = "{name}"', ("2.13",), fault, _OTHER_SCHEDULES)
    for name, fault in ({"interleaved_zero_bubble": "crashes at the first step"} | _FAULTS).items()
}
COMPILED_SPLIT_BACKWARD = Limit(
    "layout.compile = true with a schedule that splits the backward",
    (),
    "computes each layer's backward twice; the numbers are right",
    "layout.compile = false, or a schedule of " + _OTHER_SCHEDULES,
)


def as_tried(version: str) -> str:
    """Return the tried version by which `version`, such as "2.12.0+rocm7", is judged."""
    number = _number(version)
    return next((tried for tried in reversed(TRIED) if _number(tried) <= number), TRIED[0])


def schedule_complaint(schedule: str, version: str) -> str | None:
    """Return why torch `version` does not run a pipeline schedule, with the fix, or None if it does."""
    limit = SCHEDULE_LIMITS.get(schedule)
    if limit is None or as_tried(version) in limit.works_on:
        return None
    works = f"it works on torch {' and '.join(limit.works_on)}"
    return f"{limit.what} {limit.otherwise} on torch {version}; {works}. Fix: {limit.instead}"


def compile_advice(layout: Layout) -> str | None:
    """Return why compiled layers are slow in `layout`, or None."""
    if layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward:
        limit = COMPILED_SPLIT_BACKWARD
        return f"{limit.what} {limit.otherwise}. Fix: {limit.instead}"
    return None


def _number(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch")
    return int(found[1]), int(found[2])


# No key of a recipe, because tests trace without writing machine code ("aot_eager").
BACKEND_VARIABLE = "KIELO_COMPILE_BACKEND"


@dataclass(frozen=True)
class Software:
    """Software of the machine that trains.

    torch: its version. missing_compiler: why torch.compile cannot run, or None. has_amx: whether the CPU
    multiplies matrices in bf16.
    """

    torch: str
    missing_compiler: str | None = None
    has_amx: bool = False


def installed(device: str) -> Software:
    """Return the software of this machine, with the newest tried torch if none is installed."""
    return Software(installed_torch(), missing_compiler(device), _has_amx())


def planned(site: Cluster) -> Software:
    """Return the software of a plan: the card's torch, else the newest that was tried."""
    return Software(site.torch or NEWEST)


def installed_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return NEWEST


def _has_amx() -> bool:
    """Return True if Linux lists AMX with bf16 (Intel from Sapphire Rapids on)."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False


def chosen_backend() -> str:
    """Return torch.compile's backend: KIELO_COMPILE_BACKEND, or else inductor."""
    return os.environ.get(BACKEND_VARIABLE, "inductor")


def missing_compiler(device: str) -> str | None:
    """Return what torch.compile lacks on this machine, and the fix, or None.

    Inductor needs a C compiler for GPUs, a C++ compiler for CPUs, and Python's headers. Other backends need
    nothing.
    """
    if chosen_backend() != "inductor":
        return None
    is_gpu = device == "cuda"
    names = [os.environ.get("CC"), "gcc", "clang"] if is_gpu else [os.environ.get("CXX", "g++")]
    if not any(name and shutil.which(name.split()[0]) for name in names):
        package = "gcc" if is_gpu else "g++"
        missing = f"compiler ({package})"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing, package = "Python.h", "python3-dev"
    else:
        return None
    return (
        f"this machine has no {missing}, which torch.compile needs. Fix: install it (Debian and "
        f"Ubuntu: apt-get install {package})"
    )


RESOLVED_NAME = "resolved.toml"


def usual_precision(device: str, has_amx: bool) -> tuple[Precision, str]:
    """Return the precision in which a device is fastest, and why.

    With AVX-512 BF16 alone a step in bf16 took 1.4 to 2.1 times the time in fp32 (benchmarks/log).
    """
    if device == "cuda":
        return "bf16", "GPUs multiply bf16 several times as fast as fp32"
    if has_amx:
        return "bf16", "this CPU has AMX, which multiplies bf16 faster than fp32"
    return "fp32", "this CPU has no AMX, and without it products in bf16 are slower than in fp32"


def chosen_precision(recipe: Recipe, device: str, has_amx: bool, run_folder: Path) -> tuple[Precision, str]:
    """Return the precision of the run and why: the recipe's, the checkpoints', or the usual precision."""
    if recipe.train.precision is not None:
        return recipe.train.precision, "train.precision"
    begun = _begun(run_folder)
    if begun is not None:
        return begun, "the run began in it"
    return usual_precision(device, has_amx)


def precisions(train: Train) -> list[Precision]:
    chosen = [train.precision, *(precision for _, precision in train.precision_changes)]
    return list(dict.fromkeys(precision for precision in chosen if precision is not None))


def with_precision(recipe: Recipe, precision: Precision) -> Recipe:
    if recipe.train.precision is not None:
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})


def _begun(run_folder: Path) -> Precision | None:
    path = run_folder / RESOLVED_NAME
    if not path.is_file() or not step_folders(run_folder / "train" / "checkpoints"):
        return None
    return read(path).identity.train.precision


_USUAL_SECONDS = 1800.0
_SHARED_FILE_STALL_SECONDS = 120.0


def start_timeout_seconds(recipe: Recipe) -> float:
    """Return the limit of the rendezvous, of communicators' starts and of collectives in first steps."""
    card = cluster(recipe.cluster)
    return recipe.train.start_timeout_seconds or card.start_timeout_seconds or _USUAL_SECONDS


def file_stall_seconds(recipe: Recipe) -> float:
    """Return the longest wait for a file. It is longer if nodes share a file system."""
    card = cluster(recipe.cluster)
    usual = OWN_FILE_STALL_SECONDS if card.scheduler == "none" else _SHARED_FILE_STALL_SECONDS
    return card.file_stall_seconds or usual

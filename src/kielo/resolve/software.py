"""The software that a run computes with, as far as its numbers depend on it; torch-free."""

import os
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kielo.recipe.cards import Cluster
from kielo.resolve.torch_versions import NEWEST

# An environment variable and no key of a recipe: tests trace without writing machine code ("aot_eager").
BACKEND_VARIABLE = "KIELO_COMPILE_BACKEND"


@dataclass(frozen=True)
class Software:
    """Software of the machine that trains.

    torch: its version. missing_compiler: why torch.compile cannot be used, or None. has_amx: are there units
    of the processor that multiply matrices of bf16?
    """

    torch: str
    missing_compiler: str | None = None
    has_amx: bool = False


def installed(device: str) -> Software:
    """Returns the software of this machine; the newest tried torch where none is installed."""
    return Software(installed_torch(), missing_compiler(device), _has_amx())


def planned(site: Cluster) -> Software:
    """Returns the software that a plan is made for: the card's torch, else the newest that was tried."""
    return Software(site.torch or NEWEST)


def installed_torch() -> str:
    """Returns the version of the installed torch, or the newest tried one where none is installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return NEWEST


def _has_amx() -> bool:
    """Returns True if Linux lists AMX's products of bf16 (Intel from Sapphire Rapids on)."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False


def chosen_backend() -> str:
    """Returns torch.compile's backend: that of KIELO_COMPILE_BACKEND, or else inductor."""
    return os.environ.get(BACKEND_VARIABLE, "inductor")


def missing_compiler(device: str) -> str | None:
    """Returns what torch.compile lacks on this machine, and what would work; None if it has all.

    Inductor needs a C compiler for GPUs, a C++ compiler for CPUs, and the headers of Python; other backends
    need nothing.
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
        f"this machine has no {missing}, and torch.compile needs it; what would work: install it (Debian and "
        f"Ubuntu: apt-get install {package})"
    )

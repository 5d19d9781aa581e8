"""Settings of a process before torch computes: the limit of open files, and the allocators."""

import ctypes
import os
import resource

from kielo.ranks.rendezvous import Rendezvous
from kielo.recipe.cards import accelerator_of_device
from kielo.recipe.errors import KieloError

_MOST = 2**20  # some libraries make tables as long as the limit
_KEPT_BYTES = 2**30  # freed blocks below it are kept, and at most so much at the end of the heap
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_OWN_FILES = 512  # token shards, checkpoints, libraries, and about 30 sockets of other ranks
_VARIABLE = "PYTORCH_ALLOC_CONF"
_VARIABLES = (_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # names of the same settings


def open_files_needed(place: Rendezvous) -> int:
    """Return how many files and sockets a rank may have open at once.

    Rank 0 gathers the plans of checkpoints, over a socket a rank. If it serves the store, each rank has a
    connection, another for its heartbeat and, while a communicator starts, a third.
    """
    if place.rank > 0:
        return _OWN_FILES
    return _OWN_FILES + place.size * (1 if place.store_is_running else 4)


def allow_open_files(place: Rendezvous) -> None:
    """Raise this process's limit as far as allowed. Raises KieloError if that is too little."""
    needed, (soft, hard) = open_files_needed(place), resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise KieloError(
            f"rank {place.rank} of {place.size} needs up to {needed} open files and sockets, but the hard "
            f"limit is {hard} (`ulimit -Hn`). Fix: ask the cluster's administrators for a higher limit"
        )


def keep_freed_memory() -> None:
    """Let glibc keep what a training on CPUs frees, for its next step.

    By default it returns large blocks to the kernel, which clears each page when it is next used. Without
    glibc, or with settings of its allocator in the environment, nothing is changed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    set_option(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def settle_allocator(settings: str) -> str:
    """Set an accelerator card's settings, if the environment has none. Return a sentence or ""."""
    if not settings or any(name in os.environ for name in _VARIABLES):
        return ""
    os.environ[_VARIABLE] = settings
    return f"{_VARIABLE}={settings} (from the accelerator card, a value in the environment takes precedence)"


def settings_of_device() -> str:
    card = accelerator_of_device(_device_name())
    return card.allocator_settings if card is not None else ""


def _device_name() -> str:
    """Return the name by NVIDIA's library, because torch would start CUDA. No other card has settings."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    has_failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        or library.nvmlDeviceGetName(device, name, len(name))
    )
    return "" if has_failed else name.value.decode()

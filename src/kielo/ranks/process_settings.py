"""Settings of a process before torch computes: open files, and the allocator of device memory."""

import ctypes
import os
import resource

from kielo.ranks.rendezvous import Rendezvous
from kielo.recipe.cards import accelerator_of_device
from kielo.recipe.errors import KieloError

# The limit of open files, which counts sockets too: raised as far as allowed, and enough or refused.


_MOST = 2**20  # some libraries make tables as long as the limit
_OWN_FILES = 512  # token shards, checkpoints, libraries, and about 30 sockets of other ranks


def open_files_needed(place: Rendezvous) -> int:
    """Return how many files and sockets a rank may have open at once.

    Rank 0 gathers the plans of checkpoints, over one socket a rank. If it serves the store, each rank has one
    connection to it, one for its heartbeat and, while a communicator is started, another one.
    """
    if place.rank > 0:
        return _OWN_FILES
    return _OWN_FILES + place.size * (1 if place.store_is_running else 4)


def allow_open_files(place: Rendezvous) -> None:
    """Raise this process's limit to what is allowed. Raises KieloError where that is too little."""
    needed, (soft, hard) = open_files_needed(place), resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise KieloError(
            f"rank {place.rank} of {place.size} needs up to {needed} open files and sockets, but the hard "
            f"limit is {hard} (`ulimit -Hn`); ask the cluster's administrators for a higher one"
        )


# Settings of torch's allocator of device memory, which torch reads from the environment when CUDA starts.


_VARIABLE = "PYTORCH_ALLOC_CONF"
_VARIABLES = (_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # names of the same settings


def settle_allocator(settings: str) -> str:
    """Set an accelerator card's settings, unless the environment has some; return a sentence about them.

    Must be called before CUDA starts, which is when torch reads them. Returns "" if nothing was set.
    """
    if not settings or any(name in os.environ for name in _VARIABLES):
        return ""
    os.environ[_VARIABLE] = settings
    return f"{_VARIABLE}={settings} (the accelerator card's; a value in the environment takes its place)"


def settings_of_device() -> str:
    """Return the settings on the card of this machine's first GPU; "" if it has none or no card fits."""
    card = accelerator_of_device(_device_name())
    return card.allocator_settings if card is not None else ""


def _device_name() -> str:
    """Ask NVIDIA's management library for the name: torch would start CUDA. No other card has settings."""
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

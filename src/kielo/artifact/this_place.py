"""The host, boot and set of process numbers of this process, which names of what it writes aside have.

Containers on one machine, and clones of one machine, can have one host name and the same process numbers.
"""

import os
import platform
from pathlib import Path

import xxhash

_PROC = Path("/proc")


def machine(proc: Path = _PROC) -> str:
    """Return this boot and set of process numbers (containers have their own), or "" without /proc."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.stat(proc / 'self/ns/pid').st_ino}"
    except OSError:
        return ""


def this_place(proc: Path = _PROC) -> str:
    """Return the host's name with a short hash of `machine`, or the name alone without /proc."""
    here = machine(proc)
    return f"{platform.node()}-{xxhash.xxh3_64_hexdigest(here.encode())[:8]}" if here else platform.node()


def is_alive(process: str) -> bool:
    """Return False if no process has this number. It is asked only for processes of `this_place`."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True

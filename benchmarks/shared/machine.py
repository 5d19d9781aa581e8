"""Describe the machine of a result, and read the memory that Linux counted."""

import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Returns the processor's name, or at least its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Returns the processor's name and the cores that this process may use."""
    return {"cpu": processor(), "cores": len(os.sched_getaffinity(0))}


def peak_bytes() -> int:
    """Returns the peak of this program; getrusage also counts what was in memory before its exec."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

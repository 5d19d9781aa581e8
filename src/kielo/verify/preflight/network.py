"""Check: NCCL (or RCCL) uses the network that the cluster's card expects, and did not fall back to sockets.

A missing plugin is 22 times slower and no error (CSCS documentation of NCCL, 2026-08: 122.6 and 5.4 GB/s).
NCCL names its network only in its log, which must be requested before it starts.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from kielo.verify.preflight.job import Finding, Job

# `NCCL INFO Using network AWS Libfabric`, `NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)`
_NETWORK = re.compile(r"Using network (.+?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;-]+)")


def ask_nccl_for_a_log() -> Path:
    """Set NCCL's variables of a log, unless the environment has some. Return the log's path.

    Called before the first communicator. The caller removes the file.
    """
    if "NCCL_DEBUG_FILE" in os.environ:
        pattern = os.environ["NCCL_DEBUG_FILE"]
        return Path(pattern.replace("%h", os.uname().nodename).replace("%p", str(os.getpid())))
    path = Path(tempfile.gettempdir()) / f"kielo_nccl_{os.getpid()}.log"
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    os.environ["NCCL_DEBUG_FILE"] = str(path)
    return path


def networks_of(log: str) -> list[str]:
    """Return the networks and providers that NCCL's log names, each once: ["AWS Libfabric", "cxi"]."""
    return list(dict.fromkeys(_NETWORK.findall(log) + _PROVIDER.findall(log)))


class Measured(TypedDict):
    networks: list[str]
    is_expected: bool


def measure(job: Job) -> Measured | None:
    """Return the networks that this rank's NCCL names, and if the card expects them; None on CPUs."""
    if job.nccl_log is None:
        return None
    log = job.nccl_log.read_text(encoding="utf-8", errors="replace") if job.nccl_log.is_file() else ""
    expected = _expected(job)
    return {"networks": networks_of(log), "is_expected": not expected or bool(re.search(expected, log))}


def judge(found: Sequence[Measured | None], job: Job) -> list[Finding]:
    """Refuse ranks of a job on several nodes that use another network than the card's."""
    if job.num_nodes == 1:
        return []
    return [
        Finding(
            rank,
            f"NCCL uses {', '.join(one['networks']) or 'a network that its log does not name'}; the card "
            f"{job.cluster.name} expects a log with {_expected(job)!r}: is the plugin in the container, and "
            "NCCL_NET as the site says?",
        )
        for rank, one in enumerate(found)
        if one is not None and not one["is_expected"]
    ]


def _expected(job: Job) -> str:
    """Return the card's pattern in NCCL's log of the fast network, or ""."""
    return job.cluster.jobs.network_log if job.cluster.jobs else ""


def summarise(found: Sequence[Measured | None], job: Job) -> str:
    logs = [one for one in found if one is not None]
    if not logs:
        return "gloo, over sockets"
    return ", ".join(dict.fromkeys(name for one in logs for name in one["networks"])) or "NCCL names none"

"""Checks of what each rank finds on its host: software, clock, cores and network.

Software: versions, Kielo's own code and the environment's settings are the same on every rank.

Clock: the clocks agree, because leases, file times and logs are compared between nodes. All ranks read them
when a barrier ends, which is within milliseconds.

Binding: each rank may use the cores that the cluster's card gives its device, or at least one core alone.

Network: NCCL (or RCCL) uses the network that the card expects, and did not fall back to sockets. A missing
plugin is 22 times slower and no error (CSCS documentation of NCCL, 2026-08: 122.6 and 5.4 GB/s). NCCL names
its network only in its log, which must be requested before it starts. gloo's interface is shown, because many
cards name none.
"""

import os
import platform
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import torch
import xxhash

import kielo
from kielo.ranks.rendezvous import gloo_interface
from kielo.verify.preflight.job import CLOCK_ROUNDS, Finding, Job

# Variables that change how a rank computes or communicates. Those that choose its devices differ by rank.
PREFIXES = ("NCCL_", "RCCL_", "FI_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "HSA_", "CUBLAS_")
# These only change logs: in preflight each rank has its own file, and with rank.sh only rank 0 logs.
_ONLY_TELLS = ("NCCL_DEBUG", "RCCL_DEBUG")
_PACKAGES = ("torch", "numpy", "safetensors", "pydantic")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
# A proposal: no site publishes a limit. A lease of the run folder is taken over after minutes.
WARNING_SECONDS, REFUSAL_SECONDS = 1.0, 60.0
# `NCCL INFO Using network AWS Libfabric`, `NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)`
_NETWORK = re.compile(r"Using network (.+?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;-]+)")


def measure_software(job: Job) -> dict[str, str]:
    device, folder, code = job.world.device, Path(kielo.__file__).parent, xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        code.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    found = {"python": platform.python_version(), "kielo": kielo.__version__}
    found["kielo's code"] = code.hexdigest()
    found |= {name: version(name) for name in _PACKAGES}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "CUDA or ROCm": str(torch.version.hip or torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    for path in _DRIVERS:
        if path.exists():
            found["driver"] = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    return found | {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) and not name.startswith(_ONLY_TELLS)
    }


def judge_software(found: Sequence[dict[str, str]], job: Job) -> list[Finding]:
    findings = []
    for name in sorted(set().union(*found)):
        values = [one.get(name, "not set") for one in found]
        usual, count = Counter(values).most_common(1)[0]
        findings += [
            Finding(rank, f"{name} is {value}, and {usual} on {count} of {len(values)} ranks")
            for rank, value in enumerate(values)
            if value != usual
        ]
    return findings


def summarise_software(found: Sequence[dict[str, str]], job: Job) -> str:
    first = found[0]
    parts = [f"{name} {first[name]}" for name in ("torch", "NCCL", "device") if name in first]
    settings = len(set().union(*found)) - len(parts)
    return ", ".join(parts) + f", and {settings} more versions and settings"


def measure_clock(job: Job) -> list[float]:
    read = []
    for _ in range(CLOCK_ROUNDS):
        job.wait_for_all()
        read.append(time.time())
    return read


def judge_clock(found: Sequence[list[float]], job: Job) -> list[Finding]:
    return [
        Finding(
            rank,
            f"its clock is {abs(off):.1f} s {'fast' if off > 0 else 'slow'}, against the median of all "
            f"ranks; less than {WARNING_SECONDS:g} s is expected",
            is_refusal=abs(off) >= REFUSAL_SECONDS,
        )
        for rank, off in enumerate(offsets(found))
        if abs(off) >= WARNING_SECONDS
    ]


def offsets(found: Sequence[list[float]]) -> list[float]:
    """Return each rank's seconds ahead of the median of all, the least of the rounds.

    A rank that leaves one barrier late is not late in every barrier.
    """
    medians = [statistics.median(reads) for reads in zip(*found, strict=True)]
    return [
        min((read - median for read, median in zip(reads, medians, strict=True)), key=abs) for reads in found
    ]


def summarise_clock(found: Sequence[list[float]], job: Job) -> str:
    return f"at most {max(map(abs, offsets(found))):.3f} s from the median"


def measure_binding(job: Job) -> dict[str, list[int] | int]:
    return {"local_rank": job.world.local_rank, "cores": sorted(os.sched_getaffinity(0))}


def judge_binding(found: Sequence[dict], job: Job) -> list[Finding]:
    """Compare with the card's binding. Without it, check that the ranks of a node have a core each."""
    binding = job.cluster.jobs.cpu_bind if job.cluster.jobs else ""
    is_on_gpus = job.world.device.type == "cuda"
    expected = cores_of_binding(binding) if is_on_gpus else []
    findings = [
        Finding(
            rank,
            f"may use the cores {in_ranges(cores)}; the card {job.cluster.name} gives local rank {number} "
            f"{in_ranges(expected[number])}: start it with --cpu-bind={binding}",
        )
        for rank, (number, cores) in enumerate((one["local_rank"], set(one["cores"])) for one in found)
        if number < len(expected) and not cores <= expected[number]
    ]
    for ranks in job.ranks_of_nodes().values():
        shared = set().union(*(found[rank]["cores"] for rank in ranks))
        if len(shared) < len(ranks):
            message = f"the {len(ranks)} ranks of its node share {len(shared)} cores ({in_ranges(shared)})"
            # Ranks on a person's own machine are for trying a layout out.
            findings.append(Finding(ranks[0], message, is_refusal=is_on_gpus))
    return findings


def cores_of_binding(binding: str) -> list[set[int]]:
    """Return the cores of each local rank in srun's binding "mask_cpu:0xfe,…" or "map_cpu:1,…".

    Empty for bindings that leave the choice to Slurm.
    """
    kind, _, entries = binding.partition(":")
    if kind.endswith("map_cpu"):
        return [{int(entry)} for entry in entries.split(",")]
    if kind.endswith("mask_cpu"):
        masks = [int(entry, 16) for entry in entries.split(",")]
        return [{core for core in range(mask.bit_length()) if mask >> core & 1} for mask in masks]
    return []


def summarise_binding(found: Sequence[dict], job: Job) -> str:
    counts = sorted({len(one["cores"]) for one in found})
    return f"{' to '.join(map(str, sorted({counts[0], counts[-1]})))} cores a rank"


def in_ranges(cores: set[int]) -> str:
    """Return the cores as a text: {1, 2, 3, 16} → "1-3,16"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


@contextmanager
def nccl_log(device: str) -> Iterator[Path | None]:
    """Yield the file that NCCL will log to, and remove it if the environment named none. None on CPUs.

    Entered before the first communicator.
    """
    if device == "cpu":
        yield None
        return
    if (pattern := os.environ.get("NCCL_DEBUG_FILE")) is not None:
        yield Path(pattern.replace("%h", os.uname().nodename).replace("%p", str(os.getpid())))
        return
    path = Path(tempfile.gettempdir()) / f"kielo_nccl_{os.getpid()}.log"
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    os.environ["NCCL_DEBUG_FILE"] = str(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def networks_of(log: str) -> list[str]:
    """Return the networks and providers that NCCL's log names, each once: ["AWS Libfabric", "cxi"]."""
    return list(dict.fromkeys(_NETWORK.findall(log) + _PROVIDER.findall(log)))


class Networks(TypedDict):
    networks: list[str]
    is_expected: bool
    gloo: str  # its interface, "" if unknown


def measure_network(job: Job) -> Networks | None:
    """Return the networks of this rank's NCCL, and if the card expects them; None on CPUs."""
    if job.nccl_log is None:
        return None
    log = job.nccl_log.read_text(encoding="utf-8", errors="replace") if job.nccl_log.is_file() else ""
    expected = _expected_log(job)
    is_expected = not expected or bool(re.search(expected, log))
    return {"networks": networks_of(log), "is_expected": is_expected, "gloo": gloo_interface()}


def judge_network(found: Sequence[Networks | None], job: Job) -> list[Finding]:
    """Refuse ranks of a job on several nodes that use another network than the card's."""
    if len(set(job.nodes)) == 1:
        return []
    return [
        Finding(
            rank,
            f"NCCL uses {', '.join(one['networks']) or 'a network that its log does not name'}; the card "
            f"{job.cluster.name} expects a log with {_expected_log(job)!r}: is the plugin in the container, "
            "and NCCL_NET as the site says?",
        )
        for rank, one in enumerate(found)
        if one is not None and not one["is_expected"]
    ]


def _expected_log(job: Job) -> str:
    """Return the card's pattern in NCCL's log of the fast network, or ""."""
    return job.cluster.jobs.network_log if job.cluster.jobs else ""


def summarise_network(found: Sequence[Networks | None], job: Job) -> str:
    logs = [one for one in found if one is not None]
    if not logs:
        return "gloo, over sockets"
    names = ", ".join(dict.fromkeys(name for one in logs for name in one["networks"])) or "NCCL names none"
    interfaces = sorted({one["gloo"] or "an unknown interface" for one in logs})
    return f"{names}; gloo over {', '.join(interfaces)}"

"""Check: versions, Kielo's own code and the environment's settings are the same on every rank."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
import xxhash

import kielo
from kielo.verify.preflight.job import Finding, Job

# Variables that change how a rank computes or communicates. Those that choose its devices differ by rank.
PREFIXES = ("NCCL_", "RCCL_", "FI_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "HSA_", "CUBLAS_")
# These only change logs: in preflight each rank has its own file, and with rank.sh only rank 0 logs.
_ONLY_TELLS = ("NCCL_DEBUG", "RCCL_DEBUG")
_PACKAGES = ("torch", "numpy", "safetensors", "pydantic")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_MISSING = "not set"


def measure(job: Job) -> dict[str, str]:
    device = job.world.device
    found = {"python": platform.python_version(), "kielo": kielo.__version__, "kielo's code": code_hash()}
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


def judge(found: Sequence[dict[str, str]], job: Job) -> list[Finding]:
    findings = []
    for name in sorted(set().union(*found)):
        values = [one.get(name, _MISSING) for one in found]
        usual, count = Counter(values).most_common(1)[0]
        findings += [
            Finding(rank, f"{name} is {value}, and {usual} on {count} of {len(values)} ranks")
            for rank, value in enumerate(values)
            if value != usual
        ]
    return findings


def summarise(found: Sequence[dict[str, str]], job: Job) -> str:
    first = found[0]
    parts = [f"{name} {first[name]}" for name in ("torch", "NCCL", "device") if name in first]
    settings = len(set().union(*found)) - len(parts)
    return ", ".join(parts) + f", and {settings} more versions and settings"


def code_hash() -> str:
    folder, digest = Path(kielo.__file__).parent, xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()

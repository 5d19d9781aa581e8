"""Runs every test but demos and compiled layers: `make test-full`. Writes results/test_full.json.

Faults in one process, because they often wait and some have limits of seconds. Beside them all others in
three, which give way (`nice`): with two a fifth of the cores is idle once the faults are done. Compiled
layers by family and recomputation are left to `make test-torches`, which runs them with each version of
torch, and whole demos to `make test-demos`. The result has the seconds of the longest files. For a
measurement nothing else may run, and Linux's `sched_autogroup_enabled` must be 0: else each session has the
same share, whatever its `nice`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from junit import outcome, seconds_of_files
from torches import COMPILED_LAYERS

_ROOT = Path(__file__).resolve().parents[2]
_RESULT = Path(__file__).parents[1] / "results" / "test_full.json"
_OPTIONS = ["--tb=short", "--instafail", "--dist", "loadfile", "--no-loadscope-reorder"]
LONGEST = 30
_ALL_FAMILIES = (
    "test_a_compiled_layer_keeps_what_is_planned",
    "test_a_compiled_layer_of_a_gpu_keeps_flexattentions_output",
)
_LEFT_OUT = [f"--deselect={COMPILED_LAYERS}::{name}" for name in _ALL_FAMILIES]
# Name of the part → its command before and after the interpreter.
PARTS = {
    "faults": ([], ["tests/faults"]),
    "others": (["nice", "-n", "5"], ["-n", "3", "--ignore=tests/faults", "--ignore=tests/demos", *_LEFT_OUT]),
}


def main() -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(len(PARTS)) as pool:
        parts = dict(zip(PARTS, pool.map(_run, PARTS), strict=True))
    found = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores",
        "torch": version("torch"),
        "seconds": round(time.monotonic() - begun),
        "parts": parts,
    }
    _RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    sys.exit(max(part["status"] for part in parts.values()))


def _run(part: str) -> dict[str, Any]:
    """Runs pytest on a part; returns its status, counts and longest files (none if it broke off), seconds."""
    begun, (before, after) = time.monotonic(), PARTS[part]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "tests.xml"
        status = subprocess.run(
            [*before, sys.executable, "-m", "pytest", *after, *_OPTIONS, f"--junit-xml={report}"],
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ).returncode
        found: dict[str, Any] = {"status": status}
        if report.exists():
            longest = sorted(seconds_of_files(report).items(), key=lambda one: -one[1])[:LONGEST]
            found |= {**outcome(report), "longest": dict(longest)}
    return found | {"seconds": round(time.monotonic() - begun)}


if __name__ == "__main__":
    main()

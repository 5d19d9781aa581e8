"""Runs every test there is: `make test-full`. Writes results/test_full.json.

Eight parts, three at a time, for two cores, the longest first. Cases with limits of seconds are in the part
of faults, which often waits. All other parts only compute, and give way to it (`nice`). Each prints its
twelve slowest cases. For a measurement nothing else may run, and Linux's `sched_autogroup_enabled` must be 0:
else each session has the same share, whatever its `nice`.
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
from junit import outcome

_ROOT = Path(__file__).resolve().parents[2]
_RESULT = Path(__file__).parents[1] / "results" / "test_full.json"
_FAMILIES = "tests/verify/test_family_layouts.py"
# Name of the part → what it has of the cases marked full. "others" has the rest.
_FULL = {
    "demos": [f"tests/cli/test_{name}.py" for name in ("demo", "encoder", "follows")],
    "families": [_FAMILIES],
    "layouts": ["tests/verify"],
    "pages": ["tests/docs"],
    "training": ["tests/train", "tests/parallel"],
}
_FAULTS = "faults"
# Name of the part → arguments of pytest. The longest come first, so that all processes end at the same time.
PARTS = {
    _FAULTS: ["-m", "not full", "tests/faults"],
    **{name: ["-m", "full", *paths] for name, paths in _FULL.items()},
    "usual": ["-m", "not full", "--ignore=tests/faults"],
    "others": ["-m", "full", *(f"--ignore={path}" for paths in _FULL.values() for path in paths)],
}
PARTS["layouts"].append(f"--ignore={_FAMILIES}")


def main() -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
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
    """Runs pytest on the cases of a part; returns its status, counts (none if it broke off) and seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "tests.xml"
        arguments = [*PARTS[part], "--tb=short", "--durations=12", f"--junit-xml={report}"]
        priority = [] if part == _FAULTS else ["nice", "-n", "5"]
        status = subprocess.run(
            [*priority, sys.executable, "-m", "pytest", *arguments],
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ).returncode
        counts = outcome(report) if report.exists() else {}
    return {"status": status, **counts, "seconds": round(time.monotonic() - begun)}


if __name__ == "__main__":
    main()

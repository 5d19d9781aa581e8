"""Runs every test there is: `make test-full`. Writes results/test_full.json.

Five parts, two at a time, for two cores, the longest first. Each prints its twelve slowest cases.
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
# Name of the part → arguments of pytest. The longest come first, so that two processes end at the same time.
_FAMILIES = "tests/verify/test_family_layouts.py"
_DEMOS = [f"tests/cli/test_{name}.py" for name in ("demo", "encoder", "follows")]
PARTS = {
    "layouts": ["-m", "full", "--ignore=tests/cli", f"--ignore={_FAMILIES}"],
    "usual and faults": ["-m", "not full"],
    "families": ["-m", "full", _FAMILIES],
    "demos": ["-m", "full", *_DEMOS],
    "whole commands": ["-m", "full", "tests/cli", *(f"--ignore={name}" for name in _DEMOS)],
}


def main() -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        parts = dict(zip(PARTS, pool.map(_run, PARTS.values()), strict=True))
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


def _run(selection: list[str]) -> dict[str, Any]:
    """Runs pytest on the selected cases; returns its status, counts (none if it broke off) and seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "tests.xml"
        arguments = [*selection, "--tb=short", "--durations=12", f"--junit-xml={report}"]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ).returncode
        counts = outcome(report) if report.exists() else {}
    return {"status": status, **counts, "seconds": round(time.monotonic() - begun)}


if __name__ == "__main__":
    main()

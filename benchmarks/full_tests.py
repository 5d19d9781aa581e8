"""Runs every test there is: `make test-full`. Writes results/test_full.json.

Four parts, two at a time, for two cores. Whole commands come last: a core is free for their threads.
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

from junit import outcome

_ROOT = Path(__file__).resolve().parents[1]
_RESULT = Path(__file__).parent / "results" / "test_full.json"
# Name of the part → arguments of pytest. "layouts": cases marked `full`, but for families and whole commands.
# The longest come first, so that two processes end at about the same time.
_FAMILIES = "tests/verify/test_family_layouts.py"
PARTS = {
    "layouts": ["-m", "full", "--ignore=tests/cli", f"--ignore={_FAMILIES}"],
    "usual and faults": ["-m", "not full"],
    "families": ["-m", "full", _FAMILIES],
    "whole commands": ["-m", "full", "tests/cli"],
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
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *selection, "--tb=short", f"--junit-xml={report}"],
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ).returncode
        counts = outcome(report) if report.exists() else {}
    return {"status": status, **counts, "seconds": round(time.monotonic() - begun)}


if __name__ == "__main__":
    main()

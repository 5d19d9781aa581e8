"""Benchmark of faults: seconds from each until it is found and until the next step, as its test notes them.

    python benchmarks/faults/fault_seconds.py          # every row of docs/fault_matrix.toml that names a test
    python benchmarks/faults/fault_seconds.py R2 R3    # these rows; the others of the file stay
    python benchmarks/faults/fault_seconds.py --slurm  # also those that start a Slurm (root; minutes)

Runs the tests of the key `seconds`, one after another, and reads what each noted (`tests/fault_times.py`)
from pytest's report. A row whose test was skipped or failed has no seconds. Writes
results/fault_seconds.json, from which docs/faults_table.py takes them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from junit import properties

_ROOT = Path(__file__).resolve().parents[2]
_RESULT = Path(__file__).parents[1] / "results" / "fault_seconds.json"
_SLURM = "tests/slurm/"


def main() -> None:
    options = _options()
    rows = tomllib.loads((_ROOT / "docs" / "fault_matrix.toml").read_text(encoding="utf-8"))["faults"]
    tests = {row["id"]: row["seconds"] for row in rows if "seconds" in row}
    asked = options.rows or [row for row in tests if options.slurm or not tests[row].startswith(_SLURM)]
    if unknown := sorted(set(asked) - tests.keys()):
        sys.exit(f"no test for {', '.join(unknown)}; there is one for {', '.join(tests)}")
    measured = json.loads(_RESULT.read_text(encoding="utf-8"))["rows"] if _RESULT.exists() else {}
    without = []
    for row in asked:
        load = os.getloadavg()[0]
        noted = _run(tests[row])
        measured.pop(row, None)
        if noted:
            measured[row] = {"test": tests[row], **noted, **_conditions(load)}
        else:
            without.append(row)
        print(f"{row}: {noted or 'no seconds: its test was skipped or failed'}", flush=True)
        of_all = {name: measured[name] for name in tests if name in measured}
        _RESULT.write_text(json.dumps({"rows": of_all}, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(without))


def _run(test: str) -> dict[str, float]:
    """Runs one case. Returns the seconds that it noted; nothing where it did not pass."""
    variables = {"OMP_NUM_THREADS": "1"} | ({"KIELO_TEST_SLURM": "1"} if test.startswith(_SLURM) else {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}", test]
        ended = subprocess.run(command, cwd=_ROOT, env=os.environ | variables, capture_output=True, text=True)
        if ended.returncode:
            print(ended.stdout[-3000:], file=sys.stderr)
        if not report.exists():
            return {}
        noted = properties(report).get(test, {})
    return {name: float(value) for name, value in noted.items()}


def _conditions(load: float) -> dict[str, Any]:
    """Returns the day, the versions and the machine. load: processes that wanted a core before."""
    return {
        "date": date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
        },
        "versions": {name: version(name) for name in ("kielo", "torch")},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="R1 to R26; none: all that name a test")
    parser.add_argument("--slurm", action="store_true", help="also the rows whose test starts a Slurm")
    return parser.parse_args()


if __name__ == "__main__":
    main()

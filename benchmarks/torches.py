"""Runs the tests that depend on torch with each version that was tried: `make test-torches`.

A version other than the installed one is a folder made by `pip install --target`, put first on PYTHONPATH.
Each version has its entry in results/test_torches.json: version, counts, failures and seconds. A version
whose entry is replaced leaves the others as they are.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from junit import outcome

_ROOT = Path(__file__).resolve().parents[1]
_RESULT = Path(__file__).parent / "results" / "test_torches.json"
TESTS = ("tests/parallel", "tests/train", "tests/checkpoint")


def main() -> None:
    options = _options()
    found = json.loads(_RESULT.read_text(encoding="utf-8")) if _RESULT.exists() else {}
    is_green = True
    for folder in options.folders or [""]:
        entry = run_tests(folder, options.tests)
        found[".".join(entry["torch"].split(".")[:2])] = entry
        _RESULT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
        print(json.dumps(entry), flush=True)
        is_green = is_green and entry["status"] == 0
    sys.exit(0 if is_green else 1)


def run_tests(folder: str, tests: list[str]) -> dict[str, Any]:
    """Runs the tests with the torch in `folder`, or the installed one; returns its entry of the result."""
    paths = [folder, str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }
    which = "import torch, torchao; print(torch.__version__, torchao.__version__)"
    versions = subprocess.run(
        [sys.executable, "-c", which], env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    torch_version, torchao_version = versions.stdout.split()[-2:]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "tests.xml"
        arguments = ["-m", "not full and not faults", "--tb=short", f"--junit-xml={report}"]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *tests, *arguments],
            cwd=_ROOT,
            env=environment,
        ).returncode
        counts = outcome(report)
    return {
        "date": date.today().isoformat(),
        "torch": torch_version,
        "torchao": torchao_version,
        "tests": tests,
        "status": status,
        **counts,
        "seconds": round(time.monotonic() - begun),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", help='folders with a torch; "": the installed one (default)')
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Runs the tests that depend on torch with each version that was tried: `make test-torches`.

A version other than the installed one is a folder made by `pip install --target`, put first on PYTHONPATH.
The versions run side by side, as many at once as there are cores. Each has its entry in
results/test_torches.json, written when it ends: version, counts, failures and seconds. A version whose entry
is replaced leaves the others as they are.

The tests without a mark come first, then the full cases of compiled layers, because what a compiler keeps
depends on torch. `--compiled NAMES` runs only the latter, of cases that pytest's `-k NAMES` selects: an hour
in parts of minutes. Each part has its own counts in the entry.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from junit import outcome

_ROOT = Path(__file__).resolve().parents[2]
_RESULT = Path(__file__).parents[1] / "results" / "test_torches.json"
TESTS = ("tests/ranks", "tests/parallel", "tests/train", "tests/checkpoint")
_FIX = "Fix: rm -r .torch && make test-torches"
COMPILED_LAYERS = "tests/parallel/test_layer_bytes.py"
ALL = "all"


def main() -> None:
    options = _options()
    environments = [_environment(folder) for folder in options.folders or [""]]
    versions = [_versions(environment) for environment in environments]  # before the first test runs
    is_green = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(run_parts, each, options) for each in environments]
        try:
            for run in as_completed(runs):
                entry = {**versions[runs.index(run)], **run.result()}
                _write(entry)
                print(json.dumps(entry), flush=True)
                parts = [entry] * ("status" in entry) + [*entry["compiled_layers"].values()]
                if not all(part.get("passed") for part in parts):
                    print(f"no test ran with torch {entry['torch']}. {_FIX}", flush=True)
                is_green = is_green and all(
                    part["status"] == 0 and part.get("passed", 0) > 0 for part in parts
                )
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    sys.exit(0 if is_green else 1)


def run_parts(environment: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs the tests, and the full cases of compiled layers; returns their parts of the entry."""
    name, only = options.compiled or ALL, [] if options.compiled in (None, ALL) else ["-k", options.compiled]
    entry = {}
    if options.compiled is None:
        tests = run_tests(environment, options.tests, ["-m", "not full and not faults"])
        entry = {"tests": options.tests, **tests}
    return entry | {
        "compiled_layers": {name: run_tests(environment, [COMPILED_LAYERS], ["-m", "full", *only])}
    }


def run_tests(environment: dict[str, str], tests: list[str], selection: list[str]) -> dict[str, Any]:
    """Runs the tests; returns date, status, counts (unless pytest broke off) and seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "tests.xml"
        arguments = [*selection, "--tb=short", f"--junit-xml={report}"]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *tests, *arguments], cwd=_ROOT, env=environment
        ).returncode
        counts = outcome(report) if report.exists() else {}
    today, seconds = date.today().isoformat(), round(time.monotonic() - begun)
    return {"date": today, "status": status, **counts, "seconds": seconds}


def _environment(folder: str) -> dict[str, str]:
    """Returns the environment in which the torch in `folder` is imported ("": the installed one).

    Bytecode is written there: without it each process that a test starts compiles torch (4 of its 7 seconds
    of start).
    """
    paths = [folder, str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _versions(environment: dict[str, str]) -> dict[str, str]:
    """Returns the versions of torch and torchao that are imported in this environment."""
    which = "import torch, torchao; print(torch.__version__, torchao.__version__)"
    found = subprocess.run([sys.executable, "-c", which], env=environment, text=True, stdout=subprocess.PIPE)
    if found.returncode:
        folder = environment["PYTHONPATH"].split(os.pathsep)[0]
        sys.exit(f"{folder} has no torch and torchao that can be imported. {_FIX}")
    return dict(zip(("torch", "torchao"), found.stdout.split()[-2:], strict=True))


def _write(entry: dict[str, Any]) -> None:
    """Puts the entry in the place of its version in the result, which is read anew each time.

    A part of the compiled layers joins other parts. All of them replace the parts.
    """
    found = json.loads(_RESULT.read_text(encoding="utf-8")) if _RESULT.exists() else {}
    before = found.get(version := ".".join(entry["torch"].split(".")[:2]), {})
    parts = entry["compiled_layers"]
    if ALL not in parts:
        parts = {name: of for name, of in before.get("compiled_layers", {}).items() if name != ALL} | parts
    kept = {} if "status" in entry else before
    found[version] = kept | entry | {"compiled_layers": parts}
    _RESULT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", help='folders with a torch; "": the installed one (default)')
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument(
        "--compiled", metavar="NAMES", help=f'only compiled layers of these names, "{ALL}" for all of them'
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

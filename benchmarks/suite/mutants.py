"""Can the tests fail? Changes Kielo's source in small ways, and counts how many changes a test notices.

    python benchmarks/suite/mutants.py           # all known changes and 200 drawn ones: `make mutants`
    python benchmarks/suite/mutants.py --draw 0  # known changes: mutants/*.toml, each with its test
    python benchmarks/suite/mutants.py --no-known --draw 50 --seed 7 --rooms resolve plan

Known changes are changes that no test noticed in the past. Each names the test that catches it since. For
drawn changes the suite (`make test`, `make test-faults`) runs once in a copy of the checkout, with a probe at
each place that notes the tests that run it. Then each change is made in a copy, and those tests run until a
test fails, the quickest first. Some changes of nothing are among them, as controls: a test that fails for a
control fails without a reason. Writes benchmarks/results/mutants.json.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mutant_sites import Mutant, add_probes, draw

_ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parents[1] / "mutants"
_RESULT = Path(__file__).parents[1] / "results" / "mutants.json"
# Imported before a test process is forked, so that a change costs the seconds of its tests only.
_IMPORTED = (
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers",
    "hypothesis",
    "pyarrow",
    "matplotlib",
)
# Tests of one change take this long at most, by their seconds without a change. If they do not end in three
# times that, the change counts as noticed: a loop does not end.
_MOST_SECONDS = 90.0
_CONTROLS = 20

_PROBE = """
import os
import pytest

FOLDER = {folder!r}
seen = set()

def hit(number):
    if number not in seen:
        seen.add(number)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        try:
            with open(f"{{FOLDER}}/now_{{worker}}") as file:
                test = file.read()
            with open(f"{{FOLDER}}/hits_{{os.getpid()}}", "a") as file:
                file.write(f"{{number}}\\t{{test}}\\n")
        except OSError:
            pass

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    seen.clear()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with open(f"{{FOLDER}}/now_{{worker}}", "w") as file:
        file.write(item.nodeid)
"""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one change. by: the test that failed, "time" if the tests did not end, else None."""

    mutant: Mutant
    by: str | None
    num_tests: int
    seconds: float


def main() -> None:
    options = _options()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        known = [] if options.no_known else known_mutants()
        drawn = _drawn(options)
        tests = _tests_by_place(Path(temporary), drawn, options.tests) if drawn else []
        jobs = [(mutant, [mutant.test]) for mutant in known] + list(zip(drawn, tests, strict=True))
        for mutant, chosen in jobs[:: max(1, len(jobs) // _CONTROLS)]:
            jobs.append((replace(mutant, new=mutant.old), chosen))
        verdicts = _try_all(Path(temporary), jobs, options.workers)
    parts = {
        "known": verdicts[: len(known)],
        "drawn": verdicts[len(known) : len(known) + len(drawn)],
        "controls": verdicts[len(known) + len(drawn) :],
    }
    report = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores",
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun),
        **{name: _summary(part) for name, part in parts.items()},
    }
    Path(options.result).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, part in parts.items():
        print(f"{name}: a test noticed {100 * _share(part):.1f} % of {len(part)} changes")
    is_good = _share(parts["known"]) >= 0.95 and _share(parts["drawn"]) >= 0.9
    sys.exit(0 if is_good and not any(verdict.by for verdict in parts["controls"]) else 1)


def _options() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--draw", type=int, default=200, metavar="N", help="number of drawn changes (default: 200)")
    add("--seed", type=int, default=36, help="which changes are drawn (default: 36)")
    add("--rooms", nargs="+", default=[], metavar="ROOM", help="rooms to draw from (default: all)")
    add("--tests", nargs="+", default=[], metavar="PATH", help="tests for drawn changes (default: all)")
    add("--no-known", action="store_true", help="leave the known changes out")
    add("--workers", type=int, default=os.cpu_count(), help="changes tried at once (default: cores)")
    add("--result", default=str(_RESULT), metavar="FILE", help="where to write (default: results/)")
    return parser.parse_args()


def known_mutants() -> list[Mutant]:
    """Reads benchmarks/mutants/*.toml. Raises ValueError for a text that is not once in its file."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
            source = (_ROOT / "src" / "kielo" / entry["file"]).read_text(encoding="utf-8")
            if (times := source.count(entry["old"])) != 1:
                raise ValueError(f"{path.name}: {entry['file']} has {entry['old']!r} {times} times, not once")
            before = source[: source.index(entry["old"])]
            line, number = before.count("\n") + 1, len(before.encode())
            found.append(Mutant(entry["file"], line, entry["old"], entry["new"], number, entry["test"]))
    return found


def _drawn(options: argparse.Namespace) -> list[Mutant]:
    rooms = tuple(f"{room}/" for room in options.rooms)
    same = _that_change_nothing()
    mutants = draw(_ROOT / "src" / "kielo", options.draw + len(same), options.seed, rooms)
    return [mutant for mutant in mutants if (mutant.file, mutant.old, mutant.new) not in same][: options.draw]


def _that_change_nothing() -> set[tuple[str, str, str]]:
    """Returns the drawn changes that a person found to change nothing, with a reason, in `same` tables."""
    found = set()
    for path in LISTS.glob("*.toml"):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("same", []):
            found.add((entry["file"], entry["old"], entry["new"]))
    return found


def _copy(folder: Path) -> Path:
    """Copies the checkout: tracked files and new ones, as they are."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT, stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    for name in listed.decode().split("\0"):
        if name and (_ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, folder / name)
    return folder


def _environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}


def _tests_by_place(temporary: Path, mutants: list[Mutant], paths: list[str]) -> list[list[str]]:
    """Runs the suite with probes; returns the tests that run each place, the quickest first.

    Tests that fail there are left out.
    """
    copy, hits = _copy(temporary / "probed"), temporary / "hits"
    hits.mkdir()
    add_probes(copy / "src" / "kielo", mutants, lambda number: f'__import__("kielo_probe").hit({number})')
    (copy / "src" / "kielo_probe.py").write_text(_PROBE.format(folder=str(hits)), encoding="utf-8")
    report = temporary / "probed.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "kielo_probe",
        "-m",
        "not full",
        "-n",
        str(os.cpu_count()),
    ]
    command += [
        "--timeout",
        "300",
        f"--junit-xml={report}",
        "-q",
        "--no-header",
        "--tb=no",
        "-o",
        "addopts=",
        *paths,
    ]
    ended = subprocess.run(command, cwd=copy, env=_environment(copy), text=True, stdout=subprocess.PIPE)
    seconds = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        if not any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
            name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
            seconds[name] = float(case.get("time"))
    # Status 1: tests failed (some read the source), or workers collected different tests and ran none.
    if ended.returncode > 1 or not seconds:
        raise RuntimeError(
            f"the suite did not run with probes (pytest's status {ended.returncode}):\n{ended.stdout}"
        )
    found: list[set[str]] = [set() for _ in mutants]
    for path in hits.glob("hits_*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition("\t")
            found[int(number)].add(test)
    shutil.rmtree(copy)
    return [_within_the_limit(tests & seconds.keys(), seconds) for tests in found]


def _within_the_limit(tests: set[str], seconds: dict[str, float]) -> list[str]:
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        total += seconds[test] + 0.02
        if total > _MOST_SECONDS:
            break
        chosen.append(test)
    return chosen


def _try_all(temporary: Path, jobs: list[tuple[Mutant, list[str]]], num_workers: int) -> list[Verdict]:
    """Tries each change, `num_workers` at once; returns the verdicts in the order of the jobs."""
    for name in _IMPORTED:
        __import__(name)
    free = [_copy(temporary / f"copy_{number}") for number in range(num_workers)]
    verdicts = {number: Verdict(job[0], None, 0, 0.0) for number, job in enumerate(jobs) if not job[1]}
    waiting = [number for number in range(len(jobs)) if number not in verdicts]
    running: dict[int, tuple[int, Path, float]] = {}
    while waiting or running:
        while waiting and free:
            number, copy = waiting.pop(0), free.pop()
            running[_start(copy, number, *jobs[number])] = number, copy, time.monotonic()
        time.sleep(0.05)
        for process, (number, copy, begun) in list(running.items()):
            seconds = time.monotonic() - begun
            is_late = seconds > 3 * _MOST_SECONDS
            if not is_late and os.waitpid(process, os.WNOHANG)[0] == 0:
                continue
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # also what its tests left running
            if is_late:
                os.waitpid(process, 0)
            by = "time" if is_late else _failed_test(copy)
            verdicts[number] = Verdict(jobs[number][0], by, len(jobs[number][1]), round(seconds, 1))
            _restore(copy, jobs[number][0], number)
            del running[process]
            free.append(copy)
            print(f"{len(verdicts)}/{len(jobs)} {_line(verdicts[number])}", flush=True)
    return [verdicts[number] for number in range(len(jobs))]


def _start(copy: Path, number: int, mutant: Mutant, tests: list[str]) -> int:
    """Makes the change in the copy, and forks a process that runs the tests there; returns its id."""
    path = copy / "src" / "kielo" / mutant.file
    _write(path, mutant.apply(path.read_bytes()), 2 * number)
    (copy / "failed.txt").unlink(missing_ok=True)
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        os.environ |= _environment(copy)
        sys.path[:0] = [str(copy), str(copy / "src")]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "120", "-o", "addopts=", "--tb=short"]
        pytest.main([*options, f"--basetemp={copy.parent / (copy.name + '_tmp')}", *tests], [_Recorder(copy)])
    finally:
        os._exit(0)


class _Recorder:
    """Writes down the first test that fails, or file that cannot be imported."""

    def __init__(self, copy: Path) -> None:
        self._file = copy / "failed.txt"

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid, encoding="utf-8")


def _failed_test(copy: Path) -> str | None:
    file = copy / "failed.txt"
    return file.read_text(encoding="utf-8") if file.exists() else None


def _restore(copy: Path, mutant: Mutant, number: int) -> None:
    original = (_ROOT / "src" / "kielo" / mutant.file).read_bytes()
    _write(copy / "src" / "kielo" / mutant.file, original, 2 * number + 1)


def _write(path: Path, source: bytes, number: int) -> None:
    """Writes a file with a time of its own: Python knows current compiled code by time and size."""
    path.write_bytes(source)
    os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))


def _share(verdicts: list[Verdict]) -> float:
    """Returns the share of changes that a test noticed; 1 of none."""
    return sum(verdict.by is not None for verdict in verdicts) / len(verdicts) if verdicts else 1.0


def _summary(verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "tried": len(verdicts),
        "noticed": sum(verdict.by is not None for verdict in verdicts),
        "by_room": _by_room(verdicts),
        "not_noticed": [
            {**asdict(verdict.mutant), "num_tests": verdict.num_tests}
            for verdict in verdicts
            if verdict.by is None
        ],
        "noticed_by": {_line(verdict): verdict.by for verdict in verdicts if verdict.by},
    }


def _by_room(verdicts: list[Verdict]) -> dict[str, str]:
    rooms: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        rooms.setdefault(verdict.mutant.file.split("/")[0], []).append(verdict)
    return {
        room: f"{sum(each.by is not None for each in found)} of {len(found)}"
        for room, found in sorted(rooms.items())
    }


def _line(verdict: Verdict) -> str:
    mutant = verdict.mutant
    change = f"{mutant.old!r} -> {mutant.new!r}"
    word = "noticed" if verdict.by else "NOT noticed"
    return f"{word} in {verdict.seconds:g} s: {mutant.file}:{mutant.line}: {change}"


if __name__ == "__main__":
    main()

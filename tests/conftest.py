"""What all tests share: surroundings of their own, a small heap to collect, and times of a planted fault."""

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import surroundings
from tests.fault_times import FaultTimes

if TYPE_CHECKING:
    from kielo.train.watch.resources import Garbage

# Before a test imports anything. Each worker of pytest-xdist has a home of its own.
HOME = tempfile.mkdtemp(prefix="kielo_home_")
surroundings.make_own(os.environ, HOME)
surroundings.decode_alike()
surroundings.hear_interrupts()
# This process and all that it starts ask no name server: torch looks up the name of each peer of a rank, for
# its messages, and waits 5 s for a server that does not answer at once.
os.environ["RES_OPTIONS"] = "attempts:0"


# Files of which a few cases take long. They begin first, so that no process of pytest-xdist ends much later
# than the others. (The order of xdist itself, by the number of cases, puts them last.)
LONG_FILES = (
    "verify/test_layouts.py",
    "verify/test_family_layouts.py",
    "verify/test_rehearse.py",
    "verify/test_preflight.py",
    "faults/test_hangs.py",
    "faults/test_kills.py",
    # These have long cases only in make test-full.
    "docs/test_documented.py",
    "corpus/test_corpus_size.py",
    "plan/test_shipped_layouts.py",
    "parallel/test_compile.py",
    "verify/test_parity_on_ranks.py",
    "verify/test_rehearse_scoring.py",
)


# These look at one finished run (tests/cli/conftest.py), which one process of pytest-xdist makes for all.
ONE_RUN = {f"tests/cli/test_{name}.py" for name in (
    "chat", "export", "init", "publish", "run", "screens", "show", "verify_export",
)}  # fmt: skip


@pytest.hookimpl(optionalhook=True)  # a machine with a GPU may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give whole files to the processes of pytest-xdist, and all that use the finished run to one process."""
    from xdist.scheduler import LoadFileScheduling

    class FilesOfOneRun(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/cli" if file in ONE_RUN else file

    return FilesOfOneRun(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection(session: pytest.Session) -> None:
    """Begin with another share of the test files in each process of pytest-xdist.

    In a fresh checkout pytest rewrites the asserts of each file, which takes half of all collecting. Else all
    processes would do it for all files at the same time. Each finds here what the others wrote.
    """
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if worker is None or session.config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return
    root = Path(__file__).parents[1]
    left_out = [root / path for path in session.config.getoption("ignore") or ()]
    files = [
        path.relative_to(root)
        for path in sorted((root / "tests").rglob("test_*.py"))
        if not any(path.is_relative_to(folder) for folder in left_out)
    ]
    for file in files[int(worker.removeprefix("gw")) :: int(workers)]:
        with suppress(Exception, pytest.skip.Exception):  # the collection itself tells of these
            importlib.import_module(".".join(file.with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {here / name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(LONG_FILES)))


def pytest_unconfigure() -> None:
    """Of this process alone: those that were forked from it end without."""
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Takes all that is imported by now out of the collector's sight, and leaves it there.

    Else every training in a test's own process looks through 700,000 objects when it begins and at each save:
    0.4 s. What earlier tests hold goes out of sight when a training begins. The real beginning and end are
    held by tests/train/test_garbage.py, in a process of its own, and by all ranks.
    """
    from kielo.train.watch.resources import Garbage

    gc.collect()
    gc.freeze()
    Garbage.begin, Garbage.end = _begin, _end


def _begin(garbage: "Garbage") -> None:
    gc.collect()
    gc.freeze()
    gc.disable()


def _end(garbage: "Garbage") -> None:
    gc.enable()


@pytest.fixture
def fault_times(tmp_path_factory, record_property) -> Iterator[FaultTimes]:
    """Notes when a fault is planted, found, and passed; the seconds are in pytest's report (--junit-xml)."""
    times = FaultTimes(tmp_path_factory.mktemp("fault_times"))
    yield times
    times.report(record_property)

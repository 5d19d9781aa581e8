"""These tests start schedulers and take minutes: `make test-slurm` and `make test-slurm-short` run them."""

import os
import shutil
from pathlib import Path

import pytest

from tests.slurm.jobs import queue
from tests.slurm.launched_run import LaunchedRun, pack, train_undisturbed
from tests.slurm.one_machine import slurm, why_not

collect_ignore_glob = [] if os.environ.get("KIELO_TEST_SLURM") else ["test_*.py"]
CARD = """\
scheduler = "slurm"

[jobs]
partitions = [{ name = "work" }]

[jobs.sources]
partitions = "tests"
"""


def pytest_sessionfinish(session) -> None:
    """Fail if all tests that were asked for by name were skipped: a run that tests nothing is not green."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or not os.environ.get("KIELO_TEST_SLURM"):
        return
    ended = {
        outcome
        for outcome in ("passed", "failed", "error", "skipped")
        for report in reporter.stats.get(outcome, [])
        if report.nodeid.startswith("tests/slurm/")
    }
    if ended == {"skipped"}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line(f"\nall tests of tests/slurm were skipped: {why_not()}", red=True)


@pytest.fixture(scope="package")
def machine(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm") / "daemons") as machine:
        yield machine


@pytest.fixture(scope="package")
def packed(tmp_path_factory) -> Path:
    """A folder with the text, the card, and the run with its tokens."""
    return pack(tmp_path_factory.mktemp("packed"), "slurm.toml", CARD)


@pytest.fixture(scope="package")
def undisturbed(packed, tmp_path_factory) -> dict[str, bytes]:
    """The weights of one training of two ranks, which nothing stopped."""
    return train_undisturbed(packed, tmp_path_factory.mktemp("undisturbed") / "place", 2)


@pytest.fixture
def run(machine, packed, tmp_path, monkeypatch):
    """The packed run in the current folder, and an empty queue before and after."""
    place = tmp_path / "place"
    shutil.copytree(packed, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("SLURM_CONF", machine.environment["SLURM_CONF"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # jobs are login shells: not with the profile of who tests
    run = LaunchedRun(place, {"SLURM_CONF": machine.environment["SLURM_CONF"]})
    try:
        yield run
    finally:
        machine.tell("scancel", "--user=root", "--signal=KILL", "--full")
        machine.tell("scancel", "--user=root")
        machine.start_daemons()
        run.wait(lambda: queue(machine) == {} and machine.is_up())

"""What all tests share: surroundings of their own, and the times of a planted fault."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests import surroundings
from tests.fault_times import FaultTimes

# Before a test imports anything. Each worker of pytest-xdist has a home of its own.
HOME = tempfile.mkdtemp(prefix="kielo_home_")
surroundings.make_own(os.environ, HOME)
surroundings.decode_alike()


def pytest_unconfigure() -> None:
    """Of this process alone: those that were forked from it end without."""
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture
def fault_times(tmp_path_factory, record_property) -> Iterator[FaultTimes]:
    """Notes when a fault is planted, found, and passed; the seconds are in pytest's report (--junit-xml)."""
    times = FaultTimes(tmp_path_factory.mktemp("fault_times"))
    yield times
    times.report(record_property)

"""What all tests share: a collector that has little to look through, and the times of a planted fault."""

import gc
from collections.abc import Iterator

import pytest

from kielo.train.garbage import Garbage
from tests.fault_times import FaultTimes


def pytest_collection_finish() -> None:
    """Takes all that is imported by now out of the collector's sight, and leaves it there.

    Else every training in a test's own process looks through 700,000 objects when it begins: 0.4 s. The real
    beginning and end are held by tests/train/test_garbage.py, in a process of its own, and by all ranks.
    """
    gc.collect()
    gc.freeze()
    Garbage.begin, Garbage.end = _begin, _end


def _begin(garbage: Garbage) -> None:
    gc.collect()
    gc.disable()


def _end(garbage: Garbage) -> None:
    gc.enable()


@pytest.fixture
def fault_times(tmp_path_factory, record_property) -> Iterator[FaultTimes]:
    """Notes when a fault is planted, found, and passed; the seconds are in pytest's report (--junit-xml)."""
    times = FaultTimes(tmp_path_factory.mktemp("fault_times"))
    yield times
    times.report(record_property)

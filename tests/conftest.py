"""The fixture that all tests may use: the times of a planted fault."""

from collections.abc import Iterator

import pytest

from tests.fault_times import FaultTimes


@pytest.fixture
def fault_times(tmp_path_factory, record_property) -> Iterator[FaultTimes]:
    """Notes when a fault is planted, found, and passed; the seconds are in pytest's report (--junit-xml)."""
    times = FaultTimes(tmp_path_factory.mktemp("fault_times"))
    yield times
    times.report(record_property)

"""The fixture that all tests may use: the times of a planted fault."""

import os
from collections.abc import Iterator

import pytest

from tests.fault_times import FaultTimes

# This process and all that it starts ask no name server: torch looks up the name of each peer of a rank, for
# its messages, and waits 5 s for a server that does not answer at once.
os.environ["RES_OPTIONS"] = "attempts:0"


@pytest.fixture
def fault_times(tmp_path_factory, record_property) -> Iterator[FaultTimes]:
    """Notes when a fault is planted, found, and passed; the seconds are in pytest's report (--junit-xml)."""
    times = FaultTimes(tmp_path_factory.mktemp("fault_times"))
    yield times
    times.report(record_property)

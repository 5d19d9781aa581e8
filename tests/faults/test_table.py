"""The table of docs/faults.md lists the cases of this suite."""

import runpy

from tests.house.checks import ROOT


def test_the_page_counts_the_cases():
    """docs/faults.md holds the table that docs/faults_table.py writes."""
    table = runpy.run_path(str(ROOT / "docs" / "faults_table.py"))["table"]()
    assert table in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")

"""The tables of docs/faults.md list the files of this suite, and tests that there are."""

import ast
import runpy
import tomllib

from tests.house.checks import ROOT

TABLES = runpy.run_path(str(ROOT / "docs" / "faults_table.py"))


def test_the_page_is_current():
    """docs/faults.md holds the tables that docs/faults_table.py writes."""
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    for name in ("table", "matrix", "soak"):
        assert TABLES[name]() in page, name


def test_every_kind_of_fault_names_tests_that_there_are():
    """R1 to R27, each once; a test that is renamed is missed here."""
    rows = tomllib.loads(TABLES["MATRIX"].read_text(encoding="utf-8"))["faults"]
    assert [row["id"] for row in rows] == [f"R{number}" for number in range(1, 28)]
    for row in rows:
        for test in row["tests"]:
            file, _, name = test.partition("::")
            body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            assert name in {part.name for part in body if isinstance(part, ast.FunctionDef)}, test


def test_seconds_are_of_tests_that_note_them():
    """Each is one of the tests of its row, and has the fixture."""
    rows = tomllib.loads(TABLES["MATRIX"].read_text(encoding="utf-8"))["faults"]
    timed = {row["seconds"]: row["tests"] for row in rows if "seconds" in row}
    assert len(timed) > 20
    for test, tests in timed.items():
        function, _, _ = test.partition("[")
        assert function in tests
        file, _, name = function.partition("::")
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        (found,) = (part for part in body if isinstance(part, ast.FunctionDef) and part.name == name)
        assert "fault_times" in {argument.arg for argument in found.args.args}, test

"""Writes the tables of docs/faults.md, by `python docs/faults_table.py`.

In: the collected cases of the fault suite, docs/fault_matrix.toml, and the seconds that benchmarks have
measured. Out: Markdown tables.
"""

import ast
import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
MATRIX = ROOT / "docs" / "fault_matrix.toml"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- cases: written by docs/faults_table.py; do not edit by hand -->\n", "<!-- /cases -->"
MATRIX_BEGIN, MATRIX_END = BEGIN.replace("cases", "matrix"), END.replace("cases", "matrix")


class _Collected:
    """A plugin of pytest that notes the names of the collected cases."""

    names: list[str]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def table() -> str:
    """Returns the table: the first sentence of each test file's docstring and its number of cases."""
    collected = _Collected()
    tests = ROOT / "tests" / "faults"
    options = ["--collect-only", "--rootdir", ROOT, "-o", "addopts=", "-m", "faults"]
    # Without the plugins that a pytest around this one may be using.
    without = [
        part for name in ("terminal", "faulthandler", "cacheprovider") for part in ("-p", f"no:{name}")
    ]
    if pytest.main([*map(str, options), *without, str(tests)], plugins=[collected]) != 0:
        raise RuntimeError(f"the cases of {tests} cannot be collected: see pytest --collect-only {tests}")
    cases = Counter(name.partition("::")[0] for name in collected.names)
    rows = [
        f"| {_first_sentence(ROOT / name)} | `{Path(name).name}` | {count} |"
        for name, count in sorted(cases.items())
    ]
    head = ["| kind | file | cases |", "|---|---|--:|"]
    return "\n".join([*head, *rows, f"| all | | {cases.total()} |"]) + "\n"


def matrix() -> str:
    """Returns the table of faults by kind, with the tests that show each and its measured seconds."""
    rows = []
    for row in tomllib.loads(MATRIX.read_text(encoding="utf-8"))["faults"]:
        files = _by_file(row["tests"])
        shown = ", ".join(f"`{Path(file).name}`: {', '.join(names)}" for file, names in files)
        if row.get("missing"):
            shown += f"{'; ' * bool(shown)}not shown: {row['missing']}"
        cells = [row["id"], row["fault"], row["injected"], shown, *_seconds(row.get("measured"))]
        rows.append(f"| {' | '.join(cells)} |")
    head = [
        "| | fault | injected by | shown by | ended after, s | next step after, s |",
        "|---|---|---|---|--:|--:|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _seconds(name: str | None) -> tuple[str, str]:
    """Returns the longest seconds of a result: until the ranks have ended, and until the next step."""
    if name is None:
        return "", ""
    cases = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    ended = "found_seconds" if "found_seconds" in cases[0] else "ended_seconds"
    longest = [max(case[key] for case in cases) for key in (ended, "next_step_seconds")]
    return f"{longest[0]:.1f}", f"{longest[1]:.1f}"


def _by_file(tests: list[str]) -> list[tuple[str, list[str]]]:
    """Returns (file, names without `test_`) of pytest's ids."""
    files: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        files.setdefault(file, []).append(name.removeprefix("test_").replace("_", " "))
    return list(files.items())


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split()).partition(". ")[0].rstrip(".").replace("|", "\\|")


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for begin, made, end in ((BEGIN, table(), END), (MATRIX_BEGIN, matrix(), MATRIX_END)):
        before, rest = text.split(begin, 1)
        text = before + begin + made + end + rest.split(end, 1)[1]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes the tables of docs/faults.md, by `python docs/faults_table.py`.

In: the docstrings of the fault suite, docs/fault_matrix.toml, and the seconds that benchmarks have
measured. Out: three Markdown tables.
"""

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
MATRIX = ROOT / "docs" / "fault_matrix.toml"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- cases: written by docs/faults_table.py; do not edit by hand -->\n", "<!-- /cases -->"
MATRIX_BEGIN, MATRIX_END = BEGIN.replace("cases", "matrix"), END.replace("cases", "matrix")
SOAK_BEGIN, SOAK_END = BEGIN.replace("cases", "soak"), END.replace("cases", "soak")


def table() -> str:
    """Returns the table of the suite's files, each with the first sentence of its docstring.

    Without numbers of cases, which depend on the machine and change with nearly every commit.
    """
    files = sorted((ROOT / "tests" / "faults").glob("test_*.py"))
    rows = [f"| {_first_sentence(file)} | `{file.name}` |" for file in files]
    return "\n".join(["| kind | file |", "|---|---|", *rows]) + "\n"


def matrix() -> str:
    """Returns the table of faults by kind, with the tests that show each and its measured seconds."""
    file = RESULTS / "fault_seconds.json"
    timed = json.loads(file.read_text(encoding="utf-8"))["rows"]
    rows = []
    for row in tomllib.loads(MATRIX.read_text(encoding="utf-8"))["faults"]:
        files = _by_file(row["tests"])
        shown = ", ".join(f"`{Path(file).name}`: {', '.join(names)}" for file, names in files)
        if row.get("missing"):
            shown += f"{'; ' * bool(shown)}not shown: {row['missing']}"
        cells = [row["id"], row["fault"], row["injected"], shown, *_seconds(row, timed)]
        rows.append(f"| {' | '.join(cells)} |")
    head = [
        "| | fault | injected by | shown by | found after, s | next step after, s |",
        "|---|---|---|---|--:|--:|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def soak() -> str:
    """Returns the result of the last soak: its size, and the longest seconds of each fault."""
    result = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))
    bits = "the same" if result["has_the_same_bits"] else "OTHER"
    allowed = result["share_that_the_faults_allow"]
    head = (
        f"{result['minutes']:.0f} minutes, {result['date']}: {result['faults']} faults, {result['steps']} "
        f"steps of {result['step_seconds']:.2f} s, {bits} bits at the end.\n"
        f"Effective share: {result['effective_share']:.1%}, of {allowed:.1%} that the faults allow.\n"
    )
    lines = [
        "| fault | row | times | found after, s | next step after, s | recovered after, s |",
        "|---|---|--:|--:|--:|--:|",
    ]
    names = ("found_seconds", "next_step_seconds", "recovered_seconds")
    for case in result["cases"]:
        cells = [case["fault"], case["row"], str(case["times"]), *(f"{case[name]:.1f}" for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([head, *lines]) + "\n"


def _seconds(row: dict[str, Any], timed: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the cells of a row: seconds until the fault is found and until the next step, or other words.

    timed: rows of benchmarks/faults/fault_seconds.py; one of another test than the matrix names is left out.
    """
    if "measured" in row:  # the longest of its cases
        file = RESULTS / f"{row['measured']}.json"
        cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
        found = "found_seconds" if "found_seconds" in cases[0] else "ended_seconds"
        return [f"{max(case[key] for case in cases):.1f}" for key in (found, "next_step_seconds")]
    found = timed.get(row["id"], {})
    if found.get("test") != row.get("seconds"):
        found = {}
    cells = []
    for moment in ("found", "next_step"):
        seconds = found.get(f"{moment}_seconds")
        cells.append(row.get(f"instead_of_{moment}", "") if seconds is None else _rounded(seconds))
    return cells


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 0.05 else "below 0.1"


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
    for begin, made, end in (
        (BEGIN, table(), END),
        (MATRIX_BEGIN, matrix(), MATRIX_END),
        (SOAK_BEGIN, soak(), SOAK_END),
    ):
        before, rest = text.split(begin, 1)
        text = before + begin + made + end + rest.split(end, 1)[1]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

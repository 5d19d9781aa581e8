"""Writes the table of docs/faults.md, by `python docs/faults_table.py`.

In: the collected cases of the fault suite. Out: a Markdown table.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- cases: written by docs/faults_table.py; do not edit by hand -->\n", "<!-- /cases -->"


def table() -> str:
    """Returns the table: the first sentence of each test file's docstring and its number of cases."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=",
        "-m",
        "faults",
        "tests/faults",
    ]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cases = Counter(line.partition("::")[0] for line in collected.splitlines() if line.startswith("tests/"))
    rows = [
        f"| {_first_sentence(ROOT / name)} | `{Path(name).name}` | {count} |"
        for name, count in sorted(cases.items())
    ]
    head = ["| kind | file | cases |", "|---|---|--:|"]
    return "\n".join([*head, *rows, f"| all | | {cases.total()} |"]) + "\n"


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split()).partition(". ")[0].rstrip(".").replace("|", "\\|")


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()

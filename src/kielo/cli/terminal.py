"""How a verb speaks: a table for people, JSON for machines."""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any


def keep_stdout_for_json(is_json: bool) -> AbstractContextManager:
    """While it lasts, what the rooms tell a person goes to stderr, so that stdout holds one JSON value alone."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1, default=str))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """On a terminal a table as wide as it; in a pipe or log, lines whose columns are tabs apart and never cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in (titles, *rows):
            print("\t".join("" if cell is None else str(cell) for cell in row))
        return
    table = Table()
    for title in titles:
        table.add_column(Text(title))
    for row in rows:
        table.add_row(*[Text("" if cell is None else str(cell)) for cell in row])
    console.print(table)


def flat(value: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key → value of one level of sections."""
    pairs = []
    for key, entry in value.items():
        nested = isinstance(entry, dict) and entry and not prefix
        pairs += flat(entry, key + ".") if nested else [(prefix + key, entry)]
    return pairs

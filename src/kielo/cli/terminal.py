"""How a verb speaks: a table for people, JSON for machines, to whatever stdout and stderr are."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Any

from kielo.train.failsafe_stream import FailsafeStream


def open_standard_streams() -> None:
    """Where stdin, stdout or stderr is closed, let it lead nowhere: else the next file that is opened takes
    its number, and gets what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


@contextmanager
def lasting_output() -> Iterator[FailsafeStream]:
    """While it lasts, stdout and stderr raise nothing, whatever becomes of them, and write characters that
    their encoding lacks as \\u and \\x. Yields stdout, which knows whether it failed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    output = FailsafeStream(sys.stdout)
    with redirect_stdout(output), redirect_stderr(FailsafeStream(sys.stderr)):
        yield output


def keep_stdout_for_json(is_json: bool) -> AbstractContextManager:
    """While it lasts, what the rooms tell a person goes to stderr, so that stdout holds one JSON
    value alone.
    """
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def print_json(value: Any) -> None:
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not is_unicode, indent=1, default=str))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """On a terminal a table as wide as it; in a pipe or log, lines whose columns are tabs apart and never
    cut.
    """
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

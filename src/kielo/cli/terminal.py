"""The output of verbs: a table for people, JSON for machines, to whatever stdout and stderr are."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Any

from kielo.recipe.errors import is_terminal
from kielo.recipe.errors import print_text as print_text
from kielo.train.failsafe_stream import FailsafeStream

_LEAST_COLUMN = 20  # characters of the column whose cells are folded
_LONGEST_LINE = 1000  # characters, of a table that is not fitted to the terminal


def open_standard_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if they are closed.

    Else the next opened file takes their number, and gets the output of libraries.
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
    """Keep stdout and stderr from raising errors inside the block. Yield stdout, with its failure.

    Characters that their encoding lacks are written as \\u and \\x.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    output = FailsafeStream(sys.stdout)
    with redirect_stdout(output), redirect_stderr(FailsafeStream(sys.stderr)):
        yield output


def keep_stdout_for_json(is_json: bool) -> AbstractContextManager:
    """Send messages to stderr inside the block if `is_json`, so that stdout holds one JSON value alone."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def print_json(value: Any) -> None:
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not is_unicode, indent=1, default=str))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Any]], is_wide: bool = False) -> None:
    """Print a table as wide as the terminal; in a pipe or log, lines of uncut columns with tabs between.

    A cell that does not fit, or has a line break, continues in the next line: nothing is cut. If that is
    enough, only the widest column is folded. is_wide: lines of any length.
    """
    rows = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout):  # which needs no rich
        for row in (titles, *rows) if any(titles) else rows:
            print("\t".join(row).replace("\n", ""))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=any(titles), padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    console = Console(width=_LONGEST_LINE if is_wide else None)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(titles)
    widths = [max(map(len, [title, *cells])) for title, cells in zip(titles, columns, strict=True)]
    one_gives_way = sum(widths) - max(widths) + 2 * len(widths) + _LEAST_COLUMN <= console.width
    for title, cells, width in zip(titles, columns, widths, strict=True):
        is_number = all(cell[:1].isdigit() for cell in cells)
        table.add_column(
            Text(title),
            overflow="fold",
            justify="right" if is_number else "left",
            no_wrap=one_gives_way and width < max(widths),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, soft_wrap=is_wide)


def flat(value: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted key, value) pairs of one level of sections."""
    pairs: list[tuple[str, Any]] = []
    for key, entry in value.items():
        nested = isinstance(entry, dict) and entry and not prefix
        pairs += flat(entry, key + ".") if nested else [(prefix + key, entry)]
    return pairs

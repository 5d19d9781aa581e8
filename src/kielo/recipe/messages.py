"""Sentences for people, on whatever stdout and stderr are."""

import os
import shutil
import sys
import textwrap
from typing import TextIO


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print sentences, broken between words where the terminal's line ends; in a pipe and log as they are.

    Lines of the text stay apart. A word that is longer than a line, such as a path, is never broken. stream:
    default, stdout.
    """
    stream = stream or sys.stdout
    if is_terminal(stream):
        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width) for line in text.split("\n"))
    print(text, file=stream, flush=True)


def _broken(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(), max(width, 20), initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))

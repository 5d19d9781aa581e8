"""Printing of sentences for people."""

import os
import shutil
import sys
import textwrap
from typing import TextIO


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print text, default to stdout. On a terminal break lines between words, but no word such as a path."""
    stream = stream or sys.stdout
    if is_terminal(stream):
        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width) for line in text.split("\n"))
    print(text, file=stream, flush=True)


def _broken(line: str, width: int) -> str:
    text, indent = line.strip(), " " * (len(line) - len(line.lstrip()))
    wrapper = textwrap.TextWrapper(
        max(width, 20), indent, indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))

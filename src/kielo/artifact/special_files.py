"""Refusal of a pipe, a socket or a device in place of a file, because reading it might never end."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from kielo.recipe.errors import KieloError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OWN = ("/dev/", "/proc/", "/sys/")  # programs open devices there on purpose
_active = 0


@contextmanager
def files_only() -> Iterator[None]:
    """Raise KieloError if Python opens a pipe, socket or device by name in this block (audit events)."""
    global _active
    _watch()
    _active += 1
    try:
        yield
    finally:
        _active -= 1


@cache
def _watch() -> None:
    sys.addaudithook(_look)


def refuse_special_file(path: Path | str) -> None:
    """Raise KieloError for a pipe, a socket or a device. For files that a library opens without Python."""
    kind = None
    with suppress(OSError, ValueError):
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    if kind:
        raise KieloError(f"{path}: {kind}, but a file is expected. Fix: put the file in its place")


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _active and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if not path.startswith(_OWN):
            refuse_special_file(path)

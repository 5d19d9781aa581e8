"""Follows `..` in a path that a person gives, before anything is checked or written there."""

import os
from pathlib import Path


def place(given: str | Path) -> Path:
    """Returns the path without `..`, as it will lead once its folders are made; the last name stays.

    Behind a folder that is not there yet, `..` leads nowhere, so `nope/../mine` seems to be free, and it is
    `mine` when `nope` has been made.
    """
    path = Path(given)
    if ".." not in path.parts:
        return path
    if path.name == "..":
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name

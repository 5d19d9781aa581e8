"""Lines of a TOML file that its keys are in: text → dotted key → number of its line, from 1."""

import tomllib
from typing import Any


def lines_of_keys(text: str) -> dict[str, int]:
    """Returns the line in which each key of a valid TOML text begins; tables of tables are one key.

    Beginnings of the text are read, each a line longer: a key is in the line after the last beginning that
    was valid without it. A card has tens of lines.
    """
    lines, found, begin = text.splitlines(), {}, 1
    for number in range(1, len(lines) + 1):
        try:
            content = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue  # inside of a value of several lines
        for key in _keys(content):
            found.setdefault(key, begin)
        begin = number + 1
    return found


def line_of(key: str, lines: dict[str, int]) -> int | None:
    """Returns the line of a dotted key, else of the nearest key above: jobs.sources of jobs.sources.image."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition("[")[0] if key.endswith("]") else key.rpartition(".")[0]
    return None


def _keys(table: dict[str, Any], above: str = "") -> list[str]:
    keys = []
    for key, value in table.items():
        keys.append(above + key)
        if isinstance(value, dict):
            keys += _keys(value, f"{above}{key}.")
    return keys

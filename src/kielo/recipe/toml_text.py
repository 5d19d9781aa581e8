"""TOML of plain values, as in recipes and resolved.toml: tables to text, and the lines of keys."""

import tomllib
from typing import Any

TomlTable = dict[str, Any]  # a table of which only its reader knows the keys


def toml_table(name: str, content: TomlTable, brackets: tuple[str, str] = ("[", "]")) -> str:
    """Return a table and the tables in it. An empty name is the top of a file. None is left out."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lists = {key: value for key, value in content.items() if _is_list_of_tables(value)}
    plain = {key: value for key, value in content.items() if value is not None and key not in tables | lists}
    text = f"\n{brackets[0]}{name}{brackets[1]}\n" if name else ""
    below = f"{name}." if name else ""
    text += "".join(f"{_key(key)} = {toml_value(value)}\n" for key, value in plain.items())
    text += "".join(toml_table(f"{below}{_key(key)}", value) for key, value in tables.items())
    for key, entries in lists.items():
        text += "".join(toml_table(f"{below}{_key(key)}", entry, ("[[", "]]")) for entry in entries)
    return text


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else toml_value(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escape(character) for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(entry)}" for key, entry in value.items()) + "}"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character


def lines_of_keys(text: str) -> dict[str, int]:
    """Return dotted key → the line, from 1, in which it begins in a valid TOML text. Tables of tables are one
    key.

    Each prefix of the text is parsed: a key is in the line after the last valid prefix without it. Cards are
    short.
    """
    lines, begin = text.splitlines(), 1
    found: dict[str, int] = {}
    for number in range(1, len(lines) + 1):
        try:
            content = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue  # inside a value of several lines
        for key in _keys(content):
            found.setdefault(key, begin)
        begin = number + 1
    return found


def line_of(key: str, lines: dict[str, int]) -> int | None:
    """Return the line of a dotted key or of the nearest key above: of jobs.sources for jobs.sources.image."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition("[")[0] if key.endswith("]") else key.rpartition(".")[0]
    return None


def _keys(table: TomlTable, above: str = "") -> list[str]:
    keys = []
    for key, value in table.items():
        keys.append(above + key)
        if isinstance(value, dict):
            keys += _keys(value, f"{above}{key}.")
    return keys

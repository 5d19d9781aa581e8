"""Writes TOML: tables of plain values, as recipes and resolved.toml have them."""

from typing import Any


def toml_table(name: str, content: dict[str, Any], brackets: tuple[str, str] = ("[", "]")) -> str:
    """Returns one table with its tables below it; an empty name is the top of a file. None is left out."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lists = {key: value for key, value in content.items() if _is_list_of_tables(value)}
    plain = {key: value for key, value in content.items() if value is not None and key not in tables | lists}
    text = f"\n{brackets[0]}{name}{brackets[1]}\n" if name else ""
    below = f"{name}." if name else ""
    text += "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    text += "".join(toml_table(f"{below}{_key(key)}", value) for key, value in tables.items())
    for key, entries in lists.items():
        text += "".join(toml_table(f"{below}{_key(key)}", entry, ("[[", "]]")) for entry in entries)
    return text


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escape(character) for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + "}"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character

"""A JSON object of which one field is no JSON: its other fields, so that good text is not lost.

Python's own writer makes NaN, Infinity and lone surrogates, which strict readers refuse; so do they 1e999,
and values that are nested a thousand deep.
"""

import json
import re
from json.decoder import scanstring
from typing import Any

import orjson

_SPACE = re.compile(r"[ \t\n\r]*")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)


def lenient_fields(line: bytes) -> dict[str, Any] | None:
    """Returns the fields of a JSON object; one that cannot be stored is False. None for what is no object."""
    try:
        text = line.decode("utf-8")
        fields = _fields(text, _skip(text, 0))
    except (ValueError, IndexError):
        return None
    return {
        name: value if _is_storable(value) else False for name, value in fields.items() if _is_storable(name)
    }


def _fields(text: str, place: int) -> dict[str, Any]:
    """Reads the object that begins at `place` and is all of the text; ValueError or IndexError for none."""
    if text[place] != "{":
        raise ValueError
    fields: dict[str, Any] = {}
    place = _skip(text, place + 1)
    while text[place] != "}":
        if text[place] != '"':
            raise ValueError
        name, place = scanstring(text, place + 1)
        if text[place := _skip(text, place)] != ":":
            raise ValueError
        fields[name], place = _value(text, _skip(text, place + 1))
        place = _skip(text, place)
        if text[place] == ",":
            place = _skip(text, place + 1)
        elif text[place] != "}":
            raise ValueError
    if _skip(text, place + 1) != len(text):
        raise ValueError
    return fields


def _value(text: str, place: int) -> tuple[Any, int]:
    """Returns a value and where it ends; False for one that is nested too deep."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except RecursionError:
        depth = 0
        for mark in _MARK.finditer(text, place):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
            if not depth:
                return False, mark.end()
        raise ValueError from None


def _skip(text: str, place: int) -> int:
    return _SPACE.match(text, place).end()


def _is_storable(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True

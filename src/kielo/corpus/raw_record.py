"""Raw documents that are not decoded yet, reasons to pass one over, and the records of JSON files."""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # which the stub lacks
from pathlib import Path
from typing import Any

import orjson

from kielo.artifact.json_object import JsonTable
from kielo.artifact.text_files import read_utf8
from kielo.recipe.errors import KieloError

TOO_LONG = "over max_document_bytes"
NOT_UTF8 = "not UTF-8"
NO_TEXT = "no text in the field"
DAMAGED_FILE = "file damaged or not of its format"
UNEQUAL = "a pair without one of its sides"
RAGGED = "another number of columns than other rows"
BAD_MESSAGES = "no list of messages"


class BadRecord(KieloError):
    """A record that is passed over. reason: the same for all of a kind. The message names the file."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Record:
    """An undecoded document. number: its line or row (0: the rest of a damaged file). problem: a fault."""

    path: Path
    number: int
    content: Any
    problem: BadRecord | None = None


def too_long(place: str, max_bytes: int) -> BadRecord:
    return BadRecord(
        TOO_LONG, f"{place}: longer than corpus.max_document_bytes = {max_bytes}. Fix: cut it, or set more"
    )


_SPACE, _BETWEEN = re.compile(r"[ \t\n\r]*"), re.compile(r"[\s,]*")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)


def lenient_fields(line: bytes) -> JsonTable | None:
    """Return the fields of a JSON object, or None. A field that cannot be stored is False.

    Such are NaN, Infinity and lone surrogates, which Python writes, 1e999, and values nested a thousand deep.
    """
    try:
        text = line.decode("utf-8")
        fields = _fields(text, _skip(text, 0))
    except (ValueError, IndexError):
        return None
    return {
        name: value if _is_storable(value) else False for name, value in fields.items() if _is_storable(name)
    }


def _fields(text: str, place: int) -> JsonTable:
    """Read the object that begins at `place` and is all of the text. Raises ValueError or IndexError."""
    if text[place] != "{":
        raise ValueError
    fields: JsonTable = {}
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
    """Return a value and its end. A value that is nested too deep is False."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except RecursionError:
        depth = 0
        for mark in _MARK.finditer(text, place):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
            if not depth:
                return False, mark.end()
        raise ValueError from None


def _skip(text: str, place: int, passed_over: re.Pattern[str] = _SPACE) -> int:
    found = passed_over.match(text, place)
    return found.end() if found else place


def _is_storable(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def json_records(path: Path, max_bytes: int, encoding: str | None) -> Iterator[Record]:
    """Yield the elements of an array, or all values of a file, from 1. Raises KieloError or BadRecord."""
    decoder, text, number, is_array, is_over = json.JSONDecoder(), "", 0, False, False
    for piece in _pieces(path, encoding):
        text += piece
        if not number and not is_array and (start := text.lstrip()):
            is_array, text = start.startswith("["), start.removeprefix("[")
        place = 0
        while not is_over and (place := _skip(text, place, _BETWEEN)) < len(text):
            if is_array and text[place] == "]":
                is_over, place = True, place + 1
                break
            try:
                _, end = decoder.raw_decode(text, place)
            except (json.JSONDecodeError, RecursionError):
                break  # the rest may follow
            if end == len(text) and text[end - 1] not in '}]"':
                break  # more digits may follow
            number += 1
            yield Record(path, number, text[place:end].encode())
            place = end
        text = text[place:]
        if len(text) > max_bytes:
            raise too_long(f"{path}, element {number + 1}", max_bytes)
    if text.strip() or is_array and not is_over:
        raise KieloError(
            f"{path}, after element {number}: not valid JSON, or cut short ({text[:40]!r}). Fix: an array of "
            "objects, or objects one after the other"
        )


def _pieces(path: Path, encoding: str | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for number, block in enumerate(read_utf8(path, encoding)):
            yield decoder.decode(block).removeprefix("\ufeff" if not number else "")
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as problem:
        raise KieloError(
            f"{path}: invalid UTF-8 (byte 0x{problem.object[problem.start]:02x}). Fix: name its encoding in "
            "the source's `encoding`, or convert the file"
        ) from None

"""Raw documents that are not decoded yet, reasons to pass one over, and the records of JSON files."""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
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


class OtherRecord(BadRecord):
    """A record of an archive that is no text, such as a request or an image. It is counted, and not bad."""


@dataclass(frozen=True)
class Record:
    """An undecoded document. number: its line or row (0: the rest of a damaged file). problem: a fault."""

    path: Path
    number: int
    content: Any
    problem: BadRecord | None = None


def too_long(place: str, max_bytes: int) -> BadRecord:
    told = f"{place}: longer than corpus.max_document_bytes = {max_bytes}. Fix: cut it, or set more"
    return BadRecord(TOO_LONG, told)


_BETWEEN = re.compile(r"[\s,]*")
_LAST_COMMA = re.compile(r"([^{ \t\n\r])[ \t\n\r]*,[ \t\n\r]*\}[ \t\n\r]*$")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)
_QUOTE_OR_BRACKET = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_STORABLE_DEPTH = 254  # orjson's


def lenient_fields(line: bytes) -> JsonTable | None:
    """Return the fields of a JSON object, or None. A field that cannot be stored is False.

    Such are NaN, Infinity and lone surrogates, which Python writes, 1e999, and values nested a thousand deep.
    """
    try:
        text = _LAST_COMMA.sub(r"\1}", line.decode("utf-8"))
        try:
            fields = json.loads(text)
        except RecursionError:
            fields = json.loads(_without_deep_values(text))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return {
        name: value if _is_storable(value) else False for name, value in fields.items() if _is_storable(name)
    }


def _without_deep_values(text: str) -> str:
    """Return an object's text with false for each value that is nested too deep to be stored."""
    depth = begin = deepest = 0
    found = []
    for mark in _MARK.finditer(text):
        change = {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if change == 1 and depth == 1:
            begin, deepest = mark.start(), 0
        depth += change
        deepest = max(deepest, depth)
        if change == -1 and depth == 1 and deepest > _STORABLE_DEPTH:
            found.append((begin, mark.end()))
    for begin, end in reversed(found):
        text = f"{text[:begin]}false{text[end:]}"
    return text


def _is_storable(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def _after_space(text: str, place: int) -> int:
    found = _BETWEEN.match(text, place)
    return found.end() if found else place


def json_records(path: Path, max_bytes: int, encoding: str | None) -> Iterator[Record]:
    """Yield the elements of an array, or all values of a file, from 1. Raise KieloError if it is damaged."""
    decoder = json.JSONDecoder(parse_int=len)  # Python refuses to read numbers of 4,301 digits
    text, number, is_array, is_over = "", 0, False, False
    pieces = _pieces(path, encoding)
    for piece in pieces:
        text += piece
        if not number and not is_array and (start := text.lstrip()):
            is_array, text = start.startswith("["), start.removeprefix("[")
        place = 0
        while not is_over and (place := _after_space(text, place)) < len(text):
            if is_array and text[place] == "]":
                is_over, place = True, place + 1
                break
            where = f"{path}, element {number + 1}"
            try:
                _, end = decoder.raw_decode(text, place)
            except (json.JSONDecodeError, RecursionError):
                if len(text) - place <= max_bytes:
                    break  # the rest may follow
                if (rest := _after_long_element(text[place:], pieces)) is None:
                    raise _invalid(path, number, text[place:]) from None
                number, text, place = number + 1, rest, 0
                yield Record(path, number, None, too_long(where, max_bytes))
                continue
            if end == len(text) and text[end - 1] not in '}]"' and end - place <= max_bytes:
                break  # more digits may follow
            number += 1
            element = text[place:end].encode()
            is_long = len(element) > max_bytes
            yield Record(path, number, *((None, too_long(where, max_bytes)) if is_long else (element,)))
            place = end
        text = text[place:].lstrip()
        if is_over and text:
            break
    if text or is_array and not is_over:
        raise _invalid(path, number, text)


def _after_long_element(text: str, pieces: Iterator[str]) -> str | None:
    """Return what follows an element that ends in a later piece. None: it is damaged, or the file is cut."""
    if text[0] not in '[{"':
        return None
    depth, is_string, held, is_first = 0, False, "", True
    for piece in chain([text], pieces):
        piece = held + piece
        for mark in _QUOTE_OR_BRACKET.finditer(piece):
            if mark[0] == '"':
                is_string = not is_string
            elif not is_string:
                depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
            if not depth and not is_string:
                return None if is_first else piece[mark.end() :]
        num_backslashes = len(piece) - len(piece.rstrip("\\"))
        held, is_first = "\\" * (num_backslashes % 2), False
    return None


def _invalid(path: Path, number: int, text: str) -> KieloError:
    return KieloError(
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

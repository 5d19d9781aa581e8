"""JSON files: an array of objects, or objects one after the other on any number of lines → a record for each.

Read in pieces, so that memory holds one object and a block.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from kielo.artifact.text_files import read_utf8
from kielo.corpus.raw_record import Record, too_long
from kielo.recipe.errors import KieloError

_BETWEEN = re.compile(r"[\s,]*")


def json_records(path: Path, max_bytes: int, encoding: str | None) -> Iterator[Record]:
    """Yields the elements of an array, or all values of a file without one, numbered from 1.

    Raises KieloError for what is no JSON, or cut short, and BadRecord for an element over max_bytes.
    """
    decoder, text, number, is_array, is_over = json.JSONDecoder(), "", 0, False, False
    for piece in _pieces(path, encoding):
        text += piece
        if not number and not is_array and (start := text.lstrip()):
            is_array, text = start.startswith("["), start.removeprefix("[")
        place = 0
        while not is_over and (place := _BETWEEN.match(text, place).end()) < len(text):
            if is_array and text[place] == "]":
                is_over, place = True, place + 1
                break
            try:
                _, end = decoder.raw_decode(text, place)
            except (json.JSONDecodeError, RecursionError):
                break  # more of it may follow
            if end == len(text) and text[end - 1] not in '}]"':
                break  # a number may go on
            number += 1
            yield Record(path, number, text[place:end].encode())
            place = end
        text = text[place:]
        if len(text) > max_bytes:
            raise too_long(f"{path}, element {number + 1}", max_bytes)
    if text.strip() or is_array and not is_over:
        raise KieloError(
            f"{path}, after element {number}: not valid JSON, or cut short ({text[:40]!r}); one array of "
            "objects, or objects one after the other, are expected"
        )


def _pieces(path: Path, encoding: str | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for number, block in enumerate(read_utf8(path, encoding)):
            yield decoder.decode(block).removeprefix("\ufeff" if not number else "")
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as problem:
        raise KieloError(
            f"{path}: invalid UTF-8 (byte 0x{problem.object[problem.start]:02x}); name its encoding in the "
            "source's `encoding`, or convert the file"
        ) from None

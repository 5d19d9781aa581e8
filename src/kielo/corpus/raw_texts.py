"""The text of a raw record: `Record` → `RawText`, or a `BadRecord` that names its file and line or row."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kielo.artifact.documents import TOOLS, TURNS, join_messages, parse_record
from kielo.artifact.json_object import JsonTable
from kielo.artifact.text_files import SHOWING_BYTES, decode_text, marked_encoding, other_encoding
from kielo.corpus.conversations import read_conversation
from kielo.corpus.html_text import decode_page, page_text
from kielo.corpus.known_corpora import facts_of, not_finite
from kielo.corpus.programming_languages import LANGUAGE, programming_language
from kielo.corpus.raw_formats import ARCHIVES, FILE_NAME_FIELDS, RawSource, file_format, name_in
from kielo.corpus.raw_record import (
    NO_TEXT,
    NOT_UTF8,
    UNEQUAL,
    BadRecord,
    Record,
    lenient_fields,
    too_long,
)
from kielo.corpus.web_archives import text_of_page
from kielo.recipe.errors import KieloError


@dataclass(frozen=True)
class RawText:
    """A decoded document. `facts` become its metadata. A pair has `sides` but no text yet."""

    id: str
    text: str
    facts: JsonTable = field(default_factory=dict)
    sides: tuple[str, str] | None = None
    not_finite: tuple[str, ...] = ()  # facts that were left out


def parse(record: Record, source: RawSource, max_bytes: int) -> RawText:
    """Decode a record. Raises BadRecord, which names the file and the line or row."""
    if record.problem is not None:
        raise record.problem
    format = file_format(record.path, source.kind)
    file = name_in(source.root, record.path)
    place = f"{source.name}/{file}"
    if format == "html":
        content = _read_at_most(record.path, max_bytes)
        return RawText(place, page_text(decode_page(record.path, content, source.encoding)))
    if format == "code":
        text = _whole_file(record.path, max_bytes, source.encoding)
        return RawText(place, text, {LANGUAGE: programming_language(record.path.name)})
    place = f"{place}:{record.number}"
    if format in ARCHIVES:
        where = f"{record.path}, record {record.number}"
        return RawText(place, *text_of_page(where, record.content, source.encoding))
    if format == "tsv":
        return RawText(place, "", sides=_columns(record, source))
    if format == "tmx":
        return RawText(place, "", sides=record.content)
    if format == "txt":
        try:
            return RawText(place, decode_text(record.path, record.number, record.content))
        except KieloError as problem:
            raise BadRecord(NOT_UTF8, str(problem)) from None
    if format == "parquet":
        where = f"{record.path}, row {record.number}"
        fields = {name: _cell(where, value, max_bytes) for name, value in record.content.items()}
    else:
        unit = "element" if format == "json" else "line"
        where = f"{record.path}, {unit} {record.number}"
        fields = _json_fields(record, unit)
        given = fields.get("id")
        place = str(given) if given and isinstance(given, str | int | float) else place
    return _from_fields(place, where, fields, source)


def _from_fields(id: str, where: str, fields: JsonTable, source: RawSource) -> RawText:
    fields = _with_inner_fields(fields, source.text_fields)
    if source.kind == "parallel":
        first, second = (_side(where, fields, name) for name in source.text_fields)
        return RawText(id, "", sides=(first, second))
    if source.kind == "instructions":
        messages, tools = read_conversation(where, fields, source.text_fields)
        text, turns = join_messages(messages)
        return RawText(id, text, {TURNS: turns} | ({TOOLS: tools} if tools else {}))
    text = fields.get(source.text_fields[0], ...)
    text = "" if text is None else text  # null is an empty document
    if not isinstance(text, str):
        raise _no_text(NO_TEXT, where, source.text_fields[0], fields, "text_field")
    if source.kind != "code":
        return RawText(id, text, facts_of(fields), not_finite=not_finite(fields))
    names = (fields.get(name) for name in FILE_NAME_FIELDS)
    languages = (programming_language(name) for name in names if isinstance(name, str) and name)
    language = next(filter(None, languages), None)
    return RawText(id, text, {LANGUAGE: language} if language else {})


def _with_inner_fields(fields: JsonTable, names: Iterable[str]) -> JsonTable:
    """Return the fields, and each of `names` that is in a field (translation.en) unless a field has it."""
    found = dict(fields)
    for name in names:
        value: Any = fields
        for part in name.split(".") if name not in fields else ():
            value = value.get(part, ...) if isinstance(value, dict) else ...
        if value is not ... and name not in fields:
            found[name] = value
    return found


def _side(where: str, fields: JsonTable, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _no_text(UNEQUAL, where, name, fields, "pair_fields")
    return value


def _no_text(reason: str, where: str, name: str, fields: JsonTable, key: str) -> BadRecord:
    kind = {list: "a list", dict: "an object", int: "a number", float: "a number"}.get(type(fields.get(name)))
    what = f"the field {name!r} is {kind}, not text" if kind else f"no text in the field {name!r}"
    others = ", ".join(fields)[:200] or "none"
    return BadRecord(reason, f"{where}: {what} (its fields are {others}). Fix: the source's {key}")


def _columns(record: Record, source: RawSource) -> tuple[str, str]:
    where, columns = f"{record.path}, line {record.number}", record.content
    numbers = [int(name) for name in source.text_fields if name.isdecimal()]
    first, second = numbers if len(numbers) == 2 else (1, 2)
    if not 1 <= min(first, second) <= max(first, second) <= len(columns):
        raise BadRecord(
            UNEQUAL,
            f"{where}: {len(columns)} columns, and the pair is in columns {first} and {second}. Fix: the "
            "source's pair_fields = their numbers",
        )
    try:
        sides = [decode_text(record.path, record.number, columns[number - 1]) for number in (first, second)]
    except KieloError as problem:
        raise BadRecord(NOT_UTF8, str(problem)) from None
    return sides[0], sides[1]


def _json_fields(record: Record, unit: str) -> JsonTable:
    try:
        return parse_record(record.path, record.number, record.content, unit)
    except KieloError as problem:
        if (fields := lenient_fields(record.content)) is not None:
            return fields
        raise BadRecord("no JSON object", str(problem)) from None


def _whole_file(path: Path, max_bytes: int, encoding: str | None) -> str:
    """Read a program file without a change: line ends and a byte-order mark stay."""
    content = _read_at_most(path, max_bytes)
    try:
        mark = marked_encoding(content)
        if mark not in (None, "UTF-8"):
            return content.decode(mark).removeprefix("\ufeff")
        if mark is None and encoding is None and (shown := other_encoding(content[:SHOWING_BYTES])):
            raise BadRecord(
                NOT_UTF8,
                f"{path}: {shown} text without a byte-order mark. Fix: convert it, or name its encoding in "
                "the source's `encoding`",
            )
        return content.decode("utf-8" if mark else encoding or "utf-8")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise BadRecord(
            NOT_UTF8,
            f"{path}, line {line}: invalid {(encoding or 'utf-8').upper()} (byte "
            f"0x{content[problem.start]:02x}). Fix: convert it, or name it in the source's `encoding`",
        ) from None


def _read_at_most(path: Path, max_bytes: int) -> bytes:
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise too_long(str(path), max_bytes)
    return content


def _cell(where: str, value: Any, max_bytes: int) -> Any:
    """Return the value of a cell. The size of texts is checked before they are copied."""
    import pyarrow

    if not value.is_valid:
        return None
    if isinstance(value, pyarrow.DictionaryScalar | pyarrow.ExtensionScalar):
        value = value.value
    is_text = isinstance(value, pyarrow.BinaryScalar)  # so are the scalars of texts
    if is_text and value.as_buffer().size > max_bytes:
        raise too_long(where, max_bytes)
    if isinstance(value, pyarrow.ListScalar) and _list_bytes(value, max_bytes) > max_bytes:
        raise too_long(where, max_bytes)
    try:
        found = value.as_py()
        return found.decode() if is_text and isinstance(found, bytes) else found
    except UnicodeDecodeError:
        raise BadRecord(NOT_UTF8, f"{where}: invalid UTF-8. Fix: write it again from clean text") from None
    except (ValueError, OverflowError, KeyError) as problem:  # a time or a time zone that Python lacks
        told = f"{where}: a cell cannot be read ({problem}). Fix: write it as text"
        raise BadRecord("a cell that cannot be read", told) from None


def _list_bytes(value: Any, max_bytes: int) -> int:
    size = value.values.nbytes  # views share it with other rows
    return len(str(value.as_py()).encode()) if size > max_bytes and "view" in str(value.type) else size

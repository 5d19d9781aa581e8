"""Formats of raw text: .txt (a document a line), .jsonl, plain, .gz or .zst; .parquet; .html.

A source's files -> records in their order -> (id, text) of each. A format is a branch of `parse`, and of
`_file_records`, which divides a file into records.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kielo.artifact.documents import decode_text, other_encoding, parse_record, read_lines
from kielo.corpus.html_text import page_text
from kielo.recipe.errors import KieloError

FORMATS = ".txt, .jsonl (either also .gz or .zst), .parquet, .html"
KNOWN = re.compile(r"\.(txt|jsonl)(\.gz|\.zst)?$|\.parquet$|\.html?$", re.IGNORECASE)
CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]+)", re.IGNORECASE)
# Python has them as encodings of text, but no page is written in them.
NO_CHARSETS = frozenset({"utf-7", "idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined"})
PARQUET_BATCH_ROWS = 1024
PARQUET_BATCH_BYTES = 1 << 26

TOO_LONG = "over max_document_bytes"
NOT_UTF8 = "not UTF-8"
NO_TEXT = "no text in the field"
DAMAGED_FILE = "file damaged or not of its format"


class BadRecord(KieloError):
    """A record that is passed over; `reason` is the same for all of a kind, the message names the file."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RawSource:
    """A source whose files are on this disk: the output of `fetch`.

    `root` is the folder that file names are relative to; `stamps` are (bytes, time of change in ns) of the
    files before they were hashed; `origin` is a text on where the files came from.
    """

    name: str
    root: str
    files: tuple[str, ...]
    stamps: tuple[tuple[int, int], ...]
    text_field: str
    max_documents: int | None
    origin: str
    fingerprint: str


@dataclass(frozen=True)
class Record:
    """One raw document, not yet decoded: cheap to skip when another worker takes it.

    `number` is that of its line or row; 0 is the rest of a file that is damaged. `problem` is a fault that is
    known already.
    """

    path: Path
    number: int
    content: Any
    problem: BadRecord | None = None


def records(source: RawSource, max_bytes: int) -> Iterator[Record]:
    """Yields every document of the source in the order of its files, undecoded; empty lines are none.

    A file that is damaged or not of its format ends with a bad record. Raises KieloError for one that cannot
    be opened or read: that is no fault of the text.
    """
    for name in source.files:
        path = Path(source.root) / name
        try:
            yield from _file_records(path, source.text_field, max_bytes)
        except OSError as problem:
            raise unreadable(path, problem) from None
        except KieloError as problem:
            yield Record(path, 0, None, BadRecord(DAMAGED_FILE, str(problem)))


def parse(record: Record, source: RawSource, max_bytes: int) -> tuple[str, str]:
    """Decodes a record: (id, text). Raises BadRecord naming the file, and the line or row if any."""
    if record.problem is not None:
        raise record.problem
    kind = _kind(record.path)
    file = record.path.relative_to(source.root).as_posix()
    place = f"{source.name}/{file}"
    if kind == "html":
        return place, _page_text(record.path, max_bytes)
    place = f"{place}:{record.number}"
    if kind == "parquet":
        return place, _parquet_text(record, max_bytes)
    if kind == "txt":
        try:
            return place, decode_text(record.path, record.number, record.content)
        except KieloError as problem:
            raise BadRecord(NOT_UTF8, str(problem)) from None
    try:
        content = parse_record(record.path, record.number, record.content)
    except KieloError as problem:
        raise BadRecord("no JSON object", str(problem)) from None
    text = content.get(source.text_field, ...)
    # A field that says "nothing" is an empty document.
    text = "" if text is None else text
    if not isinstance(text, str):
        raise BadRecord(
            NO_TEXT,
            f"{record.path}, line {record.number}: no text in the field {source.text_field!r}; "
            f"its fields are {', '.join(content)[:200] or 'none'}. Set the source's text_field",
        )
    id = content.get("id")
    return str(id) if id and isinstance(id, str | int | float) else place, text


def is_readable(path: Path) -> bool:
    """Returns True if the file's name ends in a known format and does not begin with a dot."""
    return bool(KNOWN.search(path.name)) and not path.name.startswith(".")


def _file_records(path: Path, text_field: str, max_bytes: int) -> Iterator[Record]:
    kind = _kind(path)
    if kind == "html":
        yield Record(path, 1, None)
    elif kind == "parquet":
        yield from _parquet_records(path, text_field)
    else:
        for number, line in read_lines(path, max_bytes):
            if line is None:
                yield Record(path, number, None, _too_long(f"{path}, line {number}", max_bytes))
            elif line.strip():
                yield Record(path, number, line)


def _kind(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in (".gz", ".zst")]
    kind = suffixes[-1].lower().removeprefix(".")
    return "html" if kind == "htm" else kind


def _too_long(place: str, max_bytes: int) -> BadRecord:
    return BadRecord(
        TOO_LONG, f"{place}: longer than corpus.max_document_bytes = {max_bytes}; cut it, or set more"
    )


def unreadable(path: Path, problem: OSError) -> KieloError:
    return KieloError(
        f"{path}: cannot be read ({problem.strerror or problem}), though it was there at the start; "
        "the same command tries again"
    )


def _page_text(path: Path, max_bytes: int) -> str:
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_long(str(path), max_bytes)
    html = _decode_page(path, content)
    try:
        return page_text(html)
    # Python's parser has no error of its own: it asserts its assumptions, and converts any digits.
    except (AssertionError, ValueError, RecursionError) as problem:
        raise BadRecord("HTML that cannot be parsed", f"{path}: not parsed as HTML ({problem})") from None


def _decode_page(path: Path, content: bytes) -> str:
    """Decodes a page by its byte-order mark, else by its charset, else as UTF-8."""
    declared = CHARSET.search(content[:4096])
    charset = declared.group(1).decode() if declared else "utf-8"
    try:
        encoding = other_encoding(content[:4096]) or codecs.lookup(charset).name
        if encoding in NO_CHARSETS:
            raise LookupError
        # A charset that was found byte by byte cannot be UTF-16.
        if declared and encoding.startswith(("utf-16", "utf-32")):
            encoding = "utf-8"
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise BadRecord(
            "not in its charset",
            f"{path}, line {line}: invalid {encoding.upper()} (byte 0x{content[problem.start]:02x}); "
            "convert the file or correct its charset",
        ) from None
    except LookupError:
        raise BadRecord(
            "not in its charset", f"{path}: unknown charset {charset!r}; convert the file to UTF-8"
        ) from None


def _parquet_records(path: Path, text_field: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=PARQUET_BATCH_BYTES // 16)
        if text_field not in file.schema_arrow.names:
            raise KieloError(
                f"{path}: no column {text_field!r}; its columns are "
                f"{', '.join(file.schema_arrow.names)[:200]}. "
                "Set the source's text_field"
            )
        kind = file.schema_arrow.field(text_field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise KieloError(
                f"{path}: column {text_field!r} holds {kind} and no text; set the source's text_field"
            )
        number = 0
        for batch in file.iter_batches(_batch_rows(file), columns=[text_field]):
            for value in batch.column(0):
                number += 1
                yield Record(path, number, value)
    except (pyarrow.ArrowException, OSError) as problem:
        if isinstance(problem, MemoryError) or isinstance(problem, OSError) and problem.errno is not None:
            raise
        raise KieloError(
            f"{path}: damaged, cut short or not Parquet ({problem}); copy or download it again"
        ) from None


def _batch_rows(file: Any) -> int:
    """Returns the number of rows of about PARQUET_BATCH_BYTES, by the group with the largest rows."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(PARQUET_BATCH_ROWS, int(PARQUET_BATCH_BYTES / max(largest, 1))))


def _parquet_text(record: Record, max_bytes: int) -> str:
    value = record.content
    if not value.is_valid:
        return ""
    value = getattr(value, "value", value)  # of a dictionary
    if value.as_buffer().size > max_bytes:
        raise _too_long(f"{record.path}, row {record.number}", max_bytes)
    try:
        return value.as_py()
    except UnicodeDecodeError:
        raise BadRecord(
            NOT_UTF8,
            f"{record.path}, row {record.number}: invalid UTF-8; write the file again from clean text",
        ) from None

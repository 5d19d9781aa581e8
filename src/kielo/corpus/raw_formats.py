"""Formats of raw text: .txt (a document a line), .jsonl, plain, .gz or .zst; .parquet; .html; program files.

A source's files -> records in their order, undecoded. A format is a branch of `_file_records`, which divides
a file into records, and of `raw_texts.parse`, which decodes one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kielo.artifact.documents import read_lines
from kielo.corpus.programming_languages import programming_language
from kielo.recipe.errors import KieloError

FORMATS = ".txt, .jsonl (either also .gz or .zst), .parquet, .html"
CODE_FORMATS = ".py, .c, .java and other program files, .jsonl (also .gz or .zst), .parquet"
KNOWN = re.compile(r"\.(txt|jsonl)(\.gz|\.zst)?$|\.parquet$|\.html?$", re.IGNORECASE)
CODE_TABLES = re.compile(r"\.jsonl(\.gz|\.zst)?$|\.parquet$", re.IGNORECASE)
PARQUET_BATCH_ROWS = 1024
PARQUET_BATCH_BYTES = 1 << 26

# What says the programming language of a record of code: in The Stack, StarCoder and others.
FILE_NAME_FIELDS = ("path", "max_stars_repo_path", "file_name", "filename", "ext", "lang", "language")

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
    files before they were hashed; `origin` is a text on where the files came from. `is_cleaned`: filters
    of lines see it. `field` is that of the text, in formats that have fields.
    """

    name: str
    root: str
    files: tuple[str, ...]
    stamps: tuple[tuple[int, int], ...]
    kind: str
    is_cleaned: bool
    field: str
    max_documents: int | None
    origin: str
    fingerprint: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields or columns that must be there."""
        return (self.field,)

    @property
    def facts(self) -> tuple[str, ...]:
        """Names of fields or columns that are read where they are there."""
        return FILE_NAME_FIELDS if self.kind == "code" else ()


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
            yield from _file_records(path, source, max_bytes)
        except OSError as problem:
            raise unreadable(path, problem) from None
        except KieloError as problem:
            yield Record(path, 0, None, BadRecord(DAMAGED_FILE, str(problem)))


def is_readable(path: Path, kind: str) -> bool:
    """Returns True if the file's name ends in a format of this kind of source and begins with no dot."""
    if path.name.startswith("."):
        return False
    if kind == "code":
        return bool(CODE_TABLES.search(path.name)) or programming_language(path.name) is not None
    return bool(KNOWN.search(path.name))


def formats(kind: str) -> str:
    """Returns the formats of a kind of source, for people."""
    return CODE_FORMATS if kind == "code" else FORMATS


def file_format(path: Path, kind: str) -> str:
    """Returns the format of a file of a source of this kind: "jsonl", "parquet", "txt", "html" or "code"."""
    if kind == "code" and not CODE_TABLES.search(path.name):
        return "code"
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in (".gz", ".zst")]
    found = suffixes[-1].lower().removeprefix(".")
    return "html" if found == "htm" else found


def _file_records(path: Path, source: RawSource, max_bytes: int) -> Iterator[Record]:
    format = file_format(path, source.kind)
    if format in ("html", "code"):  # the file is the document
        yield Record(path, 1, None)
    elif format == "parquet":
        yield from _parquet_records(path, source)
    else:
        for number, line in read_lines(path, max_bytes):
            if line is None:
                yield Record(path, number, None, too_long(f"{path}, line {number}", max_bytes))
            elif line.strip():
                yield Record(path, number, line)


def too_long(place: str, max_bytes: int) -> BadRecord:
    return BadRecord(
        TOO_LONG, f"{place}: longer than corpus.max_document_bytes = {max_bytes}; cut it, or set more"
    )


def unreadable(path: Path, problem: OSError) -> KieloError:
    return KieloError(
        f"{path}: cannot be read ({problem.strerror or problem}), though it was there at the start; "
        "the same command tries again"
    )


def _parquet_records(path: Path, source: RawSource) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=PARQUET_BATCH_BYTES // 16)
        columns = file.schema_arrow.names
        for name in source.fields:
            _check_column(path, file.schema_arrow, name)
        wanted = [*source.fields, *(name for name in source.facts if name in columns)]
        number = 0
        for batch in file.iter_batches(_batch_rows(file), columns=wanted):
            for row in range(batch.num_rows):
                number += 1
                yield Record(path, number, {name: batch.column(name)[row] for name in wanted})
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


def _check_column(path: Path, schema: Any, name: str) -> None:
    """Raises KieloError where there is no such column, or one without text."""
    import pyarrow

    if name not in schema.names:
        raise KieloError(
            f"{path}: no column {name!r}; its columns are {', '.join(schema.names)[:200]}. "
            "Set the source's text_field"
        )
    kind = schema.field(name).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise KieloError(f"{path}: column {name!r} holds {kind} and no text; set the source's text_field")

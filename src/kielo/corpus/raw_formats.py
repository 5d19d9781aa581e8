"""Formats of raw text (.txt, .jsonl, .parquet, .html, program files, …): files → undecoded records in order.

A format is a branch of `_file_records`, which divides a file into records, and of `raw_texts.parse`, which
decodes a record.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from kielo.artifact.text_files import COMPRESSED, OtherEncoding, read_lines
from kielo.corpus.conversations import OTHER_FIELDS, has_questions
from kielo.corpus.known_corpora import fields_of_facts
from kielo.corpus.pair_formats import named_columns, tmx_records, tsv_records
from kielo.corpus.programming_languages import programming_language
from kielo.corpus.raw_record import DAMAGED_FILE, BadRecord, Record, json_records, too_long
from kielo.corpus.step import is_cleaned, text_fields
from kielo.corpus.web_archives import archive_records
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Source

_JSON = ("jsonl", "ndjson", "json")
ARCHIVES = ("warc", "wet")
# Kind of source → suffixes of files of records, each also compressed (.parquet and .html are not).
# Among code .json are settings.
_RECORDS = {
    "text": ("txt", *_JSON, *ARCHIVES),
    "code": ("jsonl", "ndjson"),
    "parallel": ("tsv", *_JSON, "tmx"),
    "instructions": _JSON,
}
_PACKED = "|".join(re.escape(suffix) for suffix in COMPRESSED)
_KNOWN = {
    kind: re.compile(
        rf"\.({'|'.join(suffixes)})({_PACKED})?$|\.parquet$" + (r"|\.html?$" if kind == "text" else ""),
        re.IGNORECASE,
    )
    for kind, suffixes in _RECORDS.items()
}
# Files of data, readable or not. Kielo does not leave them out silently.
_DATA = re.compile(
    r"\.(txt|text|jsonl?|jsonlines|ndjson|csv|tsv|tab|parquet|arrow|feather|avro|orc|tmx|xml|html?|xhtml|warc|wet"
    r"|wat|pdf|docx?|odt|rtf|epub|xlsx?|ods|bin|idx|np[yz]|pkl|pickle|pt|h5|hdf5|db|sqlite3?|msgpack|ds|conllu?"
    rf"|vrt|sgml?|srt|vtt|po|xliff|7z|rar|zip|tar|tgz|tbz2?|txz|lz4|br|z|snappy)({_PACKED})?$|({_PACKED})$",
    re.IGNORECASE,
)
# Files about data, by their whole name. Words that can be the title of a text are in capitals.
_ABOUT = re.compile(
    r"((?i:readme|licen[cs]e|changelog|checksums?|(md5|sha\d+)sums?)|COPYING|NOTICE|CHANGES|AUTHORS|CITATION"
    rf"|CONTRIBUTING)((?i:\.(txt|text|html?|pdf|docx?|rtf))({_PACKED})?)?|(?i:dataset_infos?\.json)"
    r"|(?i:.*\.(md5|sha\d+|sig|asc|md|rst))",
    re.DOTALL,
)
_BLANK = re.compile("[\\s\u00ad\u200b\u2060\ufeff]*")
_FIRST_OF_SPACE = frozenset({b"", b"\xc2", b"\xe1", b"\xe2", b"\xe3", b"\xef"})
PARQUET_BATCH_ROWS = 1024
PARQUET_BATCH_BYTES = 1 << 26

# Fields that say the programming language of a record of code: in The Stack, StarCoder and others.
FILE_NAME_FIELDS = ("path", "max_stars_repo_path", "file_name", "filename", "ext", "lang", "language")


@dataclass(frozen=True)
class RawSource:
    """A source whose files are on this disk: the output of `fetch`."""

    name: str
    root: str  # which file names are relative to
    files: tuple[str, ...]
    kind: str
    is_cleaned: bool  # filters of lines see it
    documents: str
    text_fields: tuple[str, ...]  # in formats with fields
    max_documents: int | None
    origin: str  # of the files, for people
    stamps: tuple[tuple[int, int], ...] = ()  # (bytes, time of change in ns) before the files were hashed
    fingerprint: str = ""
    encoding: str | None = None  # of files without a mark; None: UTF-8
    unread: tuple[str, ...] = ()  # other files
    column_names: tuple[str, ...] = ()  # pair_fields that .tsv files have in row 1

    def columns_of(self, present: Sequence[str]) -> tuple[str, ...]:
        """Return the required columns of a file with columns `present`. Conversations are in one column."""
        if self.kind == "instructions":
            there = [name for name in self.text_fields if column_path(name, present)[0] in present]
            if not there and has_questions(present):
                return ()
            return tuple(there[:1]) or self.text_fields[:1]
        return self.text_fields

    def facts_in(self, present: Sequence[str]) -> list[str]:
        """Return the other columns to read of a file with columns `present`."""
        facts = {"code": FILE_NAME_FIELDS, "instructions": OTHER_FIELDS}.get(self.kind, ())
        facts = fields_of_facts(present) if self.kind == "text" else facts
        return [name for name in facts if name in present and name not in self.text_fields]


def raw_source(source: Source, root: Path, files: Sequence[str], origin: str, **others: Any) -> RawSource:
    """Return a source of the recipe with its files, sorted by name. others: fields of `RawSource`."""
    has_tsv = any(file_format(Path(file), source.kind) == "tsv" for file in files)
    are_numbers = all(map(str.isdecimal, source.pair_fields))
    return RawSource(
        name=source.name,
        root=str(root),
        files=tuple(files),
        column_names=source.pair_fields if has_tsv and not are_numbers else (),
        kind=source.kind,
        is_cleaned=is_cleaned(source),
        documents=source.documents,
        text_fields=text_fields(source),
        max_documents=source.max_documents,
        origin=origin,
        encoding=source.encoding,
        **others,
    )


def records(source: RawSource, max_bytes: int) -> Iterator[Record]:
    """Yield the source's documents, undecoded. A damaged file ends with a bad record. Raises KieloError."""
    for name in source.files:
        path = Path(source.root) / name
        try:
            yield from _file_records(path, source, max_bytes)
        except OSError as problem:
            raise unreadable(path, problem) from None
        except OtherEncoding as problem:
            raise KieloError(f"corpus.sources, {source.name}: {problem}") from None
        except KieloError as problem:
            yield Record(path, 0, None, BadRecord(DAMAGED_FILE, str(problem)))


def is_readable(path: Path, kind: str) -> bool:
    if path.name.startswith("."):
        return False
    if kind == "code" and programming_language(path.name) is not None:
        return True
    return bool(_KNOWN[kind].search(path.name))


def is_about(path: Path) -> bool:
    return _ABOUT.fullmatch(path.name) is not None


def is_data(path: Path) -> bool:
    return bool(_DATA.search(path.name)) and not path.name.startswith(".") and not is_about(path)


def is_left_out(file: str, source: Source) -> bool:
    return any(fnmatch(file, pattern) for pattern in source.leave_out)


def first_names(names: Sequence[str]) -> str:
    """Return the first of these names, and the number of the others."""
    return ", ".join([*names[:5], *[f"and {len(names) - 5:,} more"][: len(names) > 5]])


def refuse_unread(source: Source, unread: Sequence[str]) -> None:
    data = [file for file in unread if is_data(Path(file)) and not is_left_out(file, source)]
    if data:
        endings = sorted({"*" + "".join(Path(file).suffixes[-2:]) for file in data})
        raise KieloError(
            f"corpus.sources, {source.name}: {len(data)} files that look like data would not be read: "
            f"{first_names(data)}. Fix: convert them to {formats(source.kind)}, "
            f"or leave_out = {json.dumps(endings[:5])} in the source"
        )


def formats(kind: str) -> str:
    listed = ", ".join(f".{suffix}" for suffix in _RECORDS[kind])
    listed += f" (each also {', '.join(COMPRESSED)}), .parquet"
    more = {"text": ", .html", "code": ", and .py, .c, .java and other program files"}
    return listed + more.get(kind, "")


@lru_cache(maxsize=256)  # both are asked for each document
def name_in(root: str, path: Path) -> str:
    """Return the name of a source's file below its root, with "/" on all systems."""
    return path.relative_to(root).as_posix()


@lru_cache(maxsize=256)
def file_format(path: Path, kind: str) -> str:
    """Return the format of a file of a source of this kind: "jsonl", "txt", "html", "code", …"""
    if kind == "code" and not _KNOWN[kind].search(path.name):
        return "code"
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    found = suffixes[-1].lower().removeprefix(".")
    return {"htm": "html", "ndjson": "jsonl"}.get(found, found)


def _file_records(path: Path, source: RawSource, max_bytes: int) -> Iterator[Record]:
    format = file_format(path, source.kind)
    if format in ("html", "code"):  # the file is the document
        yield Record(path, 1, None)
    elif format == "txt" and source.documents != "lines":
        yield from _several_lines(path, source, max_bytes)
    elif format == "tmx":
        yield from tmx_records(path, source.text_fields, max_bytes, source.encoding)
    elif format == "tsv":
        rows = tsv_records(path, max_bytes, source.encoding)
        yield from named_columns(path, rows, source.column_names) if source.column_names else rows
    elif format in ARCHIVES:
        yield from archive_records(path, max_bytes)
    elif format == "json":
        yield from json_records(path, max_bytes, source.encoding)
    elif format == "parquet":
        yield from _parquet_records(path, source)
    else:
        yield from line_records(path, read_lines(path, max_bytes, source.encoding), max_bytes)


def line_records(path: Path, lines: Iterable[tuple[int, bytes | None]], max_bytes: int) -> Iterator[Record]:
    for number, line in lines:
        if line is None:
            yield Record(path, number, None, too_long(f"{path}, line {number}", max_bytes))
        elif not is_blank(line):
            yield Record(path, number, line)


def unreadable(path: Path, problem: OSError) -> KieloError:
    return KieloError(
        f"{path}: cannot be read ({problem.strerror or problem}) any more. Fix: the same command, once the "
        "file is back"
    )


def is_blank(line: bytes) -> bool:
    """Return True for a line of white space of any kind and characters without width."""
    stripped = line.strip()
    if stripped[:1] not in _FIRST_OF_SPACE:
        return False
    return not stripped or _BLANK.fullmatch(stripped.decode("utf-8", "replace")) is not None


def _several_lines(path: Path, source: RawSource, max_bytes: int) -> Iterator[Record]:
    r"""Yield documents of several lines, each numbered by its first, with \n as line ends."""
    ends_at_empty_line = source.documents == "paragraphs"
    first, size = 0, 0
    lines: list[bytes] = []

    def document() -> Record:
        if size > max_bytes:
            return Record(path, first, None, too_long(f"{path}, line {first}", max_bytes))
        return Record(path, first, b"\n".join(lines))

    for number, line in read_lines(path, max_bytes, source.encoding):
        is_empty = line is not None and is_blank(line)
        if is_empty and (ends_at_empty_line or not first):
            if first:
                yield document()
            first, size, lines = 0, 0, []
            continue
        first = first or number
        size += max_bytes + 1 if line is None else len(line) + 1
        if size > max_bytes:
            lines = []  # a document that is too long is never complete in memory
        elif line is not None:
            lines.append(line)
    if first:
        yield document()


def _parquet_records(path: Path, source: RawSource) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=PARQUET_BATCH_BYTES // 16)
        columns = file.schema_arrow.names
        needed = source.columns_of(columns)
        wanted = [*needed, *source.facts_in(columns)]
        for name in wanted:
            has_text = name in needed and source.kind != "instructions"
            _check_column(path, file.schema_arrow, name, has_text)
        number = 0
        for batch in file.iter_batches(batch_rows(file), columns=wanted):
            cells = {name: _column(batch, column_path(name, columns)) for name in wanted}
            for row in range(batch.num_rows):
                number += 1
                yield Record(path, number, {name: column[row] for name, column in cells.items()})
    except (pyarrow.ArrowException, OSError) as problem:
        if isinstance(problem, MemoryError) or isinstance(problem, OSError) and problem.errno is not None:
            raise
        raise KieloError(
            f"{path}: damaged, cut short or not Parquet ({problem}). Fix: copy or download it again"
        ) from None


def batch_rows(file: Any) -> int:
    """Return the number of rows of about PARQUET_BATCH_BYTES, by the group with the largest rows."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(PARQUET_BATCH_ROWS, int(PARQUET_BATCH_BYTES / max(largest, 1))))


def column_path(name: str, present: Sequence[str]) -> list[str]:
    """Return the column and the fields in it that hold `name`. A column with this name comes first."""
    return [name] if name in present else name.split(".")


def _column(batch: Any, path: Sequence[str]) -> Any:
    import pyarrow.compute

    column, *inner = path
    return pyarrow.compute.struct_field(batch.column(column), inner) if inner else batch.column(column)


def _check_column(path: Path, schema: Any, name: str, has_text: bool) -> None:
    """Raise KieloError for a column that is missing, there twice, or without text."""
    import pyarrow

    column, *inner = column_path(name, schema.names)
    if (number := schema.names.count(column)) > 1:
        raise KieloError(f"{path}: {number} columns have the name {column!r}. Fix: write it with one of them")
    kind: Any = schema.field(column).type if number else None
    for part in inner:
        is_field = kind is not None and pyarrow.types.is_struct(kind) and kind.get_field_index(part) >= 0
        kind = kind.field(part).type if is_field else None
    if kind is None:
        raise KieloError(
            f"{path}: no column {name!r} (its columns are {', '.join(schema.names)[:200]}). "
            "Fix: the source's text_field, or pair_fields"
        )
    if has_text and not _is_text(kind):
        raise KieloError(f"{path}: column {name!r} is {kind} and no text. Fix: the source's text_field")


def _is_text(kind: Any) -> bool:
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    # Older writers do not mark bytes as text.
    texts = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    return kind in (*texts, pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())

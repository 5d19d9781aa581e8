"""Raw text in the formats that people have: .txt (one document a line), .jsonl, plain, .gz or .zst;
.parquet; .html.

A source's files -> split documents. Worker r of n takes documents r, r+n, … of each source, so one big file
keeps all workers busy, and `place` says where each belongs. A record that cannot be read is passed over and
counted; `run` refuses the corpus when there are too many of them.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import DocumentsPipeline

from kielo.artifact.documents import decode_text, other_encoding, parse_record, read_lines
from kielo.corpus.html_text import page_text
from kielo.corpus.split_document import SplitDocument, split_document
from kielo.corpus.step import CorpusStep
from kielo.recipe.errors import KieloError

FORMATS = ".txt, .jsonl (either also .gz or .zst), .parquet, .html"
KNOWN = re.compile(r"\.(txt|jsonl)(\.gz|\.zst)?$|\.parquet$|\.html?$", re.IGNORECASE)
CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]+)", re.IGNORECASE)
# Python has them as encodings of text, but no page is written in them.
NO_CHARSETS = frozenset({"utf-7", "idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined"})
PARQUET_BATCH_ROWS = 1024
PARQUET_BATCH_BYTES = 1 << 26
# Bad records of each source that are shown.
MAX_EXAMPLES = 5
MAX_EXAMPLE_CHARACTERS = 300

TOO_LONG = "over max_document_bytes"
NOT_UTF8 = "not UTF-8"
NO_TEXT = "no text in the field"
DAMAGED_FILE = "file damaged or not of its format"


class BadRecord(KieloError):
    """A record that is passed over; `reason` is the same for all of a kind, the message names
    file and line.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RawSource:
    """A source whose files are on this disk: what `fetch` gives and the reader needs.

    `root` is the folder that file names are told from; `stamps` are (bytes, time of change in ns) of the
    files before they were hashed; `origin` says in words where the text came from.
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
    """One raw document before anything is decoded: cheap to pass over when another worker takes it.

    `number` is that of its line or row; 0 stands for the rest of a file that is damaged. `problem` is what is
    known to be wrong already.
    """

    path: Path
    number: int
    content: Any
    problem: BadRecord | None = None


class ReadSources(CorpusStep):
    name = "read"

    def __init__(self, sources: tuple[RawSource, ...], max_document_bytes: int):
        super().__init__()
        self.sources = sources
        self.max_document_bytes = max_document_bytes
        self.num_examples: Counter[str] = Counter()

    def work(self, document: SplitDocument) -> bool:
        self.count("source_documents", document.source)
        self.count("source_bytes", document.source, document.num_bytes)
        return True

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        return super().run(self.documents(rank, world_size), rank, world_size)

    def documents(self, rank: int, world_size: int) -> Iterator[SplitDocument]:
        for source_number, source in enumerate(self.sources):
            for number, record in enumerate(records(source, self.max_document_bytes)):
                if number == source.max_documents:
                    break
                if number % world_size != rank:
                    continue
                file = record.path.relative_to(source.root).as_posix()
                try:
                    id, text = parse(record, source, self.max_document_bytes)
                except BadRecord as problem:
                    self.pass_over(source, number, record, problem)
                    continue
                except OSError as problem:
                    raise _unreadable(record.path, problem) from None
                metadata = {"file": file, "number": record.number}
                yield split_document(text, id, source.name, (source_number, number), metadata)

    def pass_over(self, source: RawSource, number: int, record: Record, problem: BadRecord) -> None:
        """Count a bad record, and keep the first ones as examples (see `bad_examples`)."""
        self.count("source_documents", source.name)
        self.count("source_bad", source.name)
        self.count("documents", problem.reason)
        if record.number == 0:
            self.count("source_damaged_bytes", source.name, record.path.stat().st_size)
        if self.num_examples[source.name] < MAX_EXAMPLES:
            self.num_examples[source.name] += 1
            told = str(problem).replace(f"{Path(source.root)}/", "", 1)[:MAX_EXAMPLE_CHARACTERS]
            # Examples are labels, since counts are what every executor of datatrove brings home.
            self.count("bad_example", json.dumps([source.name, number, told]))


def bad_examples(labels: dict[str, int]) -> dict[str, list[str]]:
    """Source name -> its first bad records in the order of the corpus, from the counts of `ReadSources`."""
    found = sorted(
        json.loads(label.partition("/")[2]) for label in labels if label.startswith("bad_example/")
    )
    return {
        name: [told for source, _, told in found if source == name][:MAX_EXAMPLES] for name, _, _ in found
    }


def records(source: RawSource, max_bytes: int) -> Iterator[Record]:
    """Every document of the source in the order of its files, undecoded; empty lines are none.

    A file that is damaged or not of its format ends with a bad record. Raises KieloError for one that cannot
    be opened or read: that is no fault of the text.
    """
    for name in source.files:
        path = Path(source.root) / name
        try:
            yield from _file_records(path, source.text_field, max_bytes)
        except OSError as problem:
            raise _unreadable(path, problem) from None
        except KieloError as problem:
            yield Record(path, 0, None, BadRecord(DAMAGED_FILE, str(problem)))


def parse(record: Record, source: RawSource, max_bytes: int) -> tuple[str, str]:
    """(id, text) of a record. Raises BadRecord naming the file, and the line or row where there is one."""
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
    """Whether the file's name ends in a format that is read here; hidden files are left alone."""
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


def _unreadable(path: Path, problem: OSError) -> KieloError:
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
    # Python's parser has no error of its own: it asserts what it takes for granted, and turns any digits to a
    # number.
    except (AssertionError, ValueError, RecursionError) as problem:
        raise BadRecord("HTML that cannot be parsed", f"{path}: not parsed as HTML ({problem})") from None


def _decode_page(path: Path, content: bytes) -> str:
    """By its mark, else by its charset, else as UTF-8."""
    declared = CHARSET.search(content[:4096])
    charset = declared.group(1).decode() if declared else "utf-8"
    try:
        encoding = other_encoding(content[:4096]) or codecs.lookup(charset).name
        if encoding in NO_CHARSETS:
            raise LookupError
        # What was found byte by byte is no UTF-16, whatever it says.
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
    """Rows that make about PARQUET_BATCH_BYTES at most, by the size of the group with the largest rows."""
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

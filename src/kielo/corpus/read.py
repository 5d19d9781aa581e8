"""Raw text in the formats that people have: .txt (one document a line), .jsonl, plain, .gz or .zst;
.parquet; .html.

A source's files -> split documents. Worker r of n takes documents r, r+n, … of each source, so one big file
keeps all workers busy, and `place` says where each belongs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import DocumentsPipeline

from kielo.artifact.documents import decode_text, parse_record, read_lines
from kielo.corpus.html_text import page_text
from kielo.corpus.split import SplitDocument, split_document
from kielo.corpus.steps import CorpusStep
from kielo.recipe.errors import KieloError

FORMATS = ".txt, .jsonl (either also .gz or .zst), .parquet, .html"
KNOWN = re.compile(r"\.(txt|jsonl)(\.gz|\.zst)?$|\.parquet$|\.html?$", re.IGNORECASE)
CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]+)", re.IGNORECASE)
PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True)
class RawSource:
    """A source whose files are on this disk: what `fetch` gives and the reader needs.

    `root` is the folder that file names are told from; `origin` says in words where the text came from.
    """

    name: str
    root: str
    files: tuple[str, ...]
    text_field: str
    max_documents: int | None
    origin: str
    fingerprint: str


@dataclass(frozen=True)
class Record:
    """One raw document before anything is decoded: cheap to pass over when another worker takes it."""

    path: Path
    number: int
    content: Any


class ReadSources(CorpusStep):
    name = "read"

    def __init__(self, sources: tuple[RawSource, ...]):
        super().__init__()
        self.sources = sources

    def work(self, document: SplitDocument) -> bool:
        self.count("source_documents", document.source)
        self.count("source_bytes", document.source, document.num_bytes)
        return True

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        return super().run(self.documents(rank, world_size), rank, world_size)

    def documents(self, rank: int, world_size: int) -> Iterator[SplitDocument]:
        for source_number, source in enumerate(self.sources):
            for number, record in enumerate(records(source)):
                if number == source.max_documents:
                    break
                if number % world_size != rank:
                    continue
                id, text = parse(record, source)
                file = record.path.relative_to(source.root).as_posix()
                metadata = {"file": file, "number": record.number}
                yield split_document(text, id, source.name, (source_number, number), metadata)


def records(source: RawSource) -> Iterator[Record]:
    """Every document of the source in the order of its files, undecoded; empty lines are none."""
    for name in source.files:
        path = Path(source.root) / name
        kind = _kind(path)
        if kind == "html":
            yield Record(path, 1, None)
        elif kind == "parquet":
            yield from _parquet_records(path, source.text_field)
        else:
            for number, line in read_lines(path):
                if line.strip():
                    yield Record(path, number, line)


def parse(record: Record, source: RawSource) -> tuple[str, str]:
    """(id, text) of a record. Raises KieloError naming the file, and the line or row where there is one."""
    kind = _kind(record.path)
    file = record.path.relative_to(source.root).as_posix()
    place = f"{source.name}/{file}"
    if kind == "html":
        return place, page_text(_read_html(record.path))
    if kind == "txt":
        return f"{place}:{record.number}", decode_text(record.path, record.number, record.content)
    if kind == "parquet":
        return f"{place}:{record.number}", _parquet_text(record)
    content = parse_record(record.path, record.number, record.content)
    text = content.get(source.text_field)
    if not isinstance(text, str):
        raise KieloError(
            f"{record.path}, line {record.number}: no text in the field {source.text_field!r}; "
            f"its fields are {', '.join(content) or 'none'}. Set the source's text_field"
        )
    return str(content.get("id") or f"{place}:{record.number}"), text


def is_readable(path: Path) -> bool:
    """Whether the file's name ends in a format that is read here; hidden files are left alone."""
    return bool(KNOWN.search(path.name)) and not path.name.startswith(".")


def _kind(path: Path) -> str:
    if not KNOWN.search(path.name):
        raise KieloError(f"{path}: unknown format; read are {FORMATS}")
    suffixes = [suffix for suffix in path.suffixes if suffix.lower() not in (".gz", ".zst")]
    kind = suffixes[-1].lower().removeprefix(".")
    return "html" if kind == "htm" else kind


def _read_html(path: Path) -> str:
    content = path.read_bytes()
    declared = CHARSET.search(content[:4096])
    encoding = declared.group(1).decode() if declared else "utf-8"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        name = "UTF-8" if encoding.lower() in ("utf-8", "utf8") else encoding
        raise KieloError(
            f"{path}, line {line}: invalid {name} (byte 0x{content[problem.start]:02x}); "
            "convert the file or correct its charset"
        ) from None
    except LookupError:
        raise KieloError(f"{path}: unknown charset {encoding!r}; convert the file to UTF-8") from None


def _parquet_records(path: Path, text_field: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if text_field not in file.schema_arrow.names:
            raise KieloError(
                f"{path}: no column {text_field!r}; its columns are {', '.join(file.schema_arrow.names)}. "
                "Set the source's text_field"
            )
        number = 0
        for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=[text_field]):
            for value in batch.column(0):
                number += 1
                if value.is_valid:
                    yield Record(path, number, value)
    except (pyarrow.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise
        raise KieloError(
            f"{path}: damaged, cut short or not Parquet ({problem}); copy or download it again"
        ) from None


def _parquet_text(record: Record) -> str:
    try:
        text = record.content.as_py()
    except UnicodeDecodeError:
        raise KieloError(
            f"{record.path}, row {record.number}: invalid UTF-8; write the file again from clean text"
        ) from None
    if not isinstance(text, str):
        raise KieloError(
            f"{record.path}, row {record.number}: {type(text).__name__} instead of text; "
            "set the source's text_field"
        )
    return text

"""Documents on disk: JSON lines under zstd, one document a line.

A document is {"id": str, "text": str, "source": str, "metadata": {...}}. Iterable of documents ->
*.jsonl.zst and back.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import zstandard

from kielo.artifact.durable import DurableFile
from kielo.artifact.text_files import decode_text, read_lines
from kielo.recipe.errors import KieloError

SUFFIX = ".jsonl.zst"
COMPRESSION_LEVEL = 6


class DocumentWriter:
    """Writes documents to one file, aside until `close`, so that a reader never sees half of it."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._file = DurableFile(self.path)
        self._stream = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True).stream_writer(
            self._file, closefd=False
        )

    def add(self, document: dict[str, Any]) -> None:
        self._stream.write(orjson.dumps(document) + b"\n")

    def add_lines(self, lines: bytes) -> None:
        """Append documents that are JSON already, each with a line's end."""
        self._stream.write(lines)

    def close(self) -> None:
        """Finish the file, bring it to the disk and give it its name."""
        self._stream.close()
        self._file.close()

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.abandon()

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_documents(path: Path | str, documents: Iterable[dict[str, Any]]) -> int:
    """Write all the documents to one .jsonl.zst file; returns their number. An exception leaves nothing."""
    count = 0
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.add(document)
            count += 1
    return count


def read_documents(folder_or_file: Path | str) -> Iterator[dict[str, Any]]:
    """Yields the documents of one file, or of a folder's *.jsonl.zst in the order of their names.

    Raises KieloError naming the file, and the line where there is one.
    """
    for path in document_files(folder_or_file):
        for number, line in read_lines(path):
            yield parse_record(path, number, line)


def document_files(folder_or_file: Path | str) -> list[Path]:
    """Returns the files of documents in a folder, in the order of their names; of one file itself."""
    place = Path(folder_or_file)
    if not place.exists():
        raise KieloError(f"{place}: no such file or folder of documents; run the corpus stage first")
    return sorted(place.glob("*" + SUFFIX)) if place.is_dir() else [place]


def parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Returns the JSON object of one line. KieloError, naming file and line, for anything else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        decode_text(path, number, line)
        raise KieloError(
            f"{path}, line {number}: not valid JSON ({problem}); one JSON object a line is expected"
        ) from None
    if not isinstance(record, dict):
        raise KieloError(f"{path}, line {number}: a JSON object is expected, found {type(record).__name__}")
    return record

"""Documents on disk: JSON lines under zstd, one document a line.

A document is {"id": str, "text": str, "source": str, "metadata": {...}}. Iterable of documents ->
*.jsonl.zst and back. `read_lines` is the one reader of plain, gzip and zstd lines, so that a file cut short
is noticed everywhere: a zstd stream that ends early otherwise looks like a short file.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import zstandard

from kielo.artifact.durable import DurableFile
from kielo.recipe.errors import KieloError

SUFFIX = ".jsonl.zst"
READ_BYTES = 1 << 18
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
    """Write all the documents to one .jsonl.zst file; returns how many. Nothing is left after an
    exception."""
    count = 0
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.add(document)
            count += 1
    return count


def read_documents(folder_or_file: Path | str) -> Iterator[dict[str, Any]]:
    """The documents of one file, or of a folder's *.jsonl.zst in the order of their names.

    Raises KieloError naming the file, and the line where there is one.
    """
    place = Path(folder_or_file)
    if not place.exists():
        raise KieloError(f"{place}: no such file or folder of documents; run the corpus stage first")
    for path in sorted(place.glob("*" + SUFFIX)) if place.is_dir() else [place]:
        for number, line in read_lines(path):
            yield parse_record(path, number, line)


def read_lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes without the line end) of a plain, .gz or .zst file.

    Raises KieloError when a compressed file is damaged or cut short.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".zst":
        return _number_lines(_split_lines(_decompress_zstd(path)))
    if suffix == ".gz":
        return _number_lines(_gzip_lines(path))
    return _number_lines(_plain_lines(path))


def parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """One line of JSON as a dict; KieloError names the file and line when it is not UTF-8 or not an
    object."""
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


def decode_text(path: Path, number: int, line: bytes) -> str:
    """UTF-8 text of one line; KieloError names the file, line and byte when it is something else."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise KieloError(
            f"{path}, line {number}: invalid UTF-8 (byte 0x{line[problem.start]:02x} at position "
            f"{problem.start} of the line); convert the file, e.g. with `iconv -f ISO-8859-1 -t UTF-8`"
        ) from None


def _number_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, start=1):
        yield number, line.rstrip(b"\r\n")


def _plain_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _gzip_lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            yield from file
    except EOFError:
        raise KieloError(_cut_short(path)) from None
    except (gzip.BadGzipFile, zlib.error) as problem:
        raise KieloError(f"{path}: damaged or not gzip ({problem}); copy or download it again") from None


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    """Decompressed blocks of a file of one or more frames."""
    frame = None
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as problem:
                    raise KieloError(
                        f"{path}: damaged or not zstd ({problem}); copy or download it again"
                    ) from None
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise KieloError(_cut_short(path))


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    # The end of an unfinished line is kept in parts: joining at every block would be quadratic in a long
    # line.
    unfinished: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        unfinished.append(first)
        if others:
            yield b"".join(unfinished)
            yield from others[:-1]
            unfinished = [others[-1]]
    if rest := b"".join(unfinished):
        yield rest


def _cut_short(path: Path) -> str:
    size = path.stat().st_size
    return (
        f"{path}: cut short (the compressed stream ends in the middle, at {size:,} bytes); "
        "copy or download it again"
    )

"""Documents on disk: JSON lines under zstd, one document a line.

A document is {"id": str, "text": str, "source": str, "metadata": {...}}. Iterable of documents ->
*.jsonl.zst and back. `read_lines` is the one reader of plain, gzip and zstd lines, so that a file cut short
is noticed everywhere: a zstd stream that ends early otherwise looks like a short file.
"""

import codecs
import gzip
import math
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
# A decompressor returns all the output of its input, up to 128 KiB of text for 4 bytes: at most 16 MiB here.
ZSTD_READ_BYTES = 1 << 9
COMPRESSION_LEVEL = 6

_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32LE"),  # before UTF-16LE, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "UTF-32BE"),
    (codecs.BOM_UTF16_LE, "UTF-16LE"),
    (codecs.BOM_UTF16_BE, "UTF-16BE"),
)
# Which of every four bytes are zero -> the encoding of Latin text.
_ZERO_PLACES = {(1, 3): "UTF-16LE", (0, 2): "UTF-16BE", (1, 2, 3): "UTF-32LE", (0, 1, 2): "UTF-32BE"}


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


def read_lines(path: Path | str, max_bytes: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Yields (line number from 1, bytes without the line end) of a plain, .gz or .zst file.

    A line longer than `max_bytes` comes as None, and is never held as a whole. A byte-order mark is no part
    of a line. Raises KieloError when a compressed file is damaged or cut short, and for text that is not
    UTF-8 but UTF-16 or 32.
    """
    path = Path(path)
    return _number_lines(split_lines(_check_encoding(path, read_blocks(path)), max_bytes))


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a plain, .gz or .zst file. Raises KieloError for a damaged or cut one."""
    decompress = {".zst": _decompress_zstd, ".gz": _decompress_gzip}.get(path.suffix.lower(), _read_plain)
    return decompress(path)


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


def decode_text(path: Path, number: int, line: bytes) -> str:
    """Returns the UTF-8 text of one line. KieloError, naming file, line and byte, for anything else."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise KieloError(
            f"{path}, line {number}: invalid UTF-8 (byte 0x{line[problem.start]:02x} at position "
            f"{problem.start} of the line); convert the file, e.g. with `iconv -f ISO-8859-1 -t UTF-8`"
        ) from None


def other_encoding(start: bytes) -> str | None:
    """Returns the encoding of text that begins like UTF-16 or UTF-32, by its mark or by its zero bytes."""
    for mark, name in _OTHER_MARKS:
        if start.startswith(mark):
            return name
    # Latin letters have a zero byte in UTF-16 and three in UTF-32. A few zero bytes are only dirt.
    start = start[: len(start) // 4 * 4]
    places = [place for place in range(4) if start[place::4].count(0) * 2 > len(start) // 4]
    return _ZERO_PLACES.get(tuple(places))


def _number_lines(lines: Iterable[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    for number, line in enumerate(lines, start=1):
        yield number, line if line is None else line.rstrip(b"\r\n").removeprefix(codecs.BOM_UTF8)


def _check_encoding(path: Path, blocks: Iterable[bytes]) -> Iterator[bytes]:
    is_first = True
    for block in blocks:
        if is_first and block:
            is_first = False
            if encoding := other_encoding(block[:4096]):
                raise KieloError(
                    f"{path}: {encoding} text, and UTF-8 is expected; convert it with `iconv -f {encoding} "
                    "-t UTF-8`"
                )
        yield block


def _read_plain(path: Path, num_bytes: int = READ_BYTES) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(num_bytes):
            yield block


def _decompress_gzip(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(READ_BYTES):
                yield block
            if not path.stat().st_size:
                raise EOFError
    except EOFError:
        raise KieloError(_cut_short(path)) from None
    except (gzip.BadGzipFile, zlib.error) as problem:
        raise KieloError(f"{path}: damaged or not gzip ({problem}); copy or download it again") from None


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    """Decompressed blocks of a file of one or more frames."""
    frame, is_cut_short = None, True
    for block in _read_plain(path, ZSTD_READ_BYTES):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as problem:
                raise KieloError(
                    f"{path}: damaged or not zstd ({problem}); copy or download it again"
                ) from None
            is_cut_short = not frame.eof
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if is_cut_short:
        raise KieloError(_cut_short(path))


def split_lines(blocks: Iterable[bytes], max_bytes: int | None = None) -> Iterator[bytes | None]:
    """Yields the lines; None for one of more than `max_bytes`, of which at most that and a block is held."""
    limit = math.inf if max_bytes is None else max_bytes
    # The end of an unfinished line is kept in parts: joining at every block is quadratic in a long line.
    unfinished: list[bytes] = []
    size = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        unfinished.append(first)
        size += len(first)
        if size > limit:
            unfinished.clear()
        for line in others:
            yield b"".join(unfinished) if size <= limit else None
            unfinished, size = [line], len(line)
    if size:
        yield b"".join(unfinished) if size <= limit else None


def _cut_short(path: Path) -> str:
    size = path.stat().st_size
    return (
        f"{path}: cut short (the compressed stream ends in the middle, at {size:,} bytes); "
        "copy or download it again"
    )

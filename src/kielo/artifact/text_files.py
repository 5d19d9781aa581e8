"""Text files as people have them: plain or compressed, with any line ends, in any encoding.

`read_lines` is the only reader of lines, so that a cut file is noticed everywhere: a cut zstd stream
otherwise looks like a short file.
"""

import bz2
import codecs
import gzip
import lzma
import math
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any, overload

import zstandard

from kielo.recipe.errors import KieloError

READ_BYTES = 1 << 18
# A decompressor returns all the output of its input, up to 128 KiB of text for 4 bytes: here at most 16 MiB.
ZSTD_READ_BYTES = 1 << 9
# The window of `zstd --long=31`. A frame takes as much memory as its own window.
ZSTD_WINDOW_BYTES = 1 << 31
SHOWING_BYTES = 4096  # bytes at a file's beginning that show its encoding

_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32LE"),  # before UTF-16LE, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "UTF-32BE"),
    (codecs.BOM_UTF16_LE, "UTF-16LE"),
    (codecs.BOM_UTF16_BE, "UTF-16BE"),
    (codecs.BOM_UTF8, "UTF-8"),
)
# For messages on text in one byte a letter, which does not show its encoding.
USUAL_ENCODINGS = (
    "usually windows-1257 for Estonian, Latvian and Lithuanian, windows-1250 for Central European languages, "
    "windows-1251 for Cyrillic, else windows-1252"
)
# First bytes → the format and the fix.
_FORMATS = {
    b"PK\x03\x04": "a zip file or a document of a word processor. Fix: unpack it, or save it as plain text",
    b"\xd0\xcf\x11\xe0": "a document of a word processor. Fix: save it as plain text",
    b"%PDF-": "a PDF file. Fix: save it as plain text",
    b"\x1f\x8b": "compressed with gzip. Fix: add .gz to its name",
    b"\x28\xb5\x2f\xfd": "compressed with zstd. Fix: add .zst to its name",
    b"\xfd7zXZ\x00": "compressed with xz. Fix: add .xz to its name",
}
# Zero bytes of every four → the encoding: of Latin text, and of other scripts in UTF-32.
_ZERO_PLACES = {
    (1, 3): "UTF-16LE",
    (0, 2): "UTF-16BE",
    (1, 2, 3): "UTF-32LE",
    (0, 1, 2): "UTF-32BE",
    (2, 3): "UTF-32LE",
    (0, 1): "UTF-32BE",
}
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r"))
# Share of control bytes above which UTF-8 and text of one byte a letter are tested for UTF-16, and share of
# impossible characters up to which it is UTF-16. UTF-16 that is also valid UTF-8 has few blocks of
# characters.
_FEW_CONTROLS, _MANY_CONTROLS, _MOST_DIRT, _MOST_BLOCKS = 0.01, 0.04, 0.02, 8
_FEWEST_BYTES = 64  # of text whose share of control bytes is evidence
_FEWEST_LETTERS, _MOST_HIGH_BYTES = 4, 0.9  # of shorter text in UTF-16


class OtherEncoding(KieloError):
    """A file in another encoding than it would be read in: all of its text would be lost or wrong."""


@overload
def read_lines(
    path: Path | str, max_bytes: None = None, encoding: str | None = None
) -> Iterator[tuple[int, bytes]]: ...
@overload
def read_lines(
    path: Path | str, max_bytes: int | None, encoding: str | None = None
) -> Iterator[tuple[int, bytes | None]]: ...
def read_lines(
    path: Path | str, max_bytes: int | None = None, encoding: str | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number from 1, UTF-8 without the line end) of a plain or compressed file.

    Lines end with \\n, \\r\\n or \\r. A line longer than `max_bytes` is None and never completely in memory.
    A byte-order mark is not part of a line, and text with a mark of UTF-16 or UTF-32 is read as such.
    encoding: the file's; None: from its bytes, else UTF-8. Raises KieloError for a damaged or cut compressed
    file, and OtherEncoding if the bytes show another encoding or are invalid in `encoding`.
    """
    path = Path(path)
    lines = split_lines(_with_plain_ends(read_utf8(path, encoding)), max_bytes)
    for number, line in enumerate(lines, start=1):
        yield number, line if line is None else line.removeprefix(codecs.BOM_UTF8)


def read_lines_between(
    path: Path, begin: int, end: int, max_bytes: int | None = None
) -> Iterator[bytes | None]:
    """Yield lines as `read_lines` does, of the bytes from begin to end of a plain file of UTF-8."""
    for line in split_lines(_with_plain_ends(_read_between(path, begin, end)), max_bytes):
        yield line if line is None else line.removeprefix(codecs.BOM_UTF8)


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed from .gz, .zst, .zstd, .xz or .bz2. KieloError if cut."""
    return _READERS.get(path.suffix.lower(), _read_plain)(path)


def decode_text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise KieloError(
            f"{path}, line {number}: invalid UTF-8 (byte 0x{line[problem.start]:02x} at position "
            f"{problem.start} of the line). Fix: the source's `encoding`: {USUAL_ENCODINGS}"
        ) from None


def other_format(start: bytes) -> str | None:
    """Return the format of a file that begins so and is no text, with a fix, or None."""
    return next((what for mark, what in _FORMATS.items() if start.startswith(mark)), None)


def marked_encoding(start: bytes) -> str | None:
    """Return the encoding of a byte-order mark of UTF-8, UTF-16 or UTF-32 at the beginning, or None."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), None)


def other_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32 for text that begins like it, by its mark or its bytes, or None.

    Latin letters have a zero byte in UTF-16 and three in UTF-32. A few zero bytes are only dirt. Nearly all
    letters of another script share one of their two bytes, unlike in UTF-8.
    """
    if mark := marked_encoding(start):
        return mark
    whole = start[: len(start) // 4 * 4]
    places = [place for place in range(4) if whole[place::4].count(0) * 2 > len(whole) // 4]
    return _ZERO_PLACES.get(tuple(places)) or _other_script(whole)


def _other_script(start: bytes) -> str | None:
    """Return UTF-16LE or UTF-16BE for text of a script other than Latin, even if it is valid UTF-8."""
    if len(start) < _FEWEST_BYTES:
        return _few_letters(start)
    controls = (len(start) - len(start.translate(None, _CONTROLS))) / len(start)
    if controls <= _FEW_CONTROLS:
        return None
    is_utf8 = "\ufffd" not in start.decode("utf-8", "replace")[:-1]  # the last character can be cut
    if is_utf8 and controls <= _MANY_CONTROLS:
        return None
    found = {}
    for encoding in ("UTF-16LE", "UTF-16BE"):
        text = start.decode(encoding, "replace")
        blocks = {ord(character) >> 8 for character in text}
        if _dirt(text) <= _MOST_DIRT and (not is_utf8 or len(blocks) <= _MOST_BLOCKS):
            found[encoding] = len(blocks)  # wrong halves give characters all over Unicode
    return min(found, key=found.__getitem__, default=None)


def _few_letters(start: bytes) -> str | None:
    """Return UTF-16LE or UTF-16BE for a word or two of a script below U+2000.

    Nearly each second byte is below 0x20, where a table of single letters has only tabs and line ends.
    """
    for encoding, place in (("UTF-16LE", 1), ("UTF-16BE", 0)):
        high = start[place::2]
        is_high = sum(byte < 0x20 for byte in high) >= max(_FEWEST_LETTERS, _MOST_HIGH_BYTES * len(high))
        has_controls = any(byte in _CONTROLS for byte in high)
        if is_high and has_controls and not _dirt(start.decode(encoding, "replace")):
            return encoding
    return None


def _dirt(text: str) -> float:
    """Return the share of impossible characters: controls, unassigned characters, and invalid UTF-16."""
    odd = [
        one for one in text if not (one.isprintable() or one.isspace() or unicodedata.category(one) == "Cf")
    ]
    return (len(odd) + text.count("\ufffd")) / max(len(text), 1)


def read_utf8(path: Path, encoding: str | None = None) -> Iterator[bytes]:
    blocks = read_blocks(path)
    first = next((block for block in blocks if block), b"")
    if what := other_format(first):
        raise KieloError(f"{path}: is no text, but {what}")
    marked, shown = marked_encoding(first), other_encoding(first[:SHOWING_BYTES])
    if encoding is None and shown and not marked:
        raise OtherEncoding(
            f"{path}: {shown} text without a byte-order mark, but UTF-8 is expected. Fix: encoding = "
            f'"{shown.lower()}" in its source, or convert it with `iconv -f {shown} -t UTF-8`'
        )
    yield from _recoded(path, first, blocks, marked or encoding)


def _recoded(path: Path, first: bytes, blocks: Iterator[bytes], encoding: str | None) -> Iterator[bytes]:
    if encoding is None or codecs.lookup(encoding).name == "utf-8":
        yield first
        yield from blocks
        return
    decoder, size = codecs.getincrementaldecoder(encoding)(), 0
    try:
        yield decoder.decode(first).removeprefix("\ufeff").encode()
        for block in blocks:
            size += len(block)
            yield decoder.decode(block).encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as problem:
        raise OtherEncoding(
            f"{path}: invalid {encoding.upper()} (byte 0x{problem.object[problem.start]:02x} near byte "
            f"{size + problem.start:,} of the text). Fix: correct the source's `encoding`, or the file"
        ) from None


def _with_plain_ends(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks with \\n for \\r\\n and \\r, as Python's text files have it."""
    was_return = False
    for block in filter(None, blocks):
        if was_return and block.startswith(b"\n"):
            block = block[1:]
        was_return = block.endswith(b"\r")
        yield block.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in block else block


def split_lines(blocks: Iterable[bytes], max_bytes: int | None = None) -> Iterator[bytes | None]:
    """Yield the lines; None for a line of more than `max_bytes`, which is never in memory completely."""
    limit = math.inf if max_bytes is None else max_bytes
    # An unfinished line is kept in parts, because joining at every block is quadratic in a long line.
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


def _read_plain(path: Path, num_bytes: int = READ_BYTES) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(partial(file.read, num_bytes), b"")


def _read_between(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(begin)
        while block := file.read(min(READ_BYTES, end - file.tell())):
            yield block


def _decompress(
    path: Path, *, opened: Callable[[Path], BufferedIOBase], name: str, problems: tuple[type[Exception], ...]
) -> Iterator[bytes]:
    try:
        with opened(path) as file:
            yield from iter(partial(file.read, READ_BYTES), b"")
            if not path.stat().st_size:
                raise EOFError
    except EOFError:
        raise _cut_short(path) from None
    except problems as problem:
        # bz2 reports other formats by an OSError without a number. An OSError with a number is the disk's.
        if isinstance(problem, OSError) and problem.errno is not None:
            raise
        raise _broken(path, f"damaged or not {name} ({problem})") from None


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    frame: Any = None
    is_cut_short = True
    for block in _read_plain(path, ZSTD_READ_BYTES):
        while block:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as problem:
                raise _broken(path, f"damaged or not zstd ({problem})") from None
            is_cut_short = not frame.eof
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if is_cut_short:
        raise _cut_short(path)


_GZIP_PROBLEMS = (gzip.BadGzipFile, zlib.error)
_READERS: dict[str, Callable[[Path], Iterator[bytes]]] = {
    ".gz": partial(_decompress, opened=gzip.GzipFile, name="gzip", problems=_GZIP_PROBLEMS),
    ".zst": _decompress_zstd,
    ".zstd": _decompress_zstd,
    ".xz": partial(_decompress, opened=lzma.LZMAFile, name="xz", problems=(lzma.LZMAError,)),
    ".bz2": partial(_decompress, opened=bz2.BZ2File, name="bzip2", problems=(OSError, ValueError)),
}
COMPRESSED = tuple(_READERS)


def _broken(path: Path, what: str) -> KieloError:
    return KieloError(f"{path}: {what}. Fix: copy or download it again")


def _cut_short(path: Path) -> KieloError:
    size = path.stat().st_size
    return _broken(path, f"cut short (the compressed stream ends in the middle, at {size:,} bytes)")

"""Web archives: records of .warc and .wet files, read by warcio, and the text of their pages, by trafilatura.

Both are in `kielo[warc]`. A page is the answer of status 200 to a request for HTML or plain text. All other
records of an archive are counted by their kind.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kielo.artifact.json_object import JsonTable
from kielo.artifact.text_files import read_blocks
from kielo.corpus.html_text import decode_page
from kielo.corpus.raw_record import BadRecord, OtherRecord, Record, too_long
from kielo.recipe.errors import KieloError

PLAIN_TYPE = "text/plain"
_PAGE_TYPES = ("text/html", "application/xhtml+xml", PLAIN_TYPE)
_PLAIN_ENCODINGS = ("", "identity", "gzip", "x-gzip", "deflate")
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class ArchivedPage:
    """A page as the server sent it. charset: in the header of its answer, or ""."""

    url: str
    date: str
    type: str
    charset: str
    content: bytes


def refuse_missing(name: str) -> None:
    try:
        import trafilatura  # noqa: F401
        import warcio  # noqa: F401
    except ImportError as problem:
        raise KieloError(
            f"corpus.sources, {name}: web archives need trafilatura and warcio ({problem}). Fix: pip install "
            "'kielo[warc]'"
        ) from None


def archive_records(path: Path, max_bytes: int) -> Iterator[Record]:
    """Yield each record of an archive. KieloError for an archive that is damaged or cut short."""
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    number, record, blocks = 0, None, _Blocks(path)
    archive = ArchiveIterator(io.BufferedReader(blocks))
    try:
        for number, record in enumerate(archive, start=1):
            try:
                yield Record(path, number, _page(path, number, record, max_bytes))
            except BadRecord as problem:
                yield Record(path, number, None, problem)
    except ArchiveLoadFailed as problem:
        raise KieloError(
            f"{path}, after record {number}: damaged or no web archive ({problem}). Fix: download it again"
        ) from None
    except (AttributeError, ValueError, EOFError):  # of warcio, at a header that is cut short
        raise KieloError(f"{path}, record {number + 1}: cut short. Fix: download it again") from None
    # A header that is cut in the middle has no length yet.
    if record is None or record.length is None or getattr(record.raw_stream, "limit", 0) > 0:
        raise KieloError(f"{path}, record {number}: cut short. Fix: download it again")
    if archive.offset < blocks.size:  # warcio passes over a header that is cut short in its last lines
        raise KieloError(f"{path}, record {number + 1}: cut short. Fix: download it again")


class _Blocks(io.RawIOBase):
    """The decompressed bytes of a file, which `read_blocks` refuses if it is cut short."""

    def __init__(self, path: Path) -> None:
        self._blocks, self._rest, self.size = read_blocks(path), b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (block := next(self._blocks, None)) is None:
                return 0
            self._rest, self.size = block, self.size + len(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _page(path: Path, number: int, record: Any, max_bytes: int) -> ArchivedPage:
    """Return the page of a record. Raises OtherRecord for a record without a page."""
    where, http = f"{path}, record {number}", record.http_headers
    if record.rec_type not in ("response", "resource", "conversion"):
        raise _other(where, f"{record.rec_type} record")
    if record.rec_type == "response" and (http is None or http.get_statuscode() != "200"):
        raise _other(where, "an answer of another status than 200")
    header = (http or record.rec_headers).get_header("Content-Type") or ""
    type, *parameters = (part.strip() for part in header.lower().split(";"))
    if type not in _PAGE_TYPES:
        raise _other(where, f"{type or 'no content type'} in an archive")
    encoding = (http.get_header("Content-Encoding") or "").lower() if http else ""
    if encoding not in _PLAIN_ENCODINGS:
        raise _other(where, f"a page compressed by {encoding}")
    stream, content = record.content_stream(), bytearray()
    while piece := stream.read(_READ_BYTES):
        content += piece
        if len(content) > max_bytes:
            raise too_long(where, max_bytes)
    charset = next((one.partition("=")[2].strip("\"' ") for one in parameters if one[:8] == "charset="), "")
    url, date = (record.rec_headers.get_header(f"WARC-{name}") or "" for name in ("Target-URI", "Date"))
    return ArchivedPage(url, date, type, charset, bytes(content))


def _other(where: str, reason: str) -> OtherRecord:
    return OtherRecord(reason, f"{where}: {reason}, and no text. Fix: a source without it")


def text_of_page(where: str, page: ArchivedPage, encoding: str | None) -> tuple[str, JsonTable]:
    """Return the text of a page without menus and comments, and its address and date. Raises BadRecord."""
    facts = {name: value for name, value in (("url", page.url), ("date", page.date)) if value}
    text = decode_page(where, page.content, encoding, page.charset)
    if page.type == PLAIN_TYPE or not text.strip():
        return text, facts
    import trafilatura

    try:
        return trafilatura.extract(text, favor_precision=True, include_comments=False) or "", facts
    except Exception as problem:  # of lxml, or of a page that no program foresaw
        raise BadRecord("HTML that cannot be parsed", f"{where}: not parsed as HTML ({problem})") from None

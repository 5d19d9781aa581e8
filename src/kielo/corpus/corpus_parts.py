"""Parts of the sources of a corpus: whole files, or ranges of bytes of one plain file of lines.

A range begins and ends after a line end. Its lines have the numbers that they have in the file, and the
first `max_documents` records of a source are the same for any parts, because a round counts them before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from kielo.artifact.text_files import (
    COMPRESSED,
    SHOWING_BYTES,
    marked_encoding,
    other_encoding,
    other_format,
    read_lines_between,
)
from kielo.corpus.raw_formats import RawSource, file_format, line_records, records, unreadable
from kielo.corpus.raw_record import Record

# Bytes of a part on disk. Small parts keep all workers busy, and few parts keep the rounds over them short.
LEAST_PART_BYTES, USUAL_PART_BYTES, USUAL_PARTS, MOST_PARTS = 8 << 20, 256 << 20, 256, 4096
MOST_FILES = 10_000  # of a part
PACKED_TEXT = 6  # bytes of text for a byte of a compressed file, at most


@dataclass(frozen=True)
class Part:
    """Files of one source, or the bytes from begin to end of its file."""

    source: int  # its number
    files: tuple[str, ...]
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class PartLimits:
    """What the parts before say about a part: the number of its first line, and its most records."""

    first_line: int = 1
    max_records: int | None = None


def part_bytes(total: int) -> int:
    """Return the bytes of a part of a corpus of `total` bytes."""
    return max(min(max(total // USUAL_PARTS, LEAST_PART_BYTES), USUAL_PART_BYTES), total // MOST_PARTS)


def text_bytes(sources: Sequence[RawSource]) -> int:
    """Return an upper estimate of the bytes of text in the files of sources."""
    packed = (*COMPRESSED, ".parquet")
    return sum(
        size * (PACKED_TEXT if Path(file).suffix.lower() in packed else 1)
        for source in sources
        for file, (size, _) in zip(source.files, source.stamps, strict=True)
    )


def make_parts(sources: Sequence[RawSource]) -> list[Part]:
    most = part_bytes(sum(size for source in sources for size, _ in source.stamps))
    return [part for number, source in enumerate(sources) for part in _parts_of(number, source, most)]


def _parts_of(number: int, source: RawSource, most: int) -> Iterator[Part]:
    files, size_of_files = list[str](), 0
    for file, (size, _) in zip(source.files, source.stamps, strict=True):
        path = Path(source.root) / file
        is_divided = size > most and _is_divisible(path, source)
        if files and (is_divided or size_of_files + size > most or len(files) == MOST_FILES):
            yield Part(number, tuple(files))
            files, size_of_files = [], 0
        if is_divided:
            borders = [*_borders(path, size, most), size]
            for begin, end in zip(borders, borders[1:], strict=False):
                yield Part(number, (file,), begin, end)
        else:
            files.append(file)
            size_of_files += size
    if files:
        yield Part(number, tuple(files))


def _is_divisible(path: Path, source: RawSource) -> bool:
    format = file_format(path, source.kind)
    is_of_lines = format == "jsonl" or format == "txt" and source.documents == "lines"
    if not is_of_lines or source.encoding is not None or path.suffix.lower() in COMPRESSED:
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(SHOWING_BYTES)
    except OSError as problem:
        raise unreadable(path, problem) from None
    if other_format(start):  # which reading the whole file reports
        return False
    return marked_encoding(start) == "UTF-8" or other_encoding(start) is None


def _borders(path: Path, size: int, most: int) -> Iterator[int]:
    border = 0
    with open(path, "rb") as file:
        while border < size:
            yield border
            file.seek(border + most - 1)
            while (line := file.readline(1 << 20)) and not line.endswith(b"\n"):
                pass
            border = file.tell() if line else size


def needs_count(part: Part, sources: Sequence[RawSource]) -> bool:
    return part.end is not None or sources[part.source].max_documents is not None


def count_part(source: RawSource, part: Part, max_bytes: int) -> tuple[int, int]:
    """Return the lines of a range, and the records of a part of a source with `max_documents`."""
    lines = 0
    if part.end is not None:
        path = Path(source.root) / part.files[0]
        lines = sum(1 for _ in read_lines_between(path, part.begin, part.end, max_bytes))
    found = part_records(source, part, PartLimits(max_records=source.max_documents), max_bytes)
    return lines, sum(1 for _ in found) if source.max_documents is not None else 0


def limits_of_part(
    number: int, parts: Sequence[Part], sources: Sequence[RawSource], counts: dict[int, tuple[int, int]]
) -> PartLimits:
    """Return the limits of a part. counts: number of a part → its lines and its records."""
    part, most = parts[number], sources[parts[number].source].max_documents
    before = [other for other in range(number) if parts[other].source == part.source and other in counts]
    lines = sum(counts[other][0] for other in before if parts[other].files == part.files)
    records_before = sum(counts[other][1] for other in before)
    return PartLimits(1 + lines, None if most is None else max(0, most - records_before))


def part_records(source: RawSource, part: Part, limits: PartLimits, max_bytes: int) -> Iterator[Record]:
    """Yield the documents of a part, undecoded. Raises KieloError for a file that cannot be read."""
    return islice(_all_records(source, part, limits.first_line, max_bytes), limits.max_records)


def _all_records(source: RawSource, part: Part, first_line: int, max_bytes: int) -> Iterator[Record]:
    if part.end is None:
        yield from records(replace(source, files=part.files), max_bytes)
        return
    path = Path(source.root) / part.files[0]
    try:
        lines = enumerate(read_lines_between(path, part.begin, part.end, max_bytes), first_line)
        yield from line_records(path, lines, max_bytes)
    except OSError as problem:
        raise unreadable(path, problem) from None

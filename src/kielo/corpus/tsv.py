"""Tab-separated values → a record for each row, its columns as bytes.

Most files are plain: a row is a line, and a quote is a quote (OPUS, Tatoeba). Others have the quotes of CSV
(`csv.excel_tab`, spreadsheets), in which a column may hold tabs and line ends. The whole file decides: text
with plain quotes breaks CSV's rules soon.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kielo.artifact.text_files import read_lines
from kielo.corpus.raw_record import RAGGED, BadRecord, Record, too_long

_TAB = b"\t"
# A column in quotes that holds quotes, each written twice.
_DOUBLED = re.compile(rb'(?:^|\t)"(?:[^"\t]|"")*""(?:[^"\t]|"")*"(?:\t|$)')
_EVERY_BYTE = "latin-1"


def tsv_records(path: Path, max_bytes: int, encoding: str | None = None) -> Iterator[Record]:
    """Yields the rows, numbered by their first line. A row with another number of columns than most is bad.

    So is its neighbour in a plain file if it may be the other half of a row that was cut at a line's end: it
    has an odd number of quotes.
    """
    has_csv_quotes, usual = _survey(path, max_bytes, encoding)
    rows = _csv_rows(path, max_bytes, encoding) if has_csv_quotes else _plain_rows(path, max_bytes, encoding)
    before, was_ragged = None, False
    for record in rows:
        is_ragged = record.problem is None and len(record.content) != usual
        is_half = not has_csv_quotes and _has_odd_quotes(record)
        if before is not None:
            is_half_before = is_ragged and not has_csv_quotes and _has_odd_quotes(before)
            yield _ragged(before, usual) if is_half_before else before
        before = _ragged(record, usual) if is_ragged or (was_ragged and is_half) else record
        was_ragged = is_ragged
    if before is not None:
        yield before


def _has_odd_quotes(record: Record) -> bool:
    return record.problem is None and sum(column.count(b'"') for column in record.content) % 2 == 1


def _ragged(record: Record, usual: int) -> Record:
    told = (
        f"{record.path}, line {record.number}: {len(record.content)} columns beside rows of {usual}, or part "
        f"of such a row: a tab or line end in a column shifts the others. Fix: write the file with {usual} "
        "columns in each line (`cut -f` leaves some out), or as JSONL"
    )
    return Record(record.path, record.number, None, BadRecord(RAGGED, told))


def _plain_rows(path: Path, max_bytes: int, encoding: str | None) -> Iterator[Record]:
    for number, line in read_lines(path, max_bytes, encoding):
        if line is None:
            yield Record(path, number, None, too_long(f"{path}, line {number}", max_bytes))
        elif line.strip():
            yield Record(path, number, line.split(_TAB))


def _csv_rows(path: Path, max_bytes: int, encoding: str | None) -> Iterator[Record]:
    rows = csv.reader(_csv_lines(path, max_bytes, encoding), csv.excel_tab, strict=True)
    number = 1
    for row in rows:
        if "".join(row).strip():
            yield Record(path, number, [column.encode(_EVERY_BYTE) for column in row])
        number = rows.line_num + 1


def _csv_lines(path: Path, max_bytes: int, encoding: str | None) -> Iterator[str]:
    csv.field_size_limit(max_bytes)
    for _, line in read_lines(path, max_bytes, encoding):
        if line is None:
            raise csv.Error("a line over max_bytes")
        yield line.decode(_EVERY_BYTE) + "\n"


def _survey(path: Path, max_bytes: int, encoding: str | None) -> tuple[bool, int]:
    """Returns whether the file has CSV's quotes, and the number of columns of most rows.

    It has if it keeps CSV's rules and they are needed: quotes within quotes, columns in all rows alike that
    would not be without them, or quotes around every column.
    """
    lines: Counter[int] = Counter()
    doubled = unquoted = 0
    for _, line in read_lines(path, max_bytes, encoding):
        if line is not None and line.strip():
            lines[line.count(_TAB) + 1] += 1
            doubled += b'""' in line and _DOUBLED.search(line) is not None
            unquoted += line[:1] != b'"' or line[-1:] != b'"' or line.count(_TAB) != line.count(b'"\t"')
    usual = max(lines, key=lines.__getitem__, default=0)
    if not (doubled or len(lines) > 1 or not unquoted):
        return False, usual
    try:
        rows = Counter(
            len(row)
            for row in csv.reader(_csv_lines(path, max_bytes, encoding), csv.excel_tab, strict=True)
            if row
        )
    except csv.Error:
        return False, usual
    if doubled or not unquoted or len(rows) < len(lines):
        return True, max(rows, key=rows.__getitem__)
    return False, usual

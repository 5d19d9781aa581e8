"""Files of sentence pairs as records: TMX and tab-separated values."""

import codecs
import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from kielo.artifact.text_files import SHOWING_BYTES, other_encoding, read_blocks, read_lines
from kielo.corpus.raw_record import RAGGED, UNEQUAL, BadRecord, Record, too_long
from kielo.recipe.errors import KieloError

_TAB = b"\t"
# A column in quotes that has quotes, each written twice.
_DOUBLED = re.compile(rb'(?:^|\t)"(?:[^"\t]|"")*""(?:[^"\t]|"")*"(?:\t|$)')
_EVERY_BYTE = "latin-1"
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
# Their content is code of the translated document, or a text beside the sentence (`sub`: a footnote).
_CODES = frozenset({"bpt", "ept", "ph", "it", "ut", "sub"})
_BREAKS = frozenset({"lb", "cb", "pb"})  # types of codes that end a line, column or page
_DECLARED = re.compile(rb"\s*<\?xml[^>]{0,200}encoding\s*=\s*[\"']([A-Za-z0-9._:-]+)")


def tsv_records(path: Path, max_bytes: int, encoding: str | None = None) -> Iterator[Record]:
    """Yield the rows, their columns as bytes, numbered by their first line.

    A row with another number of columns than most is bad. In a plain file so is a neighbour with an odd
    number of quotes, perhaps its other half.
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


def named_columns(path: Path, rows: Iterator[Record], names: Sequence[str]) -> Iterator[Record]:
    """Yield the rows behind row 1, of each the two columns that row 1 calls `names`, or raise KieloError."""
    first = next(rows, None)
    if first is None:
        return
    header = [column.decode("utf-8", "replace").strip() for column in first.content or ()]
    if any(header.count(name) != 1 for name in names):
        found = f"has {', '.join(map(repr, header))[:200]}" if header else f"is bad ({first.problem})"
        raise KieloError(
            f"{path}: pair_fields = {json.dumps(list(names), ensure_ascii=False)}: row 1 {found}, and not "
            'each of these names once. No other columns are read instead. Fix: pair_fields = ["1", "3"], the '
            "numbers of the columns, or names of row 1"
        )
    places = [header.index(name) for name in names]
    for row in rows:  # as many columns as row 1 has, or bad
        yield row if row.problem else Record(path, row.number, [row.content[place] for place in places])


def _has_odd_quotes(record: Record) -> bool:
    return record.problem is None and sum(column.count(b'"') for column in record.content) % 2 == 1


def _ragged(record: Record, usual: int) -> Record:
    told = (
        f"{record.path}, line {record.number}: {len(record.content)} columns beside rows of {usual}, or part "
        f"of such a row: a tab or line end in a column shifts the others. Fix: write the file with {usual} "
        "columns in each line (`cut -f` drops columns), or as JSONL"
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
    """Return whether the file has CSV's quotes, and the number of columns of most rows.

    In most files (OPUS, Tatoeba) a row is a line. A file has quotes if it keeps CSV's rules, which text with
    plain quotes breaks soon, and needs them: for quotes within quotes, equal rows, or around every column.
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


def tmx_records(
    path: Path, languages: Sequence[str], max_bytes: int, encoding: str | None = None
) -> Iterator[Record]:
    """Yield the texts of each unit of a translation memory (LISA, TMX 1.4b) in the two languages.

    A unit with several texts in a language gives several records. Raises KieloError for a file that is no XML
    or is cut short, and for a unit over max_bytes.
    """
    parser: XMLPullParser[Element] = XMLPullParser(("start", "end"))
    number, unfinished, body = 0, 0, None
    for text in _decoded(path, encoding):
        try:
            parser.feed(text)
            # The stub has all kinds of events. The second part of the two that are asked for is an element.
            events: list[tuple[str, Element]] = list(parser.read_events())  # type: ignore[arg-type]
        except ParseError as problem:
            raise KieloError(f"{path}, line {problem.position[0]}: not valid XML ({problem})") from None
        unfinished += len(text)
        for event, element in events:
            name = element.tag.rpartition("}")[2]
            if event == "start":
                body = element if body is None and name == "body" else body
            elif name in _CODES:
                del element[:]
                # A space for a line's end, so that no words are joined.
                element.text = " " if element.get("type") in _BREAKS else None
            elif name == "tu":
                number, unfinished = number + 1, 0
                yield from _unit_records(path, number, element, languages, max_bytes)
                (element if body is None else body).clear()
        if unfinished > max_bytes:
            raise too_long(f"{path}, unit {number + 1}", max_bytes)
    try:
        parser.close()
    except ParseError as problem:
        raise KieloError(f"{path}: cut short or no XML ({problem}). Fix: copy or download it again") from None


def _unit_records(
    path: Path, number: int, unit: Element, languages: Sequence[str], max_bytes: int
) -> Iterator[Record]:
    where, texts = f"{path}, unit {number}", _texts(unit)
    sides = [_in_language(texts, language) for language in languages]
    if not all(sides):
        missing = next(language for language, side in zip(languages, sides, strict=True) if not side)
        told = (
            f"{where}: no text in {missing!r} (its languages are {', '.join(texts)[:200] or 'none'}). "
            "Fix: the source's pair_fields = two of them"
        )
        yield Record(path, number, None, BadRecord(UNEQUAL, told))
        return
    for place in range(max(map(len, sides))):
        pair = tuple(side[min(place, len(side) - 1)] for side in sides)
        if max(len(text.encode()) for text in pair) > max_bytes:
            yield Record(path, number, None, too_long(where, max_bytes))
        else:
            yield Record(path, number, pair)


def _texts(unit: Element) -> dict[str, list[str]]:
    found = defaultdict(list)
    for variant in _children(unit, "tuv"):
        code = (variant.get(_LANGUAGE) or variant.get("lang") or "").lower()
        for segment in _children(variant, "seg"):
            found[code].append("".join(segment.itertext()))
    return found


def _children(element: Element, name: str) -> list[Element]:
    return [child for child in element if child.tag.rpartition("}")[2] == name]


def _in_language(texts: dict[str, list[str]], language: str) -> list[str]:
    wanted = language.lower()  # or the first of its regions (en-US for en)
    regions = (code for code in texts if code.replace("_", "-").startswith(wanted + "-"))
    code = wanted if wanted in texts else next(regions, None)
    return texts[code] if code is not None else []


def _decoded(path: Path, given: str | None) -> Iterator[str]:
    """Yield the text in the encoding that the file's bytes show, else `given`, else the declared encoding."""
    decoder, encoding = None, ""
    try:
        for block in read_blocks(path):
            if decoder is None and block:
                encoding = other_encoding(block[:SHOWING_BYTES]) or given or _declared_encoding(block)
                decoder = codecs.getincrementaldecoder(encoding)()
            yield decoder.decode(block) if decoder else ""
        yield decoder.decode(b"", final=True) if decoder else ""
    except UnicodeDecodeError as problem:
        raise KieloError(
            f"{path}: invalid {encoding} (byte 0x{problem.object[problem.start]:02x}). Fix: correct the "
            "encoding in its first line, or convert the file and name UTF-8 there"
        ) from None
    except LookupError:
        raise KieloError(f"{path}: unknown encoding {encoding!r} in line 1. Fix: correct it") from None


def _declared_encoding(start: bytes) -> str:
    """Return the declared encoding. Latin-1 and ASCII are read as windows-1252."""
    found = _DECLARED.match(start.removeprefix(codecs.BOM_UTF8)[:4096])
    if not found or start.startswith(codecs.BOM_UTF8):
        return "utf-8"
    declared = found[1].decode()
    try:
        name = codecs.lookup(declared).name
    except LookupError:
        return declared
    if name.startswith(("utf-16", "utf-32")):  # wrong: the declaration has one byte a letter
        return "utf-8"
    # As in the WHATWG encoding standard: text does not have the controls of Latin-1.
    return "cp1252" if name in ("iso8859-1", "ascii") else name

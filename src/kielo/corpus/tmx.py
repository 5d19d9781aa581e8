"""TMX: translation memories in XML (LISA, TMX 1.4b). A file → one record for each translation unit.

Read in pieces: a unit is dropped as soon as its record was made, so that memory does not grow with the file.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from kielo.artifact.documents import read_lines
from kielo.corpus.raw_record import Record, too_long
from kielo.recipe.errors import KieloError

_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


def tmx_records(path: Path, max_bytes: int) -> Iterator[Record]:
    """Yields {language code in lower case: text} of each unit, numbered from 1.

    Raises KieloError for a file that is no XML, is cut short, or has a line over max_bytes: such a line may
    hold many units, so it is not passed over alone.
    """
    parser, number, unfinished = XMLPullParser(("start", "end")), 0, None
    for line_number, line in read_lines(path, max_bytes):
        if line is None:
            raise too_long(f"{path}, line {line_number}", max_bytes)
        try:
            parser.feed(line + b"\n")
            events = list(parser.read_events())
        except ParseError as problem:
            raise KieloError(f"{path}, line {line_number}: not valid XML ({problem})") from None
        for event, element in events:
            if event == "start" and unfinished is None and element.tag == "body":
                unfinished = element
            if event == "end" and element.tag == "tu":
                number += 1
                yield Record(path, number, _texts(element))
                if unfinished is not None:
                    unfinished.clear()
    try:
        parser.close()
    except ParseError as problem:
        raise KieloError(f"{path}: cut short or not XML ({problem}); copy or download it again") from None


def _texts(unit: Element) -> dict[str, str]:
    found = {}
    for variant in unit.iter("tuv"):
        code = variant.get(_LANGUAGE) or variant.get("lang") or ""
        segment = variant.find("seg")
        if segment is not None:
            found.setdefault(code.lower(), "".join(segment.itertext()))
    return found

"""Text whose UTF-8 was read in another encoding, decoded again by ftfy (Speer 2019, zenodo.2591652)."""

from functools import cache

import regex

from kielo.corpus.step import CorpusStep, SplitDocument
from kielo.recipe.errors import KieloError

# The bytes that begin a character of UTF-8, and those that follow.
_FIRST, _FOLLOWING = bytes(range(0xC2, 0xF5)), bytes(range(0x80, 0xC0))


def refuse_missing() -> None:
    _pattern()


@cache
def _pattern() -> regex.Pattern:
    """Compile a pattern for a first and a following byte of UTF-8 in any encoding that ftfy knows.

    It finds some right text too, such as Polish "ół". ftfy then leaves that unchanged.
    """
    try:
        from ftfy.chardata import CHARMAP_ENCODINGS
    except ImportError:
        raise KieloError(
            "corpus.repair_encoding needs ftfy, which is not installed. Fix: pip install 'kielo[quality]'"
        ) from None
    pairs = {
        "".join(rf"[{regex.escape(part.decode(encoding, 'ignore'))}]" for part in (_FIRST, _FOLLOWING))
        for encoding in CHARMAP_ENCODINGS
    }
    return regex.compile("|".join(sorted(pairs)))


class RepairEncoding(CorpusStep):
    """A step that repairs lines. It runs before `Normalise`, which replaces some of their characters."""

    name = "repair encoding"

    def work(self, document: SplitDocument) -> bool:
        find = _pattern().search
        found = [number for number, line in enumerate(document.lines) if not line.isascii() and find(line)]
        if not found:
            return True
        from ftfy import fix_encoding

        lines = list(document.lines)
        for number in found:
            lines[number] = fix_encoding(lines[number])
        repaired = sum(lines[number] != document.lines[number] for number in found)
        if repaired:
            self.count("repaired_lines", amount=repaired)
            before = document.num_bytes
            document.set_lines(lines)
            self.count("bytes", "another encoding", before - document.num_bytes)
        return True

"""A document in the corpus steps, split into lines and words once, for all of them.

datatrove's own filters split the text again at every step, which costs more than all else they do (measured:
about 0.2 MB/s a core for its full chain). Here a step reads `lines` or `words()` and drops lines with
`keep`; the text is joined again once, at the end. datatrove `Document` -> the same with its split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import regex
from datatrove.data import Document

# A word is a run of letters with the marks, apostrophes and hyphens inside it; digits alone are no words.
WORD = regex.compile(r"\p{L}[\p{L}\p{M}]*(?:['’\-][\p{L}\p{M}]+)*")
_LINE_ENDS = regex.compile("\r\n|[\n\r\v\f\x1c-\x1e\u2028\u2029]")


@dataclass(slots=True)
class SplitDocument(Document):
    """A datatrove document whose content is `lines`; `text` is empty until `join`.

    `place` is (number of the source, number of the document in it): the order of the corpus, whichever worker
    had it. `sides` are the two texts of a pair that is not laid out yet. `line_bytes` holds each line's UTF-8
    bytes with its line end.
    """

    source: str = ""
    place: tuple[int, int] = (0, 0)
    lines: list[str] = field(default_factory=list)
    line_bytes: list[int] = field(default_factory=list)
    sides: tuple[str, str] | None = None
    _words: list[list[str]] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.line_bytes)

    def set_lines(self, lines: Sequence[str]) -> None:
        """Replace all the lines: for a step that rewrites them."""
        self.lines = list(lines)
        self.line_bytes = [len(line.encode()) + 1 for line in self.lines]
        self._words = None

    def set_sides(self, sides: tuple[str, str]) -> None:
        """Make this a pair; its lines, which steps count, are those of both sides."""
        self.sides = sides
        self.set_lines("\n".join(sides).split("\n"))

    def keep(self, flags: Sequence[bool]) -> None:
        """Keep the lines whose flag is true, with their share of the split."""
        self.line_bytes = [size for size, flag in zip(self.line_bytes, flags, strict=True) if flag]
        if self._words is not None:
            self._words = [words for words, flag in zip(self._words, flags, strict=True) if flag]
        self.lines = [line for line, flag in zip(self.lines, flags, strict=True) if flag]

    def words(self) -> list[list[str]]:
        """Returns the words of each line; split at the first call."""
        if self._words is None:
            self._words = [WORD.findall(line) for line in self.lines]
        return self._words

    def join(self) -> str:
        """Returns the document's text, also set as `text` for steps of datatrove that follow."""
        self.text = "\n".join(self.lines)
        return self.text


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text, split at any line end that Unicode knows but U+0085.

    That one is the ellipsis of windows-1252 in text that was taken for Latin-1 (`normalise`).
    """
    return _LINE_ENDS.split(text) if "\x85" in text else text.splitlines()


def split_document(text: str, id: str, source: str, place: tuple[int, int], metadata: dict) -> SplitDocument:
    """Makes a document from its raw text, split into lines."""
    document = SplitDocument(text="", id=id, metadata=metadata, source=source, place=place)
    document.set_lines(lines_of(text))
    return document


def split_verbatim(text: str, id: str, source: str, place: tuple[int, int], metadata: dict) -> SplitDocument:
    """Makes a document whose `join` gives back `text`, character by character: it is split at "\\n" alone."""
    document = SplitDocument(text="", id=id, metadata=metadata, source=source, place=place)
    document.set_lines(text.split("\n"))
    return document

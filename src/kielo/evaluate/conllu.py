"""CoNLL-U, the format of Universal Dependencies: a file → sentences of words with their places and tags.

Ten columns a word, separated by tabs, and a blank line after each sentence. Comments begin with `#`. A word
here is a syntactic word. A token of several words (`3-4`) stands for its words, which are all in its place.
Empty nodes (`5.1`) are left out. https://universaldependencies.org/format.html
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kielo.recipe.errors import KieloError

_COLUMNS, _FORM, _UPOS, _MISC = 10, 1, 3, 9
_WORD, _RANGE = re.compile(r"[0-9]+"), re.compile(r"([0-9]+)-([0-9]+)")
_EMPTY_NODE = re.compile(r"[0-9]+\.[0-9]+")


@dataclass
class Sentence:
    """A sentence. text: its words as they were written. places: (begin, end) of each word in it, in
    characters. words, tags: form and universal part of speech of each word.
    """

    text: str = ""
    places: list[tuple[int, int]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)


def read_sentences(path: Path) -> list[Sentence]:
    """Read the sentences of a file. Raise KieloError, with file and line, for a damaged sentence."""
    sentences = list(_sentences(path))
    if not sentences:
        raise KieloError(f"{path}: has no sentence in CoNLL-U")
    return sentences


def _sentences(path: Path) -> Iterator[Sentence]:
    sentence, last_of_range, space, place = Sentence(), 0, "", (0, 0)
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise _damaged(path, number, f"not UTF-8 ({error.reason})") from None
            if line.startswith("#"):
                continue
            if not line.strip():
                if sentence.words:
                    yield sentence
                sentence, last_of_range, space = Sentence(), 0, ""
                continue
            cells = line.split("\t")
            if len(cells) != _COLUMNS or not cells[_FORM]:
                raise _damaged(path, number, f"{len(cells)} columns where a word has {_COLUMNS}")
            name = cells[0]
            if _EMPTY_NODE.fullmatch(name):
                continue
            found = _RANGE.fullmatch(name)
            if found is None and not _WORD.fullmatch(name):
                raise _damaged(path, number, f"{name[:20]!r} is not the number of a word")
            is_inside = found is None and int(name) <= last_of_range
            if not is_inside:  # a word of a range has no text of its own
                begin = len(sentence.text) + len(space)
                sentence.text += space + cells[_FORM]
                place = (begin, len(sentence.text))
                space = "" if "SpaceAfter=No" in cells[_MISC].split("|") else " "
            if found is not None:
                last_of_range = int(found[2])
                continue
            if int(name) != len(sentence.words) + 1:
                raise _damaged(path, number, f"word {name} after word {len(sentence.words)} of the sentence")
            if cells[_UPOS] in ("", "_"):
                raise _damaged(path, number, "no universal part of speech (column 4)")
            sentence.places.append(place)
            sentence.words.append(cells[_FORM])
            sentence.tags.append(cells[_UPOS])
    if sentence.words:
        yield sentence


def _damaged(path: Path, number: int, what: str) -> KieloError:
    return KieloError(f"{path}, line {number}: damaged CoNLL-U: {what}")

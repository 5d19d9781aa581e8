"""Text that was damaged before Kielo got it: mended if nothing of it is lost, else dropped, by class.

* spaced_letters: "T ä n a   õ h t u l", from PDF files. Mended if words are further apart than letters.
* loops: a piece of a line three times in a row or more. One stays.
* capitals: lines and documents with hardly a lower-case letter.
* keyword_lists: lines of many short items, without sentences.
* lost_diacritics: documents with less than a seventh of the marked letters that the language has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from unicodedata import normalize

import regex

from kielo.corpus.step import CorpusStep, DocumentFilter, LanguageRule, LineFilter, SplitDocument
from kielo.recipe.cards import Language
from kielo.recipe.quality_limits import known_limits, marked_letters_of, stop_words_of
from kielo.recipe.sections import Corpus

MENDED = "mended"  # lines, by class
_MOST_WORD_CHARACTERS = 15  # of words on average: longer "words" are lines without gaps between words
_LEAST_TOKENS, _SINGLE_SHARE, _SPACE_SHARE = 8, 0.8, 0.4
_LEAST_COPIES, _LEAST_LOOP_CHARACTERS, _MOST_PERIOD = 3, 60, 300
_PIECE = 16  # characters that are looked for again in a line
_STRIDES = (64, 8, 1)  # characters that are compared at once
_LEAST_CASED, _UPPER_IN_LINE, _UPPER_IN_DOCUMENT = 30, 0.7, 0.5
_LEAST_ITEMS, _SHORT_SHARE, _LEAST_BARE_WORDS = 15, 0.9, 40
_MOST_ITEM_WORDS, _LEAST_ITEM_LETTERS = 3, 4  # codes and numbers are no keywords
_LEAST_EXPECTED, _LOST_SHARE = 20, 0.15  # marked letters of a document, and their share that is still there

_WORD_GAP = regex.compile(r"\s{2,}")
_NO_LOWER_CASE = regex.compile(r"\p{Lu}\P{Ll}{11}")  # lines of fewer characters are dropped anyway
_UPPER, _LOWER = regex.compile(r"[\p{Lu}\p{Lt}]"), regex.compile(r"\p{Ll}")
# Words between spaces. FORECAST.ETS.ADD and =XOR(TRUE;TRUE) are names of functions.
_PLAIN_WORD = regex.compile(r"(?<!\S)[\p{L}\p{M}'’-]+(?=[.,;:!?]?(?!\S))")
_SEPARATOR = regex.compile(r"[,;|•·،、]")
_SENTENCE_SIGN = regex.compile(r"[\p{Sentence_Terminal},;:،]")
# Marks, and letters that are written without their stroke or as two letters when marks are lost.
_MARK = regex.compile(r"[\p{Mn}đĐłŁøØßıæÆœŒðÐþÞħĦŋŊəƏ]")


def mends(corpus: Corpus, rule: LanguageRule) -> list[CorpusStep]:
    """Return the steps before text is normalised, which makes one space of several."""
    return [MendSpacedLetters(rule.has_spaces)] if "spaced_letters" in corpus.damage else []


def line_filters(corpus: Corpus, rule: LanguageRule) -> list[CorpusStep]:
    steps: dict[str, CorpusStep] = {"loops": MendLoops(), "capitals": Capitals()}
    if rule.has_spaces:
        steps["keyword_lists"] = KeywordLists(stop_words_of(rule.languages))
    return [step for name, step in steps.items() if name in corpus.damage]


def document_filters(corpus: Corpus, rule: LanguageRule) -> list[DocumentFilter]:
    share = _marked_letters(rule.languages)
    return [LostDiacritics(share)] if share and "lost_diacritics" in corpus.damage else []


def not_judged(classes: Sequence[str], cards: Sequence[Language]) -> str:
    """Return, in words, the classes of damage that are not looked for in some of the cards' languages."""
    said = []
    without = [card.code for card in cards if marked_letters_of(card.code) is None]
    if "lost_diacritics" in classes and without:
        said.append(f"lost diacritics in {', '.join(without)}")
    without = [card.code for card in cards if not card.has_spaces]
    if "keyword_lists" in classes and without:
        said.append(f"keyword lists in {', '.join(without)}")
    without = [card.code for card in cards if card.has_spaces and known_limits(card.code) is None]
    if "keyword_lists" in classes and without:
        said.append(f"keyword lists without commas in {', '.join(without)}")
    return " and ".join(said)


def _marked_letters(languages: Sequence[str]) -> float:
    return min(marked_letters_of(code) or 0.0 for code in languages)


@dataclass
class MendSpacedLetters(CorpusStep):
    """A step that joins letters with spaces between them, and drops lines that do not say where words end."""

    name = "spaced letters"
    has_spaces: bool

    def work(self, document: SplitDocument) -> bool:
        mended = list(map(self.mended, document.lines))
        if not any(line is not None for line in mended):
            return True
        size, words, reason = (
            document.num_bytes,
            document.num_spaced_words,
            "letters with spaces between them",
        )
        lines = [old if new is None else new for old, new in zip(document.lines, mended, strict=True)]
        dropped = mended.count("")
        document.set_lines([line for line, new in zip(lines, mended, strict=True) if new != ""])
        self.count(MENDED, self.name, sum(map(bool, mended)))
        self.count("lines", reason, dropped)
        self.count("bytes", reason, size - document.num_bytes)
        self.count("spaced_words", reason, words - document.num_spaced_words)
        if not document.lines:
            self.count("documents", reason)
        return bool(document.lines)

    def mended(self, line: str) -> str | None:
        """Return None for a usual line, the joined letters, or "" if they cannot be joined to words."""
        if line.count(" ") < _SPACE_SHARE * len(line.strip()):
            return None
        tokens = line.split()
        singles = sum(len(token) == 1 for token in tokens)
        if len(tokens) < _LEAST_TOKENS or singles < _SINGLE_SHARE * len(tokens):
            return None
        if not self.has_spaces:
            return "".join(tokens)
        words = ["".join(part.split()) for part in _WORD_GAP.split(line.strip())]
        is_cut = sum(map(len, words)) <= _MOST_WORD_CHARACTERS * len(words)
        return " ".join(words) if is_cut else ""


class MendLoops(CorpusStep):
    """A step that keeps one of the equal pieces that follow each other in a line."""

    name = "loops"

    def work(self, document: SplitDocument) -> bool:
        lines = [without_loops(line) for line in document.lines]
        if mended := sum(a is not b for a, b in zip(lines, document.lines, strict=True)):
            size, words, reason = document.num_bytes, document.num_spaced_words, "repeated in a row"
            document.set_lines(lines)
            self.count(MENDED, self.name, mended)
            self.count("bytes", reason, size - document.num_bytes)
            self.count("spaced_words", reason, words - document.num_spaced_words)
        return True


def without_loops(line: str) -> str:
    """Return the line with one of equal pieces in a row, if they are three and 60 characters or more."""
    place, done, kept = 0, 0, []
    while place + _PIECE < len(line):
        run = _run_at(line, place, done)
        if run is None:
            place += _PIECE
            continue
        begin, end, period = run
        kept.append(line[done : begin + period + (end - begin) % period])
        place = done = end
    return "".join([*kept, line[done:]]) if kept else line


def _run_at(line: str, place: int, done: int) -> tuple[int, int, int] | None:
    """Return begin, end and period of equal pieces around `place` and after `done`.

    Pieces of fewer than two letters, such as rows of dashes and dots, are signs of layout.
    """
    piece, last = line[place : place + _PIECE], place + _PIECE + _MOST_PERIOD
    if (found := line.find(piece, place + 1, last)) < 0:
        return None
    # All periods of a run have the same letters: none ends before the second letter behind `place`. Without
    # this the time is cubic in a row of signs. A run that is long and has letters is taken at once.
    letters = (number for number in range(place, last - _PIECE) if line[number : number + 1].isalpha())
    second, size = next(islice(letters, 1, None), last), len(line)
    found = max(found - 1, second)
    while (found := line.find(piece, found + 1, last)) > 0:
        period, begin, end = found - place, place, found + _PIECE
        for step in _STRIDES:
            while line[end : end + step] == line[end - period : end - period + step] and end + step <= size:
                end += step
            while line[begin - step : begin] == line[begin + period - step : begin + period] and (
                begin - step >= done
            ):
                begin -= step
        if end - begin >= max(_LEAST_COPIES * period, _LEAST_LOOP_CHARACTERS):
            return begin, end, period
    return None


class Capitals(LineFilter):
    name = "capitals"

    def judge(self, document: SplitDocument) -> list[str | None]:
        if not any(map(_NO_LOWER_CASE.search, document.lines)):
            return [None] * len(document.lines)
        lines = ["".join(_PLAIN_WORD.findall(line)) for line in document.lines]
        uppers = [len(_UPPER.findall(line)) for line in lines]
        cased = [upper + len(_LOWER.findall(line)) for upper, line in zip(uppers, lines, strict=True)]
        reason = "all capitals"
        if sum(cased) >= _LEAST_CASED and sum(uppers) > _UPPER_IN_DOCUMENT * sum(cased):
            return [reason] * len(cased)
        return [
            reason if all_ >= _LEAST_CASED and upper > _UPPER_IN_LINE * all_ else None
            for upper, all_ in zip(uppers, cased, strict=True)
        ]


@dataclass
class KeywordLists(LineFilter):
    """A filter of lines of short items between separators, and of many words without sentences."""

    name = "keyword lists"
    stop_words: frozenset[str]

    def judge(self, document: SplitDocument) -> list[str | None]:
        return ["short items" if self.is_list(line) else None for line in document.lines]

    def is_list(self, line: str) -> bool:
        items = _SEPARATOR.split(line)
        if len(items) < _LEAST_ITEMS:
            words = line.lower().split()
            return (
                len(words) >= _LEAST_BARE_WORDS
                and bool(self.stop_words)
                and self.stop_words.isdisjoint(words)
                and not _SENTENCE_SIGN.search(line)
            )
        short = sum(
            len(item.split()) <= _MOST_ITEM_WORDS and sum(map(str.isalpha, item)) >= _LEAST_ITEM_LETTERS
            for item in items
        )
        return short >= _SHORT_SHARE * len(items)


@dataclass
class LostDiacritics(DocumentFilter):
    """A filter of documents with few marked letters. share: of the language's letters, that are marked."""

    name = "lost diacritics"
    share: float

    def judge(self, document: SplitDocument) -> str | None:
        text = document.join()
        most = _LOST_SHARE * self.share * len(text)
        if self.share * len(text) < _LEAST_EXPECTED:
            return None
        marked = 0 if text.isascii() else len(_MARK.findall(normalize("NFD", text)))
        if marked >= most:
            return None
        expected = self.share * sum(map(str.isalpha, text))
        is_lost = expected >= _LEAST_EXPECTED and marked < _LOST_SHARE * expected
        return "few letters with marks" if is_lost else None

"""Steps that clean text: its normal form, and filters of lines, documents, duplicates and pairs.

A filter gives None to keep, or the reason to drop. The normal form is Unicode NFC without control characters,
with single spaces and no empty lines. NFC and not NFKC, which would rewrite what people typed on purpose (²,
½, …). The controls U+0080 to U+009F are letters and signs of windows-1252 that were taken for Latin-1. They
become these letters, as in browsers (WHATWG, HTML, section 13.2.5.80).
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import regex
import xxhash

from kielo.corpus import damage
from kielo.corpus.language_identification import NOT_SURE, LanguageFilter
from kielo.corpus.personal_data import MaskPersonalData
from kielo.corpus.quality import QualityFilter
from kielo.corpus.step import CorpusStep, DocumentFilter, LanguageRule, LineFilter, SplitDocument, lines_of
from kielo.corpus.web_document_score import WebDocumentScore
from kielo.corpus.word_segmenter import cutter_of_words
from kielo.recipe.errors import KieloError
from kielo.recipe.quality_limits import limits_of, names_for_score
from kielo.recipe.sections import Corpus
from kielo.recipe.source_kinds import fill

# Lines with letters of another script are counted and kept as examples: NUM_EXAMPLES of each source.
FOREIGN_DROPPED, FOREIGN_KEPT = "script_lines_dropped", "script_lines_kept"
NUM_EXAMPLES, _EXAMPLE_CHARACTERS = 2, 100
# Shorter texts say too little for an identifier (benchmarks/log/2026-11.md).
MIN_IDENTIFIED_CHARACTERS = 30
DRAW = 18  # seed of the choice of layouts


def line_filters(corpus: Corpus, rule: LanguageRule) -> list[CorpusStep]:
    """Return the filters of lines for text of one rule, cheap ones first."""
    return [
        ScriptFilter(rule.scripts, rule.letters, corpus.max_foreign_character_share),
        LineLength(corpus.min_line_characters),
        *damage.line_filters(corpus, rule),
        LineLanguage(corpus.language_identifier, rule.identifier_codes, rule.line_threshold),
    ]


@dataclass
class ScriptFilter(LineFilter):
    """A filter of lines with more than `max_foreign_share` of their letters outside `scripts` and `letters`.

    Whole scripts, because names and loan words bring letters that a language's own alphabet lacks.
    """

    name = "script"
    scripts: Sequence[str]
    letters: str
    max_foreign_share: float

    def __post_init__(self) -> None:
        self.foreign = _foreign_letters(self.scripts, self.letters)

    def judge(self, document: SplitDocument) -> list[str | None]:
        return [self._judge_line(line, document) for line in document.lines]

    def _judge_line(self, line: str, document: SplitDocument) -> str | None:
        if "Latin" in self.scripts and line.isascii():
            return None
        foreign = self.foreign.findall(line)
        if not foreign:
            return None
        is_kept = len(foreign) <= self.max_foreign_share * sum(map(str.isalpha, line))
        kind = FOREIGN_KEPT if is_kept else FOREIGN_DROPPED
        self.count_example(kind, document.place, line[:_EXAMPLE_CHARACTERS], NUM_EXAMPLES)
        return None if is_kept else f"letters of another script ({_script(foreign)})"


@dataclass
class LineLength(LineFilter):
    name = "line length"
    min_characters: int

    def judge(self, document: SplitDocument) -> list[str | None]:
        reason = f"under {self.min_characters} characters"
        return [reason if len(line) < self.min_characters else None for line in document.lines]


class LineLanguage(LanguageFilter, LineFilter):
    name = "line language"

    def judge(self, document: SplitDocument) -> list[str | None]:
        return [
            self.verdict(line, size) for line, size in zip(document.lines, document.line_bytes, strict=True)
        ]


def _script(letters: Sequence[str]) -> str:
    """Return the script of most of the letters: the first word of their Unicode names (Cyrillic, Greek)."""
    names = Counter(unicodedata.name(letter, "unknown").split()[0] for letter in letters)
    return max(names, key=names.__getitem__).title()


def _foreign_letters(scripts: Sequence[str], letters: str) -> regex.Pattern:
    """Compile a pattern for a letter outside the scripts and the letters (of either case)."""
    own = "".join(rf"\p{{Script={script}}}" for script in (*scripts, "Common", "Inherited"))
    both_cases = "".join(sorted(set(letters.lower() + letters.upper())))
    try:
        return regex.compile(rf"[\p{{L}}--[{own}{regex.escape(both_cases)}]]", regex.V1)
    except regex.error:
        raise KieloError(
            f"language card: Unicode does not know a script of {', '.join(scripts)}. Fix: Latin, Cyrillic or "
            "another of its names"
        ) from None


def document_filters(corpus: Corpus, rule: LanguageRule) -> list[DocumentFilter]:
    filters: list[DocumentFilter] = [
        DocumentLanguage(corpus.language_identifier, rule.identifier_codes, rule.document_threshold)
    ]
    filters += damage.document_filters(corpus, rule)
    if corpus.quality == "fineweb2":
        limits = limits_of(rule.languages, is_cut=corpus.words == "icu")
        filters.append(QualityFilter(limits, cutter_of_words(corpus.words)))
    elif corpus.quality == "hplt":
        filters.append(WebDocumentScore(names_for_score(rule.languages)))
    return filters


def masks(corpus: Corpus, rule: LanguageRule) -> list[CorpusStep]:
    kinds = corpus.mask_personal_data
    return [MaskPersonalData(kinds, rule.languages)] if kinds else []


class DocumentLanguage(LanguageFilter, DocumentFilter):
    name = "document language"

    def judge(self, document: SplitDocument) -> str | None:
        return self.verdict("\n".join(document.lines), document.num_bytes)


class NotEmpty(DocumentFilter):
    """A filter of documents without a character that is not white space. The others stay unchanged."""

    name = "content"

    def judge(self, document: SplitDocument) -> str | None:
        count_c1(self, "".join(document.lines), "c1_kept")
        return None if any(line.strip() for line in document.lines) else "empty"


@dataclass
class DocumentLength(DocumentFilter):
    """A filter of documents with too few characters. It runs last, after the filters of duplicates."""

    name = "document length"
    min_characters: int

    def judge(self, document: SplitDocument) -> str | None:
        # Characters of the joined text: the lines and the line ends between them.
        num_characters = sum(map(len, document.lines)) + len(document.lines) - 1
        return f"under {self.min_characters} characters" if num_characters < self.min_characters else None


class NormaliseSides(CorpusStep):
    """A step that normalises both sides of a pair. A side may have several lines."""

    name = "normalise pairs"

    def work(self, document: SplitDocument) -> bool:
        before, (first, second) = document.num_bytes, document.pair()
        count_c1(self, first + second)
        document.set_sides((_normal_form(first), _normal_form(second)))
        self.count("bytes", "white space and control characters", before - document.num_bytes)
        return True


class WholePairs(DocumentFilter):
    """A filter of pairs with an empty side, and of pairs that were copied and not translated."""

    name = "pairs"

    def judge(self, document: SplitDocument) -> str | None:
        first, second = (side.strip() for side in document.pair())
        count_c1(self, first + second, "c1_kept")  # of pairs that are not cleaned
        if not (first and second):
            return "a side is empty"
        return "both sides are the same" if first == second else None


@dataclass
class SideLanguage(LanguageFilter, DocumentFilter):
    """A filter of pairs one side of which looks like another language, by the identifier's best guess."""

    name = "pair language"
    side: int

    def judge(self, document: SplitDocument) -> str | None:
        text = document.pair()[self.side]
        if len(text) < MIN_IDENTIFIED_CHARACTERS:
            return None
        found = self.verdict(text, len(text.encode()))
        # An identifier is seldom sure of a sentence, but the other side speaks for the pair too.
        return None if found == NOT_SURE else found


@dataclass
class LayOutPairs(CorpusStep):
    """A step that makes one text of each pair, by a template and in a direction that the sides decide."""

    name = "lay out pairs"
    templates: Sequence[str]
    reverse_share: float
    languages: Sequence[str]

    def work(self, document: SplitDocument) -> bool:
        # By the sides alone, so the same for any number of workers and any seed of a run.
        drawn = xxhash.xxh3_64_intdigest("\0".join(document.pair()).encode(), seed=DRAW)
        template = self.templates[drawn % len(self.templates)]
        pairs = list(zip(document.pair(), self.languages, strict=True))
        if (drawn >> 32) < self.reverse_share * 2**32:
            pairs.reverse()
        (source, source_language), (target, target_language) = pairs
        values = {"source": source, "target": target}
        values |= {"source_language": source_language, "target_language": target_language}
        document.sides = None
        document.set_lines(fill(template, values).split("\n"))
        return True


def _normal_form(side: str) -> str:
    return "\n".join(filter(None, map(normalise_line, lines_of(side))))


C1 = regex.compile("[\u0080-\u009f]")
# Byte → its character in windows-1252. Its five holes are dropped as controls.
_OF_WINDOWS_1252 = {
    byte: character for byte in range(0x80, 0xA0) if (character := bytes([byte]).decode("cp1252", "ignore"))
}
# Controls but for the tab, and invisible characters that only split words: soft hyphen, zero-width space,
# word joiner, byte-order mark. Joiners (U+200C, U+200D) stay: Persian and the scripts of India need them.
UNWANTED = regex.compile(r"[\p{Cc}--\t]|[\u00ad\u200b\u2060\ufeff]|\p{Cs}|\p{Cn}", regex.V1)


def normalise_line(line: str) -> str:
    """Return the line in NFC, without control characters, with single spaces and none at the ends."""
    # Printable lines have no control, no invisible character and no white space but U+0020.
    if not line.isprintable():
        line = UNWANTED.sub("", line.translate(_OF_WINDOWS_1252) if C1.search(line) else line)
    # Last, because a dropped character may have stood between a letter and its mark.
    return unicodedata.normalize("NFC", " ".join(line.split()))


def count_c1(step: CorpusStep, text: str, what: str = "c1") -> None:
    """Count controls of a document: "c1" that `normalise_line` writes as letters, "c1_kept" that stay."""
    if not (text.isascii() or text.isprintable()) and (found := len(C1.findall(text))):
        step.count(f"{what}_characters", amount=found)
        step.count(f"{what}_documents")


class Normalise(CorpusStep):
    name = "normalise"

    def work(self, document: SplitDocument) -> bool:
        before = document.num_bytes
        count_c1(self, "".join(document.lines))
        lines = [normalise_line(line) for line in document.lines]
        document.set_lines([line for line in lines if line])
        self.count("bytes", "white space and control characters", before - document.num_bytes)
        if not document.lines:
            self.count("documents", "empty")
        return bool(document.lines)

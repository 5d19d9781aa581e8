"""The base of every corpus step, its settings, its documents, and the counts of dropped text."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import regex

from kielo.artifact.json_object import JsonTable
from kielo.recipe.cards import Language, language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Source
from kielo.recipe.several_languages import source_languages
from kielo.recipe.source_kinds import KINDS

# Settings of a corpus: all that decides its outcome, from the recipe's section and the languages' cards.


SHAREGPT_FIELD = "conversations"
# Keys of the section that decide what is refused and how fast it goes, not which documents come out.
_WITHOUT_OUTCOME = {"sources", "max_bad_share", "workers"}


@dataclass(frozen=True)
class LanguageRule:
    """The languages that a text may be in, as the identifier's codes, scripts and letters say.

    Thresholds are of the summed probability of all the codes.
    """

    languages: tuple[str, ...]
    identifier_codes: tuple[str, ...]
    scripts: tuple[str, ...]
    letters: str
    line_threshold: float
    document_threshold: float


def language_rule(corpus: Corpus, cards: Sequence[Language]) -> LanguageRule:
    """Return the rule of texts in any of the cards' languages.

    The cards' thresholds, the lowest of them, are used where the recipe leaves them open: the identifier must
    not be surer of two languages together than of the harder one. Raises KieloError when the identifier does
    not know a language.
    """
    identifier = corpus.language_identifier
    for card in cards:
        if not card.identifier_codes.get(identifier):
            known = [name for name, codes in card.identifier_codes.items() if codes]
            raise KieloError(
                f"corpus.language_identifier: {identifier} does not know {card.name}; "
                f"{' or '.join(known) or 'no identifier here'} does"
            )
    line, document = corpus.line_language_threshold, corpus.document_language_threshold
    lowest_line = min(card.line_language_threshold.get(identifier, 0.5) for card in cards)
    lowest_document = min(card.document_language_threshold.get(identifier, 0.5) for card in cards)
    return LanguageRule(
        tuple(card.code for card in cards),
        tuple(dict.fromkeys(code for card in cards for code in card.identifier_codes[identifier])),
        tuple(dict.fromkeys(script for card in cards for script in card.unicode_scripts)),
        # A language whose letters are not listed has all those of its scripts.
        "".join(dict.fromkeys("".join(card.letters for card in cards))),
        lowest_line if line is None else line,
        lowest_document if document is None else document,
    )


def text_fields(source: Source) -> tuple[str, ...]:
    """Return the names of the fields or columns that hold the source's text: one, or two of a pair.

    Of conversations, the first that a file has holds them.
    """
    if source.kind == "parallel":
        return source.pair_fields or source.language
    if source.kind == "instructions" and not source.text_field:
        return (KINDS[source.kind].text_field, SHAREGPT_FIELD)  # whichever a file has
    return (source.text_field or KINDS[source.kind].text_field,)


def is_cleaned(source: Source) -> bool:
    """Return True for a source of running text that the filters of lines and documents see."""
    return source.kind == "text" and source.clean


def side_rules(corpus: Corpus, source: Source) -> tuple[LanguageRule, LanguageRule]:
    """Return the rules of the two sides of a source of parallel text."""
    first, second = (language_rule(corpus, [language(code)]) for code in source.language)
    return first, second


def language_rules(corpus: Corpus, default: str) -> dict[str, LanguageRule]:
    """Return source name → rule, of the cleaned sources. `default`: the recipe's language."""
    return {
        source.name: language_rule(corpus, [language(code) for code in source_languages(source, default)])
        for source in corpus.sources
        if is_cleaned(source)
    }


def effective_settings(corpus: Corpus, card: Language) -> JsonTable:
    """Return all that decides the outcome, for the manifest. `card`: of the recipe's language.

    Raises KieloError as `language_rule` does.
    """
    rule, rules = language_rule(corpus, [card]), language_rules(corpus, card.code)
    return corpus.model_dump(exclude=_WITHOUT_OUTCOME) | {
        # of two duplicates, the earlier source's stays
        "sources": [source.name for source in corpus.sources],
        "text_fields": [text_fields(source) for source in corpus.sources],
        "max_documents": [source.max_documents for source in corpus.sources],
        "layouts": {
            source.name: [source.pair_fields, source.templates, source.reverse_share]
            for source in corpus.sources
            if source.kind == "parallel"
        },
        # Manifests of before this key stay current.
        **({"encodings": encodings} if any(encodings := [one.encoding for one in corpus.sources]) else {}),
        "documents": [source.documents for source in corpus.sources],
        "kinds": [source.kind for source in corpus.sources],
        "clean": [source.clean for source in corpus.sources],
        "source_languages": [source_languages(source, card.code) for source in corpus.sources],
        "language_rules": {name: asdict(rules[name]) for name in rules},
        "language": card.code,
        "scripts": list(card.unicode_scripts),
        "letters": card.letters,
        "identifier_codes": list(card.identifier_codes[corpus.language_identifier]),
        "line_language_threshold": rule.line_threshold,
        "document_language_threshold": rule.document_threshold,
    }


# A document in the corpus steps, split into lines and words once, for all of them.
#
# To split the text again at every step costs more than all else that steps do (measured: about 0.2 MB/s a
# core). Here a step reads `lines` or `words()` and drops lines with `keep`; the text is joined again once,
# at the end.


# A word is a run of letters with the marks, apostrophes and hyphens inside it; digits alone are no words.
WORD = regex.compile(r"\p{L}[\p{L}\p{M}]*(?:['’\-][\p{L}\p{M}]+)*")
_LINE_ENDS = regex.compile("\r\n|[\n\r\v\f\x1c-\x1e\u2028\u2029]")


@dataclass(slots=True)
class SplitDocument:
    """A document whose content is `lines`.

    `place` is (number of the source, number of the document in it): the order of the corpus, whichever worker
    had it. `sides` are the two texts of a pair that is not laid out yet. `line_bytes` holds each line's UTF-8
    bytes with its line end.
    """

    id: str
    source: str
    place: tuple[int, int]
    metadata: JsonTable
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

    def pair(self) -> tuple[str, str]:
        """Return the two sides. Raises ValueError for a document that is no pair."""
        if self.sides is None:
            raise ValueError(f"{self.id} is no pair")
        return self.sides

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
        """Return the words of each line; split at the first call."""
        if self._words is None:
            self._words = [WORD.findall(line) for line in self.lines]
        return self._words

    def join(self) -> str:
        """Return the document's text."""
        return "\n".join(self.lines)


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, split at any line end that Unicode knows but U+0085.

    That one is the ellipsis of windows-1252 in text that was taken for Latin-1 (`normalise`).
    """
    return _LINE_ENDS.split(text) if "\x85" in text else text.splitlines()


def split_document(text: str, id: str, source: str, place: tuple[int, int], metadata: dict) -> SplitDocument:
    """Make a document from its raw text, split into lines."""
    document = SplitDocument(id, source, place, metadata)
    document.set_lines(lines_of(text))
    return document


def split_verbatim(text: str, id: str, source: str, place: tuple[int, int], metadata: dict) -> SplitDocument:
    """Make a document whose `join` gives back `text`, character by character: it is split at "\\n" alone."""
    document = SplitDocument(id, source, place, metadata)
    document.set_lines(text.split("\n"))
    return document


# The counts of a step, and the base of every step.


Counts = dict[str, Counter[tuple[str, str]]]
"""Source → (what was counted, for which reason) → number."""
Example = tuple[str, str, tuple[int, int], str]
"""(source, kind of example, place of its document, text)"""


@dataclass
class Tally:
    """Counts and examples of a step, for one worker's share of the corpus or for the whole corpus."""

    name: str
    detail: str
    counts: Counts
    examples: list[Example]

    def add(self, other: "Tally") -> None:
        """Add what the same step of another worker counted."""
        for source, counts in other.counts.items():
            self.counts[source].update(counts)
        self.examples += other.examples

    def of(self, source: str) -> "Tally":
        """Return the counts of one source alone."""
        return replace(self, counts={source: self.counts.get(source, Counter())})

    def total(self) -> Counter[tuple[str, str]]:
        """Return the counts summed over the sources."""
        total: Counter[tuple[str, str]] = Counter()
        for counts in self.counts.values():
            total.update(counts)
        return total

    def first_examples(self, source: str, kind: str, most: int) -> list[str]:
        """Return the texts of a source's first examples in the order of the corpus, at most `most`."""
        found = sorted(example for example in self.examples if example[:2] == (source, kind))
        return [text for *_, text in found[:most]]


class CorpusStep(ABC):
    """Pass documents through `work`, and count what is left after it."""

    name: str
    detail: str = ""
    """Distinguishes this step from others of its name, in the funnel."""

    def __init__(self) -> None:
        self.counts: Counts = defaultdict(Counter)
        self.examples: list[Example] = []
        self.only: frozenset[str] | None = None
        self.source = ""

    def for_sources(self, names: Iterable[str], detail: str = "") -> Self:
        """Let documents of all other sources pass untouched. Returns this step."""
        self.only, self.detail = frozenset(names), detail
        return self

    def work(self, document: SplitDocument) -> bool:
        """Change the document; False drops it (and the step has counted why)."""
        return True

    def count(self, what: str, reason: str = "", amount: int = 1) -> None:
        """Count for the source of the document at work."""
        self.counts[self.source][what, reason] += amount

    def count_example(self, kind: str, place: tuple[int, int], text: str, most: int) -> None:
        """Count one of a kind, and keep the first `most` of each source as examples."""
        self.count(kind)
        if self.counts[self.source][kind, ""] <= most:
            self.examples.append((self.source, kind, place, text))

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        """Yield the documents that are left."""
        for document in documents:
            self.source = document.source
            if self.only is not None and self.source not in self.only or self.work(document):
                self.count("documents_left")
                self.count("bytes_left", amount=document.num_bytes)
                yield document


class LineFilter(CorpusStep):
    """Drop lines; a document that loses all of them is dropped for the reason that took most bytes."""

    @abstractmethod
    def judge(self, document: SplitDocument) -> Sequence[str | None]:
        """Return for each line None to keep it, or the reason to drop it."""

    def work(self, document: SplitDocument) -> bool:
        verdicts = self.judge(document)
        if not any(verdicts):
            return bool(document.lines)
        lost: Counter[str] = Counter()
        for reason, size in zip(verdicts, document.line_bytes, strict=True):
            if reason is not None:
                lost[reason] += size
                self.count("lines", reason)
        for reason, size in lost.items():
            self.count("bytes", reason, size)
        document.keep([reason is None for reason in verdicts])
        if not document.lines:
            self.count("documents", max(lost, key=lambda reason: (lost[reason], reason)))
        return bool(document.lines)


class DocumentFilter(CorpusStep):
    """Drop whole documents."""

    @abstractmethod
    def judge(self, document: SplitDocument) -> str | None:
        """Return None to keep the document, or the reason to drop it."""

    def work(self, document: SplitDocument) -> bool:
        reason = self.judge(document)
        if reason is not None:
            self.count("documents", reason)
            self.count("lines", reason, len(document.lines))
            self.count("bytes", reason, document.num_bytes)
        return reason is None

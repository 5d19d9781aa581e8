"""The base of every corpus step, its settings, its documents, and the counts of dropped text."""

import os
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar, Self

import regex
import xxhash

from kielo.artifact.json_object import JsonTable
from kielo.recipe.cards import Language, language, language_code
from kielo.recipe.errors import KieloError
from kielo.recipe.quality_limits import limits_of, marked_letters_of, names_for_score, stop_words_of
from kielo.recipe.sections import IDENTIFIERS, Corpus, Source
from kielo.recipe.several_languages import source_languages
from kielo.recipe.source_kinds import KINDS

SHAREGPT_FIELD = "conversations"
# Keys of the section that do not decide which documents come out.
_WITHOUT_OUTCOME = {"sources", "max_bad_share", "workers", "engine"}
# Later keys → their defaults, at which manifests lack them, so that finished corpora stay.
LATER: JsonTable = {
    key: Corpus.model_fields[key].default
    for key in (
        "quality",
        "repair_encoding",
        "mask_personal_data",
        "words",
        "near_copies",
        "near_copies_keep",
        "damage",
        "decontaminate",
        "own_steps",
    )
}
LEAST_KEPT = 0.9  # share of a language's text that its threshold should keep
_READ_WHOLE, _MARKED_BYTES = 64 << 20, 1 << 20  # of an identifier's file; of one of 2 GB both ends are read
# Kind of personal data → the number of the rule by which it is known. Corpora of an earlier rule are not
# current. So it is with decontamination.
_MASK_RULES, _DECONTAMINATION_RULE = {"email": 3, "ip": 3, "phone": 2}, 3
# A word is a run of letters with the marks, apostrophes and hyphens inside it. Digits alone are no words.
WORD = regex.compile(r"\p{L}[\p{L}\p{M}]*(?:['’\-][\p{L}\p{M}]+)*")
# Words, numbers and signs, about as spaCy has them: a hyphen parts words, an apostrophe does not.
_TOKEN = regex.compile(
    r"\p{L}[\p{L}\p{M}\p{N}]*(?:['’][\p{L}\p{M}]+)*|\p{N}+(?:[.,:]\p{N}+)*|\.\.\.|[^\s\p{L}\p{N}]"
)
_NUM_REMEMBERED, _MOST_REMEMBERED_CHARACTERS = 200_000, 40
CutWords = Callable[[list[str]], list[str]]
_LINE_ENDS = regex.compile("\r\n|[\n\r\v\f\x1c-\x1e\u2028\u2029]")


@dataclass(frozen=True)
class LanguageRule:
    """The languages that a text may be in. Thresholds apply to the summed probability of all the codes."""

    languages: tuple[str, ...]
    identifier_codes: tuple[str, ...]
    scripts: tuple[str, ...]
    letters: str
    line_threshold: float
    document_threshold: float
    score_names: tuple[str, ...] = ()
    """Names of the language in HPLT's scorer. Empty: no score is asked for."""
    has_spaces: bool = True
    """True if all the languages are written with spaces between words."""


def language_rule(corpus: Corpus, cards: Sequence[Language]) -> LanguageRule:
    """Return the rule of texts in any of the cards' languages. Raises KieloError for an unknown language."""
    identifier = corpus.language_identifier
    for card in cards:
        if not card.codes_of(identifier):
            raise KieloError(
                f"corpus.language_identifier: {identifier} does not know {card.name}. Fix: "
                f"{card.other_identifiers()}"
            )
    line, document = _thresholds(corpus, cards)
    return LanguageRule(
        tuple(card.code for card in cards),
        tuple(dict.fromkeys(code for card in cards for code in card.codes_of(identifier))),
        tuple(dict.fromkeys(script for card in cards for script in card.unicode_scripts)),
        # A language without a list of letters has all letters of its scripts.
        "".join(dict.fromkeys("".join(card.letters for card in cards))),
        line,
        document,
        has_spaces=all(card.has_spaces for card in cards),
    )


def _thresholds(corpus: Corpus, cards: Sequence[Language]) -> tuple[float, float]:
    """Return the probabilities that lines and documents must have, by the recipe or the cards."""
    line, document = corpus.line_language_threshold, corpus.document_language_threshold
    # The lowest, because the identifier cannot be surer of two languages together than of the harder one.
    lines, documents = zip(*(card.thresholds(corpus.language_identifier) for card in cards), strict=True)
    return min(lines) if line is None else line, min(documents) if document is None else document


def text_fields(source: Source) -> tuple[str, ...]:
    """Return the names of the source's text fields: one, two of a pair, or alternatives of conversations."""
    if source.kind == "parallel":
        return source.pair_fields or source.language
    if source.kind == "instructions" and not source.text_field:
        return (KINDS[source.kind].text_field, SHAREGPT_FIELD)
    return (source.text_field or KINDS[source.kind].text_field,)


def is_cleaned(source: Source) -> bool:
    """Return True for a source of running text, which the filters of lines and documents see."""
    return source.kind == "text" and source.clean


def language_rules(corpus: Corpus, default: str) -> dict[str, LanguageRule]:
    rules = {}
    for source in filter(is_cleaned, corpus.sources):
        cards = [language(name) for name in source_languages(source, default)]
        names = names_for_score(cards) if corpus.quality == "hplt" else ()
        rules[source.name] = replace(language_rule(corpus, cards), score_names=names)
    return rules


def languages_of_text(corpus: Corpus, default: str) -> list[str]:
    """Return the codes of the languages of running text that is cleaned."""
    return list(dict.fromkeys(card.code for card in cards_of_text(corpus, default)))


def cards_of_text(corpus: Corpus, default: str) -> list[Language]:
    sources = filter(is_cleaned, corpus.sources)
    names = dict.fromkeys(name for source in sources for name in source_languages(source, default))
    return list(map(language, names))


def doubtful_thresholds(corpus: Corpus, default: str) -> Iterator[str]:
    """Yield a sentence for each language whose threshold nobody measured, or keeps too little of its text."""
    if corpus.line_language_threshold is not None and corpus.document_language_threshold is not None:
        return
    identifier = corpus.language_identifier
    sources = [source for source in corpus.sources if source.clean and source.kind in ("text", "parallel")]
    for name in dict.fromkeys(name for source in sources for name in source_languages(source, default)):
        card, measured = language(name), language(name).measured_of(identifier)
        threshold = f"{card.thresholds(identifier)[0]:g}"
        fix = f"To measure it: kielo languages {name} --measure LINES.txt --identifier {identifier}"
        if measured is None:
            yield f"{card.name}: no threshold of {identifier} was measured. {threshold} is used. {fix}"
        elif measured.own < LEAST_KEPT:
            yield (
                f"{card.name}: the threshold {threshold} of {identifier} keeps only {measured.own:.1%} of "
                f"the {measured.text}. {fix}"
            )


def _file_of_identifier(identifier: str) -> JsonTable:
    """Return the name of an identifier's file, and a mark by which it is known again."""
    settings: JsonTable = {"language_identifier": Path(identifier).name}
    with suppress(OSError), open(identifier, "rb") as file:  # a machine that only trains may lack it
        size = os.fstat(file.fileno()).st_size
        parts = file.read(size if size <= _READ_WHOLE else _MARKED_BYTES)
        file.seek(max(size - _MARKED_BYTES, len(parts)))
        settings["identifier_file"] = f"{size} bytes, xxh3 {xxhash.xxh3_64_hexdigest(parts + file.read())}"
    return settings


def effective_settings(corpus: Corpus, card: Language, name: str = "") -> JsonTable:
    """Return all settings that decide the outcome, for the manifest.

    `card` describes the language. name: its code or the file of the card, as the recipe has it.
    """
    name, identifier = name or card.code, corpus.language_identifier
    rules, (line, document) = language_rules(corpus, name), _thresholds(corpus, [card])
    if any(is_cleaned(source) and name in source_languages(source, name) for source in corpus.sources):
        language_rule(corpus, [card])
    later = {key for key, usual in LATER.items() if getattr(corpus, key) == usual}
    return corpus.model_dump(exclude=_WITHOUT_OUTCOME | later) | {
        "sources": [source.name for source in corpus.sources],
        "text_fields": [text_fields(source) for source in corpus.sources],
        "max_documents": [source.max_documents for source in corpus.sources],
        "layouts": {
            source.name: [source.pair_fields, source.templates, source.reverse_share]
            for source in corpus.sources
            if source.kind == "parallel"
        },
        # Manifests without this key stay current.
        **({"encodings": encodings} if any(encodings := [one.encoding for one in corpus.sources]) else {}),
        **({"least_scores": scores} if (scores := _least_scores(corpus)) else {}),
        "documents": [source.documents for source in corpus.sources],
        "kinds": [source.kind for source in corpus.sources],
        "clean": [source.clean for source in corpus.sources],
        "source_languages": [_codes(source, name) for source in corpus.sources],
        "language_rules": {name: _settings_of(rule) for name, rule in rules.items()},
        **({"quality_limits": _quality_limits(corpus, rules)} if corpus.quality == "fineweb2" else {}),
        **({"decontaminate": _names(corpus.decontaminate)} if corpus.decontaminate else {}),
        **({"own_steps": _own_steps(corpus.own_steps)} if corpus.own_steps else {}),
        **({"marked_letters": _marked_letters(rules)} if "lost_diacritics" in corpus.damage else {}),
        **({"decontamination_rule": _DECONTAMINATION_RULE} if corpus.decontaminate else {}),
        **{f"{kind}_rule": rule for kind, rule in _MASK_RULES.items() if kind in corpus.mask_personal_data},
        **({"stop_words": words} if (words := _stop_words(corpus, rules)) else {}),
        "language": card.code,
        "scripts": list(card.unicode_scripts),
        "letters": card.letters,
        "identifier_codes": list(card.codes_of(identifier)),
        "line_language_threshold": line,
        "document_language_threshold": document,
        **(_file_of_identifier(identifier) if identifier not in IDENTIFIERS else {}),
    }


def _settings_of(rule: LanguageRule) -> JsonTable:
    left_out = {"has_spaces"} if rule.score_names else {"has_spaces", "score_names"}
    return {key: value for key, value in asdict(rule).items() if key not in left_out}


def _least_scores(corpus: Corpus) -> dict[str, list[float | None]]:
    least = {one.name: [one.min_language_score, one.min_document_score] for one in corpus.sources}
    return {name: scores for name, scores in least.items() if scores != [None, None]}


def _quality_limits(corpus: Corpus, rules: dict[str, LanguageRule]) -> JsonTable:
    is_cut, found = corpus.words == "icu", {}
    for name, rule in rules.items():
        limits = limits_of(rule.languages, is_cut)
        # A set has another order in each process, by which a finished corpus would not be current.
        found[name] = limits.model_dump(mode="json") | {"stop_words": sorted(limits.stop_words)}
    return found


def _marked_letters(rules: dict[str, LanguageRule]) -> JsonTable:
    return {code: marked_letters_of(code) for rule in rules.values() for code in rule.languages}


def _stop_words(corpus: Corpus, rules: dict[str, LanguageRule]) -> JsonTable:
    """Return source → hash of the stop words by which keyword lists without commas are known."""
    words = {name: " ".join(sorted(stop_words_of(rule.languages))) for name, rule in rules.items()}
    is_used = "keyword_lists" in corpus.damage
    return {name: xxhash.xxh3_64_hexdigest(text.encode()) for name, text in words.items() if is_used and text}


def _names(files: bool | tuple[str, ...]) -> bool | list[str]:
    """Return the files' names. Their hashes are inputs of the stage."""
    return files if isinstance(files, bool) else [Path(file).name for file in files]


def _own_steps(paths: Sequence[str]) -> list[list[str]]:
    """Return name and hash of each own step. A machine that only trains may lack the files."""
    found = []
    for path in map(Path, paths):
        digest = ""
        with suppress(OSError):
            digest = xxhash.xxh3_128_hexdigest(path.expanduser().read_bytes())
        found.append([path.name, digest])
    return found


def _codes(source: Source, default: str) -> tuple[str, ...]:
    return tuple(map(language_code, source_languages(source, default)))


class _Found(dict[str, tuple[str, ...]]):
    """Text without white space → the matches of a pattern in it. Most of it recurs, and is remembered."""

    def __init__(self, pattern: regex.Pattern) -> None:
        self._find = pattern.findall

    def __missing__(self, text: str) -> tuple[str, ...]:
        found = tuple(self._find(text))
        if len(text) <= _MOST_REMEMBERED_CHARACTERS:
            if len(self) >= _NUM_REMEMBERED:
                self.clear()
            self[text] = found
        return found

    def in_text(self, text: str) -> list[str]:
        return list(chain.from_iterable(map(self.__getitem__, text.split())))


_WORDS, _TOKENS = _Found(WORD), _Found(_TOKEN)


def cut_tokens(text: str) -> list[str]:
    """Return the words, numbers and signs of a text."""
    return _TOKENS.in_text(text)


@dataclass(slots=True)
class SplitDocument:
    """A document, split into lines and words once: splitting at each step would cost more than the steps."""

    id: str
    source: str
    place: tuple[int, int]  # (number of the source, number of the document in it), the order of the corpus
    metadata: JsonTable
    lines: list[str] = field(default_factory=list)
    line_bytes: list[int] = field(default_factory=list)  # UTF-8 bytes of each line with its end
    sides: tuple[str, str] | None = None  # the two texts of a pair that is not laid out yet
    cut_words: CutWords | None = None
    _words: list[list[str]] | None = None
    _tokens: list[str] | None = None
    _sizes: tuple[int, int] | None = None  # bytes and spaced words, which each step counts

    @property
    def num_bytes(self) -> int:
        return self._counted()[0]

    @property
    def num_spaced_words(self) -> int:
        """The words if spaces separate them, without the cost of `words`."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, int]:
        if self._sizes is None:
            self._sizes = sum(self.line_bytes), sum(map(spaced_words, self.lines))
        return self._sizes

    def set_lines(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        self.line_bytes = [len(line.encode()) + 1 for line in self.lines]
        self._words = self._tokens = self._sizes = None

    def pair(self) -> tuple[str, str]:
        if self.sides is None:
            raise ValueError(f"{self.id} is no pair")
        return self.sides

    def set_sides(self, sides: tuple[str, str]) -> None:
        """Make this a pair. Its lines, which steps count, are the lines of both sides."""
        self.sides = sides
        self.set_lines("\n".join(sides).split("\n"))

    def keep(self, flags: Sequence[bool]) -> None:
        self.line_bytes = [size for size, flag in zip(self.line_bytes, flags, strict=True) if flag]
        if self._words is not None:
            self._words = [words for words, flag in zip(self._words, flags, strict=True) if flag]
        self.lines = [line for line, flag in zip(self.lines, flags, strict=True) if flag]
        self._tokens = self._sizes = None

    def tokens(self) -> list[str]:
        """Return the words, numbers and signs of the text, which several filters count."""
        if self._tokens is None:
            self._tokens = cut_tokens(self.join())
        return self._tokens

    def words(self) -> list[list[str]]:
        if self._words is None:
            found = list(map(_WORDS.in_text, self.lines))
            self._words = [self.cut_words(words) for words in found] if self.cut_words else found
        return self._words

    def join(self) -> str:
        return "\n".join(self.lines)

    def opening(self) -> str:
        """Return the first SHOWN_CHARACTERS characters or more of the text, or all of it."""
        text = ""
        for line in self.lines:
            text += f"{line}\n"
            if len(text) > SHOWN_CHARACTERS:
                break
        return text.rstrip("\n")


def spaced_words(line: str) -> int:
    return line.count(" ") + 1


def lines_of(text: str) -> list[str]:
    """Return the lines of a text. U+0085, the ellipsis of windows-1252 taken for Latin-1, ends none."""
    return _LINE_ENDS.split(text) if "\x85" in text else text.splitlines()


def split_document(text: str, id: str, source: str, place: tuple[int, int], metadata: dict) -> SplitDocument:
    document = SplitDocument(id, source, place, metadata)
    document.set_lines(lines_of(text))
    return document


def split_verbatim(text: str, id: str, source: str, place: tuple[int, int], metadata: dict) -> SplitDocument:
    r"""Make a document split at "\n" alone, so that `join` gives back the text, character by character."""
    document = SplitDocument(id, source, place, metadata)
    document.set_lines(text.split("\n"))
    return document


# Of each step the pages show this many texts that it kept, and as many that it dropped: those whose openings
# have the smallest hashes, which are the same for any number of workers.
KEPT_EXAMPLE, DROPPED_EXAMPLE = "kept_example", "dropped_example"
MOST_SHOWN, SHOWN_CHARACTERS = 10, 600

Counts = dict[str, Counter[tuple[str, str]]]  # source → (what was counted, for which reason) → number
# (source, kind, place of its document or hash of its text, text)
Example = tuple[str, str, tuple[int, int], str]


@dataclass
class Tally:
    """Counts and examples of a step, for one worker's documents or for the whole corpus."""

    name: str
    detail: str
    counts: Counts
    examples: list[Example]

    def add(self, other: "Tally") -> None:
        for source, counts in other.counts.items():
            self.counts[source].update(counts)
        self.examples = fewest(self.examples + other.examples)

    def of(self, source: str) -> "Tally":
        return replace(self, counts={source: self.counts.get(source, Counter())})

    def total(self) -> Counter[tuple[str, str]]:
        total: Counter[tuple[str, str]] = Counter()
        for counts in self.counts.values():
            total.update(counts)
        return total

    def first_examples(self, source: str, kind: str, most: int) -> list[str]:
        found = sorted(example for example in self.examples if example[:2] == (source, kind))
        return [text for *_, text in found[:most]]


def fewest(examples: Sequence[Example]) -> list[Example]:
    """Return the examples, of those on both sides of a step only MOST_SHOWN each, by their hashes."""
    found: list[Example] = [one for one in examples if one[1] not in (KEPT_EXAMPLE, DROPPED_EXAMPLE)]
    for kind in (KEPT_EXAMPLE, DROPPED_EXAMPLE):
        by_hash: dict[int, Example] = {}
        for one in sorted(
            (one for one in examples if one[1] == kind), key=lambda one: (one[2], one[3], one[0])
        ):
            by_hash.setdefault(one[2][0], one)
        found += list(by_hash.values())[:MOST_SHOWN]
    return found


@dataclass
class CorpusStep(ABC):
    """A step that passes documents through `work` and counts the rest. The funnel has its `detail`."""

    name: ClassVar[str]
    detail: str = field(default="", init=False)
    counts: Counts = field(default_factory=lambda: defaultdict(Counter), init=False)
    examples: list[Example] = field(default_factory=list, init=False)
    only: frozenset[str] | None = field(default=None, init=False)
    source: str = field(default="", init=False)
    _largest_hash: dict[str, int] = field(default_factory=dict, init=False)

    def for_sources(self, names: Iterable[str], detail: str = "") -> Self:
        """Let documents of all other sources pass unchanged. Return this step."""
        self.only, self.detail = frozenset(names), detail
        return self

    def work(self, document: SplitDocument) -> bool:
        """Change the document. False drops it (after the step has counted why)."""
        return True

    def count(self, what: str, reason: str = "", amount: int = 1) -> None:
        self.counts[self.source][what, reason] += amount

    def count_example(self, kind: str, place: tuple[int, int], text: str, most: int) -> None:
        """Count one of a kind, and keep the first `most` of each source as examples."""
        self.count(kind)
        if self.counts[self.source][kind, ""] <= most:
            self.examples.append((self.source, kind, place, text))

    def show(self, reason: str | None, text: str) -> None:
        """Keep a text as an example of what the step drops (for a reason) or keeps, if its hash is small."""
        kind = KEPT_EXAMPLE if reason is None else DROPPED_EXAMPLE
        shown = text[:SHOWN_CHARACTERS]
        digest = xxhash.xxh3_64_intdigest(shown.encode()) >> 1
        if digest >= self._largest_hash.get(kind, 1 << 63):
            return
        own = sorted(one for one in self.examples if one[1] == kind)
        if any(one[2][0] == digest for one in own):
            return
        self.examples.append((self.source, kind, (digest, 0), f"{reason or ''}\0{shown}"))
        if len(own) + 1 >= MOST_SHOWN:
            own = sorted((one for one in self.examples if one[1] == kind), key=lambda one: one[2])
            for passed_over in own[MOST_SHOWN:]:
                self.examples.remove(passed_over)
            self._largest_hash[kind] = own[MOST_SHOWN - 1][2][0]

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        for document in documents:
            self.source = document.source
            if self.only is not None and self.source not in self.only or self.work(document):
                self.count("documents_left")
                self.count("bytes_left", amount=document.num_bytes)
                self.count("spaced_words_left", amount=document.num_spaced_words)
                yield document


class LineFilter(CorpusStep):
    """A filter that drops lines. A document without lines is dropped for the reason that took most bytes."""

    @abstractmethod
    def judge(self, document: SplitDocument) -> Sequence[str | None]:
        """Return for each line None to keep it, or the reason to drop it."""

    def work(self, document: SplitDocument) -> bool:
        verdicts = self.judge(document)
        first_kept = next(
            (line for line, of in zip(document.lines, verdicts, strict=True) if of is None), None
        )
        if first_kept is not None:
            self.show(None, first_kept)
        if not any(verdicts):
            return bool(document.lines)
        lost: Counter[str] = Counter()
        for reason, size, line in zip(verdicts, document.line_bytes, document.lines, strict=True):
            if reason is not None:
                lost[reason] += size
                self.count("lines", reason)
                self.count("spaced_words", reason, spaced_words(line))
                self.show(reason, line)
        for reason, size in lost.items():
            self.count("bytes", reason, size)
        document.keep([reason is None for reason in verdicts])
        if not document.lines:
            self.count("documents", max(lost, key=lambda reason: (lost[reason], reason)))
        return bool(document.lines)


class DocumentFilter(CorpusStep):
    @abstractmethod
    def judge(self, document: SplitDocument) -> str | None:
        """Return None to keep the document, or the reason to drop it."""

    def work(self, document: SplitDocument) -> bool:
        reason = self.judge(document)
        if reason is not None:
            self.count("documents", reason)
            self.count("lines", reason, len(document.lines))
            self.count("bytes", reason, document.num_bytes)
            self.count("spaced_words", reason, document.num_spaced_words)
        self.show(reason, document.opening())
        return reason is None

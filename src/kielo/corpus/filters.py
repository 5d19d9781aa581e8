"""Filters of cleaned text: of lines, of documents, and of what occurs twice."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

import regex
import xxhash

from kielo.artifact.documents import TURNS
from kielo.corpus.language_identification import LanguageFilter
from kielo.corpus.normalise import count_c1
from kielo.corpus.step import DocumentFilter, LanguageRule, LineFilter, SplitDocument
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus

# Filters of lines: each is a class below and an entry in `line_filters`, in the order in which they run.
#
# A filter gives for each line None to keep it, or the reason to drop it; the funnel counts lines and bytes
# by filter and reason.


# Lines with letters of another script: what is counted, and kept as examples.
FOREIGN_DROPPED, FOREIGN_KEPT = "script_lines_dropped", "script_lines_kept"
# Lines that are shown of each source, and of each as much.
NUM_EXAMPLES, _EXAMPLE_CHARACTERS = 2, 100


def line_filters(corpus: Corpus, rule: LanguageRule) -> list[LineFilter]:
    """Return the filters of lines for text of one rule, cheap ones first."""
    return [
        ScriptFilter(rule.scripts, rule.letters, corpus.max_foreign_character_share),
        LineLength(corpus.min_line_characters),
        LineLanguage(corpus.language_identifier, rule.identifier_codes, rule.line_threshold),
    ]


class ScriptFilter(LineFilter):
    """Drop a line when more than `max_foreign_share` of its letters are of another script.

    A letter is not foreign when it belongs to one of the Unicode `scripts` or is among the card's `letters`:
    whole scripts, since names and loan words bring letters that a language's own alphabet lacks. Digits,
    punctuation and symbols are no letters. Lines with some are counted by script, and the first are examples.
    """

    name = "script"

    def __init__(self, scripts: Sequence[str], letters: str, max_foreign_share: float):
        super().__init__()
        self.scripts = tuple(scripts)
        self.letters = letters
        self.max_foreign_share = max_foreign_share
        self.foreign = _foreign_letters(self.scripts, letters)
        self.is_latin_own = "Latin" in self.scripts

    def judge(self, document: SplitDocument) -> list[str | None]:
        return [self._judge_line(line, document) for line in document.lines]

    def _judge_line(self, line: str, document: SplitDocument) -> str | None:
        if self.is_latin_own and line.isascii():
            return None
        foreign = self.foreign.findall(line)
        if not foreign:
            return None
        is_kept = len(foreign) <= self.max_foreign_share * sum(map(str.isalpha, line))
        kind = FOREIGN_KEPT if is_kept else FOREIGN_DROPPED
        self.count_example(kind, document.place, line[:_EXAMPLE_CHARACTERS], NUM_EXAMPLES)
        return None if is_kept else f"letters of another script ({_script(foreign)})"


class LineLength(LineFilter):
    """Drop lines with too few characters to teach anything or to be identified."""

    name = "line length"

    def __init__(self, min_characters: int):
        super().__init__()
        self.min_characters = min_characters

    def judge(self, document: SplitDocument) -> list[str | None]:
        reason = f"under {self.min_characters} characters"
        return [reason if len(line) < self.min_characters else None for line in document.lines]


class LineLanguage(LanguageFilter, LineFilter):
    """Drop lines that are probably of another language."""

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
    """Compile a pattern for one letter that is outside the scripts and the letters (of either case)."""
    own = "".join(rf"\p{{Script={script}}}" for script in (*scripts, "Common", "Inherited"))
    both_cases = "".join(sorted(set(letters.lower() + letters.upper())))
    try:
        return regex.compile(rf"[\p{{L}}--[{own}{regex.escape(both_cases)}]]", regex.V1)
    except regex.error:
        raise KieloError(
            f"language card: script {', '.join(scripts)} has a name that Unicode does not know; "
            "it knows Latin, Cyrillic, Greek, …"
        ) from None


# Filters of whole documents: each is a class below and an entry in `document_filters`.
#
# A filter gives None to keep the document, or the reason to drop it; the funnel counts documents, lines and
# bytes by filter and reason.


def document_filters(corpus: Corpus, rule: LanguageRule) -> list[DocumentFilter]:
    """Return the filters of documents for text of one rule; they run after those of lines."""
    return [DocumentLanguage(corpus.language_identifier, rule.identifier_codes, rule.document_threshold)]


class DocumentLanguage(LanguageFilter, DocumentFilter):
    """Drop documents that are probably of another language."""

    name = "document language"

    def judge(self, document: SplitDocument) -> str | None:
        return self.verdict("\n".join(document.lines), document.num_bytes)


class NotEmpty(DocumentFilter):
    """Drop documents without a character that is not white space; nothing is changed in the others."""

    name = "content"

    def judge(self, document: SplitDocument) -> str | None:
        count_c1(self, "".join(document.lines), "c1_kept")
        return None if any(line.strip() for line in document.lines) else "empty"


class DocumentLength(DocumentFilter):
    """Drop documents with too few characters; it runs last, after the filters of duplicates."""

    name = "document length"

    def __init__(self, min_characters: int):
        super().__init__()
        self.min_characters = min_characters

    def judge(self, document: SplitDocument) -> str | None:
        # Characters of the joined text: the lines and the line ends between them.
        num_characters = sum(map(len, document.lines)) + len(document.lines) - 1
        return f"under {self.min_characters} characters" if num_characters < self.min_characters else None


# Filters of exact duplicates, documents and lines, over the whole corpus: the first one stays.
#
# These steps remember what they have seen, so they run in the one process of the second pass, which reads
# the documents in the order of the corpus: the outcome is the same for any number of workers. They remember
# 64-bit xxh3 hashes, about 100 bytes of memory for each different line; two of 10⁹ different lines collide
# with a probability of 3 %.


SEEN = "seen before"


class DocumentDuplicates(DocumentFilter):
    name = "document duplicates"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def judge(self, document: SplitDocument) -> str | None:
        text = "\n".join(document.lines)
        if turns := document.metadata.get(TURNS):  # the same words in other roles are another conversation
            text += f"\0{turns}"
        return None if _is_new(xxhash.xxh3_64_intdigest(text.encode()), self.seen) else SEEN


class LineDuplicates(LineFilter):
    name = "line duplicates"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def judge(self, document: SplitDocument) -> list[str | None]:
        return [
            None if _is_new(xxhash.xxh3_64_intdigest(line.encode()), self.seen) else SEEN
            for line in document.lines
        ]


def _is_new(digest: int, seen: set[int]) -> bool:
    if digest in seen:
        return False
    seen.add(digest)
    return True

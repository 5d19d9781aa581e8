"""Filters of documents by their repetitions, words and lines, after Gopher and FineWeb.

The rules are Gopher's (Rae et al. 2021, arXiv:2112.11446, table A1) and FineWeb's (Penedo et al. 2024,
arXiv:2406.17557, section 3.6), as FineWeb2 applies them, with its limits of each language (Penedo et al.
2025, arXiv:2506.20920). With equal words datatrove's filters give the same verdicts
(`benchmarks/data/quality_filters.py`). Most documents break no rule, so cheap upper bounds come before exact
counts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress

import regex

from kielo.corpus.step import CutWords, DocumentFilter, SplitDocument
from kielo.recipe.quality_limits import QualityLimits

_ENDS_SENTENCE = regex.compile(r"\p{Sentence_Terminal}")
# The signs that make no word, as datatrove's PUNCTUATION_SET has them: "•" and "€" are none of them.
_SIGNS = regex.compile(
    r"""[\p{Cc}--[\t\n]]|[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～\p{Sentence_Terminal}]""",
    regex.V1,
)
_BULLETS, _ELLIPSES = ("•", "-"), ("...", "…")
_TOP, _REPEATED = (2, 3, 4), range(5, 11)  # lengths of n-grams in words
_NUM_REMEMBERED = 1_000_000  # words whose kind a worker remembers
_SIGN, _OTHER, _WITH_LETTER = 0, 1, 2  # kinds of words: without any character that makes a word, …


class _Kinds(dict[str, int]):
    """Word → its kind."""

    def __missing__(self, word: str) -> int:
        is_sign = all(map(_SIGNS.fullmatch, word))
        kind = _SIGN if is_sign else _WITH_LETTER if any(map(str.isalpha, word)) else _OTHER
        if len(self) < _NUM_REMEMBERED:
            self[word] = kind
        return kind


class _Ends(dict[str, bool]):
    """Character → True if it ends a sentence."""

    def __missing__(self, character: str) -> bool:
        self[character] = ends = _ENDS_SENTENCE.match(character) is not None
        return ends


def _ngrams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def _repeated_lines(lines: Sequence[str]) -> tuple[int, int]:
    """Return the number of lines that occurred before, and their characters."""
    if len(seen := set(lines)) == len(lines):
        return 0, 0
    return len(lines) - len(seen), sum(map(len, lines)) - sum(map(len, seen))


def _repeated_runs(words: Sequence[str], before: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of 5-grams that occurred before: their number, and the characters of their words.

    A longer n-gram that occurred before lies in a run of n - 4.
    """
    grams = list(_ngrams(words, _REPEATED[0]))
    if len(set(grams)) == len(grams):
        return []
    first_place, runs, begun, end = dict[tuple[str, ...], int](), [], 0, -1
    for place, gram in enumerate(grams):
        if first_place.setdefault(gram, place) == place:
            continue
        if place != end:
            if end >= 0:
                runs.append((end - begun, before[end + _REPEATED[0] - 1] - before[begun]))
            begun = place
        end = place + 1
    return [*runs, (end - begun, before[end + _REPEATED[0] - 1] - before[begun])]


def _repeated_characters(words: Sequence[str], before: Sequence[int], n: int) -> int:
    """Count the characters of n-grams that occurred before, without overlaps."""
    first_place, found, free = dict[tuple[str, ...], int](), 0, 0
    for place, gram in enumerate(_ngrams(words, n)):
        if place >= free and first_place.setdefault(gram, place) != place:
            found += before[place + n] - before[place]
            free = place + n
    return found


@dataclass
class QualityFilter(DocumentFilter):
    """A filter of documents by the rules of `limits`, in the order of FineWeb2's filters."""

    name = "quality"
    limits: QualityLimits
    cut_words: CutWords | None = None
    _kinds: _Kinds = field(default_factory=_Kinds, init=False)
    _ends: _Ends = field(default_factory=_Ends, init=False)

    def judge(self, document: SplitDocument) -> str | None:
        words = document.tokens()
        return self.verdict(document.join(), self.cut_words(words) if self.cut_words else words)

    def verdict(self, text: str, words: Sequence[str]) -> str | None:
        """Return None, or the first rule that the text breaks."""
        lines = [line for line in text.split("\n") if line.strip()]
        if not words or not lines:
            return "no words"
        repeated, lengths = _repeated_lines(lines), list(map(len, words))
        # Empty lines part others here, and none is counted.
        if repeated[0] / len(lines) > self.limits.max_repeated_lines:
            return "repeated lines"
        return (
            self._one_sequence(text, words, lengths)
            or self._repeated_sequences(text, words, lengths)
            or self._lines(text, lines, len(words), repeated[1])
            or self._words(text, words, lengths)
        )

    def _one_sequence(self, text: str, words: Sequence[str], lengths: Sequence[int]) -> str | None:
        size, longest, number = len(text), max(lengths), len(words)
        for n, limit in zip(_TOP, self.limits.max_top_ngram, strict=True):
            # No n-gram has more characters, or occurs more often than the n-grams of one word less.
            if (n * longest + n - 1) * number <= limit * size:
                continue
            counts = Counter(_ngrams(words, n))
            if not counts:
                return None
            gram = max(counts, key=counts.__getitem__)  # the first of equals
            number = counts[gram]
            if (sum(map(len, gram)) + n - 1) * number / size > limit:
                return f"one sequence of {n} words repeated"
        return None

    def _repeated_sequences(self, text: str, words: Sequence[str], lengths: Sequence[int]) -> str | None:
        before = list(accumulate(lengths, initial=0))
        if not (runs := _repeated_runs(words, before)):
            return None
        for n, limit in zip(_REPEATED, self.limits.max_repeated_ngrams, strict=True):
            most = sum(characters for number, characters in runs if number > n - _REPEATED[0])
            if most > limit * len(text) and _repeated_characters(words, before, n) / len(text) > limit:
                return f"repeated sequences of {n} words"
        return None

    def _lines(self, text: str, lines: Sequence[str], num_words: int, repeated: int) -> str | None:
        limits, line_ends = self.limits, text.count("\n")
        if sum(self._ends[line[-1]] for line in lines) / len(lines) < limits.min_ended_lines:
            return "few lines end with a sentence"
        if repeated / (len(text) - line_ends) > limits.max_repeated_line_characters:
            return "repeated lines"
        return "lines of few words" if line_ends / num_words > limits.max_line_ends_per_word else None

    def _words(self, text: str, words: Sequence[str], lengths: Sequence[int]) -> str | None:
        limits, count = self.limits, len(words)
        kinds = list(map(self._kinds.__getitem__, words))
        number = count - kinds.count(_SIGN)
        if not limits.min_words <= number <= limits.max_words:
            return f"under {limits.min_words} words" if number < limits.min_words else "too many words"
        mean = sum(compress(lengths, kinds)) / number
        if not limits.min_mean_word_length <= mean <= limits.max_mean_word_length:
            return "short words" if mean < limits.min_mean_word_length else "long words"
        ellipses = sum(map(text.count, _ELLIPSES))
        if max(text.count("#"), ellipses) / count > limits.max_signs_per_word:
            return "hashes or ellipses"
        lines = text.splitlines()
        bullets = sum(line.lstrip().startswith(_BULLETS) for line in lines)
        if bullets / len(lines) > limits.max_bullet_lines:
            return "lists of bullets"
        ended = ellipses and sum(line.rstrip().endswith(_ELLIPSES) for line in lines)
        if ended / len(lines) > limits.max_ellipsis_lines:
            return "lines that end with an ellipsis"
        if kinds.count(_WITH_LETTER) / count < limits.min_words_with_letters:
            return "few words with letters"
        if len(limits.stop_words.intersection(words)) < limits.min_stop_words:
            return "few of the language's commonest words"
        return None

"""Filters of documents by their repetitions, words and lines, after Gopher and FineWeb.

The rules are Gopher's (Rae et al. 2021, arXiv:2112.11446, table A1) and FineWeb's (Penedo et al. 2024,
arXiv:2406.17557, section 3.6), as FineWeb2 applies them, with its limits of each language (Penedo et al.
2025, arXiv:2506.20920). With equal words datatrove's filters give the same verdicts
(`benchmarks/data/quality_filters.py`). Words are found once for all of them, and counted as numbers. numpy is
loaded when text is judged, because other cleaning does without it.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from kielo.corpus.step import DocumentFilter, SplitDocument
from kielo.recipe.quality_limits import QualityLimits

# Words, numbers and signs, about as spaCy has them: a hyphen parts words, an apostrophe does not.
TOKEN = regex.compile(
    r"\p{L}[\p{L}\p{M}\p{N}]*(?:['’][\p{L}\p{M}]+)*|\p{N}+(?:[.,:]\p{N}+)*|\.\.\.|[^\s\p{L}\p{N}]"
)
_ENDS_SENTENCE = regex.compile(r"\p{Sentence_Terminal}")
# The signs that make no word, as datatrove's PUNCTUATION_SET has them: "•" and "€" are none of them.
_SIGNS = regex.compile(
    r"""[\p{Cc}--[\t\n]]|[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～\p{Sentence_Terminal}]""",
    regex.V1,
)
_BULLETS, _ELLIPSES = ("•", "-"), ("...", "…")
_TOP, _REPEATED = (2, 3, 4), range(5, 11)  # lengths of n-grams in words
Numbers = Any  # an array of numpy, int64
_NUM_REMEMBERED = 1_000_000  # words whose kind a worker remembers


class Vocabulary(dict[str, int]):
    """Word → its number, by which a worker finds its kind and its length again.

    A kind is 2 if the word has a character that is no sign, plus 1 if it has a letter.
    """

    def __init__(self) -> None:
        self._kinds, self._lengths = array("b"), array("q")

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        is_sign = all(map(_SIGNS.fullmatch, word))
        self._kinds.append(0 if is_sign else 2 + any(map(str.isalpha, word)))
        self._lengths.append(len(word))
        return number

    def numbers(self, words: Sequence[str]) -> Numbers:
        import numpy as np

        if len(self) > _NUM_REMEMBERED:
            self.clear()
            self._kinds, self._lengths = array("b"), array("q")
        return np.fromiter(map(self.__getitem__, words), np.int64, len(words))

    def kinds(self, numbers: Numbers) -> Numbers:
        import numpy as np

        return np.frombuffer(self._kinds, np.int8)[numbers]

    def lengths(self, numbers: Numbers) -> Numbers:
        import numpy as np

        return np.frombuffer(self._lengths, np.int64)[numbers]


@dataclass(frozen=True)
class _NGrams:
    """The n-grams of a text that occur more than once: their places, in order, and their numbers."""

    n: int
    places: Numbers  # int64
    numbers: Numbers  # int64, from 0

    @classmethod
    def of_words(cls, ids: Numbers) -> "_NGrams":
        import numpy as np

        return cls(1, *_repeated(ids, np.arange(len(ids))))

    def longer(self) -> "_NGrams":
        """Return the n-grams of one word more. One is repeated only if both n-grams in it are."""
        import numpy as np

        is_followed = np.flatnonzero(self.places[1:] - self.places[:-1] == 1)
        keys = self.numbers[is_followed] * (len(self.places) + 1) + self.numbers[is_followed + 1]
        return _NGrams(self.n + 1, *_repeated(keys, self.places[is_followed]))

    def most_frequent(self) -> tuple[int, int]:
        """Return the place of the most frequent n-gram, the first of equals, and its number."""
        import numpy as np

        if not len(self.places):
            return 0, 1
        counts = np.bincount(self.numbers)[self.numbers]
        found = int(np.argmax(counts))
        return int(self.places[found]), int(counts[found])

    def repetitions(self) -> list[int]:
        """Return the places of n-grams that occurred before, without overlaps."""
        seen, found, free = set[int](), [], 0
        for place, number in zip(self.places.tolist(), self.numbers.tolist(), strict=True):
            if place < free:
                continue
            if number in seen:
                found.append(place)
                free = place + self.n
            seen.add(number)
        return found


def _repeated(keys: Numbers, places: Numbers) -> tuple[Numbers, Numbers]:
    """Number the keys that occur more than once. Return their places, and their numbers."""
    import numpy as np

    order = keys.argsort()
    ordered = keys[order]
    is_new = np.ones(len(keys) + 1, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:-1])
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = is_new[:-1].cumsum() - 1
    is_repeated = np.empty(len(keys), bool)
    is_repeated[order] = ~(is_new[:-1] & is_new[1:])
    return places[is_repeated], numbers[is_repeated]


class Figures:
    """Counts of a text's words, n-grams and lines for the rules, each made when it is asked for."""

    def __init__(self, text: str, words: Sequence[str], vocabulary: Vocabulary) -> None:
        self.text, self.words, self._vocabulary = text, words, vocabulary
        self.lines = [line for line in text.split("\n") if line.strip()]
        self._numbers = vocabulary.numbers(words)

    @cached_property
    def word_lengths(self) -> Numbers:
        return self._vocabulary.lengths(self._numbers)

    @cached_property
    def _characters_before(self) -> Numbers:
        import numpy as np

        return np.concatenate([[0], np.cumsum(self.word_lengths)])

    @cached_property
    def kinds(self) -> Numbers:
        return self._vocabulary.kinds(self._numbers)

    def characters(self, place: int, n: int) -> int:
        return int(self._characters_before[place + n] - self._characters_before[place])

    def characters_in(self, grams: _NGrams) -> int:
        """Count the characters of all words in the n-grams. Longer n-grams that are repeated lie in them."""
        import numpy as np

        if not len(grams.places):
            return 0
        ends = grams.places + grams.n
        ends[:-1] = np.minimum(ends[:-1], grams.places[1:])
        return int((self._characters_before[ends] - self._characters_before[grams.places]).sum())

    def ngrams(self) -> Iterator[_NGrams]:
        """Yield the n-grams of 1, 2, … words, as long as the rules need them and one is repeated."""
        grams = _NGrams.of_words(self._numbers)
        while grams.n <= len(self.words):
            yield grams
            if grams.n == _REPEATED[-1] or (grams.n >= _TOP[-1] and not len(grams.places)):
                return
            grams = grams.longer()

    @cached_property
    def repeated_lines(self) -> tuple[int, int]:
        """Return the number of lines that occurred before, and their characters."""
        seen = Counter(self.lines)
        repeated = {line: number - 1 for line, number in seen.items() if number > 1}
        return sum(repeated.values()), sum(len(line) * number for line, number in repeated.items())


@dataclass
class QualityFilter(DocumentFilter):
    """A filter of documents by the rules of `limits`, in the order of FineWeb2's filters."""

    name = "quality"
    limits: QualityLimits

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary()

    def judge(self, document: SplitDocument) -> str | None:
        text = document.join()
        return self.verdict(Figures(text, TOKEN.findall(text), self.vocabulary))

    def verdict(self, figures: Figures) -> str | None:
        """Return None, or the first rule that the text breaks."""
        if not figures.words or not figures.lines:
            return "no words"
        return self._repetitions(figures) or self._lines(figures) or self._words(figures)

    def _repetitions(self, figures: Figures) -> str | None:
        limits, size = self.limits, len(figures.text)
        # Empty lines part others here, and none is counted.
        if figures.repeated_lines[0] / len(figures.lines) > limits.max_repeated_lines:
            return "repeated lines"
        for grams in figures.ngrams():
            n = grams.n
            if n in _TOP:
                place, number = grams.most_frequent()
                characters = (figures.characters(place, n) + n - 1) * number
                if characters / size > limits.max_top_ngram[n - _TOP[0]]:
                    return f"one sequence of {n} words repeated"
            if n in _REPEATED:
                if figures.characters_in(grams) <= min(limits.max_repeated_ngrams) * size:
                    return None
                characters = sum(figures.characters(place, n) for place in grams.repetitions())
                if characters / size > limits.max_repeated_ngrams[n - _REPEATED[0]]:
                    return f"repeated sequences of {n} words"
        return None

    def _lines(self, figures: Figures) -> str | None:
        limits, lines = self.limits, figures.lines
        ended = sum(_ENDS_SENTENCE.match(line[-1]) is not None for line in lines)
        if ended / len(lines) < limits.min_ended_lines:
            return "few lines end with a sentence"
        characters = len(figures.text) - figures.text.count("\n")
        if figures.repeated_lines[1] / characters > limits.max_repeated_line_characters:
            return "repeated lines"
        if figures.text.count("\n") / len(figures.words) > limits.max_line_ends_per_word:
            return "lines of few words"
        return None

    def _words(self, figures: Figures) -> str | None:
        limits, text, count = self.limits, figures.text, len(figures.words)
        is_word = figures.kinds > 0
        if not limits.min_words <= (number := int(is_word.sum())) <= limits.max_words:
            return f"under {limits.min_words} words" if number < limits.min_words else "too many words"
        mean = float(figures.word_lengths[is_word].mean())
        if not limits.min_mean_word_length <= mean <= limits.max_mean_word_length:
            return "short words" if mean < limits.min_mean_word_length else "long words"
        ellipses = sum(map(text.count, _ELLIPSES))
        if max(text.count("#"), ellipses) / count > limits.max_signs_per_word:
            return "hashes or ellipses"
        lines = text.splitlines()
        if sum(line.lstrip().startswith(_BULLETS) for line in lines) / len(lines) > limits.max_bullet_lines:
            return "lists of bullets"
        if sum(line.rstrip().endswith(_ELLIPSES) for line in lines) / len(lines) > limits.max_ellipsis_lines:
            return "lines that end with an ellipsis"
        if int((figures.kinds == 3).sum()) / count < limits.min_words_with_letters:
            return "few words with letters"
        if len(limits.stop_words.intersection(figures.words)) < limits.min_stop_words:
            return "few of the language's commonest words"
        return None

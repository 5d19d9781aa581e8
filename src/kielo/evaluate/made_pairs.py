"""Minimal pairs that rules make from held-out sentences and the words of a corpus; no torch.

A rule changes one word, or two neighbours, in the middle of a sentence:

* `word_order`: two neighbouring words change places. The words of both sentences are the same.
* `suffix_swap`: a word gets another suffix that the corpus has with its stem, so that both are words. Pairs
  come in twos: each word is once the right word and once the wrong word. So a model that sees no context is
  right in half of the pairs.
* `wrong_ending`: a word gets a suffix with which its stem never occurs in the corpus, but similar stems do.
  Both words have the same number of tokens by the tokenizer of the run.

Suffixes are not listed by anybody. Two forms with a common stem of at least four letters are an alternation
of the rest, as "-d" and "-le". An alternation that at least ten stems have counts as grammar.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from kielo.evaluate.pair_files import Pair
from kielo.tokenizer.load import TextTokenizer, encode

LEAST_STEM, LONGEST_SUFFIX = 4, 4  # letters
LEAST_STEMS = 10  # of an alternation
LEAST_COUNT = 2  # of a form in the training text: most words that occur once are names and errors
MOST_FORMS = 50_000
MOST_OF_A_COUPLE = 4  # times that two forms are swapped
_WORDS, _MOST_CHARACTERS = (5, 30), 250  # of a sentence
_SENTENCE_END = re.compile(r"(?<=[.!?…։।])\s+")


@dataclass(frozen=True)
class MadePairs:
    pairs: tuple[Pair, ...]  # their group is the rule
    num_sentences: int  # held-out sentences that the rules saw
    num_in_training: int  # sentences left out because the training text has them too


@dataclass(frozen=True)
class Morphology:
    """Words of a corpus, and suffixes that change places in them."""

    words: frozenset[str]
    forms: frozenset[str]  # words that are frequent enough to be changed
    partners: dict[str, tuple[str, ...]]  # suffix → suffixes that as many stems have in its place

    def splits(self, form: str) -> Iterator[tuple[str, str]]:
        """Yield the stems and suffixes that a form can have."""
        for length in range(min(LONGEST_SUFFIX, len(form) - LEAST_STEM) + 1):
            stem, suffix = form[: len(form) - length], form[len(form) - length :]
            if suffix in self.partners:
                yield stem, suffix


@dataclass(frozen=True)
class _Word:
    """A word in the middle of a sentence."""

    sentence: int
    place: int
    form: str


def make_pairs(
    heldout: Sequence[str], training: Sequence[str], tokenizer: TextTokenizer, wanted: int, seed: int
) -> MadePairs:
    """Make `wanted` pairs by each rule, or as many as the held-out texts have.

    Each rule changes a sentence once at most.
    """
    found = dict.fromkeys(sentence for text in heldout for sentence in sentences_of(text))
    known = {sentence for text in training for sentence in sentences_of(text) if sentence in found}
    sentences = [sentence.split(" ") for sentence in found if sentence not in known]
    morphology = learn_morphology(training, heldout)
    pairs: list[Pair] = []
    for number, (name, rule) in enumerate(RULES.items()):
        made = rule(sentences, morphology, tokenizer, np.random.default_rng([seed, number]))
        pairs += [Pair(good, bad, name) for good, bad in islice(made, wanted)]
    return MadePairs(tuple(pairs), len(sentences), len(known))


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a text with 5 to 30 words between single spaces."""
    for line in text.splitlines():
        for part in _SENTENCE_END.split(line):
            sentence = " ".join(part.split())
            if len(sentence) <= _MOST_CHARACTERS and _WORDS[0] <= sentence.count(" ") + 1 <= _WORDS[1]:
                yield sentence


def learn_morphology(texts: Iterable[str], others: Iterable[str] = ()) -> Morphology:
    """Learn forms and suffixes from texts. Words of `others` are only known as words."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    more = {word for text in others for word in text.split() if is_word(word)}
    words = {word: count for word, count in counts.items() if is_word(word)}
    frequent = sorted((word for word in words if len(word) >= LEAST_STEM and words[word] >= LEAST_COUNT),
                      key=lambda word: (-words[word], word))[:MOST_FORMS]  # fmt: skip
    stems: defaultdict[str, list[str]] = defaultdict(list)
    for form in sorted(frequent):
        for length in range(min(LONGEST_SUFFIX, len(form) - LEAST_STEM) + 1):
            stems[form[: len(form) - length]].append(form[len(form) - length :])
    alternations: Counter[tuple[str, str]] = Counter()
    for suffixes in stems.values():
        alternations.update(_alternate(suffixes))
    partners: defaultdict[str, list[str]] = defaultdict(list)
    for (one, other), count in sorted(alternations.items()):
        if count >= LEAST_STEMS:
            partners[one].append(other)
            partners[other].append(one)
    kept = {suffix: tuple(sorted(others)) for suffix, others in partners.items()}
    return Morphology(frozenset(words) | more, frozenset(frequent), kept)


def is_word(text: str) -> bool:
    """Return True for letters and their marks alone."""
    return text.isalpha() or (bool(text) and all(unicodedata.category(one)[0] in "LM" for one in text))


def _alternate(suffixes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the suffixes of one stem by two, if they have no letter in common that belongs to the stem."""
    for one, other in combinations(sorted(set(suffixes)), 2):
        if one[:1] != other[:1]:
            yield one, other


Sentences = Sequence[Sequence[str]]
Made = Iterator[tuple[str, str]]  # good and bad sentences


def _word_order(sentences: Sentences, _: Morphology, __: TextTokenizer, random: np.random.Generator) -> Made:
    for number in random.permutation(len(sentences)):
        words = sentences[number]
        places = [
            place
            for place in range(1, len(words) - 2)
            if words[place] != words[place + 1] and is_word(words[place]) and is_word(words[place + 1])
        ]
        if places:
            place = places[random.integers(len(places))]
            one, other = words[place : place + 2]
            yield " ".join(words), " ".join([*words[:place], other, one, *words[place + 2 :]])


def _suffix_swap(
    sentences: Sentences, morphology: Morphology, _: TextTokenizer, random: np.random.Generator
) -> Made:
    places: defaultdict[str, list[_Word]] = defaultdict(list)
    for word in _middles(sentences, morphology, random):
        places[word.form].append(word)
    stems: defaultdict[str, set[str]] = defaultdict(set)
    for form in places:
        for stem, suffix in morphology.splits(form):
            stems[stem].add(suffix)
    couples = sorted(
        (stem + one, stem + other)
        for stem, suffixes in stems.items()
        for one, other in _alternate(suffixes)
        if other in morphology.partners[one]
    )
    couples = [couples[number] for number in random.permutation(len(couples))]
    used: set[int] = set()
    for _turn in range(MOST_OF_A_COUPLE):
        for couple in couples:
            right = [next((w for w in places[form] if w.sentence not in used), None) for form in couple]
            if right[0] and right[1] and right[0].sentence != right[1].sentence:
                used |= {right[0].sentence, right[1].sentence}
                yield _changed(sentences, right[0], couple[1])
                yield _changed(sentences, right[1], couple[0])


def _wrong_ending(
    sentences: Sentences, morphology: Morphology, tokenizer: TextTokenizer, random: np.random.Generator
) -> Made:
    used: set[int] = set()
    for word in _middles(sentences, morphology, random):
        if word.sentence in used:
            continue
        wrong = [
            stem + other
            for stem, suffix in morphology.splits(word.form)
            for other in morphology.partners[suffix]
            if not {stem + other, (stem + other).lower(), (stem + other).capitalize()} & morphology.words
        ]
        rows = encode(tokenizer, [f" {form}" for form in (word.form, *wrong)])
        wrong = [form for form, row in zip(wrong, rows[1:], strict=True) if len(row) == len(rows[0])]
        if wrong:
            used.add(word.sentence)
            yield _changed(sentences, word, wrong[random.integers(len(wrong))])


def _middles(sentences: Sentences, morphology: Morphology, random: np.random.Generator) -> Iterator[_Word]:
    """Yield the frequent words of sentences, neither the first word nor the last, in random order."""
    found = [
        _Word(number, place, words[place])
        for number, words in enumerate(sentences)
        for place in range(1, len(words) - 1)
        if words[place] in morphology.forms
    ]
    for number in random.permutation(len(found)):
        yield found[number]


def _changed(sentences: Sentences, word: _Word, form: str) -> tuple[str, str]:
    words = sentences[word.sentence]
    return " ".join(words), " ".join([*words[: word.place], form, *words[word.place + 1 :]])


RULES = {"word_order": _word_order, "suffix_swap": _suffix_swap, "wrong_ending": _wrong_ending}

"""Part of speech by frozen states: scikit-learn's logistic regression from an encoder's states to tags.

The encoder is not trained, so the classifier finds only what its states already contain. A word of several
tokens has the state of the first token, or the mean of all.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.scores import PartOfSpeechScores
from kielo.evaluate.encoder import Encoder, by_length
from kielo.evaluate.texts import evenly, text_lines
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import PartOfSpeech

MOST_TRAINING_WORDS = 100_000
_MOST_ITERATIONS = 1000

# CoNLL-U, the format of Universal Dependencies: a file → sentences of words with their places and tags.
#
# Ten columns a word, separated by tabs, and a blank line after each sentence. Comments begin with `#`. A word
# here is a syntactic word. A token of several words (`3-4`) stands for its words, which are all in its place.
# Empty nodes (`5.1`) are left out. https://universaldependencies.org/format.html

_COLUMNS, _FORM, _UPOS, _MISC = 10, 1, 3, 9
_WORD, _RANGE = re.compile(r"[0-9]+"), re.compile(r"([0-9]+)-([0-9]+)")
_EMPTY_NODE = re.compile(r"[0-9]+\.[0-9]+")


@dataclass
class Sentence:
    text: str = ""  # as it was written
    places: list[tuple[int, int]] = field(default_factory=list)  # (begin, end) of each word, in characters
    words: list[str] = field(default_factory=list)  # the form of each
    tags: list[str] = field(default_factory=list)  # universal part of speech of each


def read_sentences(path: Path) -> list[Sentence]:
    """Read the sentences of a file. Raise KieloError, with file and line, for a damaged sentence."""
    sentences = list(_sentences(path))
    if not sentences:
        raise KieloError(f"{path}: has no sentence in CoNLL-U")
    return sentences


def _sentences(path: Path) -> Iterator[Sentence]:
    sentence, last_of_range, space, place = Sentence(), 0, "", (0, 0)
    for number, line in text_lines(path):
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


def score_part_of_speech(encoder: Encoder, settings: PartOfSpeech) -> PartOfSpeechScores:
    """Learn from at most about 100,000 words of one file, and score the sentences of another file.

    Raise KieloError if scikit-learn is missing, the model lacks the layer, a file is damaged or the training
    file has one tag only.
    """
    classifier = _classifier()
    num_layers = len(encoder.contender.module.layers)
    layer = num_layers if settings.from_layer is None else settings.from_layer
    if layer > num_layers:
        raise KieloError(
            f"evaluate.part_of_speech.from_layer = {layer}: the model has {num_layers} layers. "
            f"Fix: 1 to {num_layers}"
        )
    training, heldout = (read_sentences(Path(path).expanduser()) for path in (settings.train, settings.dev))
    share = MOST_TRAINING_WORDS / sum(len(one.words) for one in training)
    training = list(evenly(training, share))
    tags = [tag for one in training for tag in one.tags]
    if len(set(tags)) < 2:
        raise KieloError(f"{settings.train}: only the tag {tags[0]}. Fix: sentences with two tags or more")
    classifier.fit(word_states(encoder, training, layer, settings.pieces), tags)
    predicted = classifier.predict(word_states(encoder, heldout, layer, settings.pieces))
    wanted = np.array([tag for one in heldout for tag in one.tags])
    return PartOfSpeechScores(
        accuracy=float((predicted == wanted).mean()),
        baseline=float((np.array(_most_frequent_tags(training, heldout)) == wanted).mean()),
        words=len(wanted),
        training_words=len(tags),
        tags=len(set(tags)),
        layer=layer,
        pieces=settings.pieces,
    )


def word_states(encoder: Encoder, sentences: Sequence[Sentence], layer: int, pieces: str) -> np.ndarray:
    """Return the states of all words in order, fp32 [words, d], or 0 for a word without a token.

    A sentence that is longer than a sequence is read in parts.
    """
    parts = list(_parts(encoder, sentences))
    first_words = np.cumsum([0, *(len(one.words) for one in sentences)])
    sums = np.zeros((first_words[-1], encoder.contender.module.config.hidden_size), np.float32)
    counts = np.zeros(first_words[-1], np.int64)
    for together in by_length(len(parts), lambda one: len(parts[one][1])):
        inputs = np.stack([encoder.sequence(parts[one][1]) for one in together])
        states = encoder.states(inputs, layer).cpu().numpy()[:, len(encoder.first) :]
        for state, (sentence, _, words_of_tokens) in zip(
            states, (parts[one] for one in together), strict=False
        ):
            for token, words in enumerate(words_of_tokens):
                for word in first_words[sentence] + np.array(words, np.int64):
                    if pieces == "mean" or not counts[word]:
                        sums[word] += state[token]
                        counts[word] += 1
    return sums / np.maximum(counts, 1)[:, None]


def _parts(
    encoder: Encoder, sentences: Sequence[Sentence]
) -> Iterator[tuple[int, list[int], list[list[int]]]]:
    """Yield (sentence, ids, the words in the place of each id) of parts that are at most one sequence."""
    tokenizer = encoder.contender.tokenizer.for_text.tokenizer
    encodings = tokenizer.encode_batch([one.text for one in sentences], add_special_tokens=False)
    for number, (sentence, encoding) in enumerate(zip(sentences, encodings, strict=True)):
        words = [
            [word for word, (begin, end) in enumerate(sentence.places) if begin < last and first < end]
            for first, last in encoding.offsets
        ]
        for start in range(0, len(words), encoder.most_tokens):
            part = slice(start, start + encoder.most_tokens)
            yield number, encoding.ids[part], words[part]


def _most_frequent_tags(training: Sequence[Sentence], heldout: Sequence[Sentence]) -> list[str]:
    """Return each held-out word's most frequent training tag; for unknown words the most frequent of all."""
    of_word: dict[str, Counter[str]] = defaultdict(Counter)
    for sentence in training:
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            of_word[word][tag] += 1
    usual = sum(of_word.values(), Counter())
    return [(of_word.get(word) or usual).most_common(1)[0][0] for one in heldout for word in one.words]


def _classifier() -> Any:
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise KieloError(
            "evaluate.part_of_speech needs scikit-learn. Fix: pip install 'kielo[tagging]', or "
            "a recipe without this table"
        ) from None
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=_MOST_ITERATIONS))

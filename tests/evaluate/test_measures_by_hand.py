"""Measures of encoders on a model whose probabilities and states are known: sums and shares by hand."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kielo.evaluate import part_of_speech
from kielo.evaluate.encoder import Encoder
from kielo.evaluate.pair_files import read_pairs
from kielo.evaluate.part_of_speech import Sentence, score_part_of_speech, word_states
from kielo.evaluate.pseudo_likelihood import pseudo_bits_per_byte, score_minimal_pairs
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import PartOfSpeech
from tests.evaluate.test_encoder import CONTROL, SIZE, WORDS, words

NUMBER = {name: number for number, name in enumerate(CONTROL + WORDS)}


def nats(*tokens: str) -> float:
    """A text begins at place 2; at place p token t has 1 + (t - p) mod 10 of 55 parts."""
    parts = (1 + (NUMBER[token] - 2 - place) % SIZE for place, token in enumerate(tokens))
    return sum(math.log(part / 55) for part in parts)


@pytest.mark.parametrize(
    ("num_tokens", "texts"),
    [(1, 1), (2, 1), (3, 2), (5, 2), (6, 3), (99, 3)],
)
def test_documents_are_scored_until_enough_tokens_are_hidden(num_tokens: int, texts: int) -> None:
    """Texts without a token are passed over; bits are those of all tokens, for each byte of the text."""
    documents = ["tere leht", "", "vali abc maailm", "tere tere leht vali"]
    found = pseudo_bits_per_byte(words(40), documents, num_tokens)
    rows = [document.split() for document in documents if document][:texts]
    total, tokens = -sum(nats(*row) for row in rows), sum(map(len, rows))
    num_bytes = sum(len(" ".join(row)) for row in rows)
    assert (found.texts, found.tokens, found.bytes) == (texts, tokens, num_bytes)
    assert found.token == found.within_word == pytest.approx(total / math.log(2) / num_bytes, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_a_pair_that_is_too_long_is_told_with_the_limit(tmp_path: Path) -> None:
    """Four tokens fit a sequence of seven; of six they do not."""
    path = tmp_path / "pairs.tsv"
    path.write_text("phenomenon\tsen\twrong_sen\nword\ttere leht vali abc\tleht tere\n\ttere\tleht\textra\n")
    assert [tuple(pair) for pair in read_pairs(path)] == [
        ("tere leht vali abc", "leht tere", "word", ""), ("tere", "leht", "", ""),
    ]  # fmt: skip
    scores = score_minimal_pairs(words(7), path)
    right = [nats("tere", "leht", "vali", "abc") > nats("leht", "tere"), nats("tere") > nats("leht")]
    assert right == [False, False] and scores.all.pairs == 2 and scores.all.token == 0
    assert scores.file == "pairs.tsv" and list(scores.groups) == ["word"] and scores.groups["word"].pairs == 1
    path.write_text("sen\twrong_sen\nleht\ttere\n")
    assert nats("leht") > nats("tere") and score_minimal_pairs(words(7), path).all.token == 1
    path.write_text("sen\twrong_sen\nleht\ttere leht vali abc\n")
    with pytest.raises(KieloError) as caught:
        score_minimal_pairs(words(6), path)
    assert str(caught.value) == (
        f"{path}: a sentence has 4 tokens and a sequence 3: 'tere leht vali abc'. Fix: a file "
        "without such pairs, or a model of a longer dataset.sequence_length"
    )


class States(torch.nn.Module):
    """A model of two layers: a token's state is 1 at its number, and twice as much after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=SIZE)
        self.layers = torch.nn.ModuleDict({"0": torch.nn.Identity(), "1": Doubled()})

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        states = torch.nn.functional.one_hot(tokens_bs, SIZE).float()
        for layer in self.layers.values():
            states = layer(states)
        return states


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def with_states(sequence_length: int) -> Encoder:
    encoder = words(sequence_length)
    return replace(encoder, contender=replace(encoder.contender, module=States()))


def sentence(*pairs: tuple[str, str]) -> Sentence:
    """Words, with a space between, and their tags."""
    found = Sentence()
    for word, tag in pairs:
        found.text += " " if found.words else ""
        found.places.append((len(found.text), len(found.text) + len(word)))
        found.text += word
        found.words.append(word)
        found.tags.append(tag)
    return found


def state(*tokens: str) -> np.ndarray:
    return sum(np.eye(SIZE)[NUMBER[token]] for token in tokens)


@pytest.mark.parametrize("sequence_length", [40, 6, 4])
def test_words_have_states_by_hand(sequence_length: int) -> None:
    """In one part, in parts of three tokens, and of one; a word without letters in the text has none."""
    first, second = sentence(("tere?maailm", "X"), ("abc", "Y"), ("leht", "X")), sentence(("vali", "Y"))
    first.places.append((4, 4))
    first.words.append("")
    encoder = with_states(sequence_length)
    found = word_states(encoder, [first, second], 1, "mean")
    expected = [state("tere", "?", "maailm") / 3, state("abc"), state("leht"), 0 * state("?"), state("vali")]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    expected[0] = state("tere")
    np.testing.assert_allclose(word_states(encoder, [first, second], 1, "first"), expected)
    doubled = word_states(encoder, [first, second], 2, "first")
    np.testing.assert_allclose(doubled, 2 * np.array(expected))


def test_tags_stand_beside_those_of_a_list_of_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A known word has its most frequent tag, an unknown one the most frequent of all: 3 of 5 are right. The
    classifier is scikit-learn's on the states.
    """
    linear = pytest.importorskip("sklearn.linear_model")
    pipeline, scaling = pytest.importorskip("sklearn.pipeline"), pytest.importorskip("sklearn.preprocessing")
    training = [
        sentence(("tere", "X"), ("leht", "Y")),
        sentence(("tere", "X"), ("vali", "X")),
        sentence(("leht", "X"), ("leht", "Y")),
    ]
    heldout = [
        sentence(("leht", "Y"), ("abc", "X")),
        sentence(("vali", "Y"), ("maailm", "Y"), ("tere", "X")),
    ]
    files = {tmp_path / "train": training, tmp_path / "dev": heldout}
    monkeypatch.setattr(part_of_speech, "read_sentences", files.__getitem__)
    settings = PartOfSpeech(train=str(tmp_path / "train"), dev=str(tmp_path / "dev"))
    for most, number in ((6, 3), (3, 2)):
        monkeypatch.setattr(part_of_speech, "MOST_TRAINING_WORDS", most)
        taken = training[:number]
        x, y, wanted = (
            [state(word) * 2 for one in taken for word in one.words],
            [tag for one in taken for tag in one.tags],
            [tag for one in heldout for tag in one.tags],
        )
        model = pipeline.make_pipeline(scaling.StandardScaler(), linear.LogisticRegression()).fit(x, y)
        predicted = model.predict([state(word) * 2 for one in heldout for word in one.words])
        scores = score_part_of_speech(with_states(40), settings)
        assert scores.accuracy == pytest.approx((predicted == np.array(wanted)).mean())
        assert (scores.baseline, scores.words, scores.training_words, scores.tags) == (0.6, 5, 2 * number, 2)
        assert (scores.layer, scores.pieces) == (2, settings.pieces)
    for layer in (1, 2):
        given = settings.model_copy(update={"from_layer": layer})
        assert score_part_of_speech(with_states(40), given).layer == layer
    files[tmp_path / "train"] = [sentence(("tere", "X"))]
    with pytest.raises(KieloError) as caught:
        score_part_of_speech(with_states(40), settings)
    told = f"{tmp_path / 'train'}: only the tag X. Fix: sentences with two tags or more"
    assert str(caught.value) == told

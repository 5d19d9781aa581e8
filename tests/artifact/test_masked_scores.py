"""Scores of hidden tokens: counts that are of something, fillings as people read them."""

import pytest
from pydantic import ValidationError

from kielo.artifact.scores import (
    Accuracy,
    FilledMask,
    Filling,
    MaskedScores,
    PairAccuracy,
    PartOfSpeechScores,
    PseudoBitsPerByte,
)


def test_scores_of_hidden_tokens_are_of_something() -> None:
    """Counts from 1; baselines that were measured; fillings as people read them."""
    assert Accuracy(model=0.4, unigram=0.1, bigram=0.2).baselines() == {"unigram": 0.1, "bigram": 0.2}
    filled = FilledMask(before="a ", after=" c", truth=None, fillings=[
        Filling(text="b", probability=0.256), Filling(text="d", probability=0.004),
    ])  # fmt: skip
    assert (filled.sentence(), filled.likeliest()) == ("a ____ c", "b 26 %, d 0 %")
    pairs = {"pairs": 1, "token": 0.5, "within_word": 0.5}
    bits = {"token": 1.0, "within_word": 1.0, "perplexity": 2.0, "texts": 1, "tokens": 1, "bytes": 1}
    tags = {
        "accuracy": 0.5, "baseline": 0.5, "words": 1, "training_words": 1, "tags": 2,
        "layer": 1, "pieces": "mean",
    }  # fmt: skip
    scores = {
        "model": "x", "accuracy": Accuracy(model=0.4, unigram=0.1, bigram=0.2), "loss": 1.0,
        "hidden_tokens": 1, "sequences": 1, "sequence_length": 16, "masking": "span", "masking_rate": 0.15,
        "seed": 1,
    }  # fmt: skip
    for kind, values, counts in (
        (PairAccuracy, pairs, ("pairs",)), (PseudoBitsPerByte, bits, ("texts", "tokens", "bytes")),
        (PartOfSpeechScores, tags, ("words", "training_words")),
        (MaskedScores, scores, ("hidden_tokens", "sequences")),
    ):  # fmt: skip
        kind(**values)
        for count in counts:
            with pytest.raises(ValidationError, match=count):
                kind(**values | {count: 0})

"""Keys of [model] and [tokenizer] that something else replaces, and sizes at the borders of what fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kielo.recipe.phases import full_phases
from kielo.recipe.sections import Model, Tokenizer
from kielo.resolve.complete_model import (
    complete_model,
    model_of_weights_here,
    overridden_by_tokenizer,
    overridden_by_weights,
    overridden_in_words,
    size_of_ready_tokenizer,
)
from kielo.resolve.rules import MODEL_RULES, Case, Machine, complaints
from tests.resolve.test_resolve import finish_tokenizer, recipe

CONFIG = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "vocab_size": 1000, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{tmp_path}"


def completed(vocabulary: int, *lengths: int, **model: Any) -> tuple[Model, list[str]]:
    """The model for a tokenizer of so many tokens and phases of these lengths, and what is complained of."""
    one = recipe(model=model)
    phases = tuple(replace(full_phases(one)[0], sequence_length=length) for length in lengths)
    made = complete_model(one, phases, vocabulary)
    return made, complaints(Case(one, made, Machine(), phases, vocabulary), MODEL_RULES)


def test_sizes_that_do_not_fit_are_refused_and_those_that_just_do_are_not() -> None:
    """As many tokens as the tokenizer has, and as many positions as the longest phase."""
    found, said = completed(300, 32, 64, 16)
    assert (found.vocab_size, found.max_position_embeddings) == (300, 64) and not said
    found, said = completed(300, 32, 64, vocab_size=300, max_position_embeddings=64)
    assert (found.vocab_size, found.max_position_embeddings) == (300, 64) and not said
    found, said = completed(300, 32, 64, vocab_size=299, max_position_embeddings=63)
    assert said == [
        "model.vocab_size = 299 is less than the tokenizer's 300 tokens. Fix: 300 or more",
        "dataset.sequence_length = 64 is more than model.max_position_embeddings = 63. Fix: a "
        "sequence_length of at most 63",
    ]
    assert completed(300, 64, vocab_size=301, max_position_embeddings=65)[1] == []


def test_keys_beside_weights_are_named_where_config_json_says_otherwise(weights: str) -> None:
    """Not those with the same value, nor those that belong to the recipe in any case."""
    given = Model(
        weights=weights, hidden_size=48, num_hidden_layers=5, num_attention_heads=4, vocab_multiple=9
    )
    assert overridden_by_weights(given) == ["num_hidden_layers", "num_attention_heads"]
    assert overridden_in_words(given) == (
        f"not used, because config.json of {weights} replaces it: model.num_hidden_layers = 5 (3 there), "
        "model.num_attention_heads = 4 (6 there)"
    )
    assert model_of_weights_here(given).num_hidden_layers == 3
    same = Model(weights=weights, hidden_size=48, vocab_multiple=9)
    assert overridden_by_weights(same) == [] and overridden_in_words(same) == ""


def test_without_config_json_all_given_keys_are_named() -> None:
    """Weights that are not here yet; none where the model has no weights."""
    away = Model(weights="hf:org/model_that_nobody_has", hidden_size=48, vocab_multiple=9)
    assert model_of_weights_here(away) is None and overridden_by_weights(away) == ["hidden_size"]
    assert overridden_in_words(away) == (
        "not used, because config.json of hf:org/model_that_nobody_has replaces it: model.hidden_size = 48"
    )
    plain = Model(hidden_size=48)
    assert overridden_by_weights(plain) == [] and overridden_in_words(plain) == ""
    assert model_of_weights_here(plain) is None


def test_a_ready_tokenizer_is_not_trained(tmp_path: Path) -> None:
    """All keys but its place and what frames its texts are without effect; its size is read if it is here."""
    finish_tokenizer(tmp_path / "tokenizer", 321, largest_id=320, end_of_text_id=0)
    ready = Tokenizer(path=str(tmp_path / "tokenizer"))
    assert overridden_by_tokenizer(Tokenizer()) == []
    assert overridden_by_tokenizer(ready) == [
        key for key in Tokenizer.model_fields if key not in ("path", "bos", "eos")
    ]
    assert size_of_ready_tokenizer(ready) == 321
    assert size_of_ready_tokenizer(Tokenizer(path=str(tmp_path / "nothing"))) is None

"""Usual settings of a training by its size: GPT-3's table, and what an idea of a recipe is filled with."""

import pytest

from kielo.plan.idea import (
    UsualTraining,
    flops_of_device_hours,
    parameters_asked,
    tokens_of_device_hours,
    usual_training,
    with_usual_training,
)
from kielo.recipe.sections import Recipe

MUCH = 10**13  # tokens, of which no step is too large


def idea(**more) -> Recipe:
    corpus = {"sources": [{"name": "a", "path": "a.txt"}]}
    return Recipe.model_validate({"name": "mine", "language": "et", "corpus": corpus} | more)


@pytest.mark.parametrize(
    ("parameters", "tokens_per_step", "rate"),
    [
        (125_000_000, 2**19, 6e-4), (350_000_000, 2**19, 3e-4), (760_000_000, 2**19, 2.5e-4),
        (1_300_000_000, 2**20, 2e-4), (2_700_000_000, 2**20, 1.6e-4), (6_700_000_000, 2**21, 1.2e-4),
        (13_000_000_000, 2**21, 1e-4), (175_000_000_000, 2**22, 6e-5),
        # between two sizes the nearer one by its ratio: their geometric mean is 209.2 million
        (209_000_000, 2**19, 6e-4), (209_400_000, 2**19, 3e-4),
        # 993.98 million, and 47.7 billion
        (993_900_000, 2**19, 2.5e-4), (994_100_000, 2**20, 2e-4),
        (47_690_000_000, 2**21, 1e-4), (47_700_000_000, 2**22, 6e-5),
        (60_000_000, 2**19, 6e-4), (59_999_999, 2**19, 1e-3),
    ],
)  # fmt: skip
def test_steps_are_those_of_gpt_3(parameters, tokens_per_step, rate):
    """Brown et al. 2020, table 2.1, with steps as powers of two; small models learn faster."""
    found = usual_training(parameters, MUCH)
    assert (found.tokens_per_step, found.learning_rate) == (tokens_per_step, rate)


@pytest.mark.parametrize(
    ("parameters", "vocabulary", "length"),
    [
        (30_000_000, 8192, 512), (30_000_001, 32_000, 1024), (300_000_000, 32_000, 1024),
        (300_000_001, 65_536, 2048), (1_200_000_000, 65_536, 2048), (1_200_000_001, 131_072, 4096),
    ],
)  # fmt: skip
def test_vocabularies_and_sequences_grow_with_the_model(parameters, vocabulary, length):
    found = usual_training(parameters, MUCH)
    assert (found.vocabulary_size, found.sequence_length) == (vocabulary, length)


@pytest.mark.parametrize(
    ("parameters", "tokens", "step", "whole"),
    [
        # 20 tokens a parameter: 200 million, of which 2^17 are a thousandth or less
        (10_000_000, None, 131_072, 1525 * 131_072),
        (100_000_000, None, 2**19, 3814 * 2**19),
        (1_000_000_000, 65_536_000, 65_536, 65_536_000), (1_000_000_000, 65_535_999, 32_768, 1999 * 32_768),
        # eight sequences of 2,048 are the least of a step, and one step of a run
        (1_000_000_000, 16_384_000 - 1, 16_384, 999 * 16_384), (1_000_000_000, 1000, 16_384, 16_384),
    ],
)  # fmt: skip
def test_a_short_run_has_a_thousand_whole_steps(parameters, tokens, step, whole):
    found = usual_training(parameters, tokens)
    assert (found.tokens_per_step, found.tokens) == (step, whole)


def test_device_hours_are_flops_at_35_of_100():
    """10 hours at 100 TFLOP/s are 3.6e18 at best; 6 FLOPs a parameter and token."""
    assert flops_of_device_hours(10, 100) == pytest.approx(1.26e18)
    assert tokens_of_device_hours(10, 10**9, 100) == 210_000_000


def test_an_idea_is_filled_with_what_is_usual_and_told():
    """Of 100 million parameters: 2 billion tokens in whole steps of 2^19."""
    made, (told,) = with_usual_training(idea(model={"params": "100M"}))
    assert (made.tokenizer.vocab_size, made.dataset.sequence_length) == (32_000, 1024)
    train = made.train
    assert (train.tokens, train.tokens_per_step, train.learning_rate) == (1_999_634_432, 524_288, 6e-4)
    assert told == (
        "not set in the recipe, so as usual for this size: train.tokens = 1_999_634_432 (20 a parameter), "
        "tokens_per_step = 524_288, learning_rate = 0.0006, sequences of 1_024, 32_000 tokens in the "
        "vocabulary"
    )


def test_what_a_recipe_says_itself_stays():
    """Steps have at least one of its sequences, and the tokens are whole steps of its own."""
    dataset, model = {"sequence_length": 1_000_000}, {"params": "100M", "vocab_size": 50_000}
    made, (told,) = with_usual_training(idea(dataset=dataset, model=model))
    assert made.train.tokens_per_step == 1_000_000 and made.train.tokens == 1_999_000_000
    assert "vocab_size" not in made.tokenizer.model_fields_set
    # and nothing that it says is told again
    assert told.endswith("tokens_per_step = 1_000_000, learning_rate = 0.0006")
    train = {"tokens_per_step": 3 * 2**30, "learning_rate": 0.25}
    tokenizer = {"vocab_size": 12_345}
    made, (told,) = with_usual_training(idea(train=train, model={"params": "100M"}, tokenizer=tokenizer))
    assert made.train.tokens == made.train.tokens_per_step == 3 * 2**30
    assert made.train.learning_rate == 0.25 and told.endswith("(20 a parameter), sequences of 1_024")


@pytest.mark.parametrize(
    "more", [{"train": {"tokens": 4096}}, {"model": {"weights": "hf:org/one"}}], ids=["budget", "weights"]
)
def test_a_recipe_with_a_budget_or_weights_is_left_alone(more):
    recipe = idea(**more)
    assert with_usual_training(recipe) == (recipe, [])


@pytest.mark.parametrize(
    ("more", "step", "length", "vocabulary"),
    [
        ({}, 2**22, 4096, 131_072),
        ({"train": {"tokens_per_step": 2**23}}, 2**23, 4096, 131_072),
        ({"train": {"tokens_per_step": 1024}}, 1024, 1024, 131_072),
        ({"train": {"tokens_per_step": 6144}}, 6144, 3072, 131_072),
        ({"dataset": {"sequence_length": 3000}}, 1398 * 3000, 3000, 131_072),
        ({"dataset": {"sequence_length": 2048}}, 2**22, 2048, 131_072),
        ({"tokenizer": {"vocab_size": 50_000}}, 2**22, 4096, 50_000),
    ],
)
def test_an_idea_with_a_budget_is_filled_key_by_key(more, step, length, vocabulary):
    """An idea of 70 billion parameters has the steps of GPT-3's 175 billion."""
    train = more.get("train", {}) | {"tokens": 4 * 10**12}
    made, (told,) = with_usual_training(
        idea(model={"params": "70B"}, **more | {"train": train}), is_idea=True
    )
    assert made.dataset.sequence_length == length and made.tokenizer.vocab_size == vocabulary
    assert (made.train.tokens, made.train.tokens_per_step) == (4 * 10**12, step)
    assert made.train.learning_rate == 6e-5 and "train.tokens =" not in told


def test_an_idea_with_phases_has_their_budget():
    """84 million tokens: the largest power of two that makes a thousand steps of them is 2^16."""
    phases = [{"tokens": 10 * 2**22}] * 2
    made, _ = with_usual_training(idea(model={"params": "70B"}, phases=phases), is_idea=True)
    assert made.train.tokens is None and made.train.tokens_per_step == 2**16


def test_parameters_are_asked_for_by_number_or_by_shape():
    """Two tables of 8 columns, three layers of 4 × 8 × 8 and 3 × 8 × 24 weights, and seven norms."""
    shape = {
        "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    layers = 3 * (4 * 64 + 3 * 8 * 24) + 7 * 8
    assert parameters_asked(idea(model=shape | {"vocab_size": 50})) == 2 * 50 * 8 + layers
    assert parameters_asked(idea(model=shape, tokenizer={"vocab_size": 300})) == 2 * 300 * 8 + layers
    assert parameters_asked(idea(model={"params": "7M"})) == 7_000_000
    assert usual_training(7_000_000, MUCH) == UsualTraining(8192, 512, 2**19, 1e-3, MUCH // 2**19 * 2**19)

"""Advice for a compute budget, where the best choices are made up; and numbers that follow from laws."""

import math

import pytest

from kielo.plan import scaling_laws as room
from kielo.plan.scaling_laws import (
    CHINCHILLA,
    Choice,
    advise,
    best_repeated,
    of_size,
    parameters_of,
    repeated,
)
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe

FLOPS, UNIQUE = 6 * 1.2e9 * 40e9, 2_000_000_000


def best_of(tokens: float):
    """The law's answers: `tokens` of the text; a tenth of the budget and ten texts differ by 0.2 and 0.4."""

    def best(flops: float, unique: float) -> Choice:
        loss = 2.7 if flops < FLOPS else 2.1 if unique > UNIQUE else 2.5
        return Choice(1.2e9, tokens, unique, loss)

    return best


def test_the_best_reads_the_text_twenty_times(monkeypatch):
    """Four times are 8 billion tokens, for which the budget trains 6 billion parameters."""
    monkeypatch.setattr(room, "best_repeated", best_of(40e9))
    found = advise(FLOPS, UNIQUE, 4)
    four, sixteen = repeated(6e9, 8e9, 2e9), repeated(1.5e9, 32e9, 2e9)
    assert [(row.what, row.law) for row in found.rows] == [
        ("unlimited text", "Chinchilla"), ("this text", "repetition"), ("4 epochs", "repetition"),
        ("16 epochs", "repetition"),
    ]  # fmt: skip
    assert found.rows[0].choice == CHINCHILLA.optimum(FLOPS)
    assert [row.choice for row in found.rows[2:]] == [four, sixteen] and found.complaints == ()
    assert found.sentences == (
        "The best length reads the text 20 times, and dataset.max_epochs = 4 refuses this before the first "
        f"step. Fix: 6B parameters and 8B tokens, for {four.loss - 2.5:.3f} more loss, or "
        "dataset.max_epochs = 16.",
        "Beyond 16 epochs a text teaches next to nothing. A tenth of this budget would cost 0.200 of loss, "
        "and ten times the text would gain 0.400.",
    )
    assert "or dataset.max_epochs = 19." in advise(FLOPS, UNIQUE, 18.5).sentences[0]
    assert len(advise(FLOPS, UNIQUE, 20).sentences) == 1


@pytest.mark.parametrize(
    ("tokens", "max_epochs", "rows", "sentences"),
    [
        (32e9, 16, [], 0), (32e9, 17, [], 0), (32e9, 15.5, ["15.5 epochs"], 1),
        (32.2e9, 17, ["16 epochs"], 1),
        (8e9, 4, [], 0), (8.2e9, 4, ["4 epochs"], 1), (31e9, 15.5, [], 0),
    ],
)  # fmt: skip
def test_a_row_and_a_sentence_come_beyond_the_limits(tokens, max_epochs, rows, sentences, monkeypatch):
    """At 16 times nothing is said yet, and at the recipe's own limit nothing is refused."""
    monkeypatch.setattr(room, "best_repeated", best_of(tokens))
    found = advise(FLOPS, UNIQUE, max_epochs)
    assert [row.what for row in found.rows[2:]] == rows and len(found.sentences) == sentences


def test_a_recipe_has_its_size_and_its_length(monkeypatch):
    """Llama 3.1's 70,553,706,496 parameters, and ten billion tokens: five readings."""
    monkeypatch.setattr(room, "best_repeated", best_of(40e9))
    recipe = read_recipe("estonian_llama31_70b", ["train.tokens=10000000000"]).recipe
    parameters = 70_553_706_496
    assert parameters_of(recipe) == parameters
    found = advise(FLOPS, UNIQUE, 6, recipe)
    size, own = found.rows[-2:]
    assert (size.what, own.what, size.law, own.law) == ("this size", "the recipe", "repetition", "repetition")
    assert size.choice == of_size(FLOPS, parameters, UNIQUE)
    assert size.choice.tokens == pytest.approx(48e18 / parameters)
    assert own.choice.parameters == parameters and own.choice.epochs == 5
    share = 6 * parameters * own.choice.tokens / FLOPS
    assert found.sentences[-1] == f"The recipe takes {share:.0%} of this budget." and share > 10
    assert found.complaints == ()
    at = own.choice.tokens / UNIQUE
    assert advise(FLOPS, UNIQUE, at, recipe).complaints == ()
    (why,) = advise(FLOPS, UNIQUE, 4.5, recipe).complaints
    tokens = int(own.choice.tokens)
    assert why == (
        f"the recipe's {tokens:,} tokens read a text of 2,000,000,000 tokens {at:.2f} times, more than "
        "dataset.max_epochs = 4.5. Fix: at most 9,000,000,000 tokens, dataset.max_epochs = "
        f"{math.ceil(at)}, or more text"
    )


def test_a_recipe_without_a_budget_or_without_a_size_has_fewer_rows(monkeypatch):
    """Its length is not looked at, or its size is not; tokens that are too many are refused in any case."""
    monkeypatch.setattr(room, "best_repeated", best_of(8e9))
    settings = {"name": "t", "language": "et", "corpus": {"sources": ["a.txt"]}}
    sized = Recipe(**settings, model={"vocab_size": 260})
    found = advise(FLOPS, UNIQUE, 4, sized)
    assert [row.what for row in found.rows[2:]] == ["this size"] and found.complaints == ()
    assert found.sentences == ()
    train = {"tokens": 9_000_000_000}
    monkeypatch.setattr(room, "model_of_weights_here", lambda model: None)
    elsewhere = Recipe(**settings, train=train, model={"weights": "hf:a/b"}, tokenizer={"path": "x"})
    assert parameters_of(elsewhere) is None
    found = advise(FLOPS, UNIQUE, 4, elsewhere)
    assert len(found.rows) == 2 and "4.50 times" in found.complaints[0]
    assert len(advise(FLOPS, UNIQUE, 4).rows) == 2


def test_choices_count_what_they_read():
    """A text that is longer than the training is not repeated; epochs and FLOPs follow."""
    some = repeated(2e9, 30e9, 12e9)
    assert (some.unique_tokens, some.epochs, some.flops) == (12e9, 2.5, 6 * 2e9 * 30e9)
    once = repeated(2e9, 30e9, 40e9)
    assert (once.unique_tokens, once.epochs) == (30e9, 1)
    sized = of_size(72e18, 3e9, 1e9)
    assert (sized.parameters, sized.tokens) == (3e9, 4e9) and sized.epochs == 4


def test_small_budgets_have_their_best_size_too():
    """Of 600 million FLOPs and as much text as one can read: the least of a thousand sizes."""
    best = best_repeated(6e14, 1e12)
    sizes = [1e4 * 1.01**step for step in range(2000)]
    least = min(sizes, key=lambda size: of_size(6e14, size, 1e12).loss)
    assert best.parameters == pytest.approx(least, rel=0.01) and best.flops == pytest.approx(6e14)

"""The facts that `plan`, `show`, `rehearse`, the report and the card say of a run first."""

import pytest

from kielo.recipe.read import read_recipe
from kielo.resolve.overview import amount, overview_of_recipe, overview_of_run
from kielo.resolve.resolve import resolve
from kielo.resolve.text import Text

# The published numbers of parameters, in billions, and how exactly they were published.
PUBLISHED = {
    "estonian_llama31_70b": (70.6, 0.05),  # arXiv:2407.21783, and the model card
    "norwegian_7b": (7.25, 0.01),  # norallm/normistral-7b-warm
    "poro_34b": (34.2, 0.1),  # arXiv:2404.01856
    "bloom_176b_finnish": (176.2, 0.1),  # arXiv:2211.05100
    "llmjp_172b": (172.0, 1.0),  # arXiv:2407.03963
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    parameters, error = PUBLISHED[name]
    assert overview_of_recipe(read_recipe(name).recipe).parameters / 1e9 == pytest.approx(
        parameters, abs=error
    )


def test_a_recipe_and_its_run_have_the_same_facts() -> None:
    """They differ in epochs, which follow from the text, and in tokens by less than a step of each phase."""
    recipe = read_recipe("demo_estonian").recipe
    before = dict(overview_of_recipe(recipe).rows())
    source = recipe.corpus.sources[0].name
    text = Text({source: recipe.train.tokens // 2}, 10**6, "", recipe.tokenizer.vocab_size, 0)
    run = overview_of_run(resolve(recipe, "", 1, "cpu", text=text).identity, text.tokens)
    after = dict(run.rows())
    assert after.pop("epochs") == f"2.00 of {source}"
    assert after.keys() == before.keys() and after["shape"] == before["shape"]
    assert after["learning rate"] == before["learning rate"]
    assert recipe.train.tokens - recipe.train.tokens_per_step < run.tokens <= recipe.train.tokens
    assert run.flops / run.tokens == pytest.approx(6 * run.parameters, rel=0.5)


def test_amounts_read_like_text() -> None:
    amounts = {34_216_534_016: "34.2 billion", 10**10: "10 billion", 9_440_000: "9.44 million", 512: "512"}
    assert {number: amount(number) for number in amounts} == amounts

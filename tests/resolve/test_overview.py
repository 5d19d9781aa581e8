"""The facts that `plan`, `show`, `rehearse`, the report and the card say of a run first."""

import pytest

from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.resolve.overview import Overview, amount, overview_of_recipe, overview_of_run
from kielo.resolve.resolve import resolve
from kielo.resolve.text import Text, check_text_suffices, imagined_text

# The published numbers of parameters, in billions, and how exactly they were published.
PUBLISHED = {
    "estonian_llama31_70b": (70.6, 0.05),  # arXiv:2407.21783, and the model card
    "norwegian_7b": (7.25, 0.01),  # norallm/normistral-7b-warm
    "poro_34b": (34.2, 0.1),  # arXiv:2404.01856
    "bluumi_176b": (176.2, 0.1),  # arXiv:2211.05100
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
    run = overview_of_run(resolve(recipe, "", 1, "cpu", text=text).identity, text)
    after = dict(run.rows())
    assert after.pop("epochs") == f"2.00 of {source}"
    assert after.keys() == before.keys() and after["shape"] == before["shape"]
    assert after["learning rate"] == before["learning rate"]
    assert recipe.train.tokens - recipe.train.tokens_per_step < run.tokens <= recipe.train.tokens
    assert run.flops / run.tokens == pytest.approx(6 * run.parameters, rel=0.5)


def test_a_rate_without_a_decay_is_held() -> None:
    """NorMistral's two stages; in the recipe, and in the run that it makes."""
    recipe = read_recipe("norwegian_7b_warm").recipe
    run = resolve(recipe, "no_such_folder", 512, "cuda", text=imagined_text(recipe))
    for found in (overview_of_recipe(recipe), overview_of_run(run.identity)):
        assert found.learning_rates == ("0.0001, held", "0.0001, held")
    falling = recipe.model_copy(update={"train": recipe.train.model_copy(update={"decay_share": 0.1})})
    assert overview_of_recipe(falling).learning_rates[0] == "0.0001 to 1e-05, wsd"


def test_a_budget_that_is_not_set_follows_from_the_text() -> None:
    """Whole steps that read no source too often, also with weights; a plan needs a number."""
    recipe = read_recipe("own_text", ["corpus.sources=a.txt,b.txt", "dataset.max_epochs=4"]).recipe
    text = Text({"a": 90_001, "b": 30_001}, 10**5, "hash", recipe.tokenizer.vocab_size, 0)
    for weights, most in (("{}", 8 * 120_000), ("{a = 1, b = 1}", 2 * 8 * 30_000)):
        asked = read_recipe("own_text", ["corpus.sources=a.txt,b.txt", f"dataset.mixture={weights}"]).recipe
        run = overview_of_run(resolve(asked, "", 1, "cpu", text=text).identity, text)
        assert most - 3 * 2048 < run.tokens <= most * 1.01 and run.tokens % 2048 == 0
        assert max(run.epochs.values()) <= 8.01
    with pytest.raises(KieloError, match="train.tokens is not set"):
        resolve(recipe, "", 1, "cpu", text=imagined_text(recipe))
    with pytest.raises(KieloError, match="less than one step .* Fix"):
        resolve(recipe, "", 1, "cpu", text=Text({"a": 100}, 10**5, "hash", 4096, 0))
    assert overview_of_recipe(recipe).tokens is None


def test_a_budget_that_the_text_cannot_give_is_refused_before_the_text_is_packed() -> None:
    recipe = read_recipe("demo_estonian", ["train.tokens=16000000"]).recipe
    check_text_suffices(recipe, 4_000_000, "runs/x/corpus")
    with pytest.raises(KieloError, match="runs/x/corpus has 3,000,000 bytes.*leave train.tokens out"):
        check_text_suffices(recipe, 3_000_000, "runs/x/corpus")


def test_rows_and_figures_of_a_run() -> None:
    """The whole text of each; epochs and ready tokens only where they are known."""
    model = Model(
        model_type="llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=32_000,
    )  # fmt: skip
    whole = Overview(
        model, 9_440_000, 1_234_567_890, ((2048, 256), (4096, 512)), ("0.1 to 0.01, wsd", "0.2, held"),
        3.456e15, {"fi": 1.5, "en": 0.254}, {"fi": 12_000_000, "en": 512},
    )  # fmt: skip
    assert whole.rows() == [
        ("model", "llama, 9.44 million parameters"),
        ("shape", "3 layers of 2,048, 4 heads (2 of keys), MLP 5,632, 32,000 tokens in the vocabulary"),
        ("training",
         "1.23 billion tokens; steps of 2,048, sequences of 256; steps of 4,096, sequences of 512"),
        ("epochs", "1.50 of fi, 0.25 of en"),
        ("learning rate", "0.1 to 0.01, wsd; then 0.2, held"),
        ("compute", "3.5e+15 model FLOPs"),
        ("ready tokens", "12 million of fi, 512 of en"),
    ]  # fmt: skip
    assert whole.figures() == {
        "model_type": "llama", "parameters": 9_440_000, "tokens": 1_234_567_890, "model_flops": 3.456e15,
        "epochs": {"fi": 1.5, "en": 0.254},
    }  # fmt: skip
    same_heads = model.model_copy(update={"num_key_value_heads": 4})
    bare = Overview(same_heads, 9_440_000, None, ((2048, 256),), ("0.2, held",), None)
    assert [name for name, _ in bare.rows()] == ["model", "shape", "training", "learning rate"]
    assert dict(bare.rows())["training"] == (
        "as many tokens as the text gives; steps of 2,048, sequences of 256"
    )
    assert ", 4 heads, MLP" in dict(bare.rows())["shape"] and bare.figures()["epochs"] is None


def test_amounts_read_like_text() -> None:
    amounts = {
        34_216_534_016: "34.2 billion", 10**10: "10 billion", 9_440_000: "9.44 million", 512: "512",
        10**9: "1 billion", 999_900_000: "999.9 million", 9_994_000_000: "9.99 billion",
        1_234_567_890_123: "1,235 billion", 10**12: "1,000 billion", 10**6: "1 million", 999_999: "999,999",
        10_500_000: "10.5 million", 1_000_600_000_000: "1,001 billion",
    }  # fmt: skip
    assert {number: amount(number) for number in amounts} == amounts

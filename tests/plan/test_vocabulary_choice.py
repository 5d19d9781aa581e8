"""Keep, extend or replace a vocabulary: shares, tokens, device-hours and the advice."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kielo.models.families import complete
from kielo.plan.cost import cost
from kielo.plan.planned_layout import plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.plan.vocabulary_choice import (
    TOKENS_PER_NEW_ROW,
    Advice,
    Choice,
    Pricing,
    Vocabulary,
    check_rows,
    embedding_share,
    kind_of,
    recipe_tokens,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model, Recipe
from kielo.tokenizer.learn_vocabulary import extend
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.train import save, train_on

TEXTS = ["Õpetaja selgitas reeglit ja õpilased kirjutasid selle üles.", "Eesti keele sõnad on pikad."] * 3
# NorMistral-11B: 1.79 tokens a Norwegian word with Nemo's vocabulary, 1.22 with its own (its card); 6 bytes a
# word stand in for the text.
NEMO, OWN = 6 / 1.79, 6 / 1.22


def recipe(*sets):
    return read_recipe("estonian_llama31_70b", sets).recipe


def without_machine(read: Recipe) -> Pricing:
    model = read.model.model_copy(update={"vocab_size": 1})  # each choice has its own
    return Pricing(read, complete(model, read.dataset.sequence_length), None)


def of_size(size: int) -> Vocabulary:
    return Vocabulary("b", "replace", size, OWN, size)


def test_the_embedding_and_the_head_are_the_published_share():
    """Llama-3.1-70B: 128,256 rows of 8,192, twice, of 70,553,706,496 parameters."""
    matrix, model = 128_256 * 8192, recipe().model
    assert embedding_share(model, 128_256) == 2 * matrix / 70_553_706_496
    tied = model.model_copy(update={"tie_word_embeddings": True})
    assert embedding_share(tied, 128_256) == matrix / (70_553_706_496 - matrix)


def test_flops_are_those_of_the_weights_and_of_half_of_the_keys():
    """Six for each weight but the embedding's. A frozen body's weights have no gradient: four of six."""
    pricing, matrix = without_machine(recipe()), 128_256 * 8192
    found = pricing.choice(Vocabulary("a", "replace", 128_256, 4.0, 100), 4e6, 500)
    body, attention = 70_553_706_496 - 2 * matrix, 80 * 6 * 8192 * 4096
    assert found.parameters == 70_553_706_496 and found.text_tokens == 1_000_000
    assert found.text_flops == 1_000_000 * (6 * (body + matrix) + attention)
    assert found.relearn_tokens == 500
    assert found.relearn_flops == 500 * (4 * body + 6 * matrix + attention)


def test_normistral_pays_for_fewer_tokens_with_the_steps_of_its_recipe():
    """A third fewer tokens; 1,000 steps of 1,024 x 4,096 learn the rows, as the recipe's first phase does."""
    warm = read_recipe("norwegian_7b_warm").recipe
    assert TOKENS_PER_NEW_ROW * 51_200 == 1000 * 1024 * 4096 == warm.phases[0].tokens
    pricing, text = without_machine(warm), recipe_tokens(warm) * NEMO
    assert recipe_tokens(warm) == warm.phases[1].tokens
    kept = pricing.choice(Vocabulary("a", "keep", 32_000, NEMO, 0), text)
    new = pricing.choice(of_size(32_768), text)
    assert (kept.text_tokens, kept.relearn_tokens) == (warm.phases[1].tokens, 0)
    assert new.text_tokens == pytest.approx(kept.text_tokens * 1.22 / 1.79)
    assert new.relearn_tokens == warm.phases[0].tokens
    assert pricing.choice(of_size(32_768), text, 10**9).relearn_tokens == 10**9
    assert Advice(text, [kept, new]).best is new


def test_device_hours_are_the_planners():
    """A token costs what it costs in `kielo plan` on its best layout, and less with a frozen body."""
    read = read_recipe("norwegian_7b").recipe
    run = RunToPlan.of_recipe(read)
    fastest = search(run, [1]).ranked[1][0]
    pricing = Pricing(read, run.model, 1)
    kept = pricing.choice(Vocabulary("a", "keep", run.model.vocab_size, 4.0, 0), 4.0 * read.train.tokens)
    assert kept.text_hours == pytest.approx(cost(fastest).training_seconds * fastest.devices / 3600, rel=1e-3)
    new = pricing.choice(of_size(16_000), 4.0 * read.train.tokens)
    each, frozen = new.text_hours / new.text_tokens, new.relearn_hours / new.relearn_tokens
    assert new.relearn_tokens == TOKENS_PER_NEW_ROW * 16_000
    assert 0.5 * each < frozen < each < kept.text_hours / kept.text_tokens
    # with every digit: on this vocabulary's fastest layout, and on the same layout with a frozen body
    model = run.model.model_copy(update={"vocab_size": 16_000})
    fastest = search(RunToPlan.of(read, model), [1]).ranked[1][0]
    assert each == pytest.approx(8 / fastest.tokens_per_second / 3600, rel=1e-12)
    sets = ['train.trainable=["embed", "head"]']
    still = RunToPlan.of(read_recipe("norwegian_7b", sets).recipe, model)
    (slow,) = plan_layouts(still, [(fastest.layout, 1, fastest.micro_batch)])
    assert frozen == pytest.approx(8 / slow.tokens_per_second / 3600, rel=1e-12)


def test_a_vocabulary_pays_from_where_both_cost_the_same():
    """At pays_from_bytes, both choices cost the same; a longer text makes the new one cheaper."""
    pricing = without_machine(recipe())

    def at(text: float) -> Advice:
        return Advice(
            text, [pricing.choice(Vocabulary("a", "keep", 128_256, NEMO, 0), text),
                   pricing.choice(of_size(128_256), text)],
        )  # fmt: skip

    pays_from = at(1e12).pays_from_bytes(at(1e12).choices[1])
    kept, new = at(pays_from).choices
    assert new.cost == pytest.approx(kept.cost, rel=1e-6)
    assert (
        at(pays_from).best is not at(pays_from).choices[1] and at(2 * pays_from).best.vocabulary.name == "b"
    )


def test_tokens_of_a_recipe_are_those_with_a_trained_body():
    """Of phases that train the embedding or the head alone none; without a number they follow from text."""
    assert recipe_tokens(read_recipe("norwegian_7b", ["train.tokens=5000000000"]).recipe) == 5_000_000_000
    assert recipe_tokens(read_recipe("own_text").recipe) is None
    phase = {"tokens_per_step": 1000, "sequence_length": 10}
    phases = [
        phase | {"tokens": tokens, "trainable": trainable}
        for tokens, trainable in (
            (1000, ["embed"]), (2000, ["embed", "head"]), (4000, []), (8000, ["layers.0"]),
            (16_000, ["embed", "layers.0"]),
        )
    ]  # fmt: skip
    settings = {"name": "t", "language": "et", "corpus": {"sources": ["a.txt"]}}
    read = Recipe(**settings, phases=phases, model={"vocab_size": 260})
    assert recipe_tokens(read) == 28_000
    pricing = without_machine(read)
    assert pricing.choice(Vocabulary("b", "replace", 300, 2.0, 40), 1e6).relearn_tokens == 3000
    assert pricing.choice(Vocabulary("b", "keep", 300, 2.0, 0), 1e6, 500).relearn_tokens == 0


@pytest.mark.parametrize("rows", [None, 260, 261])
def test_a_model_has_a_row_for_each_token_of_its_tokenizer(rows):
    """259 tokens fit into any of these, 260 into two, 261 into two."""
    model, kept = Model(vocab_size=rows), SimpleNamespace(folder="here")
    for size in (259, 260, 261):
        if rows is None or size <= rows:
            check_rows(model, kept, size)
        else:
            with pytest.raises(KieloError, match="here: 261 tokens, and the model has 260. Fix: "):
                check_rows(model, kept, size)


def test_the_cheaper_of_two_savings_is_advised():
    """A twentieth of 100 exactly is worth it; FLOPs count where no hours are known."""
    kept = Choice(Vocabulary("a", "keep", 9, 4.0, 0), 9, 0.1, 100, 0, 100.0, 0.0)
    found = [
        replace(kept, vocabulary=of_size(9), text_flops=text, relearn_flops=learn)
        for text, learn in ((80.0, 15.0), (60.0, 30.0))
    ]
    assert Advice(1e6, [kept, *found]).best is found[1]
    assert Advice(1e6, [kept, found[0]]).best is found[0]
    assert Advice(1e6, [kept, replace(found[0], relearn_flops=15.001)]).best is kept
    # 40 less a million bytes of text, for 30: from 750,000 bytes on
    assert Advice(1e6, [kept, *found]).pays_from_bytes(found[1]) == pytest.approx(750_000)
    timed = [
        replace(one, text_hours=hours, relearn_hours=learn)
        for one, hours, learn in ((kept, 8.0, 0.0), (found[0], 5.0, 2.0), (found[1], 7.0, 1.0))
    ]
    assert Advice(1e6, timed).best is timed[1] and timed[1].cost == 7.0
    assert Advice(1e6, timed).pays_from_bytes(timed[1]) == pytest.approx(2e6 / 3)


def test_a_saving_within_a_twentieth_is_none():
    """Costs of 100 and 96: the vocabulary is kept; of 100 and 94 it is not."""
    kept = Choice(Vocabulary("a", "keep", 9, 4.0, 0), 9, 0.1, 100, 0, 100.0, 0.0)
    for cheaper, is_better in ((96.0, False), (94.0, True)):
        new = replace(kept, vocabulary=of_size(9), text_flops=cheaper)
        advice = Advice(1e6, [kept, new])
        assert (advice.best is new) == is_better
        assert advice.pays_from_bytes(new) == 0
    for dearer in (100.0, 101.0):
        other = replace(kept, vocabulary=of_size(9), text_flops=dearer, relearn_flops=1.0)
        assert Advice(1e6, [kept, other]).pays_from_bytes(other) is None


def test_the_kind_follows_from_the_ids(tmp_path):
    """The same vocabulary, one that goes on after the old ids, and another one."""
    settings = {"name": "t", "language": "et", "corpus": {"sources": ["a.txt"]}}
    for name, size, texts in (
        ("old", 270, TEXTS),
        ("again", 270, TEXTS),
        ("other", 260, ["abc abc abd"] * 3),
    ):
        save(train_on(texts, Recipe(**settings, tokenizer={"vocab_size": size})), tmp_path / name)
    old, again, other = (load_tokenizer(tmp_path / name) for name in ("old", "again", "other"))
    save(extend(old, TEXTS, 280), tmp_path / "extended")
    extended = load_tokenizer(tmp_path / "extended")
    assert [kind_of(old, new) for new in (again, extended, other)] == ["keep", "extend", "replace"]
    assert kind_of(extended, old) == "replace"

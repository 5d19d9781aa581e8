"""The files inside the package fit together: recipes, cards, and the wheel's list of data files."""

import json
import runpy
import tomllib

import pytest

from kielo.models.families import complete, hf_config
from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.read import read_first_language, read_recipe, recipe_choices, shipped_recipes
from kielo.resolve.resolve import resolve
from kielo.resolve.text import has_budget
from tests.house.checks import PACKAGE, ROOT
from tests.resolve.test_resolve import finish_pack, finish_tokenizer
from tests.shipped import RUNS


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_checks_on_every_cluster(name):
    """A shipped recipe can be started on any machine that a card describes."""
    for cluster in cards.clusters():
        read = read_first_language(name, [f"cluster={cluster}"])
        assert read.recipe.name == NAMES.get(name, name) and read.recipe.cluster == cluster
        assert cards.accelerator(cards.cluster(cluster).accelerator).source


# Of several runs the first, whose name has its language or variant in it.
NAMES = {
    name: f"{name}_{choices[0].partition('=')[2]}"
    for name in shipped_recipes()
    if (choices := recipe_choices(name))
} | {"ltg_bert_base": "ltg_bert_base_et"}
# Ranks that each recipe's steps can be shared by, and the parameters that its paper or card prints, in
# billions.
PUBLISHED = {
    "bluumi_176b": (384, 176.2), "fingpt_small": (8, 0.186), "fingpt_medium": (8, 0.437),
    "fingpt_large": (8, 0.881), "fingpt_xl": (8, 1.5), "fingpt_3b": (8, 2.8), "fingpt_8b": (8, 6.98),
    "fingpt_13b": (64, 13.3), "poro_34b": (512, 34.2), "viking_13b": (512, 14), "viking_33b": (512, 33),
    "llammas_7b": (8, 6.74), "smugri_7b": (8, 6.74), "estllm_8b": (64, 8.03), "llmjp_172b_fp8": (512, 172),
    "norwegian_7b": (512, 7.2), "norwegian_7b_warm": (512, 7.2), "llmjp_172b": (512, 172),
    "viking_7b": (512, 7.55), "lumi_140b_scaling": (6144, 140), "estonian_llama31_8b": (32, 8.03),
    "ltg_bert_base": (128, 0.125), "seventy_five_berts": (128, 0.125),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_every_recipe_resolves_on_text_enough(name, tmp_path, monkeypatch):
    """Each recipe becomes a plan when there is plenty of text: whole steps up to its budget, parameters
    within 2 % of the published.
    """
    recipe = read_first_language(name).recipe
    if recipe.model.weights:  # their shape is all that is asked of them
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / recipe.model.weights.removeprefix("hf:")
        folder.mkdir(parents=True)
        shape = recipe.model.model_copy(update={"vocab_size": recipe.model.vocab_size or 32_768})
        if recipe.follows:  # weights that `kielo run` makes first
            shape = read_recipe(recipe.follows, ["model.vocab_size=4096"]).recipe.model
        config = hf_config(complete(shape, shape.max_position_embeddings or recipe.dataset.sequence_length))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layout = recipe.layout
    smallest = (
        layout.pipeline * max(1, layout.replicate) * max(1, layout.shard) * layout.context * layout.tensor
    )
    ranks, billions = PUBLISHED.get(name, (smallest, None))
    if not has_budget(recipe):
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"tokens": 10**6})})
    budget = sum(phase.tokens for phase in full_phases(recipe))
    is_new = recipe.model.transplant and not recipe.follows  # else the recipe tells the vocabulary's size
    finish_tokenizer(tmp_path / "tokenizer", recipe.tokenizer.vocab_size if is_new else 300)
    if not recipe.tokenizer.path:
        size = {"vocab_size": recipe.tokenizer.vocab_size}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=size)})
    finish_pack(tmp_path / "tokens", {source.name: budget for source in recipe.corpus.sources}, heldout=10**6)
    resolved = resolve(recipe, tmp_path, ranks, "cpu")
    trained, largest_step = resolved.identity.total_tokens, recipe.train.tokens_per_step
    assert budget - len(full_phases(recipe)) * largest_step < trained <= budget
    assert billions is None or resolved.placement.parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_a_recipe_that_does_not_check_is_caught():
    """Broken on purpose: the same reading refuses a recipe whose numbers do not fit."""
    with pytest.raises(KieloError, match="train.tokens_per_step"):
        read_recipe(next(iter(shipped_recipes())), ["train.tokens_per_step=1"])


def test_the_wheel_carries_every_card_recipe_and_template():
    """Each TOML file and template in the package matches a pattern of package-data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "kielo"
    ]
    carried = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert {*PACKAGE.rglob("*.toml"), *PACKAGE.rglob("*.jinja")} <= carried


def test_the_readme_shows_the_committed_result_of_the_demo():
    """The table in README.md is what docs/demo_table.py makes of benchmarks/results/demo_estonian.json,
    no hand's work.
    """
    result = json.loads((ROOT / "benchmarks" / "results" / "demo_estonian.json").read_text(encoding="utf-8"))
    table = runpy.run_path(str(ROOT / "docs" / "demo_table.py"))["table"](result)
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    bits = result["summary"]["bits_per_byte"]
    assert bits["model"] < min(bits["unigram"], bits["xz"], bits["ngram"])


def test_the_page_of_a_new_language_shows_the_committed_result_of_its_demo():
    """The table in docs/tokenizer.md is made of benchmarks/results/demo_new_language.json, whose model
    beats its baselines.
    """
    results = ROOT / "benchmarks" / "results"
    followed, from_scratch = (
        json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("demo_new_language", "demo_estonian")
    )
    table = runpy.run_path(str(ROOT / "docs" / "demo_table.py"))["new_language_table"](followed, from_scratch)
    assert table in (ROOT / "docs" / "tokenizer.md").read_text(encoding="utf-8")
    bits = followed["summary"]["bits_per_byte"]
    assert bits["model"] < min(bits["unigram"], bits["xz"], bits["ngram"])


def test_the_page_of_encoders_shows_the_committed_result_of_their_demo():
    """The tables in docs/encoders.md are made of benchmarks/results/demo_estonian_bert.json, which keeps the
    bar of tests/demos/test_estonian.py.
    """
    path = ROOT / "benchmarks" / "results" / "demo_estonian_bert.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    table = runpy.run_path(str(ROOT / "docs" / "demo_table.py"))["encoder_table"](result)
    assert table in (ROOT / "docs" / "encoders.md").read_text(encoding="utf-8")
    accuracy = result["summary"]["masked_tokens"]
    bars = {"unigram": 0.30, "bigram": 0.20, "neighbours": 0.01}
    assert all(accuracy["model"] > accuracy[name] + margin for name, margin in bars.items())

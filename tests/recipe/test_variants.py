"""A recipe of several variants: what each variant's recipe is, its name, and what is refused."""

import re
from pathlib import Path

import pytest

from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_first_language, read_recipe, recipe_choices

VARIANTS = """
name = "sized_{variant}"
language = "fi"
corpus.sources = ["text.txt"]
model = { hidden_size = 64, intermediate_size = 256, num_hidden_layers = 2, num_attention_heads = 4 }
train.tokens = 1_000_000
[variants.small]
[variants.large]
model = { hidden_size = 128, num_attention_heads = 8 }
description = "the {variant} model"
train.learning_rate = 1e-4
[variants.3b]
model.params = "3B"
"""


@pytest.fixture
def variants(tmp_path: Path) -> Path:
    path = tmp_path / "sized.toml"
    path.write_text(VARIANTS, encoding="utf-8")
    return path


def test_each_variant_is_the_recipe_that_one_would_write_by_hand(variants: Path, tmp_path: Path) -> None:
    """Its values replace the recipe's key by key, a size replaces a shape, and --set replaces both."""
    assert recipe_choices(variants) == ("variant=small", "variant=large", "variant=3b")
    assert recipe_choices(variants, ["variant=large"]) == ()
    by_hand = VARIANTS.partition("[variants.small]")[0].replace("{variant}", "large")
    by_hand = by_hand.replace("= 64", "= 128").replace("heads = 4", "heads = 8")
    by_hand = f'description = "the large model"\ntrain.learning_rate = 1e-4\n{by_hand}'
    (tmp_path / "large.toml").write_text(by_hand, encoding="utf-8")
    large = read_recipe(variants, ["variant=large"])
    assert large.recipe == read_recipe(tmp_path / "large.toml").recipe
    assert large.origins["train.learning_rate"] == f"{variants}, variant large"
    assert large.origins["train.tokens"] == str(variants)
    assert read_first_language(variants).recipe.name == "sized_small"
    of_size = read_recipe(variants, ["variant=3b"]).recipe.model
    assert of_size.params == 3_000_000_000 and "hidden_size" not in of_size.model_fields_set
    changed = read_recipe(variants, ["train.learning_rate=2e-4", 'variant="large"']).recipe
    assert changed.train.learning_rate == 2e-4 and changed.model.hidden_size == 128


def test_a_shipped_variant_has_a_name_of_its_own(tmp_path: Path) -> None:
    """RECIPE_VARIANT, which another recipe can extend: its own values are over the variant's."""
    assert read_recipe("fingpt_13b").recipe == read_recipe("fingpt", ["variant=13b"]).recipe
    child = tmp_path / "child.toml"
    child.write_text('extends = "fingpt_13b"\nname = "mine"\ntrain.learning_rate = 5e-5\n', encoding="utf-8")
    mine = read_recipe(child)
    assert (mine.recipe.model.hidden_size, mine.recipe.train.learning_rate) == (5120, 5e-5)
    assert mine.origins["model.hidden_size"] == "fingpt.toml, variant 13b"
    of_family = tmp_path / "family.toml"
    of_family.write_text('extends = "fingpt"\nname = "mine_{variant}"\n', encoding="utf-8")
    assert recipe_choices(of_family) == recipe_choices("fingpt")
    with pytest.raises(KieloError, match="fingpt_13b is variant 13b already: variant = small"):
        read_recipe("fingpt_13b", ["variant=small"])


def test_a_recipe_replaces_the_values_of_variants_that_it_inherits(variants: Path, tmp_path: Path) -> None:
    """Its shape or size too. Its own variants are over both."""
    of_base = 'micro_batch_sequences = 1\nnodes = [2]\ncluster = "lumi_g"\nlayout = {}\n'
    variants.write_text(f"{VARIANTS}[[variants.large.layouts]]\n{of_base}", encoding="utf-8")
    child = tmp_path / "child.toml"
    child.write_text(
        'extends = "sized.toml"\nmodel.hidden_size = 192\ntrain.learning_rate = 5e-5\n'
        "train.micro_batch_sequences = 4\n[variants.small]\ntrain.learning_rate = 6e-5\n",
        encoding="utf-8",
    )
    small, large, of_size = (read_recipe(child, [text]).recipe for text in recipe_choices(child))
    assert (large.model.hidden_size, large.model.num_attention_heads, large.train.learning_rate) == (
        192,
        8,
        5e-5,
    )
    assert [entry.micro_batch_sequences for entry in large.layouts] == [None]
    assert small.train.learning_rate == 6e-5 and of_size.model.params is None
    named = re.sub(r"(\[variants\.(\w+)\])", r'\1\nname = "\2"', VARIANTS)
    variants.write_text(named, encoding="utf-8")
    with pytest.raises(KieloError, match="name = 'one' would name 3 runs"):
        recipe_choices(variants, ["name=one"])


@pytest.mark.parametrize(
    ("old", "new", "sets", "answer"),
    [
        ("", "", [], "3 variants, and none is chosen. .* Fix: --set variant=small"),
        ("", "", ["variant=huge"], "variant = huge: .* has small, large, 3b. Fix: variant=small"),
        ("sized_{variant}", "one", [], r'name = \'one\' would name 3 runs. Fix: name = "one_{variant}"'),
        ('language = "fi"', 'languages = ["fi"]', [], "has both languages and variants"),
        ("[variants.3b]", "[variants.'3 b']", [], "variants.3 b: not a name"),
        ("num_attention_heads = 8", "heads = 8", ["variant=large"], "variant large.*heads"),
        ("", "", ["variant="], "variant = : .* Fix: variant=small"),
        ("", "", ["variants.small.nodes=[9]"], r"Fix: --set variant=small --set nodes=\[9\]"),
        ("[variants.large]", '[variants.large]\nlanguages = ["fi"]', [], "large cannot have languages"),
        (
            "[variants.large]",
            '[variants.large]\nname = "sized_3b"',
            [],
            "large and variants.3b both have name",
        ),
        ("[variants.large]", '[variants.large]\nfolder = "runs/sized_3b"', [], "folder = 'runs/sized_3b'"),
    ],
)
def test_what_is_refused_and_what_would_work(
    variants: Path, old: str, new: str, sets: list[str], answer: str
) -> None:
    variants.write_text(VARIANTS.replace(old, new) if old else VARIANTS, encoding="utf-8")
    with pytest.raises(KieloError, match=answer):
        read_recipe(variants, sets)


def test_a_recipe_without_variants_has_none_to_choose(tmp_path: Path) -> None:
    with pytest.raises(KieloError, match="demo_estonian.toml has no variants. Fix: leave it out"):
        read_recipe("demo_estonian", ["variant=large"])
    (tmp_path / "none.toml").write_text("variants = 3\n" + VARIANTS.partition("[variants.small]")[0])
    with pytest.raises(KieloError, match="variants holds no tables"):
        recipe_choices(tmp_path / "none.toml")

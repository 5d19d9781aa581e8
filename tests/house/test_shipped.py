"""What ships inside the package fits together: recipes, cards, and the wheel's list of data files."""

import json
import runpy
import tomllib

import pytest

from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, shipped_recipes
from tests.house.checks import PACKAGE, ROOT


@pytest.mark.parametrize("cluster", cards.clusters())
@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_checks_on_every_cluster(name, cluster):
    """A shipped recipe can be started on any machine that a card describes."""
    read = read_recipe(name, [f"cluster={cluster}"])
    assert read.recipe.name == name and read.recipe.cluster == cluster
    assert cards.accelerator(cards.cluster(cluster).accelerator).source


def test_a_recipe_that_does_not_check_is_caught():
    """Broken on purpose: the same reading refuses a recipe whose numbers do not fit."""
    with pytest.raises(KieloError, match="train.tokens_per_step"):
        read_recipe(next(iter(shipped_recipes())), ["train.tokens_per_step=1"])


def test_the_wheel_carries_every_card_and_recipe():
    """Each TOML file in the package matches a pattern of package-data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kielo"]
    carried = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert set(PACKAGE.rglob("*.toml")) <= carried


def test_the_readme_shows_the_committed_result_of_the_demo():
    """The table in README.md is what docs/demo_table.py makes of benchmarks/results/demo_estonian.json, no hand's work."""
    result = json.loads((ROOT / "benchmarks" / "results" / "demo_estonian.json").read_text(encoding="utf-8"))
    table = runpy.run_path(str(ROOT / "docs" / "demo_table.py"))["table"](result)
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    bits = result["summary"]["bits_per_byte"]
    assert bits["model"] < min(bits["unigram"], bits["xz"], bits["ngram"])

"""A recipe of several languages: what each language's recipe is, and what is refused."""

from pathlib import Path

import pytest

from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_first_language, read_recipe, recipe_choices

SEVERAL = """
name = "small_{language}"
languages = ["et", "fi"]
description = "a model of {language}"
tokenizer.path = "hf:OWNER/tokenizer_{language}"
[[corpus.sources]]
path = "text/{language}/*.txt"
[[corpus.sources]]
path = "only.txt"
language = "fi"
[[corpus.sources]]
path = "english.txt"
language = "en"
"""


@pytest.fixture
def several(tmp_path: Path) -> Path:
    path = tmp_path / "several.toml"
    path.write_text(SEVERAL, encoding="utf-8")
    return path


def test_each_language_has_the_recipe_that_one_would_write_by_hand(several: Path, tmp_path: Path) -> None:
    """The code is in every text; a source of one of the languages is of its recipe alone, others of all."""
    assert recipe_choices(several) == ("language=et", "language=fi")
    by_hand = SEVERAL.replace('languages = ["et", "fi"]', 'language = "et"').replace("{language}", "et")
    only = by_hand.index('[[corpus.sources]]\npath = "only')
    by_hand = by_hand[:only] + by_hand[by_hand.index('[[corpus.sources]]\npath = "english') :]
    (tmp_path / "et.toml").write_text(by_hand, encoding="utf-8")
    assert read_recipe(several, ["language=et"]).recipe == read_recipe(tmp_path / "et.toml").recipe
    finnish = read_recipe(several, ["language=fi"]).recipe
    assert [source.path for source in finnish.corpus.sources] == [
        "text/fi/*.txt",
        "only.txt",
        "english.txt",
    ]
    assert recipe_choices(several, ["language=fi"]) == ()
    assert read_first_language(several).recipe.name == "small_et"


def test_the_nearer_of_language_and_languages_holds(several: Path, tmp_path: Path) -> None:
    """--set over the file, a file over the one that it extends; a run's own recipe.toml is of one."""
    assert recipe_choices(several, ["languages=sv,da"]) == ("language=sv", "language=da")
    child = tmp_path / "child.toml"
    child.write_text('extends = "several.toml"\nlanguage = "sv"\n', encoding="utf-8")
    assert recipe_choices(child) == () and read_recipe(child).recipe.name == "small_sv"
    grandchild = tmp_path / "again.toml"
    grandchild.write_text('extends = "one.toml"\nlanguages = ["nb", "nn"]\n', encoding="utf-8")
    one = SEVERAL.replace('languages = ["et", "fi"]', 'language = "et"')
    (tmp_path / "one.toml").write_text(one, encoding="utf-8")
    assert recipe_choices(grandchild) == ("language=nb", "language=nn")
    assert read_recipe(grandchild, ["language=nn"]).recipe.description == "a model of nn"
    assert recipe_choices("demo_estonian") == ()


@pytest.mark.parametrize(
    ("sets", "answer"),
    [
        ([], "2 languages, and none is chosen. .* take it as a whole. Fix: --set language=et"),
        (["language=sv"], "sv is none of them. .* Fix: --set language=et"),
        (["languages=[]"], r'languages = \[\] does not fit. Fix: languages = \["et", "fi"\]'),
        (["languages=et,xx"], "languages: xx without a card; `kielo languages` lists"),
        (["languages=et,et"], "lists et more than once"),
        (["name=mine"], r"name = 'mine' would name 2 runs. Fix: name = \"mine_{language}\""),
        (["folder=here"], "folder = 'here' would name 2 runs"),
    ],
)
def test_what_is_refused_and_what_would_work(several: Path, sets: list[str], answer: str) -> None:
    with pytest.raises(KieloError, match=answer):
        read_recipe(several, sets)


def test_a_file_with_both_is_refused(several: Path) -> None:
    several.write_text('language = "et"\n' + SEVERAL, encoding="utf-8")
    with pytest.raises(KieloError, match="has both language and languages"):
        recipe_choices(several)

"""The program as a library: the examples of its docstrings, and errors in place of exit codes."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import kielo
from kielo import api
from tests.cli.test_run import write_recipe
from tests.report import synthetic_run


def test_the_examples_of_the_docstrings_are_right(tmp_path, monkeypatch) -> None:
    """In a folder in which a run was made."""
    synthetic_run.write_run(tmp_path / "runs" / "demo_estonian")
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(api, optionflags=doctest.ELLIPSIS)
    assert done.failed == 0 and done.attempted > 8


def test_the_package_has_its_library_when_it_is_asked_for() -> None:
    """`import kielo` alone loads none of it."""
    code = (
        "import sys, kielo\nassert 'kielo.api' not in sys.modules\n"
        "from kielo import KieloError, Recipe, Run, Stopped\n"
        "assert Recipe is sys.modules['kielo.api'].Recipe and issubclass(Stopped, KieloError)\n"
        "sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = kielo.Recipes


def test_stages_are_made_and_read(tmp_path: Path) -> None:
    """The corpus stage of a recipe, twice; what other stages would have made is not there."""
    recipe = kielo.Recipe.load(write_recipe(tmp_path)).with_(dataset__heldout_share=0.25)
    assert recipe.settings.dataset.heldout_share == 0.25
    run = recipe.make("corpus")
    assert run.folder == tmp_path / "run" and not run.stages["corpus"].skipped
    assert run.funnel is not None and run.funnel.steps[-1].documents_left > 0
    assert run.recipe.settings == recipe.settings.model_copy(update={"folder": str(run.folder)})
    assert recipe.make("corpus").stages["corpus"].skipped
    assert (run.metrics(), run.scores, run.summary) == ([], None, None)


def test_what_does_not_fit_is_an_error_of_kielo(tmp_path: Path) -> None:
    recipe = kielo.Recipe.load(write_recipe(tmp_path))
    for wrong, said in (
        (lambda: recipe.with_(train__tokens="many"), "train.tokens"),
        (lambda: recipe.make("corpse"), "corpse: no such stage. Fix: one of corpus, tokenizer"),
        (lambda: recipe.make("train", ranks=0), "ranks = 0: give 1 or more"),
        (lambda: recipe.train(), "is not finished, and this stage needs it"),
        (lambda: kielo.Recipe.load("viking_7b").plan(3000, cluster="lumi_g"), "lumi_g has 1 to 2978 nodes"),
        (lambda: kielo.Run(tmp_path / "nowhere"), "no such folder. Fix: "),
        (lambda: kielo.Run(tmp_path).model(), "not exported yet. Fix: kielo run"),
    ):
        with pytest.raises(kielo.KieloError, match=said):
            wrong()

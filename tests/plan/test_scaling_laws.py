"""Scaling laws against the values of the authors' code, and `kielo plan --budget`."""

import json
import math
import re

import pytest

from kielo.cli.main import main
from kielo.plan.scaling_laws import CHINCHILLA, advise, best_repeated, of_size, repeated
from kielo.recipe.read import read_recipe
from tests.house.checks import ROOT


@pytest.mark.parametrize(
    ("parameters", "tokens", "loss"),
    [(6.34e9, 242e9, 2.2256440889984477), (8.67e9, 178e9, 2.2269634075087867)],
)
def test_repetition_has_the_loss_of_the_authors_code(parameters, tokens, loss):
    """huggingface/datablations, README: 25 billion different tokens; equal but for the last digits."""
    assert repeated(parameters, tokens, 25e9).loss == pytest.approx(loss, rel=1e-12)


def test_the_best_repetition_is_that_of_the_authors_code():
    """Their optimum for 1e22 FLOPs and 25 billion tokens, of a coarser search: 7.02 billion parameters,
    237.3 billion tokens, 9.49 epochs; and no neighbour is better.
    """
    best = best_repeated(1e22, 25e9)
    assert best.parameters == pytest.approx(7.02e9, rel=2e-3)
    assert best.tokens == pytest.approx(237.3e9, rel=2e-3) and best.epochs == pytest.approx(9.49, rel=2e-3)
    assert best.flops == pytest.approx(1e22)
    for factor in (0.99, 1.01):
        assert of_size(1e22, factor * best.parameters, 25e9).loss > best.loss


def test_text_enough_is_not_repeated():
    """With more text than the budget can read, the law is the one without repetition: one epoch at most."""
    best = best_repeated(1e20, 1e15)
    assert best.epochs == 1 and best.unique_tokens == best.tokens < 1e15


@pytest.mark.parametrize("flops", [1e19, 1e22, 1e25])
def test_chinchillas_optimum_is_the_least_of_all_sizes(flops):
    """The closed form against a search in steps of 0.1 %; there the loss is flat, so to 0.2 % of the size."""
    best = CHINCHILLA.optimum(flops)
    sizes = [best.parameters * 1.001**step for step in range(-3000, 3001)]
    found = min(sizes, key=lambda size: CHINCHILLA.loss(size, flops / 6 / size))
    assert best.parameters == pytest.approx(found, rel=2e-3)
    assert best.loss == pytest.approx(CHINCHILLA.loss(found, flops / 6 / found), abs=1e-9)


def test_the_optimum_grows_with_the_fitted_exponent():
    """N ~ C^0.5126 by Besiroglu's constants; about 20 tokens a parameter at the budget of Chinchilla."""
    small, large = CHINCHILLA.optimum(1e20), CHINCHILLA.optimum(1e24)
    assert math.log(large.parameters / small.parameters) / math.log(1e4) == pytest.approx(0.5126, abs=1e-4)
    chinchilla = CHINCHILLA.optimum(5.76e23)
    assert 17 < chinchilla.tokens / chinchilla.parameters < 23


def test_the_cap_on_epochs_has_a_row_and_a_way_out():
    """A budget that would read the text too often: what the cap allows is beside the best, and costs more."""
    rows = {row.what: row.choice for row in advise(1e22, 25_000_000_000, 4).rows}
    assert rows["4 epochs"].epochs == 4 and rows["4 epochs"].flops == pytest.approx(1e22)
    assert rows["4 epochs"].loss > rows["this text"].loss
    assert "dataset.max_epochs = 10." in advise(1e22, 25_000_000_000, 4).sentences[0]
    assert not advise(1e22, 25_000_000_000, 10).sentences


def test_a_recipes_own_tokens_are_refused_where_they_read_the_text_too_often():
    """10 billion tokens of a text of 2: five times, and the numbers of the complaint do work."""
    recipe = read_recipe("estonian_llama31_70b").recipe
    (why,) = advise(1e22, 2_000_000_000, 4, recipe).complaints
    assert "5.00 times" in why and "at most 8,000,000,000 tokens" in why and "max_epochs = 5" in why
    (why,) = advise(1e22, 2_400_000_000, 4, recipe).complaints
    assert "4.17 times" in why and "at most 9,600,000,000 tokens" in why and "max_epochs = 5" in why
    assert not advise(1e22, 2_500_000_000, 4, recipe).complaints
    assert not advise(1e22, 2_000_000_000, 5, recipe).complaints


def test_sentences_say_what_a_tenth_of_the_budget_and_ten_texts_would_change():
    """The differences of loss between the best choices of each; and the share that a recipe takes."""
    recipe = read_recipe("estonian_llama31_70b").recipe
    advice = advise(1e23, 1_000_000_000, 100, recipe)
    best, tenth, more = (best_repeated(*of) for of in ((1e23, 1e9), (1e22, 1e9), (1e23, 1e10)))
    assert best.epochs > 16
    said = " ".join(advice.sentences)
    assert f"would cost {tenth.loss - best.loss:.3f} of loss" in said
    assert f"ten times the text would gain {best.loss - more.loss:.3f}." in said
    mine = next(row.choice for row in advice.rows if row.what == "the recipe")
    assert mine.tokens == 10_000_000_000
    assert f"The recipe takes {mine.flops / 1e23:.0%} of this budget." in said


def test_device_hours_are_flops_at_the_usual_share_of_peak(capsys):
    """20,000 hours of LUMI's devices, 191.5 TFLOP/s each in bf16, at 35 %."""
    asked = ["plan", "--budget", "20000h", "--corpus", "6.6B", "--cluster", "lumi_g", "--json"]
    assert main(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["flops"] == pytest.approx(20_000 * 3600 * 191.5e12 * 0.35)
    assert said["unique_tokens"] == 6_600_000_000
    best = next(choice for choice in said["choices"] if choice["what"] == "this text")
    assert best["epochs"] > 16 and best["flops"] == pytest.approx(said["flops"])


def test_the_page_shows_what_the_verb_says(capsys):
    """The example of docs/planning.md, line by line, but for the width of its columns."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").partition("## How large a model")[2]
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert main(["plan", "--budget", "20000h", "--corpus", "6.6B", "--cluster", "lumi_g"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    lines = [line.split() for line in shown.splitlines()]
    assert lines == said[: len(lines)]

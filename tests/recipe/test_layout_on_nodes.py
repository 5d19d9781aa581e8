"""Layouts by number of nodes: a recipe's entry holds on its cluster and nodes alone, and --set takes over."""

import pytest

from kielo.plan.choose_layout import own
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text

# Two cards of 8 devices a node.
BASE = """
extends = "viking_7b"
train.micro_batch_sequences = 2
[layout]
zero = 3
shard = 0
replicate = 1
[[layouts]]
cluster = "lumi_g"
nodes = [2, 4]
micro_batch_sequences = 1
layout = { tensor = 2, pipeline = 4, recompute = "full" }
[[layouts]]
cluster = "dgx_h100"
nodes = [4]
layout = { tensor = 4 }
"""
USUAL, SPLIT, ON_DGX = (1, 1, 3, "none"), (2, 4, 1, "full"), (4, 1, 1, "none")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(BASE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def axes(layout) -> tuple[int, int, int, str]:
    return layout.tensor, layout.pipeline, layout.zero, layout.recompute


@pytest.mark.parametrize(
    ("nodes", "sets", "wanted", "micro_batch"),
    [
        (1, [], USUAL, 2), (2, [], SPLIT, 1), (8, [], USUAL, 2), (4, [], SPLIT, 1),
        (4, ["cluster=dgx_h100"], ON_DGX, 2), (2, ["cluster=dgx_h100"], USUAL, 2),
        (4, ["layout.zero=2"], (1, 1, 2, "none"), 2), (4, ["train.micro_batch_sequences=4"], SPLIT, 4),
        (4, ["layout={zero=2}"], (1, 1, 2, "none"), 2),
        (4, ["train={tokens=100_000_000_000, tokens_per_step=4_194_304, micro_batch_sequences=4}"], SPLIT, 4),
    ],
)  # fmt: skip
def test_an_entry_holds_on_its_cluster_and_nodes(here, nodes, sets, wanted, micro_batch):
    """What the job computes with, and what is planned for it."""
    recipe = read_recipe("mine.toml", sets).recipe
    text = imagined_text(recipe)
    placement = resolve(recipe, "", nodes * 8, "cuda", text=text).placement
    assert axes(placement.layout) == wanted
    assert placement.phases[0].micro_batch_sequences == micro_batch
    planned = own(RunToPlan.of_recipe(recipe), nodes)
    assert (axes(planned.layout), planned.micro_batch) == (wanted, micro_batch)


def test_ranks_that_are_no_whole_nodes_have_the_usual_layout(here):
    recipe = read_recipe("mine.toml").recipe
    placement = resolve(recipe, "", 20, "cuda", text=imagined_text(recipe)).placement
    assert axes(placement.layout) == USUAL


def test_a_recipe_that_extends_it_with_a_layout_has_no_other(here):
    (here / "of.toml").write_text('extends = "mine.toml"\n[layout]\nzero = 2\n', encoding="utf-8")
    text = (here / "mine.toml").read_text(encoding="utf-8").replace('extends = "viking_7b"', "")
    (here / "mine.toml").write_text('name = "a"\nlanguage = "fi"\ncorpus.sources = ["a"]\n' + text, "utf-8")
    assert len(read_recipe("mine.toml").recipe.layouts) == 2
    assert read_recipe("of.toml").recipe.layouts == ()
    assert read_recipe("mine.toml", ["layout.zero=2"]).recipe.layouts == ()
    (here / "of.toml").write_text('extends = "mine.toml"\ntrain.micro_batch_sequences = 4\n', "utf-8")
    assert [entry.micro_batch_sequences for entry in read_recipe("of.toml").recipe.layouts] == [None, None]
    one = '[{cluster = "lumi_g", nodes = [4], layout = {tensor = 4}}]'
    with pytest.raises(KieloError, match="layouts and layout.tensor both give the layout"):
        read_recipe("mine.toml", ["layout.tensor=8", f"layouts={one}"])
    (here / "of.toml").write_text('extends = "mine.toml"\nlayouts = "x"\n', encoding="utf-8")
    with pytest.raises(KieloError, match=r"layouts = 'x' does not fit. Fix: a list"):
        read_recipe("of.toml", ["train.micro_batch_sequences=4"])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            'cluster = "dgx_h100"',
            'cluster = "lumi_g"',
            "two entries name 4 nodes of lumi_g. Fix: one of them",
        ),
        ('cluster = "dgx_h100"', 'cluster = "lumi"', "did you mean lumi_g"),
        ("nodes = [4]", "nodes = []", "nodes"),
        ("tensor = 4", "tensors = 4", "tensor"),
        ('cluster = "dgx_h100"', 'cluster = "missing.toml"', "missing.toml: cannot be read"),
        ("tensor = 2", "tensor = 7", "layouts, 4 nodes of lumi_g: layout.tensor = 7 does not divide"),
    ],
)
def test_an_entry_that_cannot_hold_is_refused(here, old, new, told):
    (here / "mine.toml").write_text(BASE.replace(old, new), encoding="utf-8")
    with pytest.raises(KieloError) as refused:
        recipe = read_recipe("mine.toml").recipe
        resolve(recipe, "", 32, "cuda", text=imagined_text(recipe))
    assert told in str(refused.value) and "layouts" in str(refused.value)

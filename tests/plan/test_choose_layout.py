"""Layouts by name, and the messages for what does not run: the search's answers are made up."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.plan import choose_layout
from kielo.plan.choose_layout import named, nothing_runs
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Choice, Found, search
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout
from tests.plan.hand_made import planned, run

LARGE, LARGER = {"activations": 60e9}, {"activations": 70e9}  # 80.5 and 90.5 GB in all, of 48 usable


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Makes a search in which layouts fit on so many nodes; returns a list that gets what was asked for."""

    def make(found: Found | None = None, fits_on: tuple[int, ...] = ()) -> list[list[int]]:
        asked: list[list[int]] = []

        def search(of: RunToPlan, nodes: list[int], fits: Any = None) -> Found:
            asked.append(nodes)
            return found or Found(ranked={one: [planned()] if one in fits_on else [] for one in nodes})

        monkeypatch.setattr(choose_layout, "search", search)
        return asked

    return make


def test_the_three_reasons_with_most_layouts_are_told() -> None:
    """And the fewest tokens of a step: a sequence for each group of tensor ranks, of which a node has one."""
    some = Choice(Layout(), 1, 1, 2)
    found = Found(
        refused={3: {"a": [some] * 2, "b": [some]}, 5: {"c": [some] * 4, "d": [some] * 3}},
        impossible={"heads": [some] * 9},
    )
    assert str(nothing_runs(run(), [3, 5], found)) == (
        "no layout of mine runs on 3 or 5 nodes of here: c (4 layouts); d (3 layouts); a (2 layouts). "
        f"Fix: train.tokens_per_step = {3 * 2048} or a multiple (it is 98304), or at most 48 nodes"
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sequences", "groups", "fewer"),
    [
        (8, 8, 2, 1, ", or at most 2 nodes"), (6, 4, 2, 2, ", or at most 1 nodes"), (6, 4, 1, 2, ""),
        (12, 4, 7, 1, ", or at most 7 nodes"), (8, None, 9, 4, ", or at most 2 nodes"),
        (8, None, 3, 4, ""),
    ],
)  # fmt: skip
def test_a_node_needs_a_sequence_for_each_group_of_tensor_ranks(heads, kv_heads, sequences, groups, fewer):
    """Of four devices, as many as divide the heads and those of keys are a group."""
    of = run(train={"tokens": 10**8, "tokens_per_step": 2048 * sequences})
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    of = replace(of, model=of.model.model_copy(update=heads))
    said = str(nothing_runs(of, [7], Found()))
    advice = f"= {7 * groups * 2048} or a multiple (it is {2048 * sequences}){fewer}"
    assert said.endswith(f". Fix: train.tokens_per_step {advice}")


def test_a_number_of_nodes_nearby_that_divides_is_named() -> None:
    """2,978 nodes of LUMI are 2 × 1,489: no pipeline of up to 16 ranks leaves 1,024 replicas or fewer.

    2,977 are 13 × 229, whose replicas have four sequences for 13 ranks. 2,976 are 6 × 496.
    """
    large = read_recipe("lumi_140b_scaling", ["train.tokens_per_step=5_242_880"]).recipe
    of = RunToPlan.of_recipe(large)
    said = str(nothing_runs(of, [2978], search(of, [2978])))
    assert said.endswith("(it is 5242880), or 2976 nodes")


@pytest.mark.parametrize(
    ("nodes", "fits_on", "asked", "advice"),
    [
        ([2, 3], (6,), [[6]], "6 nodes"),
        ([1], (8,), [[2], [4], [8]], "8 nodes"),
        ([5], (10,), [[10]], "10 nodes"),
        ([5, 4], (), [[10]], "a smaller model, or a machine with more memory a device"),
        ([6], (12,), [], "a smaller model, or a machine with more memory a device"),
    ],
)  # fmt: skip
def test_twice_as_many_nodes_until_it_fits_or_there_are_no_more(searched, nodes, fits_on, asked, advice):
    """The site has ten nodes. The layout that needs least is named, with its number of nodes."""
    tried = searched(fits_on=fits_on)
    least = planned(bytes_=LARGE)
    nearest = {number: planned(bytes_=LARGER, micro_batch=1) for number in nodes} | {nodes[-1]: least}
    where = " or ".join(map(str, nodes))
    assert str(nothing_runs(run(), nodes, Found(nearest=nearest))) == (
        f"no layout of mine fits on {where} nodes of here: the least is 80.5 GB a device ({least.name} on "
        f"{nodes[-1]}), and 48.0 GB are usable. Fix: {advice}"
    )
    assert tried == asked


def test_memory_of_a_node_is_named(searched) -> None:
    """Weights, moments and copies of four ranks beside each other; the machine's own memory is too small."""
    searched()
    of = run()
    of = replace(of, site=of.site.model_copy(update={"memory_gib_per_node": 44.0}))
    least = planned(of)
    assert least.device_need.fits and not least.host_need.fits
    said = str(nothing_runs(of, [3], Found(nearest={3: least})))
    assert "the least is 48.0 GB of host memory a node (" in said and "and 47.2 GB are usable" in said
    assert said.endswith("Fix: a smaller model, or a machine with more host memory a node")


def test_the_fastest_with_the_name_or_the_nearest(searched) -> None:
    """The nearest only on request; else the message has its bytes."""
    first, second, far = planned(), planned(micro_batch=1), planned(bytes_=LARGE)
    searched(Found(ranked={6: [first, second]}, nearest={6: far}))
    assert named(run(), 6, "tp2") is first and named(run(), 6, "tp2", or_nearest=True) is first
    searched(Found(nearest={6: far}))
    assert named(run(), 6, "tp2", or_nearest=True) is far
    with pytest.raises(KieloError) as caught:
        named(run(), 6, "tp2")
    assert str(caught.value) == (
        f"tp2 on 6 nodes does not fit: {far.name} needs 80.5 GB a device, the least of all with that name, "
        "and 48.0 GB are usable"
    )


def test_why_no_layout_has_the_name(searched) -> None:
    """Reasons on so many nodes, and those of every number of nodes for layouts with this name."""
    tensor, pipeline = Choice(Layout(tensor=2), 1, 1, 2), Choice(Layout(pipeline=2), 1, 1, 2)
    impossible = {"heads": [pipeline, tensor], "layers": [pipeline]}
    found = Found(refused={6: {"too slow": [tensor], "none": []}, 7: {"other": [tensor]}})
    for refused, impossible_too, why in (
        (found.refused, impossible, "too slow; heads"),
        ({}, impossible, "heads"),
        ({}, {}, "no layout of 24 devices has that name"),
    ):
        searched(Found(refused=refused, impossible=impossible_too))
        for or_nearest in (False, True):
            with pytest.raises(KieloError) as caught:
                named(run(), 6, "tp2", or_nearest)
            assert str(caught.value) == f"tp2: {why}"


def test_the_recipes_own_layout_is_planned_by_its_longest_phase(monkeypatch) -> None:
    """With the ranks and the micro-batch that training would take; a refusal is the text of an error."""
    asked = []
    monkeypatch.setattr(
        choose_layout, "plan_layouts", lambda of, layouts: asked.append(layouts) or ["first", "second"]
    )
    short, long = ({"sequence_length": length, "tokens_per_step": 98_304} for length in (1024, 2048))
    phases = [short | {"tokens": 98_304 * 3}, long | {"tokens": 98_304 * 9}, short | {"tokens": 98_304 * 5}]
    for number, phase in enumerate(phases, start=1):
        phase["micro_batch_sequences"] = number
    of = run(train={}, phases=phases, layout={"tensor": 2, "replicate": 2})
    assert choose_layout.own(of, 4) == "first"
    (((layout, nodes, size),),) = asked
    assert (nodes, size, layout.tensor, layout.replicate, layout.shard) == (4, 2, 2, 2, 4)
    said = choose_layout.own(run(layout={"tensor": 3}), 4)
    assert isinstance(said, str) and "layout.tensor = 3" in said


def test_one_layout_of_each_axes() -> None:
    """The first of the same tensor, pipeline and context ranks."""
    axes = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (2, 1, 1), (4, 1, 1)]
    ranked = [
        SimpleNamespace(layout=Layout(tensor=tensor, pipeline=pipeline, context=context))
        for tensor, pipeline, context in axes
    ]
    assert choose_layout.different_axes(ranked) == ranked[:4]

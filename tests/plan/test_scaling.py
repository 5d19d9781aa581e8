"""Strong and weak scaling: which searches are asked for, with which batch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.plan import compare
from kielo.plan.compare import strong_and_weak
from kielo.plan.planned_layout import plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found
from kielo.recipe.read import read_recipe
from tests.plan.hand_made import model
from tests.plan.test_run_to_plan import recipe


def fastest(nodes: int, name: str) -> Any:
    return SimpleNamespace(nodes=nodes, name=name)


def test_a_batch_grows_with_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the smallest number on which a layout runs; where none runs there is no point in either curve."""
    asked = []

    def search(run: RunToPlan, nodes: list[int]) -> Found:
        asked.append((nodes, run.recipe.train.tokens_per_step, run.phase.tokens_per_step))
        (number,) = nodes
        names = ["fast", "slow"] if number != 6 else []
        return Found(ranked={number: [fastest(number, name) for name in names]})

    monkeypatch.setattr(compare, "search", search)
    run = RunToPlan.of(recipe(), model())
    numbers = [1, 2, 3, 5, 6]
    ranked = {number: [fastest(number, "first"), fastest(number, "second")] for number in numbers[1:]}
    strong, weak = strong_and_weak(run, numbers, Found(ranked=ranked | {1: []}))
    assert [(one.nodes, one.name) for one in strong] == [(number, "first") for number in (2, 3, 5, 6)]
    batch = 98_304
    grown = [batch, batch * 3 // 2, batch * 5 // 2, 3 * batch]
    assert asked == [([number], tokens, tokens) for number, tokens in zip((2, 3, 5, 6), grown)]
    assert [(one.nodes, one.name) for one in weak] == [(2, "fast"), (3, "fast"), (5, "fast")]
    # a phase with steps of its own has larger ones too, and the other those of [train]
    phases = [{"tokens": 10**6}, {"tokens": 10**7, "tokens_per_step": 2048}]
    phased = RunToPlan.of(recipe(train={"tokens_per_step": batch}, phases=phases), model())
    asked.clear()
    strong_and_weak(phased, [2, 3], Found(ranked={number: [fastest(number, "first")] for number in (2, 3)}))
    assert asked == [([2], batch, 2048), ([3], batch * 3 // 2, 3072)]


def kept(run, ring_share, **layout) -> float:
    """Speed of a device on 768 nodes beside 48, in the published tensor 8 × pipeline 8."""
    of = replace(run, site=run.site.model_copy(update={"ring_share": ring_share}))
    base = run.recipe.layout.model_copy(update={"tensor": 8, "pipeline": 8} | layout)
    few, many = plan_layouts(
        of, [(base.model_copy(update={"shard": nodes // 8}), nodes, 1) for nodes in (48, 768)]
    )
    return many.tokens_per_second / few.tokens_per_second / 16


def test_the_140b_on_768_nodes_is_between_the_two_rates_of_the_network():
    """CSC published 80 %. It is out of reach of 1F1B: its bubble alone leaves (8 / 15) / (128 / 135) = 56 %.
    With four stages a rank it lies between the rate in training and the rate between two nodes.
    """
    run = RunToPlan.of_recipe(read_recipe("lumi_140b_scaling").recipe)
    assert (
        kept(run, 1.0, pipeline_schedule="1f1b", pipeline_stages_per_rank=None)
        < (8 / 15) / (128 / 135) + 0.03
    )
    four = {"pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_rank": 4}
    slow, fast = kept(run, 0.37, **four), kept(run, 0.85, **four)
    assert slow < 0.78 < 0.80 < fast + 0.02 < 0.86

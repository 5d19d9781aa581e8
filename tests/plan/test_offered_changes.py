"""What is offered where a layout does not fit: each change that is tried, in order, and its words."""

from dataclasses import replace
from typing import Any

import pytest

from kielo.plan import compare as offers
from kielo.plan import remedies as of_memory
from kielo.plan.compare import overlap_offer
from kielo.plan.explain import explain
from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.remedies import Remedy, in_words, memory_warning, remedies
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text
from tests.plan.hand_made import a_phase, planned, run
from tests.plan.test_remedies import TOO_LARGE

TRIED: list[list[tuple[Layout, int, int]]] = []


def plans(monkeypatch, seconds, fits) -> None:
    """seconds(layout, nodes, size): of a step of the changed layout. fits: of it, if it fits."""

    def plan(of: RunToPlan, layouts: list[tuple[Layout, int, int]], simulate: bool) -> list[PlannedLayout]:
        assert not simulate
        TRIED.append(layouts)
        return [
            replace(
                planned(), run=of, layout=layout, nodes=nodes, devices=4 * nodes, micro_batch=size,
                seconds={"matrix": seconds(layout, nodes, size)},
                bytes={"activations": 30.25e9 if fits(layout, nodes, size) else 50e9},
            )
            for layout, nodes, size in layouts
        ]  # fmt: skip

    TRIED.clear()
    monkeypatch.setattr(of_memory, "plan_layouts", plan)


def four_nodes(**layout: Any) -> PlannedLayout:
    return planned(**{"shard": 2, "micro_batch": 4} | layout)


def tried(changed: list[tuple[Layout, int, int]], before: PlannedLayout) -> list[dict[str, Any]]:
    """Returns what differs from `before`, of each."""
    found = []
    for layout, nodes, size in changed:
        own, old = (one.model_dump(exclude={"shard"}) for one in (layout, before.layout))
        differs: dict[str, Any] = {key: value for key, value in own.items() if value != old[key]}
        differs |= {"nodes": nodes} if nodes != before.nodes else {}
        differs |= {"size": size} if size != before.micro_batch else {}
        found.append(differs | ({"shard": layout.shard} if layout.shard != before.layout.shard else {}))
    return found


CHEAP, OPERATORS = {"recompute": "norms+activations"}, {"recompute": "operators"}
HALF, FULL = {"recompute": "full", "recompute_every_layers": 2}, {"recompute": "full"}
ZERO, SIZE = [{"zero": 2}, {"zero": 3}], [{"size": 2}, {"size": 1}]
AXES = [{"tensor": 4, "shard": 1}, {"pipeline": 8, "shard": 1}]
NODES = [{"nodes": 8, "shard": 4}]


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({}, [CHEAP, OPERATORS, HALF, FULL, *ZERO, *SIZE, *AXES, *NODES]),
        ({"recompute": "attention"}, [
            {"recompute": "attention+norms+activations"}, OPERATORS, HALF, FULL, *ZERO, *SIZE, *AXES, *NODES,
        ]),
        ({"recompute": "norms+activations"}, [OPERATORS, HALF, FULL, *ZERO, *SIZE, *AXES, *NODES]),
        # of every second layer, all may be made
        ({"recompute": "norms+activations", "recompute_every_layers": 2}, [
            {"recompute_every_layers": 1}, {"recompute": "operators", "recompute_every_layers": 1},
            {"recompute": "full"}, {"recompute": "full", "recompute_every_layers": 1},
            *ZERO, *SIZE, *AXES, *NODES,
        ]),
        ({"recompute": "operators"}, [HALF, FULL, *ZERO, *SIZE, *AXES, *NODES]),
        ({"recompute": "full", "recompute_every_layers": 3}, [
            {"recompute_every_layers": 2}, {"recompute_every_layers": 1}, *ZERO, *SIZE, *AXES, *NODES,
        ]),
        ({"recompute": "full", "recompute_every_layers": 2}, [
            {"recompute_every_layers": 1}, *ZERO, *SIZE, *AXES, *NODES,
        ]),
        ({"recompute": "full"}, [*ZERO, *SIZE, *AXES, *NODES]),
        ({"recompute": "full", "zero": 2}, [{"zero": 3}, *SIZE, *AXES, *NODES]),
        ({"recompute": "full", "zero": 3, "micro_batch": 1}, [*AXES, *NODES]),
        # a split backward pass makes no products again, and has no degree 3; 16 stages are too many
        (CHEAP | {"pipeline_schedule": "zbv"}, [{"zero": 2}, *SIZE, AXES[0], *NODES]),
        # layers that are given are of so many stages; four tensor ranks are a node's
        ({"recompute": "full", "pipeline_layers": (1, 2, 2, 3)}, [*ZERO, *SIZE, AXES[0], *NODES]),
        ({"recompute": "full", "tensor": 4, "shard": 1}, [*ZERO, *SIZE, {"nodes": 8, "shard": 2}]),
        # ranks that do not divide the devices are no change, nor are more nodes than ten
        ({"recompute": "full", "shard": 3}, [*ZERO, *SIZE]),
        # on five nodes there are none for two copies of four pipeline ranks and two of tensors
        ({"recompute": "full", "shard": 1, "replicate": 2}, [*ZERO, *SIZE, {"nodes": 8, "shard": 2}]),
    ],
)  # fmt: skip
def test_each_change_that_can_run_is_tried(keys, changes, monkeypatch):
    plans(monkeypatch, lambda *of: 12.0, lambda *of: True)
    before = four_nodes(**keys)
    remedies(before)
    assert tried(TRIED[0], before) == changes
    assert TRIED[1:] == [[(before.layout, before.nodes, before.micro_batch)]]


def test_the_cheapest_three_are_told(monkeypatch):
    """By seconds of a device for a token: 12 before, 16, 10, and 8 on twice the nodes, as long as 16."""
    of = {"operators": 10.0, "norms+activations": 16.0, "full": 30.0}
    plans(
        monkeypatch,
        lambda layout, nodes, size: 8.0 if nodes == 8 else of.get(layout.recompute, 12.0),
        lambda layout, nodes, size: layout.recompute != "none" or nodes == 8,
    )
    found = remedies(four_nodes())
    assert [one.slower for one in found] == pytest.approx([-0.2, 0.25, 0.25])
    assert list(map(str, found)) == [
        "--set layout.recompute='\"operators\"' --set layout.recompute_every_layers=1 (30.2 GB, 20% faster a "
        "device)",
        "--set layout.recompute='\"norms+activations\"' --set layout.recompute_every_layers=1 (30.2 GB, 25% "
        "slower a device)",
        "--nodes 8 (30.2 GB, 25% slower a device)",
    ]
    assert in_words(four_nodes()) == (
        "changes that make it fit, the fastest first: " + "; ".join(map(str, found))
    )
    even = Remedy({"train.micro_batch_sequences": 2}, found[0].planned, 0.0)
    assert str(even) == "--set train.micro_batch_sequences=2 (30.2 GB, 0% slower a device)"


def test_two_changes_are_tried_where_no_single_one_is_enough(monkeypatch):
    """Of different keys only: ZeRO 3 with micro-batches of one sequence."""
    plans(
        monkeypatch, lambda *of: 12.0,
        lambda layout, nodes, size: layout.zero == 3 and (size == 1 or layout.tensor == 4),
    )  # fmt: skip
    before = four_nodes(recompute="full")
    assert [one.changes for one in remedies(before)] == [
        {"layout.zero": 3, "train.micro_batch_sequences": 1}, {"layout.zero": 3, "layout.tensor": 4},
    ]  # fmt: skip
    twice = [change for change in tried(TRIED[2], before) if "zero" in change and "size" in change]
    assert twice == [{"zero": zero, "size": size} for zero in (2, 3) for size in (2, 1)]
    # 21 pairs of seven changes, less two degrees, two sizes, and 4 × 8 ranks of 16 devices
    assert len(TRIED[2]) == 21 - 3
    plans(monkeypatch, lambda *of: 12.0, lambda *of: False)
    assert remedies(before) == []
    assert in_words(before) == (
        "no one or two changes of the layout make it fit; `kielo plan RECIPE --nodes N` lists others"
    )


def test_a_step_must_have_a_sequence_for_each_rank(monkeypatch):
    """48 on 48 ranks, not on 64; and stages must not be more than the layers."""
    plans(monkeypatch, lambda *of: 12.0, lambda *of: True)
    wide = planned(recompute="full", zero=3, micro_batch=1, tensor=1, pipeline=1, shard=16)
    remedies(wide)
    assert tried(TRIED[0], wide) == [
        {"tensor": 2, "shard": 8}, {"pipeline": 2, "shard": 8}, {"nodes": 8, "shard": 32},
    ]  # fmt: skip
    for tokens, nodes in ((32, [8]), (31, [])):
        train = {"tokens": 2048 * tokens * 10, "tokens_per_step": 2048 * tokens}
        remedies(replace(wide, run=run(train=train), phase=a_phase(2048, 2048 * tokens)))
        assert [changed[1] for changed in TRIED[-2] if changed[1] != 4] == nodes


def test_the_warning_is_of_the_runs_own_nodes_and_micro_batch(monkeypatch):
    """128 ranks on nodes of eight."""
    monkeypatch.setattr(of_memory, "in_words", lambda one: f"{one.nodes} nodes, {one.name}")
    recipe = read_recipe("estonian_llama31_70b", TOO_LARGE).recipe
    resolved = resolve(recipe, "", 128, "cuda", "mi250x_gcd", text=imagined_text(recipe))
    assert memory_warning(resolved, recipe).endswith(" usable GB; 16 nodes, tp8-pp4-dp4-mb4-zero1-1f1b")


@pytest.mark.parametrize(("step", "said"), [(11.93, "0.6%"), (11.95, None), (12.5, None), (9.0, "25.0%")])
def test_chunks_are_offered_from_a_half_per_cent_on(step, said, monkeypatch):
    asked = []

    def plan(of, layouts, phase):
        asked.append((layouts, phase.tokens_per_step))
        return [replace(planned(), seconds={"matrix": step})]

    monkeypatch.setattr(offers, "plan_layouts", plan)
    found = overlap_offer(planned())
    told = (
        f'tp2-pp4-dp3-mb2-zero1-1f1b: layout.tensor_overlap = "chunked" would take {said} off a step, since '
        "its collectives then run beside products (by assumption: a product beside a collective keeps 90% of "
        "its rate. It was not measured on a GPU)."
    )
    assert found == (told if said else None)
    (((layout, nodes, size),), tokens) = asked[0]
    assert (layout.tensor_overlap, nodes, size, tokens) == ("chunked", 6, 2, 98_304)


@pytest.mark.parametrize("keys", [{"tensor": 1}, {"sequence_parallel": False}, {"tensor_overlap": "chunked"}])
def test_chunks_are_not_offered_where_there_are_none(keys, monkeypatch):
    monkeypatch.setattr(offers, "plan_layouts", None)
    assert overlap_offer(planned(**keys)) is None
    assert overlap_offer(planned(run("fp8"))) is None


def test_a_changed_layout_is_planned_in_the_phase_of_the_plan() -> None:
    """Phases may differ only in what they train: each sentence is of the phase whose plan it explains."""
    of = RunToPlan.of_recipe(read_recipe("norwegian_7b_warm").recipe)
    frozen, whole = of.phases
    assert (frozen.sequence_length, frozen.tokens_per_step) == (whole.sequence_length, whole.tokens_per_step)
    usual = Layout(tensor=8, pipeline=1, shard=8, recompute="none", zero=1)
    chunked = usual.model_copy(update={"tensor_overlap": "chunked"})
    again = usual.model_copy(update={"recompute": "full"})
    told = []
    for phase in (frozen, whole):
        before, after, slower = plan_layouts(of, [(one, 8, 4) for one in (usual, chunked, again)], phase)
        saved = 1 - after.step_seconds / before.step_seconds
        assert f"would take {saved:.1%} off a step" in overlap_offer(before)
        (row,) = [row for row in explain(slower) if row.part == "no recomputation"]
        assert row.seconds == pytest.approx(before.step_seconds)
        told.append(row.seconds)
    assert told[0] < 0.8 * told[1]

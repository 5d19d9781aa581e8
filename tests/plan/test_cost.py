"""Cost of small runs by hand: one node without a network, phases of several lengths, and limits of a job."""

from dataclasses import replace

import pytest

from kielo.plan import cost as costs
from kielo.plan.cost import cost, resolved_of, tokens_per_second, with_expectation, with_layout
from kielo.plan.failures import Rate
from kielo.plan.planned_layout import PlannedLayout, plan_layouts, shares_of
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.workload import matrix_recipe
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Fp8, Layout
from tests.plan.hand_made import model
from tests.plan.test_run_to_plan import recipe
from tests.plan.test_search import run_of

SETS = ["checkpoint.every_steps=500", "checkpoint.memory_every_steps=50"]


def on_node(run: RunToPlan, nodes: int = 1, **layout) -> PlannedLayout:
    keys = {"shard": 8 * nodes, "zero": 3, "recompute": "full"} | layout
    shape = run.recipe.layout.model_copy(update={"replicate": 1} | keys)
    return plan_layouts(run, [(shape, nodes, 1)])[0]


@pytest.mark.parametrize("nodes", [1, 2])
def test_copies_on_one_node_go_nowhere(nodes, monkeypatch):
    """One pass over a rank's bytes, and nothing is sent; on two nodes three passes and what a node sends."""
    asked = []
    monkeypatch.setattr(costs, "expect", lambda *what: asked.append(what) or made)
    made = type("Failures", (), {"effective_share": 0.5})()
    planned = on_node(run_of("norwegian_7b", *SETS), nodes)
    found = cost(planned, rate=Rate(1.0, "test"))
    rate, layout, save, steps, read, job, copies = asked[0]
    bytes_ = 12 * resolved_of(planned).placement.parameters
    stop = 0.2 + bytes_ / (8 * nodes) / 1e9
    traffic = 0.0 if nodes == 1 else bytes_ / 2 / 100e9  # 800 Gbit/s
    passes = (1 if nodes == 1 else 3) * bytes_ / (8 * nodes) / 1e9
    assert copies.between == 50 and copies.cost.stop == pytest.approx(stop + traffic)
    assert copies.cost.safe == pytest.approx(passes + traffic / 0.1)
    assert (save.stop, save.safe, read) == (pytest.approx(stop), found.checkpoint_seconds, save.safe)
    assert (steps.between_saves, steps.seconds, job) == (500, planned.step_seconds, 48 * 3600)
    assert layout is planned.layout and rate.source == "test" and found.failures is made
    # half of the time is lost, and copies and stops are in the share
    work = (found.training_seconds + found.heldout_seconds) / 0.5
    starts = found.jobs * (600 + found.checkpoint_seconds)
    assert found.wall_seconds == pytest.approx(work + starts)


def test_a_machine_without_a_network_sends_in_no_time(monkeypatch):
    run = run_of("norwegian_7b", *SETS)
    planned = on_node(
        replace(run, site=run.site.model_copy(update={"network_gbit_per_second_per_node": 0})), 2
    )
    asked = []
    made = type("Failures", (), {"effective_share": 0.5})()
    monkeypatch.setattr(costs, "expect", lambda *what: asked.append(what) or made)
    endless = planned.run.site.model_copy(update={"max_wall_hours": None})
    planned = replace(planned, run=replace(planned.run, site=endless))
    found = cost(planned, rate=Rate(1.0, "test"))
    *_, save, _, _, job, copies = asked[0]
    assert copies.cost.stop == save.stop and found.jobs == 1
    # without a limit the job is the whole run, with its saves and copies
    number = found.steps // 50 - found.checkpoints
    work = found.training_seconds + found.heldout_seconds + (found.checkpoints + number) * save.stop
    assert job == pytest.approx(work)


def test_a_run_of_fewer_steps_than_a_save_has_one():
    """And copies as rare as saves are none; held-out text of fewer steps than between two looks is none."""
    run = run_of("norwegian_7b", "checkpoint.every_steps=100000000", "train.heldout_every_steps=100000000")
    planned = on_node(run)
    found = cost(planned)
    assert found.checkpoints == 1 and found.heldout_seconds == 0
    ends = found.training_seconds + found.stop_seconds + found.jobs * (600 + found.checkpoint_seconds)
    assert found.wall_seconds == pytest.approx(ends)


def test_the_layout_and_its_micro_batch_go_into_the_recipe():
    run = run_of("norwegian_7b_warm")
    planned = replace(on_node(run), micro_batch=3)
    made = with_layout(run.recipe, planned)
    assert made.layout == planned.layout and made.train.micro_batch_sequences == 3
    assert {phase.micro_batch_sequences for phase in made.phases} == {3} and len(made.phases) == 2


def test_phases_are_scaled_from_the_one_that_was_planned():
    """The plan's own phase takes its steps; the other by the ratio of closed forms."""
    run = run_of("norwegian_7b_warm")
    planned = on_node(run, 16, tensor=2, pipeline=2, shard=32, zero=1, recompute="none")
    resolved = resolved_of(planned)
    speeds = tokens_per_second(run, resolved)
    assert len(speeds) == len(resolved.identity.phases) == 2
    share = speeds[1] / planned.tokens_per_second  # the longest phase is the second
    assert share != pytest.approx(1, abs=1e-4)
    tokens = [phase.steps * phase.tokens_per_step for phase in resolved.identity.phases]
    seconds = sum(many / speed * share for many, speed in zip(tokens, speeds))
    assert cost(planned).training_seconds == pytest.approx(seconds)


def test_an_expectation_is_of_the_same_devices():
    """By the card of the recipe's machine; on others, and where FP8 is emulated, nothing is expected."""
    run = run_of("norwegian_7b")
    planned = on_node(run)
    recipe, resolved = with_layout(run.recipe, planned), resolved_of(planned)
    told = with_expectation(resolved, recipe).placement.phases[0].planned_tokens_per_second
    assert told == round(tokens_per_second(replace(run, recipe=recipe), resolved)[0], 1) > 0
    for update in ({"accelerator": "h100_80"}, {"device": "cpu"}):
        other = resolved.model_copy(update={"placement": resolved.placement.model_copy(update=update)})
        assert with_expectation(other, recipe) == other


@pytest.mark.parametrize(("names", "sets"), [("a", 1), ("ab", 3), ("abc", 4)])
def test_held_out_text_takes_a_third_of_trained_text(names, sets):
    """A look is at the set of all sources, and of several also at each source. Ten steps have three looks."""
    sources = [{"name": name, "path": f"{name}.txt"} for name in names]
    train = {"tokens": 983_040, "tokens_per_step": 98_304, "heldout_every_steps": 3, "heldout_sequences": 64}
    found = cost(planned := on_node(RunToPlan.of(recipe(corpus={"sources": sources}, train=train), model())))
    tokens = 3 * sets * 64 * 2048
    assert found.steps == 10
    assert found.heldout_seconds == pytest.approx(tokens / 3 / planned.tokens_per_second)


def test_steps_that_are_skipped_take_no_time():
    """The steps 2 to 4 and 9 of ten."""
    train = {"tokens": 983_040, "tokens_per_step": 98_304}
    whole, skipping = (
        cost(on_node(RunToPlan.of(recipe(train=train | more), model()))).training_seconds
        for more in ({}, {"skip_steps": [(2, 4), (9, 9)]})
    )
    assert skipping == pytest.approx(0.6 * whole)


def test_emulated_fp8_has_no_expectation():
    """A run in bf16 has one, whatever its settings of FP8; and FP8 on devices that have it."""
    run = run_of("norwegian_7b", "cluster=dgx_h100")
    planned = on_node(run)
    recipe, resolved = with_layout(run.recipe, planned), resolved_of(planned)

    def told(precision: str, emulate: bool) -> float | None:
        train = {"precision": precision, "fp8": Fp8(emulate=emulate)}
        train = resolved.identity.train.model_copy(update=train)
        identity = resolved.identity.model_copy(update={"train": train})
        of = with_expectation(resolved.model_copy(update={"identity": identity}), recipe)
        return of.placement.phases[0].planned_tokens_per_second

    wide = told("bf16", False)
    assert told("bf16", True) == wide and told("fp8", False) > 1.1 * wide
    assert told("fp8", True) is None
    # on devices without FP8 nothing is planned; a card of the person's own that is not there is told
    gone = recipe.model_copy(update={"machine": "gone.toml"})
    with pytest.raises(KieloError, match="gone.toml"):
        with_expectation(resolved, gone)
    assert with_expectation(resolved, recipe.model_copy(update={"cluster": "laptop"})) == resolved


def test_shares_of_a_layout_are_rounded_up():
    """Of 8 sequences three ranks have three at most: two micro-batches of two; four stages need four."""
    phase = run_of("norwegian_7b").phase
    phase = replace(phase, tokens_per_step=8 * phase.sequence_length)
    found = shares_of(Layout(shard=3), 2, phase)
    assert (found.sequences, found.data_ranks, found.micro_batch, found.micro_batches) == (8, 3, 2, 2)
    assert shares_of(Layout(shard=3, pipeline=4), 2, phase).micro_batches == 4
    assert shares_of(Layout(shard=2, replicate=2), 1, phase).data_ranks == 4
    assert plan_layouts(run_of("norwegian_7b"), []) == []


def test_products_have_the_recipe_of_their_scaling():
    assert [matrix_recipe("fp8", Fp8(scaling=scaling)) for scaling in ("tensorwise", "rowwise")] == [
        "fp8", "fp8_rowwise",
    ]  # fmt: skip
    assert matrix_recipe("fp32", Fp8()) == matrix_recipe("bf16", Fp8(scaling="rowwise")) == "bf16"

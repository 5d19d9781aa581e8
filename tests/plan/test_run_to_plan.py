"""Runs on machines: which precision, peak and memory a plan counts with, and what no card can plan."""

from dataclasses import replace
from typing import Any

import pytest

from kielo.plan import run_to_plan
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.workload import main_precision, steps_by_precision
from kielo.recipe.cards import accelerator
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from tests.plan.hand_made import model, run


def recipe(cluster: str = "dgx_h100", **sections: Any) -> Recipe:
    """Ten steps of 48 sequences of 2,048."""
    sections = {
        "corpus": {"sources": [{"name": "a", "path": "a.txt"}]}, "cluster": cluster,
        "dataset": {"sequence_length": 2048}, "train": {"tokens": 983_040, "tokens_per_step": 98_304},
    } | sections  # fmt: skip
    return Recipe.model_validate({"name": "mine", "language": "et"} | sections)


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989.0), ("fp8", 1979.0)])
def test_the_peak_is_of_the_precision(precision: str, peak: float) -> None:
    """H100's, of NVIDIA's data sheet; products that stay in bf16 keep theirs in a plan for FP8."""
    train = {"tokens": 983_040, "tokens_per_step": 98_304, "precision": precision}
    for of in (RunToPlan.of(recipe(train=train), model()), RunToPlan.of(recipe(), model(), precision)):
        assert (of.precision, of.peak_tflops, of.card.peak_tflops["bf16"]) == (precision, peak, 989.0)
        assert of.site.name == "dgx_h100" and of.card.name == "h100_80"


def test_a_peak_in_fp32_is_planned_as_that_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    card = accelerator("h100_80").model_copy(update={"peak_tflops": {"bf16": 989.0, "fp32": 67.0}})
    monkeypatch.setattr(run_to_plan, "accelerator_card", lambda name: card)
    of = RunToPlan.of(recipe(), model(), "fp32")
    assert (of.precision, of.peak_tflops) == ("fp32", 67.0)


@pytest.mark.parametrize(
    ("lacks", "precision"),
    [
        ({"memory_bandwidth_tb_per_second": None}, "bf16"), ({"peak_tflops": {"fp8": 1979.0}}, "bf16"),
        ({"peak_tflops": {"bf16": 989.0}}, "fp32"),
    ],
)  # fmt: skip
def test_a_card_without_a_peak_or_a_bandwidth_plans_nothing(lacks, precision, monkeypatch) -> None:
    card = accelerator("h100_80").model_copy(update=lacks)
    monkeypatch.setattr(run_to_plan, "accelerator_card", lambda name: card)
    with pytest.raises(KieloError) as caught:
        RunToPlan.of(recipe(), model(), precision)
    assert str(caught.value).startswith(
        f"the card 'h100_80' has no {precision} peak or no memory bandwidth, so no speed can be planned"
    )


@pytest.mark.parametrize(
    ("changes", "steps", "main"),
    [
        ([], {"bf16": 10}, "bf16"),
        ([(6, "fp8")], {"bf16": 5, "fp8": 5}, "bf16"),
        ([(5, "fp8")], {"bf16": 4, "fp8": 6}, "fp8"),
        ([(10, "fp8")], {"bf16": 9, "fp8": 1}, "bf16"),
        ([(11, "fp8")], {"bf16": 10, "fp8": 0}, "bf16"),
    ],
)  # fmt: skip
def test_a_plan_is_for_the_precision_of_most_steps(changes, steps, main) -> None:
    """A change counts from its own step; of equally many the earlier precision is planned."""
    train = {"tokens": 983_040, "tokens_per_step": 98_304, "precision": "bf16"}
    asked = recipe(train=train | {"precision_changes": changes})
    assert steps_by_precision(asked) == steps and main_precision(asked) == main
    assert RunToPlan.of(asked, model()).precision == main


def test_steps_of_a_ramp_and_of_all_phases_count() -> None:
    """12 steps of 49,152 tokens in a ramp of 589,824, the rest of phase 1 in four, and two of phase 2."""
    ramp = {"first_tokens_per_step": 49_152, "step_tokens": 49_152, "tokens": 589_824}
    phase = {"tokens_per_step": 98_304, "sequence_length": 2048}
    phases = [phase | {"tokens": 983_040}, phase | {"tokens": 196_608}]
    train = {"batch_ramp": ramp, "precision": "bf16", "precision_changes": [(17, "fp8")]}
    assert steps_by_precision(recipe(train=train, phases=phases)) == {"bf16": 16, "fp8": 2}


def test_the_phase_with_most_tokens_ranks_layouts() -> None:
    """Steps of all phases are known by their sequences, each number once."""
    sizes = [(1024, 24, 2), (2048, 48, 4), (4096, 48, 1), (2048, 12, 3)]
    phases = [
        {
            "tokens": length * sequences * steps,
            "tokens_per_step": length * sequences,
            "sequence_length": length,
        }
        for length, sequences, steps in sizes
    ]
    of = run(train={}, phases=phases)
    assert [phase.number for phase in of.phases] == [1, 2, 3, 4]
    assert of.phase is of.phases[1] and of.sequences_of_steps == (12, 24, 48)


def test_a_device_without_memory_has_its_share_of_the_node() -> None:
    """100 GiB for four devices; the card's own less the context, 50 and 2 GB, where it has some."""
    of = run()
    assert of.usable_bytes == 48e9 and of.usable_host_bytes == 100 * 2**30
    assert run(card={"memory_bytes": None}).usable_bytes == 25 * 2**30


@pytest.mark.parametrize(("every", "copies"), [(0, 0), (1, 4)])
def test_host_memory_has_copies_of_four_ranks(every: int, copies: int) -> None:
    """A save's copies of weights and moments; with copies in memory four more; and all that is offloaded.

    A processor also has there what its ranks hold.
    """
    parts = {"weights": 3.0, "gradients": 5.0, "optimiser": 7.0, "logits": 11.0}
    of = run(checkpoint={"memory_every_steps": every})
    assert of.host_bytes_per_node(parts, False) == 4 * (1 + copies) * 10
    assert of.host_bytes_per_node(parts, True) == 4 * ((1 + copies) * 10 + 15)
    assert of.host_bytes_per_node({"weights": 3.0}, False) == 4 * (1 + copies) * 3
    processor = replace(of, card=of.card.model_copy(update={"device": "cpu"}))
    for is_offloaded in (False, True):
        assert processor.host_bytes_per_node(parts, is_offloaded) == 4 * ((1 + copies) * 10 + 26)


def test_flops_of_a_token_are_those_of_the_phase() -> None:
    """Six for each weight, without the embedding, and attention, of which half is in sight."""
    of = run()
    weights = 8 * (4 * 1024**2 + 3 * 1024 * 2816) + 32_000 * 1024 + 17 * 1024
    attention = 8 * 12 * 1024 * 2048 // 2
    assert of.flops_per_token(of.phase) == 6 * weights + attention

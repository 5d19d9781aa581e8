"""What brings a layout under the memory of its devices, and the one definition of "fits"."""

from typing import get_args

import pytest

from kielo.plan.choose_layout import own
from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.remedies import in_words, memory_warning, remedies
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.cards import accelerator
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recompute
from kielo.resolve.memory import needed_bytes, usable_bytes
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text

# A layout that keeps everything: 70B on 16 nodes of LUMI.
TOO_LARGE = ["layout.recompute=none", "train.micro_batch_sequences=4"]


def planned(*sets: str, nodes: int = 16) -> PlannedLayout:
    found = own(RunToPlan.of_recipe(read_recipe("estonian_llama31_70b", list(sets)).recipe), nodes)
    assert isinstance(found, PlannedLayout), found
    return found


def test_each_remedy_is_a_change_of_the_recipe_that_fits():
    """Ordered by what they cost; the changed recipe, read again, is planned with the same bytes."""
    before = planned(*TOO_LARGE)
    assert not before.fits
    found = remedies(before)
    assert found and [one.slower for one in found] == sorted(one.slower for one in found)
    for one in found:
        sets = [f"{key}={value}" for key, value in one.changes.items() if key != "nodes"]
        again = planned(*TOO_LARGE, *sets, nodes=one.changes.get("nodes", 16))
        assert again.fits and again.peak_bytes == pytest.approx(one.planned.peak_bytes, rel=1e-6)


def test_two_changes_where_one_is_not_enough():
    """Each of them alone is too little."""
    before = planned("layout.recompute=none", "train.micro_batch_sequences=4", "layout.tensor=2",
                     "layout.pipeline=1", nodes=8)  # fmt: skip
    found = remedies(before)
    assert found and all(len(one.changes) >= 2 for one in found)


@pytest.mark.parametrize("recompute", sorted({*get_args(Recompute)} - {"full"}))
def test_whatever_is_made_again_already_more_is_offered(recompute):
    """Every choice of `recompute` has an answer, and none that is offered makes less again than before."""
    before = planned(f"layout.recompute={recompute}", "train.micro_batch_sequences=32")
    assert not before.fits and "the fastest first" in in_words(before)
    for one in remedies(before):
        offered = set(one.changes.get("layout.recompute", "full").split("+"))
        assert offered & {"operators", "full"} or offered > before.layout.recomputed


@pytest.mark.parametrize("now", ["none", "attention"])
def test_norms_and_activations_are_offered_beside_what_is_made_again(now):
    """Of what costs no matrix product, the layout then makes all again."""
    before = planned(f"layout.recompute={now}", "train.micro_batch_sequences=4")
    offered = [one.changes.get("layout.recompute") for one in remedies(before)]
    assert "+".join([now] * (now != "none") + ["norms", "activations"]) in offered


def test_the_warning_names_rank_stage_and_ways_out():
    """For GPUs whose card is known; nothing is said of what fits."""
    recipe = read_recipe("estonian_llama31_70b", TOO_LARGE).recipe

    def warning(of) -> str | None:
        return memory_warning(resolve(of, "", 128, "cuda", "mi250x_gcd", text=imagined_text(of)), of)

    said = warning(recipe)
    assert "GB on rank 0 (stage 0), of 66.2 usable GB; changes that make it fit" in said and "--set " in said
    small = read_recipe("estonian_llama31_70b", ["layout.recompute=full"]).recipe
    assert warning(small) is None
    cpu = resolve(small, "", 128, "cpu", text=imagined_text(small))
    assert memory_warning(cpu, small) is None


def test_plan_and_rehearsal_add_up_the_same_bytes():
    """The plan's peak is what a rehearsal of the same tensors would need."""
    for one in plan_layouts(planned().run, [(planned().layout, 16, 1), (planned().layout, 32, 2)]):
        held = sum(one.bytes[part] for part in ("weights", "gradients", "optimiser"))
        tensors = one.peak_bytes - one.bytes["workspace"]
        assert needed_bytes(held, tensors) == pytest.approx(one.peak_bytes)
        assert one.device_need.usable == usable_bytes(accelerator("mi250x_gcd"))

"""What brings a layout under the memory of its devices, and the one definition of "fits"."""

import json
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


def planned(*sets: str, nodes: int = 16, recipe: str = "estonian_llama31_70b") -> PlannedLayout:
    found = own(RunToPlan.of_recipe(read_recipe(recipe, list(sets)).recipe), nodes)
    assert isinstance(found, PlannedLayout), found
    return found


# An entry of [[layouts]] that fits no better. --set of a key of [layout] removes it.
ENTRY = """extends = "estonian_llama31_70b"
[[layouts]]
cluster = "lumi_g"
nodes = [16]
micro_batch_sequences = 4
layout = { tensor = 4, pipeline = 2, shard = 4, replicate = 0, zero = 2 }
"""


@pytest.mark.parametrize("has_entry", [False, True])
def test_each_remedy_is_a_change_of_the_recipe_that_fits(has_entry, tmp_path):
    """Ordered by what they cost; the changed recipe, read again, is planned with the same bytes."""
    (tmp_path / "entry.toml").write_text(ENTRY)
    recipe, large = (str(tmp_path / "entry.toml"), []) if has_entry else ("estonian_llama31_70b", TOO_LARGE)
    before = planned(*large, recipe=recipe)
    assert not before.fits
    found = remedies(before)
    assert found and [one.slower for one in found] == sorted(one.slower for one in found)
    for one in found:
        sets = [f"{key}={json.dumps(value)}" for key, value in one.changes.items() if key != "nodes"]
        again = planned(*large, *sets, nodes=one.changes.get("nodes", 16), recipe=recipe)
        assert again.fits and again.peak_bytes == pytest.approx(one.planned.peak_bytes, rel=1e-6)
        assert again.name == one.planned.name


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


def test_the_warning_names_rank_stage_and_ways_out(tmp_path):
    """For GPUs whose card is known; nothing is said of what fits. An entry for these ranks counts."""
    recipe = read_recipe("estonian_llama31_70b", TOO_LARGE).recipe

    def warning(of) -> str | None:
        return memory_warning(resolve(of, "", 128, "cuda", "mi250x_gcd", text=imagined_text(of)), of)

    said = warning(recipe)
    assert "GB on rank 0 (stage 0), of 66.2 usable GB; changes that make it fit" in said and "--set " in said
    (tmp_path / "entry.toml").write_text(ENTRY)
    entry = str(tmp_path / "entry.toml")
    need = planned(recipe=entry).peak_bytes / 1e9
    assert warning(read_recipe(entry, []).recipe).startswith(f"planned to need {need:.1f} GB on rank 0")
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

"""Micro-batches that Kielo chooses: by the device's memory, the schedule, and what still saves time."""

from dataclasses import replace

import pytest

from kielo.models.families import complete
from kielo.plan.choose_layout import own
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.cards import accelerator
from kielo.recipe.sections import Layout, Recipe
from kielo.resolve.memory import memory_bytes, usable_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.micro_batch import RankOfRun, micro_batch
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text

LENGTH = 4096
H200 = accelerator("h200")
RECIPE = Recipe.model_validate({
    "name": "shape_8b", "language": "et", "cluster": "dgx_h100", "corpus": {"sources": ["a.txt"]},
    "dataset": {"sequence_length": LENGTH},
    "layout": {"zero": 3, "recompute": "operators"},
    "model": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "train": {"tokens_per_step": 16 * 24 * LENGTH, "tokens": 160 * 24 * LENGTH},
})  # fmt: skip
MODEL_8B = complete(RECIPE.model, LENGTH)


def rank(card: str = "h200", **layout) -> RankOfRun:
    """A rank of 8B on 64 devices or more, which have little besides activations."""
    return RankOfRun(MODEL_8B, Layout(**{"shard": 64} | layout), (TrainOptions(),), accelerator(card))


def peak(one: RankOfRun, size: int, sequences: int) -> float:
    row = memory_row(
        MODEL_8B, one.layout, StepSize(LENGTH, size, sequences // size), one.options[0], one.card
    )
    return memory_bytes(MemoryColumns.of([row])).peak("reserved")[0]


@pytest.mark.parametrize(("card", "layout", "sequences", "expected"), [
    ("cpu", {}, 24, 4), ("cpu", {}, 9, 3), ("cpu", {}, 25, 1),
    ("cpu", {"pipeline": 4}, 12, 3), ("cpu", {"pipeline": 2}, 1, 1),
    ("h200", {}, 24, 3), ("h200", {}, 7, 1), ("h200", {"recompute": "full"}, 24, 12),
    ("h200", {"recompute": "full"}, 1024, 16), ("h200", {"recompute": "full", "context": 2}, 1024, 32),
    ("mi250x_gcd", {}, 24, 1), ("mi250x_gcd", {"recompute": "full"}, 24, 1),
    ("mi250x_gcd", {"recompute": "full", "zero": 3}, 24, 12),
    ("h200", {"pipeline": 4}, 8, 1), ("h200", {"pipeline": 4}, 128, 2), ("h200", {"pipeline": 4}, 192, 3),
    ("h200", {"pipeline": 4, "recompute": "full"}, 1024, 16),
    ("h200", {"pipeline": 4, "pipeline_schedule": "interleaved_1f1b"}, 9, 3),
])  # fmt: skip
def test_the_largest_that_fits_and_is_worth_it(card, layout, sequences, expected):
    """No memory known: up to 4. A GPU: what fits, at most 65,536 tokens. A pipeline: 16 micro-batches for
    each of its ranks, or the smallest that its schedule accepts.
    """
    assert micro_batch(rank(card, **layout), LENGTH, sequences) == expected


@pytest.mark.parametrize("layout", [{}, {"zero": 3}, {"tensor": 2}, {"recompute": "operators"}])
def test_the_next_larger_one_does_not_fit(layout):
    """The choice leaves a tenth of the memory free, by the planner's own bytes; the next larger does not."""
    one, sequences = rank(**layout), 2**10
    chosen, usable = micro_batch(one, LENGTH, sequences), usable_bytes(H200)
    assert peak(one, chosen, sequences) <= 0.9 * usable
    assert chosen * LENGTH == 2**16 or peak(one, 2 * chosen, sequences) > 0.9 * usable


def test_every_precision_of_the_run_fits():
    """A run that begins in fp32 has the micro-batch that fits there."""
    one = rank()
    wide = replace(one, options=(*one.options, TrainOptions("fp32")))
    assert micro_batch(wide, LENGTH, 24) < micro_batch(one, LENGTH, 24)


def test_small_steps_of_a_ramp_have_no_larger_micro_batches():
    """24 sequences a rank have micro-batches of 4; 6 at the start of a ramp have 3, and 32 keep 4."""
    assert [micro_batch(rank(recompute="full"), LENGTH, number, at_most=4) for number in (6, 8, 32)] == [
        3,
        4,
        4,
    ]


def test_plan_and_run_choose_the_same():
    """On a cluster's card, on the driver's name of the device, and in the planner's row; the recipe wins."""

    def chosen(recipe: Recipe, device_name: str | None = None) -> int:
        text = imagined_text(recipe)
        return resolve(recipe, "", 16, "cuda", device_name, text).placement.phases[0].micro_batch_sequences

    planned = own(RunToPlan.of_recipe(RECIPE), 2).micro_batch
    assert planned == chosen(RECIPE) == chosen(RECIPE, "NVIDIA H100 80GB HBM3") == 4
    assert chosen(RECIPE, "a device without a card") == 4  # whose memory is not known
    given = RECIPE.train.model_copy(update={"micro_batch_sequences": 12})
    assert chosen(RECIPE.model_copy(update={"train": given})) == 12

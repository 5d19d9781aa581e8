"""Bytes of a device: those that rehearsals counted, and small trainings that are added up by hand."""

import json
from typing import Any

import numpy as np
import pytest
from planner_memory import CASES, RESULTS, planned_bytes, small

from kielo.resolve.memory import MemoryBytes, is_last_fullest, memory_bytes
from kielo.resolve.memory_row import MemoryColumns

# A model of three layers with two tables: 8 columns, 100 rows. Of a token and layer 300 bytes are kept. Its
# bf16 step has two micro-batches of 16 tokens; the loss takes 4 tokens at once.
TABLE, LAYER, LAYERS, TOKENS = 800, 700, 3, 16
TOY = {
    "hidden": 8, "ffn": 20, "mlp_matrices": 3, "vocabulary": 100, "sequence": TOKENS, "tied": 0,
    "tensor": 1, "pipeline": 1, "chunks": 1, "context": 1, "shard": 1, "zero": 1, "sequence_parallel": 0,
    "micro_batch": 1, "micro_batches": 2, "splits_backward": 0, "optimiser_bytes": 8,
    "compute_bytes": 2, "gathered_bytes": 2, "reduce_bytes": 4, "layer_elements": LAYER,
    "first_parameters": LAYERS * LAYER + 2 * TABLE, "first_layers": LAYERS, "first_passes": 1,
    "kept_bytes": 300, "again_bytes": 40, "logit_bytes": 6, "loss_tokens": 4,
}  # fmt: skip
MLP = 3 * 8 * 20  # elements
KEPT = LAYERS * TOKENS * 300
# The last norm's result, the hidden states before and after the head in bf16, and one of them in fp32.
ENDS = TOKENS * 8 * (2 + 2 + 2 * 2 + 4)
BF16 = 2 * (LAYERS * LAYER + 2 * TABLE)  # all parameters
# The head's gradient in fp32, and logits of two chunks of 4 tokens: 6 bytes, and 2 of the chunk before.
LOSS = 4 * TABLE + 4 * 100 * (6 + 2)
MADE = 2 * MLP + 4 * TABLE  # gradients of an MLP in bf16, and the buffer in which the head's are reduced
HEADLESS = BF16 - 2 * TABLE  # the head is freed after its loss


def toy(**changes: Any) -> MemoryBytes:
    return memory_bytes(MemoryColumns.of([TOY | changes]))


def gpipe(**changes: Any) -> dict[str, Any]:
    """The first of two pipeline ranks has the embedding and three layers, the last a layer and the head."""
    return {
        "pipeline": 2, "first_passes": np.inf, "last_passes": np.inf, "last_layers": 1,
        "first_parameters": LAYERS * LAYER + TABLE, "last_parameters": LAYER + TABLE,
    } | changes  # fmt: skip


def one_f_one_b(**changes: Any) -> dict[str, Any]:
    return gpipe(first_passes=2, last_passes=1, micro_batches=8) | changes


ALL = LAYERS * LAYER + 2 * TABLE
FIRST, LAST = LAYERS * LAYER + TABLE, LAYER + TABLE
SHARE = TOKENS * 8 * 2  # bytes of a micro-batch's hidden states in bf16
AGAIN = TOKENS * 40
WIDE, WIDE_ALL, WIDE_FIRST = 7000, 3 * 7000 + 2 * TABLE, 3 * 7000 + TABLE
# Layers that outweigh the tables, and two tokens.
DEEP = {"sequence": 2, "layer_elements": WIDE, "first_parameters": WIDE_ALL}
DEEP_FIRST = DEEP | {"first_parameters": WIDE_FIRST, "last_parameters": WIDE + TABLE}
ALONE = {"sequence": 1, "micro_batches": 1}
OF_LAMB = ALONE | {"whole_update_bytes": 8}
NARROW = ALONE | {"optimiser_bytes": 4, "widened_bytes": 8}
# what is changed → the bytes of weights and of the optimiser, then those at the time of the peak: gradients,
# gathered parameters, activations, logits
BY_HAND: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    # While the loss of a chunk is computed, gradients of the micro-batch before wait.
    "loss": ({}, (4 * ALL, 8 * ALL, 4 * ALL, BF16, KEPT + ENDS, LOSS)),
    "loss, fp32": (
        {"compute_bytes": 4, "gathered_bytes": 4, "logit_bytes": 8},
        (4 * ALL, 8 * ALL, 4 * ALL, 4 * ALL, KEPT + TOKENS * 8 * (4 + 4 + 8 + 4), 4 * TABLE + 4 * 100 * 12),
    ),
    "loss of all tokens at once": (
        {"loss_tokens": 0}, (4 * ALL, 8 * ALL, 4 * ALL, BF16, KEPT + ENDS, 4 * TABLE + 16 * 100 * 6)
    ),
    "loss of fewer tokens than there may be": (
        {"loss_tokens": 17}, (4 * ALL, 8 * ALL, 4 * ALL, BF16, KEPT + ENDS, 4 * TABLE + 16 * 100 * 6)
    ),
    # of a token the head's gradient in bf16, and the logits' gradient, are more than its logits
    "loss of a token at once": (
        {"loss_tokens": 1}, (4 * ALL, 8 * ALL, 4 * ALL, BF16, KEPT + ENDS, 4 * TABLE + 2 * TABLE + 2 * 100)
    ),
    "loss of a token at once, fp32": (
        {"compute_bytes": 4, "gathered_bytes": 4, "logit_bytes": 8, "loss_tokens": 1, "again_bytes": 0},
        (4 * ALL, 8 * ALL, 4 * ALL, 4 * ALL, KEPT + TOKENS * 8 * (4 + 4 + 8 + 4), 4 * TABLE + 100 * 12),
    ),
    "loss, head in 8 bits": (
        {"head_in_recipe": 1}, (4 * ALL, 8 * ALL, 4 * ALL, BF16, KEPT + ENDS, LOSS + 2 * TABLE)
    ),
    "loss, half of the layers' parameters frozen": (
        {"frozen": 0.5},
        (4 * ALL, 8 * (ALL - 1050), 4 * (ALL - 1050), BF16, KEPT + ENDS, LOSS),
    ),
    "loss, ZeRO 2": (  # shards, and the buffer in which the embedding's gradient was reduced
        {"zero": 2, "shard": 4}, (ALL, 2 * ALL, ALL + 4 * TABLE, BF16, KEPT + ENDS, LOSS)
    ),
    "loss, ZeRO 2, reduced in bf16": (
        {"zero": 2, "shard": 4, "reduce_bytes": 2},
        (ALL, 2 * ALL, ALL + 2 * TABLE, BF16, KEPT + ENDS, LOSS),
    ),
    "loss, ZeRO 3": (
        {"zero": 3, "shard": 4}, (ALL, 2 * ALL, ALL + 4 * TABLE, 2 * 2 * TABLE, KEPT + ENDS, LOSS)
    ),
    "loss, matrices gathered in 8 bits": (
        {"gathered_bytes": 1}, (4 * ALL, 8 * ALL, 4 * ALL, ALL + 2 * TABLE, KEPT + ENDS, LOSS)
    ),
    "loss, two context ranks": (
        {"context": 2}, (4 * ALL, 8 * ALL, 4 * ALL, BF16, (KEPT + ENDS) / 2, LOSS)
    ),
    "loss, two tensor ranks": (  # all hidden states are whole on both
        {"tensor": 2, "layer_elements": 350, "first_parameters": ALL / 2},
        (2 * ALL, 4 * ALL, 2 * ALL, BF16 / 2, KEPT + ENDS, LOSS / 2),
    ),
    "loss, two tensor ranks, sequence parallel": (  # split but for those before and after the head
        {"tensor": 2, "layer_elements": 350, "first_parameters": ALL / 2, "sequence_parallel": 1},
        (2 * ALL, 4 * ALL, 2 * ALL, BF16 / 2, KEPT + TOKENS * 8 * (1 + 1 + 2 * 2 + 2), LOSS / 2),
    ),
    "loss, last of two pipeline ranks": (  # that has three layers, and both micro-batches under way
        gpipe(first_layers=1, last_layers=LAYERS, first_parameters=LAST, last_parameters=FIRST),
        (4 * FIRST, 8 * FIRST, 0, 2 * FIRST, 2 * KEPT + 2 * ENDS + 4 * TABLE, LOSS),
    ),
    "loss, last of two pipeline ranks, three micro-batches, tied": (
        gpipe(first_layers=1, last_layers=LAYERS, first_parameters=LAST, last_parameters=FIRST)
        | {"micro_batches": 3, "tied": 1},
        (4 * FIRST, 8 * (FIRST - TABLE), 0, 2 * FIRST, 3 * KEPT + 3 * ENDS + 2 * 4 * TABLE, LOSS),
    ),
    # A rank with both ends of a V of two stages a rank; a half of the layers is a stage. Gradients of a stage
    # and of the head are kept as computed.
    "loss, V of a split backward pass": (
        {"pipeline": 2, "chunks": 2, "zero": 2, "splits_backward": 1, "first_passes": 4, "micro_batches": 8,
         "tied": 0},
        (4 * ALL, 8 * ALL, 4 * ALL + 2 * (1050 + TABLE), BF16, 2 * KEPT + ENDS + 3 * SHARE, LOSS),
    ),
    "loss, V of a split backward pass, frozen in half": (
        {"pipeline": 2, "chunks": 2, "zero": 2, "splits_backward": 1, "first_passes": 4, "micro_batches": 8,
         "frozen": 0.5},
        (4 * ALL, 8 * (ALL - 1050), 4 * (ALL - 1050) + 2 * (525 + TABLE), BF16, 2 * KEPT + ENDS + 3 * SHARE,
         LOSS),
    ),
    # In a backward pass, while a layer's MLP has gradients and the head's are in their reduction.
    "backward, one micro-batch": (
        {"micro_batches": 1, "again_bytes": 400},
        (4 * ALL, 8 * ALL, MADE, HEADLESS, KEPT + ENDS + 10 * AGAIN, 0),
    ),
    "backward, one micro-batch, frozen in half": (
        {"micro_batches": 1, "again_bytes": 400, "frozen": 0.5},
        (4 * ALL, 8 * (ALL - 1050), MLP + 4 * TABLE, HEADLESS, KEPT + ENDS + 10 * AGAIN, 0),
    ),
    "backward, one micro-batch, two tensor ranks": (
        {"micro_batches": 1, "again_bytes": 400, "tensor": 2, "layer_elements": 350,
         "first_parameters": ALL / 2},
        (2 * ALL, 4 * ALL, MADE / 2, HEADLESS / 2, KEPT + ENDS + 10 * AGAIN, 0),
    ),
    "backward, one micro-batch, fp32": (
        {"micro_batches": 1, "again_bytes": 800, "compute_bytes": 4, "gathered_bytes": 4, "logit_bytes": 8},
        (4 * ALL, 8 * ALL, 4 * MLP + 4 * TABLE, 4 * (ALL - TABLE),
         KEPT + TOKENS * 8 * (4 + 4 + 8 + 4) + 20 * AGAIN, 0),
    ),
    "backward, one micro-batch, ZeRO 3": (  # one layer and the next
        {"micro_batches": 1, "again_bytes": 400, "zero": 3, "shard": 4},
        (ALL, 2 * ALL, MADE, 2 * TABLE + 2 * 2 * LAYER, KEPT + ENDS + 10 * AGAIN, 0),
    ),
    "backward, ZeRO 3, gathered in 8 bits": (
        {"again_bytes": 400, "zero": 3, "shard": 4, "gathered_bytes": 1},
        (ALL, 2 * ALL, ALL + MADE, 2 * TABLE + 2 * LAYER, KEPT + ENDS + 10 * AGAIN, 0),
    ),
    "backward, first of two pipeline ranks": (  # two passes under way and what they sent, a buffer
        one_f_one_b(zero=2, shard=2),
        (2 * FIRST, 4 * FIRST, 2 * FIRST + 4 * TABLE + 2 * MLP, 2 * FIRST, 2 * KEPT + 4 * SHARE + AGAIN, 0),
    ),
    # The other stage keeps the buffer of a layer's reduction, and has gathered a layer for its next pass.
    "backward, two stages a rank, ZeRO 3": (
        one_f_one_b(zero=3, shard=2, chunks=2, first_passes=4),
        (2 * FIRST, 4 * FIRST, 2 * FIRST + 4 * TABLE + 4 * LAYER + 2 * MLP, 2 * TABLE + 3 * 2 * LAYER,
         2 * KEPT + (1 + 2 + 4) * SHARE + AGAIN, 0),
    ),
    "backward, two stages a rank, ZeRO 3, dense masks": (
        one_f_one_b(zero=3, shard=2, chunks=2, first_passes=4, mask_bytes=900),
        (2 * FIRST, 4 * FIRST, 2 * FIRST + 4 * TABLE + 4 * LAYER + 2 * MLP, 2 * TABLE + 3 * 2 * LAYER,
         2 * KEPT + 4 * 900 + (1 + 2 + 4) * SHARE + AGAIN, 0),
    ),
    "backward, before GPipe's first gradients": (
        gpipe(), (4 * FIRST, 8 * FIRST, 2 * MLP, 2 * FIRST, 2 * KEPT + 4 * SHARE + AGAIN, 0)
    ),
    # GPipe after its first gradients: they wait, and the pass that made them is over.
    "second backward of GPipe": (
        gpipe(kept_bytes=100, again_bytes=60),
        (4 * FIRST, 8 * FIRST, 4 * FIRST + 2 * MLP, 2 * FIRST, KEPT / 3 + 4 * SHARE + TOKENS * 60, 0),
    ),
    "second backward of GPipe, ZeRO 3": (
        gpipe(kept_bytes=10, again_bytes=60, zero=3, shard=2),
        (2 * FIRST, 4 * FIRST, 2 * FIRST + 4 * TABLE + 2 * MLP, 2 * TABLE + 4 * LAYER,
         3 * TOKENS * 10 + 4 * SHARE + TOKENS * 60, 0),
    ),
    "second backward of a V with as many passes as there are": (
        {"pipeline": 2, "chunks": 2, "zero": 2, "splits_backward": 1, "first_passes": 4},
        (4 * ALL, 8 * ALL, 4 * ALL + 2 * (1050 + TABLE + MLP), BF16,
         1.5 * KEPT + ENDS + 3 * SHARE + AGAIN, 0),
    ),
    "second backward of a V with room for more passes": (
        {"pipeline": 2, "chunks": 2, "zero": 2, "splits_backward": 1, "first_passes": 5},
        (4 * ALL, 8 * ALL, 4 * ALL + 2 * (1050 + TABLE + MLP), BF16,
         1.5 * KEPT + ENDS + 3 * SHARE + AGAIN, 0),
    ),
    # At the end of a pass the embedding has its gradient.
    "embedding's gradient": (
        gpipe(kept_bytes=100, again_bytes=20),
        (4 * FIRST, 8 * FIRST, 4 * FIRST + 2 * TABLE, 2 * FIRST, KEPT / 3 + 4 * SHARE, 0),
    ),
    # While the last micro-batch is reduced: a layer's gradients are whole, and that layer is let go. Of the
    # head's there are shards.
    "reduced, ZeRO 1": (
        DEEP | {"shard": 2},
        (2 * WIDE_ALL, 4 * WIDE_ALL, 4 * (WIDE_ALL - TABLE) + 2 * TABLE + 4 * WIDE,
         2 * (WIDE_ALL - WIDE - TABLE), 2 * 600, 0),
    ),
    "reduced, ZeRO 2": (
        DEEP | {"shard": 2, "zero": 2},
        (2 * WIDE_ALL, 4 * WIDE_ALL, 2 * WIDE_ALL + 4 * WIDE + 2 * MLP, 2 * (WIDE_ALL - WIDE - TABLE),
         2 * 600 + 80, 0),
    ),
    "reduced, ZeRO 3, frozen in half": (
        DEEP | {"shard": 2, "zero": 3, "frozen": 0.5},
        (2 * WIDE_ALL, 4 * (WIDE_ALL - 1.5 * WIDE),
         2 * (WIDE_ALL - 1.5 * WIDE) + 2 * WIDE + MLP, 2 * TABLE + 4 * WIDE, 2 * 600 + 80, 0),
    ),
    "reduced, ZeRO 3": (
        DEEP | {"shard": 2, "zero": 3},
        (2 * WIDE_ALL, 4 * WIDE_ALL, 2 * WIDE_ALL + 4 * WIDE + 2 * MLP, 2 * TABLE + 4 * WIDE, 2 * 600 + 80,
         0),
    ),
    "reduced in GPipe, ZeRO 3": (  # beside the other pass, of whose layers none is done
        gpipe(kept_bytes=100, again_bytes=60, zero=3, shard=2),
        (2 * FIRST, 4 * FIRST, 2 * FIRST + 4 * LAYER + 2 * MLP, 2 * TABLE + 4 * LAYER,
         5 * TOKENS * 100 + 4 * SHARE + TOKENS * 60, 0),
    ),
    "reduced after all passes of a pipeline": (
        one_f_one_b(**DEEP_FIRST),
        (4 * WIDE_FIRST, 8 * WIDE_FIRST, 4 * WIDE_FIRST + 4 * WIDE, 2 * (WIDE_FIRST - WIDE), 0, 0),
    ),
    "reduced in a pipeline, ZeRO 2": (  # beside the other pass, and hidden states
        one_f_one_b(**DEEP_FIRST, zero=2, shard=2),
        (2 * WIDE_FIRST, 4 * WIDE_FIRST, 2 * WIDE_FIRST + 4 * WIDE + 2 * MLP, 2 * (WIDE_FIRST - WIDE),
         3 * 600 + 4 * 32 + 2 * 600 + 80, 0),
    ),
    # When all layers and the head are reduced the embedding still has its gradient as computed.
    "embedding reduced": (
        DEEP | ALONE,
        (4 * WIDE_ALL, 8 * WIDE_ALL, (4 * 3 + 4) * WIDE + (4 + 2) * TABLE, 2 * TABLE, 0, 0),
    ),
    "embedding reduced, two shards in bf16": (
        DEEP | ALONE | {"shard": 2, "reduce_bytes": 2},
        (2 * WIDE_ALL, 4 * WIDE_ALL, (2 * 3 + 2) * WIDE + (2 + 2) * TABLE, 2 * TABLE, 0, 0),
    ),
    "embedding reduced, frozen in half": (
        DEEP | ALONE | {"frozen": 0.5},
        (4 * WIDE_ALL, 8 * (WIDE_ALL - 1.5 * WIDE), 8 * WIDE + (4 + 2) * TABLE, 2 * TABLE, 0, 0),
    ),
    # In the optimiser's step. On one shard the embedding's gradient has a copy.
    "step": (ALONE, (4 * ALL, 8 * ALL, 4 * ALL + 4 * TABLE, 0, 0, 0)),
    "step of LAMB": (
        OF_LAMB, (4 * ALL, 8 * ALL, 4 * ALL + 4 * TABLE, 8 * TABLE, 0, 0)
    ),
    "step of LAMB, two shards": (
        OF_LAMB | {"ffn": 200, "shard": 2, "zero": 3, "kept_bytes": 0, "first_layers": 600,
                 "layer_elements": 35, "first_parameters": 600 * 35 + 2 * TABLE},
        (2 * 22_600, 4 * 22_600, 2 * 22_600, 4 * 8 * 200, 0, 0),
    ),
    "step of LAMB, a wide MLP": (
        OF_LAMB | {"ffn": 200},
        (4 * ALL, 8 * ALL, 4 * ALL + 4 * TABLE, 8 * 8 * 200, 0, 0),
    ),
    "step of LAMB, a wide MLP on two tensor ranks": (
        OF_LAMB | {"ffn": 200, "tensor": 2, "layer_elements": 350, "first_parameters": ALL / 2},
        (2 * ALL, 4 * ALL, 2 * ALL + 2 * TABLE, 8 * 8 * 100, 0, 0),
    ),
    "step of LAMB, a wide MLP frozen in half": (
        OF_LAMB | {"ffn": 300, "frozen": 0.5},
        (4 * ALL, 8 * (ALL - 1050), 4 * (ALL - 1050) + 4 * TABLE, 8 * 8 * 150, 0, 0),
    ),
    "step of moments in bf16": (
        NARROW, (4 * ALL, 4 * ALL, 4 * ALL + 4 * TABLE, 8 * ALL, 0, 0)
    ),
    "step of moments in bf16, two shards": (
        NARROW | {"shard": 2}, (2 * ALL, 2 * ALL, 2 * ALL, 4 * ALL, 0, 0)
    ),
    "step of moments in bf16, many at a time": (
        NARROW | {"first_layers": 30, "layer_elements": 1e7,
                 "first_parameters": 3e8 + 2 * TABLE},
        (4 * (3e8 + 1600), 4 * (3e8 + 1600), 4 * (3e8 + 1600) + 4 * 800, 2**28, 0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_bytes_are_those_that_were_held_against_rehearsals(number):
    """The comparison with counted bytes is of today's formulas: each part, and so the error."""
    (ranks, micro_batches, more), row = CASES[number], json.loads(RESULTS.read_text())["rows"][number]
    found = planned_bytes(small(ranks, micro_batches, more))
    assert {part: column[0] for part, column in vars(found).items()} == pytest.approx(row["planned_parts"])
    assert found.peak("rehearsed")[0] / row["rehearsed"] - 1 == pytest.approx(row["error"], abs=1e-9)


@pytest.mark.parametrize("name", BY_HAND)
def test_small_trainings_have_the_bytes_that_are_added_up_by_hand(name):
    """The peak is at a time that the example names, with the terms that it writes out."""
    changes, (weights, optimiser, gradients, gathered, activations, logits) = BY_HAND[name]
    found = toy(**changes)
    assert (found.weights[0], found.optimiser[0]) == (weights, optimiser)
    parts = gradients + gathered, activations, logits
    assert found.peak("rehearsed")[0] == pytest.approx(weights + optimiser + sum(parts))


def test_what_is_not_there_yet_is_not_counted_twice():
    """Shards of gradients count as held. At a peak before there are any, their bytes hold what passes."""
    found = toy(micro_batches=1, again_bytes=400)
    passing, missing = HEADLESS + KEPT + ENDS + 10 * AGAIN, 4 * ALL - MADE
    share = (passing - missing) / passing
    assert found.gradients[0] == 4 * ALL and found.logits[0] == 0
    assert found.activations[0] == pytest.approx(share * (KEPT + ENDS + 10 * AGAIN))
    assert found.gathered[0] == pytest.approx(share * HEADLESS)
    late = toy(**DEEP, shard=2)
    assert late.gradients[0] == 2 * WIDE_ALL and late.activations[0] == 2 * 600
    assert late.gathered[0] == 2 * WIDE_ALL - 2 * TABLE + 4 * WIDE + 2 * (WIDE_ALL - WIDE - TABLE)
    tiny = {"sequence": 0, "zero": 3, "shard": 2, "vocabulary": 0, "reduce_bytes": 0}
    nothing = toy(**tiny, micro_batches=1, first_parameters=LAYERS * LAYER)
    assert nothing.passing[0] == 0


def test_the_fuller_end_of_a_pipeline_is_counted():
    """The last rank only where it peaks higher, and never where the first has both ends."""
    heavy = gpipe(first_layers=1, last_layers=LAYERS, first_parameters=LAST, last_parameters=FIRST)
    rows = [TOY | change for change in (gpipe(), heavy, {}, {"last_layers": 99, "last_passes": 9})]
    assert list(is_last_fullest(MemoryColumns.of(rows))) == [False, True, False, False]
    with pytest.raises(ValueError, match="only Kielo's trainings"):
        memory_bytes(MemoryColumns.of([TOY, TOY | {"compute_bytes": 0}]))


def test_tasks_in_training_count_if_they_need_more_than_a_step():
    """A forward pass of their tokens, and their logits three times in fp32, after the last layer."""
    assert toy(asked_tokens=1).peak("reserved") == toy().peak("reserved")
    found, tokens = toy(asked_tokens=5000), 5000
    assert found.static == toy().static
    assert found.passing[0] == pytest.approx(BF16 + 4 * tokens * 8 * 2 + 3 * 4 * tokens * 100)
    assert toy(asked_tokens=5000, shard=2, zero=3).passing[0] == pytest.approx(
        2 * (2 * TABLE + 2 * LAYER) + 4 * tokens * 8 * 2 + 3 * 4 * tokens * 100
    )


def test_tools_count_more_and_more_bytes():
    """Tensors; 1.5 GB of workspaces; 6 % of what passes, for the allocator; and 2.5 GB for the driver."""
    found = toy()
    held, passing = 4 * ALL + 8 * ALL + 4 * ALL, BF16 + KEPT + ENDS + LOSS
    assert found.peak("rehearsed")[0] == held + passing
    assert found.peak("allocated")[0] == held + passing + 1.5e9
    assert found.peak("reserved")[0] == pytest.approx(held + 1.06 * passing + 1.5e9)
    assert found.peak("device")[0] == pytest.approx(held + 1.06 * passing + 4e9)
    assert sum(found.parts().values())[0] == found.peak("reserved")[0]

"""Bytes between steps, counted by hand for a model of 8 columns; `tests/verify` rehearses larger models."""

from typing import Any

import pytest

from kielo.models.families import complete
from kielo.models.parameter_shapes import parameters
from kielo.recipe.sections import Layout, Model
from kielo.resolve.state_bytes import StateBytes, host_bytes, state_bytes

SHAPE = {
    "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "vocab_multiple": 1, "tie_word_embeddings": False,
}  # fmt: skip
# q, k, v, o; gate, up, down; two norms: nine parameters of a layer. Two tables, and the last norm.
LAYER = 64 + 32 + 32 + 64 + 3 * 160 + 2 * 8
TABLE, NORM = 800, 8
ALL, NUMBER = 3 * LAYER + 2 * TABLE + NORM, 3 * 9 + 3


def model(**changes: Any) -> Model:
    return complete(Model(**SHAPE | changes), 64)


def fp32(elements: int, trained: int, stepped: int, parameters: int) -> StateBytes:
    return StateBytes(4 * elements, 4 * trained, 2 * 4 * stepped + 4 * parameters)


# Rows over three ranks, rounded up: 34 of 100, 3 of 8, 2 of 4, 7 of 20; the last has 32, 2, 0 and 6.
SHARD = 2 * 34 * 8 + 3 + 3 * (3 * 8 + 2 * 8 + 2 * 8 + 3 * 8 + 7 * 8 + 7 * 8 + 3 * 20 + 3 + 3)
LAST_SHARD = 2 * 32 * 8 + 2 + 3 * (2 * 8 + 0 + 0 + 2 * 8 + 6 * 8 + 6 * 8 + 2 * 20 + 2 + 2)
# Of two tensor ranks first: 17 of 50 rows of a table, 2 of 4 of queries, 1 of 2 of keys, 4 of 10 of the MLP,
# and of those that are split by columns 3 of 8 rows.
BOTH = 2 * 17 * 8 + 3 + 3 * (2 * 8 + 2 * 8 + 3 * 4 + 2 * 4 * 8 + 3 * 10 + 3 + 3)
# Two tensor ranks split all but norms.
HALF = 3 * ((LAYER - 16) // 2 + 16) + TABLE + NORM
STAGES = {"pipeline": 2, "pipeline_layers": (2, 1), "shard": 1}


@pytest.mark.parametrize(
    ("layout", "rank", "tied", "expected"),
    [
        ({"shard": 1}, 0, False, fp32(ALL, ALL, ALL, NUMBER)),
        ({"shard": 1}, 0, True, fp32(ALL - TABLE, ALL - TABLE, ALL - TABLE, NUMBER - 1)),
        ({"shard": 3}, 0, False, fp32(SHARD, SHARD, SHARD, NUMBER)),
        ({"shard": 3}, 2, False, fp32(SHARD, SHARD, LAST_SHARD, NUMBER)),
        ({"shard": 1, "context": 3}, 2, False, fp32(SHARD, SHARD, LAST_SHARD, NUMBER)),
        ({"shard": 3, "replicate": 2}, 5, False, fp32(SHARD, SHARD, LAST_SHARD, NUMBER)),
        ({"shard": 1, "tensor": 2}, 1, False, fp32(HALF, HALF, HALF, NUMBER)),
        ({"shard": 3, "tensor": 2}, 1, False, fp32(BOTH, BOTH, BOTH, NUMBER)),
        (STAGES, 0, False, fp32(2 * LAYER + TABLE, 2 * LAYER + TABLE, 2 * LAYER + TABLE, 19)),
        (STAGES, 1, False, fp32(*[LAYER + NORM + TABLE] * 3, 11)),
        (STAGES, 0, True, fp32(2 * LAYER + TABLE, 2 * LAYER + TABLE, 2 * LAYER + TABLE, 19)),
        # the head is a copy, with a gradient and no moments
        (STAGES, 1, True, fp32(LAYER + NORM + TABLE, LAYER + NORM + TABLE, LAYER + NORM, 10)),
        # a V: the first rank has the first stage and the last
        (STAGES | {"pipeline_schedule": "zbv", "pipeline_layers": (1, 1, 0, 1)}, 0, True,
         fp32(2 * LAYER + NORM + 2 * TABLE, 2 * LAYER + NORM + 2 * TABLE, 2 * LAYER + NORM + TABLE, 20)),
        (STAGES | {"pipeline_schedule": "zbv", "pipeline_layers": (1, 1, 0, 1)}, 1, True,
         fp32(LAYER, LAYER, LAYER, 9)),
        # a loop: the last rank has stages 1 and 3
        (STAGES | {"pipeline_schedule": "interleaved_1f1b", "pipeline_layers": (1, 1, 1, 0)}, 1, False,
         fp32(*[LAYER + NORM + TABLE] * 3, 11)),
    ],
)  # fmt: skip
def test_a_ranks_state_is_counted_by_hand(layout, rank, tied, expected):
    """Parameters with padding, their gradients, and two moments and a count of what is there."""
    found = state_bytes(model(tie_word_embeddings=tied), Layout(**layout), rank)
    assert found == expected
    assert found.total == expected.parameters + expected.gradients + expected.optimiser


def test_norms_over_all_heads_are_split_as_the_heads_are():
    """An OLMo 2's of queries and keys; its two others lie whole on both tensor ranks."""
    olmo = model(model_type="olmo2", num_key_value_heads=4)
    layer = (4 * 64 + 3 * 160) // 2 + 2 * 8 + 2 * 8 // 2
    half = 3 * layer + TABLE + NORM
    assert state_bytes(olmo, Layout(shard=1, tensor=2), 1) == fp32(half, half, half, 3 * 11 + 3)


def test_moments_in_bf16_and_frozen_modules_take_less():
    """Half of the moments; and neither gradients nor moments of what is not trained."""
    whole = model()
    narrow = state_bytes(whole, Layout(shard=1), 0, "bf16")
    assert narrow == StateBytes(4 * ALL, 4 * ALL, 2 * 2 * ALL + 4 * NUMBER)
    head = state_bytes(whole, Layout(shard=1), 0, trainable=("head",))
    assert head == fp32(ALL, TABLE, TABLE, 1)
    tied = model(tie_word_embeddings=True)
    copy = state_bytes(tied, Layout(**STAGES), 1, trainable=("embed",))
    assert copy == fp32(LAYER + NORM + TABLE, TABLE, 0, 0)


@pytest.mark.parametrize(
    ("pipeline", "copies"),
    [({"pipeline_layers": (2, 1)}, 1),
     ({"pipeline_schedule": "interleaved_1f1b", "pipeline_layers": (1, 1, 1, 0)}, 3)],
)  # fmt: skip
def test_every_stage_has_the_relative_positions_of_a_bert(pipeline, copies):
    """A table of 2 × 4 - 1 rows and a norm: its copies have gradients, and moments only the first."""
    bert = model(
        model_type="ltg_bert", num_key_value_heads=4, tie_word_embeddings=None, position_bucket_size=4
    )
    whole = state_bytes(bert, Layout(shard=1), 0)
    assert whole.parameters == 4 * parameters(bert)
    first, last = (state_bytes(bert, Layout(pipeline=2, shard=1, **pipeline), rank) for rank in (0, 1))
    more = 4 * (copies * (7 * 8 + 8 + 8) + TABLE)
    assert first.parameters + last.parameters == whole.parameters + more
    assert first.gradients + last.gradients == whole.gradients + more
    assert first.optimiser + last.optimiser == whole.optimiser


def test_a_nodes_memory_has_the_copies_of_a_save_and_files_of_two_ranks_twice():
    """Also what is offloaded to it."""
    assert host_bytes(1, 10, 100, False) == 101
    assert host_bytes(1, 10, 100, True) == 101 + 111
    assert host_bytes(1, 10, 100, False, True) == 101 + 2 * 2 * 101
    assert host_bytes(1, 10, 100, True, True) == 101 + 111 + 2 * 2 * 101

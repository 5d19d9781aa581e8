"""Bytes of activations, layer by layer, added up by hand for a model of 8 columns."""

from typing import Any

import pytest

from kielo.models.families import complete
from kielo.recipe.sections import Layout, Model
from kielo.resolve.activation_bytes import (
    attention_dropout_bytes,
    dropout_bytes,
    layer_bytes,
    layer_parts,
    memory_columns,
)

# Four heads of 2 numbers, two of keys; queries 8 wide, keys 4, the MLP 20; tables of 100 rows.
SHAPE = {
    "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "vocab_multiple": 1, "tie_word_embeddings": False,
}  # fmt: skip


def model(model_type: str = "llama", **changes: Any) -> Model:
    groups = {"num_key_value_heads": 4, "tie_word_embeddings": None} if model_type != "llama" else {}
    return complete(Model(**SHAPE | groups | {"model_type": model_type} | changes), 64)


# Of a token and layer in bf16: two norms' inputs 2 × 2 × 8 = 32, two inputs of matrices 32, of attention
# queries, keys, values and result 2 × (8 + 4 + 4 + 8) = 48, a sum in fp32 of each head 16, and of the MLP
# gate,
# up and product 2 × 3 × 20 = 120: 248.
# (layout, whether matrices are in FP8) → bytes kept, and bytes added while a layer is made again
OF_A_LLAMA: dict[str, tuple[dict[str, Any], bool, float, float]] = {
    "all is kept": ({}, False, 248, 0),
    # half of all but the matrices' inputs is there once: 16 + 32 - 16 + 24 + 8 + 60
    "two tensor ranks": ({"tensor": 2}, False, 124, 0),
    "two tensor ranks, FP8": ({"tensor": 2}, True, 140, 0),
    "two tensor ranks, not along the sequence": (
        {"tensor": 2, "sequence_parallel": False}, False, 32 + 32 + 24 + 8 + 60, 0,
    ),
    # keys and values of both context ranks, and results of two blocks that are joined: 2 × (8 + 8)
    "two context ranks": ({"context": 2}, False, 248 + 32, 0),
    "two context ranks, Ulysses": ({"context": 2, "context_attention": "ulysses"}, False, 248, 0),
    "attention again": ({"recompute": "attention"}, False, 248, 0),
    "attention again, two context ranks": ({"recompute": "attention", "context": 2}, False, 248, 32),
    "attention again, three context ranks": (
        {"recompute": "attention", "context": 3}, False, 248, 2 * (2 * (12 - 4) + 8)
    ),
    "attention again, two tensor ranks": ({"recompute": "attention", "tensor": 2}, False, 124, 16),
    "attention again, two context and two tensor ranks": (
        {"recompute": "attention", "tensor": 2, "context": 2}, False, 124, 16 + 16
    ),
    "norms again": ({"recompute": "norms"}, False, 248 - 32, 32),
    "norms again, two tensor ranks": ({"recompute": "norms", "tensor": 2}, False, 124 - 16, 16),
    "norms again, FP8": ({"recompute": "norms"}, True, 248 - 32, 32),
    "norms again, FP8, two tensor ranks": ({"recompute": "norms", "tensor": 2}, True, 140, 0),
    "norms again, FP8, two tensor ranks, not along the sequence": (
        {"recompute": "norms", "tensor": 2, "sequence_parallel": False}, True, 156 - 32, 32,
    ),
    "activations again": ({"recompute": "activations"}, False, 248 - 40, 40),
    "norms and activations again, the larger at a time": (
        {"recompute": "norms+activations"}, False, 248 - 32 - 40, 40
    ),
    "norms and activations again, every second layer": (
        {"recompute": "norms+activations", "recompute_every_layers": 2}, False, 248 - 16 - 20, 40
    ),
    # the input, sums of two matrices, products 2 × 8 + 2 × 4 and 2 × 20, and the heads' sums
    "operators kept": ({"recompute": "operators"}, False, 2 * (8 + 16 + 64) + 16, 248 - 192),
    "operators kept, two tensor ranks": (
        {"recompute": "operators", "tensor": 2}, False, 2 * (4 + 8 + 32) + 8, 124 + 16 - 96
    ),
    "operators kept, two tensor ranks, FP8": (
        {"recompute": "operators", "tensor": 2}, True, 2 * (4 + 16 + 32) + 8, 140 - 112
    ),
    "all again": ({"recompute": "full"}, False, 16, 248 - 16),
    "all again, two tensor ranks": ({"recompute": "full", "tensor": 2}, False, 8, 124 + 16 - 8),
    "all again, every second layer": (
        {"recompute": "full", "recompute_every_layers": 2}, False, (16 + 248) / 2, 248 - 16
    ),
    "all again, every fourth layer": (
        {"recompute": "full", "recompute_every_layers": 4}, False, 16 / 4 + 248 * 3 / 4, 248 - 16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_A_LLAMA)
def test_a_llamas_layer_keeps_what_is_added_up_by_hand(name):
    """Both numbers of each kind of recomputation, on one rank and on several."""
    layout, in_fp8, kept, again = OF_A_LLAMA[name]
    assert layer_bytes(model(), Layout(**layout), 2, in_fp8) == pytest.approx((kept, again))


@pytest.mark.parametrize(
    ("model_type", "changes", "recompute", "kept", "again"),
    [
        ("gpt2", {}, "none", 32 + 32 + 2 * (16 + 16) + 16 + 2 * 2 * 20, 0),
        ("gpt2", {}, "activations", 224 - 40, 40),
        ("gpt2", {}, "operators", 2 * (8 + 16 + 32 + 20) + 16, 224 - 168),
        ("opt", {"hidden_act": "relu"}, "none", 144 + 2 * 20, 0),  # ReLU's result is all that it needs
        ("opt", {"hidden_act": "relu"}, "activations", 184, 0),
        ("qwen3", {"num_key_value_heads": 2}, "none", 248 + 2 * (8 + 4), 0),  # norms of queries and keys
        ("gemma2", {}, "none", 64 + 32 + 64 + 16 + 120, 0),  # four norms
        ("olmo2", {}, "none", 32 + 2 * (8 + 8) + 32 + 64 + 16 + 120, 0),
        ("olmo2", {}, "norms", 296, 0),  # whose results no matrix takes
        # three norms, one inside the MLP, and two tables of 2 × 4 - 1 relative positions for each head
        ("ltg_bert", {"position_bucket_size": 4}, "none", 48 + 32 + 64 + 2 * 2 * 7 * 4 + 16 + 160, 0),
        ("ltg_bert", {"position_bucket_size": 4}, "activations", 432 - 40, 40),
        ("ltg_bert", {"position_bucket_size": 4}, "attention", 432 - 2 * 2 * 7 * 4, 2 * 2 * 7 * 4),
    ],
)
def test_layers_of_other_families_keep_what_is_added_up_by_hand(model_type, changes, recompute, kept, again):
    found = layer_bytes(model(model_type, **changes), Layout(recompute=recompute), 2)
    assert found == pytest.approx((kept, again))


def test_tensor_ranks_share_the_tables_of_relative_positions():
    """By heads; and fp32 takes twice the bytes but for sums, which are in fp32 anyway."""
    bert = model("ltg_bert", position_bucket_size=4)
    split = 24 + 32 - 16 + (64 + 2 * 2 * 7 * 4) / 2 + 8 + 80
    assert layer_bytes(bert, Layout(tensor=2), 2)[0] == split
    assert layer_bytes(model(), Layout(), 4) == (2 * (248 - 16) + 16, 0)


@pytest.mark.parametrize(
    ("layout", "hidden", "bf16", "fp32"),
    [
        ({}, 16, 2 * 2 * 8 + 3 * 4 * 4, 2 * 4 * 8 + 3 * 4 * 4),
        ({"tensor": 2}, 8, 40, 56),
        ({"tensor": 2, "sequence_parallel": False}, 16, 40, 56),
        ({"recompute": "attention"}, 16, 80, 112),
        ({"recompute": "full"}, 0, 0, 0),
        # One layer of four keeps the result of one pass more, and one log of each head.
        ({"recompute": "operators", "recompute_every_layers": 4}, 12, 60 + (2 * 8 + 4 * 4) / 4, 96),
    ],
)
def test_dropout_keeps_two_masks_and_attentions_two_more_passes(layout, hidden, bf16, fp32):
    """A byte an element of hidden states; of attention two results and three numbers of each head."""
    assert dropout_bytes(model(), Layout(**layout)) == hidden
    assert attention_dropout_bytes(model(), Layout(**layout), "bf16") == bf16
    assert attention_dropout_bytes(model(), Layout(**layout), "fp32") == pytest.approx(fp32)


MATRICES = 8 * (2 * (8 + 4) + 3 * 20)  # elements of a layer's matrices
TABLE = 800
COLUMNS = {
    "compute_bytes": 2, "gathered_bytes": 2, "layer_elements": MATRICES, "first_layers": 3, "last_layers": 3,
    "first_parameters": 3 * MATRICES + 2 * TABLE, "last_parameters": 0, "first_passes": 1, "last_passes": 1,
    "kept_bytes": 248, "again_bytes": 0, "logit_bytes": 2 + 4, "loss_tokens": 2048,
}  # fmt: skip
PIPELINE = {"pipeline": 2, "pipeline_layers": (2, 1)}
OF_PIPELINE = {
    "first_layers": 2, "last_layers": 1, "first_passes": 2,
    "first_parameters": 2 * MATRICES + TABLE, "last_parameters": MATRICES + TABLE,
}  # fmt: skip
V = {"pipeline": 2, "pipeline_layers": (1, 1, 0, 1)}
OF_V = {
    "first_layers": 2, "last_layers": 1, "first_passes": 4, "last_passes": 4,
    "first_parameters": 2 * MATRICES + 2 * TABLE, "last_parameters": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "tied", "expected"),
    [
        ({}, False, {}),
        ({}, True, {"first_parameters": 3 * MATRICES + TABLE}),
        (PIPELINE, False, OF_PIPELINE),
        (PIPELINE, True, OF_PIPELINE),  # the last rank has a copy of the table
        (V | {"pipeline_schedule": "zbv"}, False, OF_V),
        (V | {"pipeline_schedule": "zbv"}, True, OF_V),  # as the first rank has in a V
        (V | {"pipeline_schedule": "dualpipev"}, False, OF_V | {"first_passes": 5, "last_passes": 5}),
        (PIPELINE | {"pipeline_schedule": "gpipe"}, False,
         OF_PIPELINE | {"first_passes": float("inf"), "last_passes": float("inf")}),
        ({"pipeline": 3, "pipeline_layers": (1, 1, 1)}, False,
         {"first_layers": 1, "last_layers": 1, "first_passes": 3, "last_passes": 1,
          "first_parameters": MATRICES + TABLE, "last_parameters": MATRICES + TABLE}),
        # two stages a rank: the first has 0 and 2, the last 1 and 3
        ({"pipeline": 2, "pipeline_layers": (1, 1, 1, 0), "pipeline_schedule": "interleaved_1f1b"}, False,
         OF_PIPELINE | {"first_passes": 2 + 2 + 1, "last_passes": 2 * 2}),  # two through the layer, of three
        # three: of 6 + 4 + 1 passes, five through the first stage's layer and three through the second's
        ({"pipeline": 3, "pipeline_layers": (1, 0, 0, 1, 0, 0, 0, 1, 0), "pipeline_stages_per_rank": 3,
          "pipeline_schedule": "interleaved_1f1b"}, False,
         {"first_layers": 2, "last_layers": 0, "first_passes": (5 + 3) * 3 / 2, "last_passes": 6 + 1,
          "first_parameters": 2 * MATRICES + TABLE, "last_parameters": TABLE}),
        # passes whose weights wait count 1.4
        ({"pipeline": 3, "pipeline_layers": (1, 0, 1, 1, 0, 0),
          "pipeline_schedule": "interleaved_zero_bubble"},
         False,
         {"first_layers": 2, "last_layers": 1, "first_passes": 3 + 2 + 1, "last_passes": 3 + 1 + 2 * 1.4,
          "first_parameters": 2 * MATRICES + TABLE, "last_parameters": MATRICES + TABLE}),
    ],
)  # fmt: skip
def test_the_ends_of_a_pipeline_have_what_is_counted_by_hand(layout, tied, expected):
    """All columns: elements, layers, and passes under way by the orders of the schedules."""
    found = memory_columns(model(tie_word_embeddings=tied), Layout(**layout), 64)
    assert found == pytest.approx(COLUMNS | expected)


def test_a_processor_copies_the_logits_of_a_whole_vocabulary():
    """In bf16 on one tensor rank: they become fp32 before softmax. In fp32 they are that."""
    logits = [
        memory_columns(model(), Layout(tensor=tensor), 64, precision, 2048, on_processor)["logit_bytes"]
        for tensor, precision, on_processor in (
            (1, "bf16", True), (1, "bf16", False), (2, "bf16", True), (1, "fp32", True), (1, "fp8", True),
        )
    ]  # fmt: skip
    assert logits == [10, 6, 6, 8, 10]


def test_columns_follow_precision_positions_and_tensor_ranks():
    """fp32 takes 4 bytes an element; FP8 keeps gathered inputs; learned positions lie whole on each rank."""
    wide = memory_columns(model(), Layout(), 64, "fp32", 300)
    assert (wide["compute_bytes"], wide["gathered_bytes"], wide["kept_bytes"]) == (4, 4, 2 * 232 + 16)
    assert wide["loss_tokens"] == 300
    eight = memory_columns(model(), Layout(tensor=2), 64, "fp8")
    assert (eight["compute_bytes"], eight["gathered_bytes"], eight["kept_bytes"]) == (2, 2, 140)
    assert eight["layer_elements"] == 8 * (8 + 4 + 30)
    assert eight["first_parameters"] == 3 * 8 * (8 + 4 + 30) + TABLE
    plain = 8 * (2 * 16 + 2 * 20)  # elements of a GPT-2's layer
    for model_type, rows in (("gpt2", 64), ("opt", 64 + 2)):
        columns = memory_columns(model(model_type), Layout(tensor=2), 64)
        assert columns["first_parameters"] == 3 * plain / 2 + TABLE / 2 + rows * 8
    assert layer_parts(model("ltg_bert")).norms == 3

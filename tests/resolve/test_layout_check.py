"""Layouts that cannot run are refused before anything starts;
what a machine likes is said and never blocks.
"""

import pytest

from kielo.recipe.sections import Layout, Model
from kielo.resolve.activation_bytes import attention_dropout_bytes
from kielo.resolve.attention_check import attention_complaint
from kielo.resolve.encoder_check import dropout_complaints
from kielo.resolve.layout_check import layout_complaints, speed_advice

MODEL = Model(
    hidden_size=2048, intermediate_size=5632, num_attention_heads=12, num_key_value_heads=4, head_dim=128,
    vocab_size=32001, max_position_embeddings=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "length", "named"),
    [
        (Layout(tensor=5), 4096, ["32064 rows (model.vocab_size = 32001", "model.vocab_multiple = 320"]),
        (
            Layout(tensor=8),
            4096,
            ["num_attention_heads = 12", "num_key_value_heads = 4", "layout.tensor of 1"],
        ),
        (Layout(context=4), 4100, ["2 × layout.context = 8", "4096 or 4104"]),
        (
            Layout(context=8, context_attention="ulysses"),
            4096,
            ["key-value heads", 'context_attention = "all_gather"'],
        ),
        (Layout(tensor=3, context=2), 4096, ["dataset.sequence_length = 4096", "4092 or 4098"]),
    ],
)
def test_what_does_not_divide_is_named_with_numbers_that_would(layout, length, named):
    complaints = "\n".join(layout_complaints(MODEL, length, layout))
    assert all(words in complaints for words in named), complaints


def test_relative_positions_need_whole_sequences():
    """An LTG-BERT is refused the context axis by name, and nothing else; a ModernBERT has it."""
    sizes = {"vocab_size": 64, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64}
    relative, rotary = (Model(model_type=name, **sizes) for name in ("ltg_bert", "modernbert"))
    assert layout_complaints(rotary, 64, Layout(context=2)) == []
    (complaint,) = layout_complaints(relative, 64, Layout(context=2))
    assert "what would work: layout.context = 1" in complaint
    assert layout_complaints(relative, 64, Layout(shard=4, replicate=2, tensor=2, pipeline=2)) == []


def test_rows_are_split_and_not_tokens():
    """Whatever the number of tokens, padding makes the rows divide; the multiple that is suggested does."""
    bare = MODEL.model_copy(update={"vocab_multiple": 1})
    (complaint,) = layout_complaints(bare, 4096, Layout(tensor=2))
    assert "32001 rows" in complaint and "layout.tensor of 1, or model.vocab_multiple = 2" in complaint
    assert layout_complaints(bare.model_copy(update={"vocab_multiple": 2}), 4096, Layout(tensor=2)) == []


def test_a_layout_that_fits_has_no_complaints():
    assert layout_complaints(MODEL, 4096, Layout(tensor=4, context=2)) == []
    assert layout_complaints(MODEL, 4095, Layout()) == []


def test_advice_is_for_the_machine():
    """MI250X likes a hidden size in multiples of 1,024 and 1,280 columns a tensor rank;
    others are not told so.
    """
    assert speed_advice(MODEL, Layout(tensor=1), "mi250x_gcd") == []
    assert "less than 1,280" in speed_advice(MODEL, Layout(tensor=2), "mi250x_gcd")[0]
    assert speed_advice(MODEL, Layout(tensor=2), "h100_sxm") == []
    assert (
        "multiples of 1,024"
        in speed_advice(MODEL.model_copy(update={"hidden_size": 2560}), Layout(), "mi250x_gcd")[0]
    )


def test_overlap_of_tensor_collectives_needs_sequence_parallelism_and_is_not_for_fp8():
    chunked = Layout(tensor=4, tensor_overlap="chunked")
    assert layout_complaints(MODEL, 4096, chunked) == []
    (complaint,) = layout_complaints(MODEL, 4096, chunked.model_copy(update={"sequence_parallel": False}))
    assert "layout.sequence_parallel = true" in complaint
    assert speed_advice(MODEL, chunked, "h100_sxm") == []
    assert "tensor_overlap" in speed_advice(MODEL, chunked, "h100_sxm", has_fp8=True)[0]


def test_only_encoders_drop_weights_of_attention():
    """A decoder's refusal names the key and what there is; on a GPU without a compiler an encoder's does."""
    (complaint,) = dropout_complaints("llama", 0.1)
    assert "train.attention_dropout = 0.1" in complaint and "train.hidden_dropout = 0.1" in complaint
    assert not [*dropout_complaints("llama", 0.0), *dropout_complaints("modernbert", 0.1)]
    sizes = {"vocab_size": 64, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64}
    model = Model(model_type="modernbert", sliding_window=65, **sizes)
    assert attention_complaint(model, 64, False, 0.0, "no compiler") is None
    assert "train.attention_dropout = 0.1" in attention_complaint(model, 64, False, 0.1, "no compiler")


def test_dropped_weights_are_counted():
    """By hand, of 8 heads of 32 in bf16: two outputs more, and three fp32 numbers a head; a half on 2 tensor
    ranks; none where the layer is made again.
    """
    sizes = {"vocab_size": 64, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64}
    model = Model(model_type="ltg_bert", **sizes)
    one = attention_dropout_bytes(model, Layout(), "bf16")
    assert one == 2 * 2 * 8 * 32 + 3 * 4 * 8 and model.num_attention_heads == 8
    assert attention_dropout_bytes(model, Layout(tensor=2), "bf16") == one / 2
    assert attention_dropout_bytes(model, Layout(recompute="full"), "bf16") == 0

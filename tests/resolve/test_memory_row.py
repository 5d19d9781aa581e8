"""The row of a training that bytes are computed from: every key, and what each setting changes in it."""

import numpy as np
import pytest

from kielo.models.families import complete
from kielo.recipe.cards import accelerator
from kielo.recipe.sections import Fp8, Layout, Model, Train
from kielo.resolve.activation_bytes import memory_columns
from kielo.resolve.memory import needed_bytes, usable_bytes, workspace_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, asked_tokens, memory_row

MODEL = complete(
    Model(
        hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, vocab_multiple=8, tie_word_embeddings=False,
    ),
    128,
)  # fmt: skip
STEP = StepSize(128, 3, 5)
LAYOUT = Layout(shard=4, replicate=2)
ROW = {
    "hidden": 64, "ffn": 160, "mlp_matrices": 3, "vocabulary": 104, "sequence": 128, "tensor": 1,
    "pipeline": 1, "chunks": 1, "context": 1, "shard": 4, "zero": 1, "sequence_parallel": 0, "micro_batch": 3,
    "micro_batches": 5, "splits_backward": 0, "optimiser_bytes": 8, "tied": 0,
    "update_traffic_bytes": 46, "update_flops": 0, "widened_bytes": 0, "whole_update_bytes": 0,
    "head_in_recipe": 0, "reduce_bytes": 4, "frozen": 0,
}  # fmt: skip


def row(layout: Layout = LAYOUT, card: str = "h100_80", **options):
    return memory_row(MODEL, layout, STEP, TrainOptions(**options), accelerator(card))


def own(layout: Layout = LAYOUT, precision="bf16", chunk=2048):
    return memory_columns(MODEL, layout, 128, precision, chunk)


def test_the_plain_row_is_the_sizes_of_the_training():
    """Every key; the loss takes as many tokens at once as an H100 has room for."""
    assert row() == ROW | own(chunk=1 << 21)
    assert row(card="cpu") == ROW | own()
    assert row(loss_chunk_tokens=77) == ROW | own(chunk=77)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"context": 2}, {"context": 2, "shard": 8}),
        ({"tensor": 2}, {"tensor": 2, "sequence_parallel": 1}),
        ({"tensor": 2, "sequence_parallel": False}, {"tensor": 2}),
        ({"zero": 3}, {"zero": 3}),
        ({"pipeline": 2}, {"pipeline": 2}),
        ({"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"}, {"pipeline": 2, "chunks": 2}),
        ({"pipeline": 2, "pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_rank": 2},
         {"pipeline": 2, "chunks": 2}),
        ({"pipeline": 2, "pipeline_schedule": "zbv"}, {"pipeline": 2, "chunks": 2, "splits_backward": 1}),
        ({"pipeline": 1, "pipeline_schedule": "zbv"}, {}),
    ],
)  # fmt: skip
def test_a_layout_changes_its_own_columns(layout, changes):
    layout = LAYOUT.model_copy(update=layout)
    found = row(layout, loss_chunk_tokens=64)
    assert found == ROW | changes | own(layout, chunk=64)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (
            {"optimiser_state": "bf16"},
            {"optimiser_bytes": 4, "update_traffic_bytes": 70, "widened_bytes": 8},
        ),
        ({"optimiser": "lamb"}, {"update_traffic_bytes": 258, "whole_update_bytes": 8}),
        ({"gradient_reduce_dtype": "bf16"}, {"reduce_bytes": 2}),
        ({"trainable": ("embed", "layers.0", "layers.1", "layers.2")}, {"frozen": 0.25}),
        ({"hidden_dropout": 0.1}, {"kept_bytes": own()["kept_bytes"] + 2 * 64}),
        ({"attention_dropout": 0.1}, {"kept_bytes": own()["kept_bytes"] + 2 * 2 * 64 + 3 * 4 * 4}),
        ({"fp8": Fp8(head=True)}, {}),
        ({"deterministic": True}, {}),
    ],
)
def test_a_setting_of_the_training_changes_its_own_columns(options, changes):
    assert row(**options, loss_chunk_tokens=64) == ROW | own(chunk=64) | changes


def test_biases_of_alibi_are_there_while_attention_runs():
    """On a GPU 4 heads have 128 keys a token: 2 bytes each if compiled, and 2 + 4 more before the mask.

    A compiled layer computes attention's output and a number of each head again.
    """
    model = complete(
        Model(model_type="bloom", hidden_size=64, intermediate_size=256, num_hidden_layers=4,
              num_attention_heads=4, vocab_size=100, vocab_multiple=8), 128,
    )  # fmt: skip

    def again(card: str = "mi250x_gcd", **layout) -> float:
        placed = LAYOUT.model_copy(update=layout)
        return memory_row(model, placed, STEP, TrainOptions(), accelerator(card))["again_bytes"]

    bias = {"alibi_kernel": "bias"}
    assert again(**bias) - again() == 4 * 128 * 2 + 2 * 64 + 4 * 4
    assert again(**bias, compile=False) - again(compile=False) == 4 * 128 * (2 + 2 + 4)
    assert again(**bias, tensor=2) - again(tensor=2) == 2 * 128 * 2 + 2 * 32 + 4 * 2
    assert again("cpu", **bias) == again("cpu")
    rehearsed = memory_row(model, LAYOUT, STEP, TrainOptions(), accelerator("mi250x_gcd"), on_processor=True)
    assert rehearsed["again_bytes"] == again("cpu") + 4 * 128 * (2 + 2 + 4)
    assert rehearsed["mask_bytes"] == 128 * 128 * (8 + 1)


def test_fp8_gathers_matrices_in_8_bits_on_gpus():
    """A quarter of the layers that stays in bf16 is gathered so; a processor emulates; rows have no scale for
    all; and the head is in 8 bits where it is asked for.
    """
    fp8 = {"precision": "fp8", "loss_chunk_tokens": 64}
    plain = ROW | own(precision="fp8", chunk=64)
    assert row(**fp8) == plain | {"gathered_bytes": 1}
    kept = Fp8(kept_in_bf16=("layers.0",), head=True)
    assert row(**fp8, fp8=kept) == plain | {"gathered_bytes": 1.25, "head_in_recipe": 1}
    assert row(**fp8, card="cpu") == plain
    assert row(**fp8, fp8=Fp8(scaling="rowwise")) == plain
    assert row(**fp8, fp8=Fp8(gathered_in_fp8=False)) == plain
    unknown = memory_row(MODEL, LAYOUT, STEP, TrainOptions(**fp8))
    assert unknown == plain | {"gathered_bytes": 1}
    rehearsed = memory_row(MODEL, LAYOUT, STEP, TrainOptions(**fp8), accelerator("h100_80"), True)
    assert rehearsed == plain | {"logit_bytes": 2 + 4 + 4}


def test_options_are_those_of_the_section():
    """Each of `[train]`, in its place."""
    train = Train(
        optimiser_state="bf16", loss_chunk_tokens=9, gradient_reduce_dtype="bf16", deterministic=True,
        optimiser="lamb", hidden_dropout=0.1, attention_dropout=0.2, fp8=Fp8(head=True),
    )  # fmt: skip
    assert TrainOptions.of("fp8", train, ("embed",), True) == TrainOptions(
        "fp8", Fp8(head=True), "bf16", 9, "bf16", True, ("embed",), "lamb", 0.1, 0.2, True
    )


def test_tasks_in_training_ask_at_least_a_whole_sequence():
    """A batch has 8,192 tokens, or fewer if their logits would be more than 2^26."""
    for vocabulary, length, tokens in ((1000, 128, 8192), (2**17, 128, 512), (2**17, 4096, 4096)):
        assert asked_tokens(MODEL.model_copy(update={"vocab_size": vocabulary}), length) == tokens
    assert row(asks_tasks=True)["asked_tokens"] == asked_tokens(MODEL, 128)


def test_rows_become_columns_and_may_leave_out_what_has_a_default():
    columns = MemoryColumns.of([row(), row(layout=Layout(shard=4, context=2))])
    assert len(columns) == 2 and list(columns.tokens) == [3 * 128, 3 * 128 / 2]
    assert list(columns.take(np.array([False, True])).context) == [2]
    bare = {key: value for key, value in row().items() if key not in ("frozen", "update_traffic_bytes")}
    columns = MemoryColumns.of([bare])
    assert list(columns.frozen) == [0] and list(columns.update_traffic_bytes) == [46]
    with pytest.raises(KeyError, match="^'hidden'$"):
        MemoryColumns.of([{key: value for key, value in row().items() if key != "hidden"}])


def test_what_fits_is_by_the_card():
    """What the driver gives, or 0.99 × 2^30 for each sold GB, less the context; workspaces are 1.5 GB and 6 %
    of what passes.
    """
    card = accelerator("h100_80")
    assert usable_bytes(card.model_copy(update={"given_bytes": 80e9, "context_bytes": 1e9})) == 79e9
    sold = card.model_copy(update={"given_bytes": None, "memory_bytes": 80e9, "context_bytes": 2e9})
    assert usable_bytes(sold) == pytest.approx(80 * 0.99 * 2**30 - 2e9)
    assert usable_bytes(card.model_copy(update={"memory_bytes": None})) is None
    assert workspace_bytes(1e9) == 1.56e9 and needed_bytes(3e9, 5e9) == 5e9 + 1.5e9 + 0.12e9

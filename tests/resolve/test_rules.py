"""The rules: what cannot run is refused before anything starts; what a machine likes never blocks."""

import pytest

from kielo.models.families import complete
from kielo.plan.remedies import speed_advice
from kielo.recipe.sections import Layout, Model
from kielo.resolve.activation_bytes import attention_dropout_bytes
from tests.resolve.rule_cases import attention_complaints, layout_complaints, model_complaints

MODEL = complete(Model(
    hidden_size=2048, intermediate_size=5632, num_attention_heads=12, num_key_value_heads=4, head_dim=128,
    vocab_size=32001, max_position_embeddings=4096,
), 4096)  # fmt: skip


def completed(model_type: str, **keys) -> Model:
    return complete(Model(model_type=model_type, vocab_size=64, **keys), 1024)


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
    relative, rotary = (complete(Model(model_type=name, **sizes), 64) for name in ("ltg_bert", "modernbert"))
    assert layout_complaints(rotary, 64, Layout(context=2)) == []
    (complaint,) = layout_complaints(relative, 64, Layout(context=2))
    assert "Fix: layout.context = 1" in complaint
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
    two = Layout(tensor=2, tensor_overlap="chunked", sequence_parallel=False)
    assert layout_complaints(MODEL, 4096, two) == [
        "layout.tensor_overlap = 'chunked' splits the sequence, but with layout.sequence_parallel = false "
        "each tensor rank has it whole. Fix: layout.sequence_parallel = true, or "
        'layout.tensor_overlap = "none"'
    ]
    assert speed_advice(MODEL, chunked, "h100_sxm") == []
    assert "tensor_overlap" in speed_advice(MODEL, chunked, "h100_sxm", has_fp8=True)[0]


def test_only_encoders_drop_weights_of_attention():
    """A decoder's refusal names the key and what there is; on a GPU without a compiler an encoder's does."""
    dropped, masked = {"attention_dropout": 0.1}, {"objective": "masked_tokens"}
    (complaint,) = model_complaints(completed("llama"), train=dropped)
    assert "train.attention_dropout = 0.1" in complaint and "train.hidden_dropout = 0.1" in complaint
    assert model_complaints(completed("llama")) == []
    assert model_complaints(completed("modernbert"), train=dropped | masked) == []
    sizes = {"vocab_size": 64, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64}
    model = complete(Model(model_type="modernbert", sliding_window=65, **sizes), 64)
    assert attention_complaints(model, 64, False, 0.0, "no compiler") == []
    (asked,) = attention_complaints(model, 64, False, 0.1, "no compiler")
    assert "train.attention_dropout = 0.1" in asked
    assert attention_complaints(model, 64, False, 0.1, "no compiler", device="cpu") == []


def test_dropped_weights_are_counted():
    """By hand, of 8 heads of 32 in bf16: two outputs more, and three fp32 numbers a head; a half on 2 tensor
    ranks; none where the layer is made again.
    """
    sizes = {"vocab_size": 64, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64}
    model = complete(Model(model_type="ltg_bert", **sizes), 64)
    one = attention_dropout_bytes(model, Layout(), "bf16")
    assert one == 2 * 2 * 8 * 32 + 3 * 4 * 8 and model.num_attention_heads == 8
    assert attention_dropout_bytes(model, Layout(tensor=2), "bf16") == one / 2
    assert attention_dropout_bytes(model, Layout(recompute="full"), "bf16") == 0


@pytest.mark.parametrize(
    ("layout", "length", "expected"),
    [
        ({"tensor": 3, "context": 2}, 4096, [
            "layout.tensor = 3 does not divide model.num_key_value_heads = 4. Fix: layout.tensor "
            "of "
            "1, 2, or model.num_key_value_heads = 6",
            "layout.tensor = 3 does not divide model.intermediate_size = 5632. Fix: "
            "layout.tensor "
            "of 1, 2, or model.intermediate_size = 5634",
            "dataset.sequence_length = 4096 is not divisible by layout.tensor × layout.context = 6, the "
            "ranks that split it. Fix: 4092 or 4098",
        ]),
        ({"tensor": 8}, 4096, [
            "layout.tensor = 8 does not divide model.num_attention_heads = 12. Fix: "
            "layout.tensor "
            "of 1, 2, 4, or model.num_attention_heads = 16",
            "layout.tensor = 8 does not divide model.num_key_value_heads = 4. Fix: layout.tensor "
            "of "
            "1, 2, 4, or model.num_key_value_heads = 8",
        ]),
        ({"tensor": 2, "context": 2}, 2, [
            "dataset.sequence_length = 2 is not divisible by layout.tensor × layout.context = 4, the ranks "
            "that split it. Fix: 4",
            "dataset.sequence_length = 2 does not split into 2 × layout.context = 4 equal blocks. "
            "Fix: sequence_length 4, or layout.context 1",
        ]),
        ({"tensor": 2, "sequence_parallel": False}, 5, []),
        ({"tensor": 1, "tensor_overlap": "chunked", "sequence_parallel": False}, 5, []),
        ({"tensor": 2, "tensor_overlap": "none", "sequence_parallel": False}, 5, []),
        ({"context": 4}, 4100, [
            "dataset.sequence_length = 4100 does not split into 2 × layout.context = 8 equal blocks. "
            "Fix: sequence_length 4096 or 4104, or layout.context 1 or 2",
        ]),
        ({"context": 4}, 4098, [
            "dataset.sequence_length = 4098 does not split into 2 × layout.context = 8 equal blocks. "
            "Fix: sequence_length 4096 or 4104, or layout.context 1 or 3",
        ]),
        ({"context": 2}, 4100, []),
        ({"context": 2}, 5, [
            "dataset.sequence_length = 5 does not split into 2 × layout.context = 4 equal blocks. "
            "Fix: "
            "sequence_length 4 or 8, or layout.context 1",
        ]),
        ({"context": 8, "context_attention": "ulysses", "tensor": 2}, 4096, [
            'layout.context = 8 with layout.context_attention = "ulysses" splits the 6 heads and 2 key-value '
            "heads of each tensor rank, which must both be multiples of it. Fix: layout.context "
            "1 "
            'or 2, or context_attention = "all_gather"',
        ]),
    ],
)  # fmt: skip
def test_complaints_have_every_number_that_would_work(layout, length, expected):
    """The whole answer: no complaint more, no number more and none less."""
    assert layout_complaints(MODEL, length, Layout(**layout)) == expected


def test_advice_begins_at_its_borders():
    """1,280 columns a tensor rank are enough for an MI250X, 64 for matrix units; and one rank is no split."""
    wide = MODEL.model_copy(update={"hidden_size": 2560})
    (only,) = speed_advice(wide, Layout(tensor=2), "mi250x_gcd")
    assert only == "model.hidden_size = 2560: MI250X is fastest at multiples of 1,024"
    assert speed_advice(MODEL, Layout(tensor=32), "h100_sxm") == []
    (tiles,) = speed_advice(MODEL, Layout(tensor=64), "h100_sxm")
    assert tiles.startswith("model.hidden_size = 2048 over layout.tensor = 64 is no multiple of 64 a rank")
    small = MODEL.model_copy(update={"hidden_size": 1024})
    assert speed_advice(small, Layout(tensor=1), "mi250x_gcd") == []
    odd = MODEL.model_copy(update={"hidden_size": 100})
    assert speed_advice(odd, Layout(tensor=1, tensor_overlap="chunked"), "h100_sxm", has_fp8=True) == []
    assert speed_advice(MODEL, Layout(tensor=2), "h100_sxm", has_fp8=True) == []
    two = Layout(tensor=2, tensor_overlap="chunked")
    (overlap,) = speed_advice(MODEL, two, "h100_sxm", has_fp8=True)
    assert overlap.startswith("layout.tensor_overlap = 'chunked' is for matrices in bf16 and fp32: torchao")
    (tiles,) = speed_advice(odd.model_copy(update={"hidden_size": 192}), Layout(tensor=2), "h100_sxm")
    assert tiles.startswith("model.hidden_size = 192 over layout.tensor = 2 is no multiple of 64 a rank")
    split = Layout(pipeline=2, pipeline_schedule="zbv", compile=True)
    (slow,) = speed_advice(MODEL, split, "h100_sxm")
    assert slow.startswith("layout.compile = true with a schedule that splits the backward computes each")
    assert speed_advice(MODEL, split.model_copy(update={"compile": False}), "h100_sxm") == []
    assert speed_advice(MODEL, Layout(compile=True), "h100_sxm") == []


def test_attention_needs_a_compiler_for_what_it_is_asked():
    """Each reason alone, and none: a window that is no shorter than the sequences hides nothing."""
    rest = "on a GPU: attention is compiled, even with layout.compile = false; no compiler"
    sizes = {"vocab_size": 64, "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 64}

    def answer(masks_documents=False, missing="no compiler", **keys):
        found = attention_complaints(complete(Model(**sizes | keys), 64), 64, masks_documents, 0.0, missing)
        return "; ".join(found) or None

    assert answer() is None and answer(masks_documents=True, missing=None) is None
    assert answer(masks_documents=True) == f"dataset.mask_documents = true {rest}"
    assert answer(sliding_window=63) == f"model.sliding_window = 63 {rest}"
    assert answer(sliding_window=64) is None
    full = ("full_attention",) * 6
    assert answer(sliding_window=8, layer_types=full) is None
    assert answer(sliding_window=8, layer_types=(*full[1:], "sliding_attention")) is not None
    assert answer(model_type="bloom") == f"model.model_type = 'bloom' (ALiBi) {rest}"
    assert answer(model_type="ltg_bert") == f"model.model_type = 'ltg_bert' (relative positions) {rest}"
    both = answer(True, model_type="gemma2", attn_logit_softcapping=50.0)
    assert both == f"dataset.mask_documents = true and model.attn_logit_softcapping = 50.0 {rest}"


MASKED = {"objective": "masked_tokens"}


@pytest.mark.parametrize(
    ("model_type", "train", "named"),
    [
        ("ltg_bert", {}, 'train.objective = "masked_tokens"'),
        ("llama", MASKED, "model.model_type = ltg_bert"),
        ("llama", {"causal_share": 0.5}, "or train.causal_share = 0"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(model_type: str, train: dict, named: str) -> None:
    (complaint,) = model_complaints(completed(model_type), train=train)
    assert named in complaint


@pytest.mark.parametrize("model_type", ["ltg_bert", "modernbert"])
def test_every_encoder_may_be_a_hybrid(model_type: str) -> None:
    assert model_complaints(completed(model_type), train=MASKED | {"causal_share": 0.1}) == []


@pytest.mark.parametrize(
    ("context", "tensor", "form", "length", "words"),
    [
        (1, 1, "ulysses", 15, []),
        (4, 1, "all_gather", 64, []),
        (2, 2, "ulysses", 64, []),
        (4, 1, "all_gather", 60, ["sequence_length 56 or 64, or layout.context 1 or 2"]),
        (4, 2, "ulysses", 64, ['layout.context 1 or 2, or context_attention = "all_gather"']),
        (8, 1, "ulysses", 8, ["sequence_length 16", "4 key-value heads", "layout.context 1 or 2 or 4,"]),
    ],
)
def test_what_cannot_split_is_refused_with_numbers_that_would(
    context: int, tensor: int, form: str, length: int, words: list[str]
) -> None:
    """Divisible sequence and heads pass; otherwise each complaint names the sizes that would work."""
    model = complete(Model(num_attention_heads=8, num_key_value_heads=4, vocab_size=64), 64)
    layout = Layout(context=context, tensor=tensor, context_attention=form, sequence_parallel=False)
    complaints = "; ".join(layout_complaints(model, length, layout))
    assert bool(complaints) == bool(words)
    for part in words:
        assert part in complaints


@pytest.mark.parametrize(
    ("state", "first", "second", "named"),
    [
        ("bf16", 0.9, 0.95, []), ("bf16", 0.996, 0.996, []), ("fp32", 0.9999, 0.9999, []),
        ("bf16", 1 - 2.0**-8, 0.95, ["beta1"]), ("bf16", 0.9, 0.999, ["beta2"]),
        ("bf16", 0.997, 0.998, ["beta1", "beta2"]), ("bf16", 0.9, 0.99, []),
    ],
)  # fmt: skip
def test_moments_in_bf16_follow_rates_that_change_them(state, first, second, named) -> None:
    """A change by a 256th of a value is undone by rounding to nearest; by more it is not."""
    train = {"optimiser_state": state, "adam_beta1": first, "adam_beta2": second}
    found = model_complaints(completed("llama"), train=train)
    assert [complaint[: len("train.adam_beta1")] for complaint in found] == [
        f"train.adam_{key}" for key in named
    ]
    if second == 0.999:
        assert found == [
            'train.adam_beta2 = 0.999 with train.optimiser_state = "bf16": a step would change a moment by '
            "0.001 of itself, which rounding to bf16 undoes (up to 0.0039). Fix: "
            'train.adam_beta2 of at most 0.99, or train.optimiser_state = "fp32"'
        ]

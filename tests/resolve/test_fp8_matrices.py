"""FP8 settings that a model cannot have are refused before anything starts, with the fix."""

import pytest

from kielo.models import families
from kielo.models.families import complete
from kielo.recipe.sections import Fp8, Layout, Model
from kielo.resolve.fp8_matrices import is_kept, layer_matrices
from tests.resolve.rule_cases import fp8_complaints

MODEL = complete(Model(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128, vocab_size=32000, max_position_embeddings=4096, attention_bias=False, mlp_bias=False,
    tie_word_embeddings=False,
), 4096)  # fmt: skip


def changed(**keys) -> Model:
    return MODEL.model_copy(update=keys)


def test_a_model_that_fits_has_no_complaints():
    kept = ("layers.0", "layers.*.attention", "layers.3.mlp.down", "*.gate")
    assert fp8_complaints(MODEL, Layout(tensor=4), Fp8(kept_in_bf16=kept)) == []
    assert fp8_complaints(MODEL, Layout(tensor=4), Fp8(head=True)) == []  # 8,000 rows a rank
    odd = changed(vocab_size=100, vocab_multiple=4)
    assert fp8_complaints(odd, Layout(tensor=4), Fp8(head=True, emulate=True)) == []


@pytest.mark.parametrize(
    ("model", "layout", "fp8", "named"),
    [
        (MODEL, Layout(), Fp8(kept_in_bf16=("layers.4",)),
         ['"layers.4" names no matrix', '"layers.0" to "layers.3"', ".mlp.down"]),
        (MODEL, Layout(), Fp8(kept_in_bf16=("head",), emulate=True), ['"head" names no matrix']),
        (MODEL, Layout(), Fp8(kept_in_bf16=("layers.*.attention_norm",)), ["attention_norm"]),
        (MODEL, Layout(), Fp8(kept_in_bf16=("layers",)), ["no matrix in FP8", 'train.precision = "bf16"']),
        (changed(hidden_size=2056), Layout(), Fp8(), ["model.hidden_size = 2056", "2048 or 2064"]),
        (changed(head_dim=36), Layout(tensor=4), Fp8(), [
            "model.num_key_value_heads × model.head_dim = 4 × 36", "is 36 a rank", "layout.tensor of 1",
            "model.head_dim of 32 or 48",
        ]),
        (changed(intermediate_size=5640), Layout(tensor=4), Fp8(),
         ["model.intermediate_size = 5640", "is 1410 a rank", "5632 or 5696"]),
        (changed(vocab_size=100, vocab_multiple=4), Layout(tensor=4), Fp8(head=True),
         ["train.fp8.head: 100 rows", "model.vocab_multiple = 64"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_would(model, layout, fp8, named):
    complaints = fp8_complaints(model, layout, fp8)
    assert len(complaints) == 1 and all(words in complaints[0] for words in named), complaints


def test_the_whole_answer_to_sizes_that_fp8_does_not_multiply():
    """Numbers of tensor ranks that divide a width into multiples of 16, and the nearest sizes."""
    rest = (
        "FP8 kernels multiply sizes in multiples of 16. Fix: {}, or keep such matrices in bf16 by "
        "train.fp8.kept_in_bf16"
    )
    (heads,) = fp8_complaints(changed(head_dim=36), Layout(tensor=4), Fp8())
    assert heads == (
        "model.num_key_value_heads × model.head_dim = 4 × 36 over layout.tensor = 4 is 36 a rank: "
        + rest.format("layout.tensor of 1 or 3, or model.head_dim of 32 or 48")
    )
    (mlp,) = fp8_complaints(changed(intermediate_size=96), Layout(tensor=4), Fp8())
    assert mlp == (
        "model.intermediate_size = 96 over layout.tensor = 4 is 24 a rank: "
        + rest.format("layout.tensor of 1 or 2 or 3, or model.intermediate_size of 64 or 128")
    )
    (small,) = fp8_complaints(changed(intermediate_size=8), Layout(), Fp8())
    assert small == (
        "model.intermediate_size = 8 over layout.tensor = 1 is 8 a rank: "
        + rest.format("model.intermediate_size of 16")
    )


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (changed(intermediate_size=5640), "layers.*.mlp"),
        (changed(num_key_value_heads=1, head_dim=136), "layers.*.attention"),
    ],
)
def test_matrices_kept_in_bf16_may_have_any_size(model, kept):
    assert fp8_complaints(model, Layout(), Fp8()) != []
    assert fp8_complaints(model, Layout(), Fp8(kept_in_bf16=(kept,))) == []
    assert fp8_complaints(model, Layout(), Fp8(emulate=True)) == []


def test_a_pattern_takes_modules_whole():
    assert is_kept("layers.1.mlp.up", ["layers.1"]) and not is_kept("layers.10.mlp.up", ["layers.1"])
    assert is_kept("layers.10.mlp.up", ["layers.*.mlp"]) and not is_kept("layers.10.mlp.up", ["mlp"])


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_the_matrices_are_all_linears_of_the_layers(model_type):
    """The tables here name what `parallel/fp8.py` finds in the model."""
    import torch

    heads = 2 if model_type in ("gpt2", "opt", "gpt_neox", "bloom", "ltg_bert", "modernbert") else 1
    model = families.complete(
        Model(model_type=model_type, hidden_size=32, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2,
              num_key_value_heads=heads, vocab_size=64), 32
    )  # fmt: skip
    with torch.device("meta"):
        modules = dict(families.build_model(model).named_modules())
    linears = [
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and name.startswith("layers.")
    ]
    assert linears and sorted(linears) == sorted(layer_matrices(model))

"""Counts of parameters and FLOPs by family, for small models that are added up by hand; needs no torch."""

from math import prod
from typing import Any

import pytest

from kielo.models.families import check, complete, module
from kielo.models.family_tables import LayerParts
from kielo.models.parameter_shapes import (
    parameter_shapes,
    parameters,
    parameters_without_embedding,
    token_flops,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Model

GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3")


def model(model_type: str, **changes: Any) -> Model:
    """Three layers of 8 columns and four heads, an MLP of 20 (of a bloom 32), 100 tokens, 64 positions."""
    shape = {
        "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 100,
        "intermediate_size": 32 if model_type == "bloom" else 20, "vocab_multiple": 1,
        "num_key_value_heads": 2 if model_type in GROUPED else 4,
    }  # fmt: skip
    return complete(Model(model_type=model_type, **shape | changes), 64)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_are_those_of_the_shapes(model_type, bias, tied):
    """With every bias that the family may have and without, tied and not; the head multiplies in any case,
    and what is looked up does not.
    """
    config = model(model_type)
    for change in ({"attention_bias": bias}, {"mlp_bias": bias}, {"tie_word_embeddings": tied}):
        changed = config.model_copy(update=change)
        try:
            check(changed)
            config = changed
        except KieloError:  # the family has no choice
            continue
    shapes = {name: prod(shape) for name, shape in parameter_shapes(config).items()}
    assert parameters(config) == sum(shapes.values())
    looked_up = ("position_table.", "relative_table.", "relative_norm.", "embed_norm.")
    if model_type in ("ltg_bert", "gpt2", "opt", "modernbert"):
        shapes = {name: size for name, size in shapes.items() if not name.startswith(looked_up)}
    if not config.tie_word_embeddings:
        del shapes["embed.weight"]
    assert parameters_without_embedding(config) == sum(shapes.values())


FULL = ("full_attention",)
# Of a llama's layer: 2 × 8 × (8 + 4) and 3 × 8 × 20 weights, and two norms; then a norm and the head.
LLAMA = 3 * (192 + 480 + 16) + 8 + 800


@pytest.mark.parametrize(
    ("model_type", "changes", "length", "flops"),
    [
        # each query sees half of a sequence on average: 6 × 8 × 16 in each layer
        ("llama", {}, 16, 6 * LLAMA + 3 * 6 * 8 * 16),
        ("llama", {"sliding_window": 16}, 16, 6 * LLAMA + 3 * 6 * 8 * 16),
        # of a window of 4 in 16 tokens 4 - 4² / 32 = 3.5 keys, twice 6 × 8 each
        ("llama", {"sliding_window": 4}, 16, 6 * LLAMA + 3 * 12 * 8 * 3.5),
        ("llama", {"sliding_window": 4, "layer_types": ("full_attention", "sliding_attention") + FULL}, 16,
         6 * LLAMA + 12 * 8 * (2 * 8 + 3.5)),
        ("llama", {"sliding_window": 99}, 16, 6 * LLAMA + 3 * 6 * 8 * 16),
        ("llama", {"head_dim": 4}, 16, 6 * (LLAMA + 3 * 192) + 3 * 6 * 16 * 16),
        # an encoder sees all 16, and has terms for 2 × 4 - 1 relative positions
        ("ltg_bert", {"position_bucket_size": 4}, 16,
         6 * (3 * (4 * 64 + 4 * 8 + 480 + 16) + 64 + 8 + 800 + 100) + 3 * 12 * 8 * (16 + 7)),
        # every third layer is full, from the first; others see 4 both ways: 7 keys less 4 × 3 / 16
        ("modernbert", {"sliding_window": 4}, 16,
         6 * (3 * (4 * 64 + 480 + 16) - 8 + 8 + 64 + 8 + 800 + 100) + 12 * 8 * (31 - 15 + 2 * (7 - 12 / 16))),
        ("modernbert", {"sliding_window": 99}, 16,
         6 * (3 * (4 * 64 + 480 + 16) - 8 + 8 + 64 + 8 + 800 + 100) + 12 * 8 * 3 * 16),
        ("modernbert", {"sliding_window": 4, "layer_types": ("full_attention",) * 3}, 16,
         6 * (3 * (4 * 64 + 480 + 16) - 8 + 8 + 64 + 8 + 800 + 100) + 12 * 8 * 3 * 16),
    ],
)  # fmt: skip
def test_flops_of_a_token_are_added_up_by_hand(model_type, changes, length, flops):
    """Six for each parameter that it is multiplied with, and those of attention by what a query sees."""
    assert token_flops(model(model_type, **changes), length) == flops


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if not FAMILIES[name].is_encoder])
def test_every_decoder_counts_attention_alike(model_type):
    """Also the families that count no weights alike."""
    config = model(model_type)
    config = config.model_copy(update={"sliding_window": None, "layer_types": None})
    expected = 6 * parameters_without_embedding(config) + 3 * 6 * 8 * 16
    assert token_flops(config, 16) == expected


OF_WINDOWS = "it is of mistral, qwen2, qwen3, olmo3, gemma2, gemma3_text, modernbert. Fix: leave the key out"
COMPLAINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "odd heads": ("llama", {"head_dim": 3}, "model.head_dim = 3 is odd; rotary positions need pairs"),
    "groups": (
        "llama", {"num_key_value_heads": 3},
        "model.num_attention_heads = 4 is no multiple of model.num_key_value_heads = 3",
    ),
    "types": (
        "olmo3", {"layer_types": ("full_attention",) * 2},
        "model.layer_types has 2 entries for model.num_hidden_layers = 3",
    ),
    "window": (
        "olmo3", {"layer_types": FULL + FULL + ("sliding_attention",)},
        "model.layer_types has sliding_attention, but model.sliding_window is not set",
    ),
    "another family's": (
        "llama", {"rotary_pct": 0.5},
        "model.rotary_pct = 0.5: llama models do not have it; it is of gpt_neox. Fix: leave the key out",
    ),
    "only": ("llama", {"hidden_act": "gelu"}, "model.hidden_act = 'gelu': llama models have 'silu'"),
    "all heads": (
        "gpt2", {"num_key_value_heads": 2},
        "model.num_key_value_heads = 2: a gpt2 model has as many as model.num_attention_heads = 4",
    ),
    "whole heads": (
        "gpt2", {"head_dim": 4}, "model.head_dim = 4: a gpt2 model's 4 heads are model.hidden_size = 8 wide "
        "together"
    ),
    "no windows": (
        "gpt2", {"sliding_window": 4}, f"model.sliding_window = 4: gpt2 models do not have it; {OF_WINDOWS}",
    ),
    "no types": (
        "gpt2", {"layer_types": ("full_attention",) * 3}, "model.layer_types = ('full_attention', "
        "'full_attention', 'full_attention'): gpt2 models do not have it; it is of qwen2, qwen3, olmo3, "
        "gemma2, gemma3_text, modernbert. Fix: leave the key out",
    ),
    "bloom's width": (
        "bloom", {"intermediate_size": 31},
        "model.intermediate_size = 31: in a bloom it is four times model.hidden_size, 32",
    ),
    "bloom's function": (
        "bloom", {"hidden_act": "gelu"},
        "model.hidden_act = 'gelu': bloom models have 'gelu_new' or 'gelu_fast' or 'gelu_pytorch_tanh'",
    ),
    "pairs": (
        "gpt_neox", {"rotary_pct": 0.5},
        "model.rotary_pct = 0.5 of model.head_dim = 2 is 1 numbers; rotary positions need pairs",
    ),
    "odd pairs": (
        "gpt_neox", {"rotary_pct": 0.75, "hidden_size": 16, "head_dim": 4},
        "model.rotary_pct = 0.75 of model.head_dim = 4 is 3 numbers; rotary positions need pairs",
    ),
    "gemma's heads": (
        "gemma2", {"hidden_size": 10}, "model.hidden_size = 10 is no multiple of model.num_attention_heads = "
        "4"
    ),
    "gemma's scalar": (
        "gemma2", {"query_pre_attn_scalar": 2.5}, "model.query_pre_attn_scalar = 2.5 is not a whole number"
    ),
    "olmo 2's windows": (
        "olmo2", {"sliding_window": 4},
        f"model.sliding_window = 4: olmo2 models do not have it; {OF_WINDOWS}",
    ),
    "odd buckets": (
        "ltg_bert", {"position_bucket_size": 5},
        "model.position_bucket_size = 5 is odd; half of it are distances with rows of their own",
    ),
    "few positions": (
        "ltg_bert", {"position_bucket_size": 8, "max_position_embeddings": 5},
        "model.max_position_embeddings = 5 is no more than half of model.position_bucket_size = 8, and 1. "
        "Fix: position_bucket_size = 2, or longer sequences",
    ),
    "few positions of many": (
        "ltg_bert", {"position_bucket_size": 32, "max_position_embeddings": 17},
        "model.max_position_embeddings = 17 is no more than half of model.position_bucket_size = 32, and 1. "
        "Fix: position_bucket_size = 14, or longer sequences",
    ),
    "bert's function": (
        "ltg_bert", {"hidden_act": "gelu"},
        "model.hidden_act = 'gelu': ltg_bert models have 'gelu_new' or 'gelu_fast' or 'gelu_pytorch_tanh'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLAINTS)
def test_a_model_that_cannot_be_is_refused_in_full(name):
    """One complaint and no other."""
    model_type, changes, complaint = COMPLAINTS[name]
    with pytest.raises(KieloError) as caught:
        check(model(model_type).model_copy(update=changes))
    assert str(caught.value) == complaint


def test_every_family_passes_and_two_complaints_are_both_told():
    """Also at the border: a model of an LTG-BERT with one position more than is too few."""
    for model_type in FAMILIES:
        check(model(model_type))
    least = model("ltg_bert").model_copy(update={"position_bucket_size": 8, "max_position_embeddings": 6})
    check(least)
    neox = model("gpt_neox", hidden_size=16).model_copy(update={"rotary_pct": 0.5})
    check(neox)
    assert module("gpt_neox", "tables").rotary_size(neox) == 2
    both = model("llama").model_copy(update={"head_dim": 3, "num_key_value_heads": 3})
    with pytest.raises(
        KieloError, match="head_dim = 3 is odd; rotary .*; model.num_attention_heads = 4 is no"
    ):
        check(both)


def test_a_model_without_a_vocabulary_is_not_complete():
    with pytest.raises(KieloError, match="^model.vocab_size is not set$"):
        complete(Model(), 64)


def parts(mlp_matrices: int, norms: int = 2, **others: Any) -> LayerParts:
    """All of a layer's parts, those that a Llama has not in `others`."""
    usual = {
        "norms_inputs": True, "has_head_norms": False, "is_rotary": True, "has_groups": True,
        "has_alibi": False, "has_mlp_norm": False, "is_parallel": False, "relative_rows": 0,
        "mlp_ratio": None,
    }  # fmt: skip
    return LayerParts(mlp_matrices=mlp_matrices, norms=norms, **usual | others)


PARTS = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), parts(3)),
    "qwen3": parts(3, has_head_norms=True),
    **dict.fromkeys(("olmo2", "olmo3"), parts(3, has_head_norms=True, norms_inputs=False)),
    "gemma2": parts(3, 4),
    "gemma3_text": parts(3, 4, has_head_norms=True),
    **dict.fromkeys(("gpt2", "opt"), parts(2, is_rotary=False, has_groups=False)),
    "gpt_neox": parts(2, has_groups=False, is_parallel=True),
    "bloom": parts(2, is_rotary=False, has_groups=False, has_alibi=True, mlp_ratio=4),
    "ltg_bert": parts(3, 3, is_rotary=False, has_groups=False, has_mlp_norm=True, relative_rows=27),
    "modernbert": parts(3, has_groups=False),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_layer_has_its_familys_parts(model_type: str) -> None:
    """An LTG-BERT of 14 buckets has 2 × 14 - 1 relative positions."""
    config = model(model_type, position_bucket_size=14)
    assert module(model_type, "tables").layer_parts(config) == PARTS[model_type]

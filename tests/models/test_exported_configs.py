"""The whole config.json of an export, and what a section means that leaves keys out, for every family."""

import json
from typing import Any

import pytest

from kielo.models.families import check, complete, hf_config, read_hf_config
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Model

LINEAR = {"rope_type": "linear", "factor": 2.0}
KINDS = ("sliding_attention", "full_attention", "sliding_attention")
_TOKENS = {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5, "torch_dtype": "bfloat16"}
_SHAPE = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
          "num_attention_heads": 6, "max_position_embeddings": 80}  # fmt: skip
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 10}
_ROPE = {"rope_theta": 7e3, "rope_scaling": LINEAR}
_PLAIN = {"attention_dropout": 0.0, "initializer_range": 0.3, "use_cache": True} | _TOKENS
_LLAMA = _GROUPED | _ROPE | _PLAIN | {"hidden_act": "silu", "rms_norm_eps": 1e-3}
_GEMMA = _GROUPED | _ROPE | _PLAIN | {
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3, "layer_types": list(KINDS),
    "sliding_window": 9, "query_pre_attn_scalar": 77, "final_logit_softcapping": 8.0,
    "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
_OLMO = _LLAMA | {"attention_bias": True, "tie_word_embeddings": True}
_WINDOWS = {"sliding_window": 9, "layer_types": KINDS}
_BASE = {"rms_norm_eps": 1e-3, "initializer_range": 0.3, **_ROPE, **_GROUPED}
_ROPELESS = {"layer_norm_epsilon": 1e-3, "initializer_range": 0.3, **_SHAPE}
_WHOLE = _ROPELESS | _ROPE

# The keys that are given (model_type first), and all that is written for them.
EXPORTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {**_BASE, "attention_bias": True, "mlp_bias": False, "tie_word_embeddings": True},
        _LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True,
                  "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "mistral": (
        {**_BASE, "sliding_window": 9},
        _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                  "tie_word_embeddings": False, "sliding_window": 9},
    ),
    "qwen2": (
        {**_BASE, **_WINDOWS, "tie_word_embeddings": True},
        _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True,
                  "use_sliding_window": True, "sliding_window": 9, "layer_types": list(KINDS)},
    ),
    "qwen3": (
        {**_BASE, "attention_bias": True},
        _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False,
                  "attention_bias": True, "use_sliding_window": False, "sliding_window": None,
                  "layer_types": ["full_attention"] * 3},
    ),
    "olmo2": (
        {**_BASE, "attention_bias": True, "tie_word_embeddings": True},
        _OLMO | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    ),
    "olmo3": (
        {**_BASE, **_WINDOWS, "attention_bias": True, "tie_word_embeddings": True},
        _OLMO | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 9,
                 "layer_types": list(KINDS), "rope_parameters": {
                     "full_attention": {"rope_theta": 7e3} | LINEAR,
                     "sliding_attention": {"rope_theta": 7e3, "rope_type": "default"}}},
    ),
    "gemma2": (
        {**_BASE, **_WINDOWS, "query_pre_attn_scalar": 77, "attn_logit_softcapping": 6.0,
         "final_logit_softcapping": 8.0, "attention_bias": True, "tie_word_embeddings": False},
        _GEMMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
                  "attn_logit_softcapping": 6.0},
    ),
    "gemma3_text": (
        {**_BASE, "final_logit_softcapping": 8.0, "rope_local_base_freq": 2e3},
        _GEMMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
                  "attn_logit_softcapping": None, "rope_local_base_freq": 2e3, "attention_bias": False,
                  "tie_word_embeddings": True, "query_pre_attn_scalar": 10, "sliding_window": 80,
                  "layer_types": ["full_attention"] * 3},
    ),
    "gpt2": (
        {**_ROPELESS, "tie_word_embeddings": False, "hidden_act": "relu"},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 97, "n_embd": 24,
         "n_inner": 40, "n_layer": 3, "n_head": 6, "n_positions": 80, "n_ctx": 80,
         "activation_function": "relu", "layer_norm_epsilon": 1e-3,
         "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "initializer_range": 0.3, "use_cache": True} | _TOKENS,
    ),
    "opt": (
        {**_ROPELESS, "layer_norm_epsilon": 1e-5, "attention_bias": False, "mlp_bias": False,
         "tie_word_embeddings": False, "hidden_act": "gelu"},
        {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 97, "hidden_size": 24,
         "word_embed_proj_dim": 24, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
         "max_position_embeddings": 80, "do_layer_norm_before": True, "activation_function": "gelu",
         "enable_bias": False, "tie_word_embeddings": False, "dropout": 0.0, "attention_dropout": 0.0,
         "layerdrop": 0.0, "init_std": 0.3, "use_cache": True} | _TOKENS,
    ),
    "gpt_neox": (
        {**_WHOLE, "rotary_pct": 0.5, "use_parallel_residual": False, "attention_bias": False,
         "tie_word_embeddings": True, "hidden_act": "relu"},
        _SHAPE | _PLAIN | {
            "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "relu",
            "layer_norm_eps": 1e-3, "rotary_emb_base": 7e3, "rotary_pct": 0.5, "rope_scaling": LINEAR,
            "use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False,
            "hidden_dropout": 0.0},
    ),
    "bloom": (
        {**_ROPELESS, "intermediate_size": 96, "tie_word_embeddings": False},
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 97, "hidden_size": 24,
         "n_layer": 3, "n_head": 6, "seq_length": 80, "layer_norm_epsilon": 1e-3,
         "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": False,
         "attention_dropout": 0.0, "hidden_dropout": 0.0, "initializer_range": 0.3, "use_cache": True}
        | _TOKENS,
    ),
    "ltg_bert": (
        _SHAPE | {"layer_norm_epsilon": 1e-3, "position_bucket_size": 14, "position_heads": "interleaved"},
        _SHAPE | _TOKENS | {
            "model_type": "ltg_bert", "architectures": ["LtgBertForMaskedLM"], "position_bucket_size": 14,
            "layer_norm_eps": 1e-3, "position_heads": "interleaved", "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0, "cls_token_id": 3, "sep_token_id": 4,
            "auto_map": {
                "AutoConfig": "modeling_ltg_bert.LtgBertConfig",
                "AutoModel": "modeling_ltg_bert.LtgBertModel",
                **{f"AutoModelFor{task}": f"modeling_ltg_bert.LtgBertFor{task}" for task in (
                    "MaskedLM", "SequenceClassification", "TokenClassification")}}},
    ),
    "modernbert": (
        {key: value for key, value in _WHOLE.items() if key != "rope_scaling"} | {
            "attention_bias": True, "rope_local_base_freq": 2e3, "hidden_act": "relu", "sliding_window": 12,
            "layer_types": ("full_attention", "sliding_attention", "full_attention")},
        _SHAPE | {key: value for key, value in _PLAIN.items() if key != "use_cache"} | {
            "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert",
            "hidden_activation": "relu", "norm_eps": 1e-3, "norm_bias": False, "global_rope_theta": 7e3,
            "local_rope_theta": 2e3, "local_attention": 22, "attention_bias": True, "mlp_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "classifier_bias": False, "decoder_bias": True, "embedding_dropout": 0.0, "mlp_dropout": 0.0,
            "tie_word_embeddings": True, "cls_token_id": 3, "sep_token_id": 4,
            "global_attn_every_n_layers": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_export_has_all_keys(model_type: str) -> None:
    """Every value is another one than the family's usual one, where there is a choice."""
    given, expected = EXPORTS[model_type]
    model = complete(Model(model_type=model_type, **given), 80)
    check(model)
    assert hf_config(model, 3, 4, 5, "bfloat16") == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_export_of_a_plain_model_has_no_tokens_and_is_fp32(model_type: str) -> None:
    """A window that no layer has is as long as the longest text where transformers wants one."""
    model = complete(Model(model_type=model_type, vocab_size=97, num_hidden_layers=3, hidden_size=176), 80)
    written = hf_config(model)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "torch_dtype": "float32"}
    assert {key: written[key] for key in tokens} == tokens
    if model_type in ("olmo3", "gemma2", "gemma3_text"):
        assert written["sliding_window"] == 80
        assert written["layer_types"] == ["full_attention"] * 3
    if model_type == "modernbert":
        assert (written["local_attention"], written["global_attn_every_n_layers"]) == (128, 3)
        written = hf_config(model, eos_token_id=[7, 8])
        assert (written["eos_token_id"], written["sep_token_id"]) == ([7, 8], 7)


DECODERS = ("silu", False, False, False)
LEFT_OUT = {
    # activation, tied head, biases of attention, biases of the MLP
    **dict.fromkeys(("llama", "mistral", "qwen3", "olmo2", "olmo3"), DECODERS),
    "qwen2": ("silu", False, True, False),
    "gemma2": ("gelu_pytorch_tanh", True, False, False),
    "gemma3_text": ("gelu_pytorch_tanh", True, False, False),
    "gpt2": ("gelu_new", True, True, True),
    "opt": ("relu", True, True, True),
    "gpt_neox": ("gelu", False, True, True),
    "bloom": ("gelu_new", True, True, True),
    "ltg_bert": ("gelu_new", True, True, False),
    "modernbert": ("gelu", True, False, False),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_a_section_leaves_out_is_the_familys(model_type: str) -> None:
    """And what is given stays, None excepted; heads and positions follow from the others."""
    asked = Model(model_type=model_type, vocab_size=97, hidden_size=48, num_attention_heads=6)
    model = complete(asked, 80)
    found = (model.hidden_act, model.tie_word_embeddings, model.attention_bias, model.mlp_bias)
    assert found == LEFT_OUT[model_type]
    assert (model.num_key_value_heads, model.head_dim, model.max_position_embeddings) == (6, 8, 80)
    assert model.sliding_window == (65 if model_type == "modernbert" else None)
    given = {"num_key_value_heads": 3, "head_dim": 10, "rope_theta": 7.0, "hidden_act": "relu"}
    model = complete(asked.model_copy(update=given | {"mlp_bias": not found[3]}), 80)
    assert {key: getattr(model, key) for key in given} == given and model.mlp_bias != found[3]


REFUSED = [
    *((name, "attention_dropout", 0.25, "(known: 0.0)") for name in (
        "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma2", "gemma3_text", "modernbert")),
    *((name, "architectures", ["X"], f"(known: ['{known}'])") for name, known in (
        ("qwen2", "Qwen2ForCausalLM"), ("olmo2", "Olmo2ForCausalLM"), ("olmo3", "Olmo3ForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"), ("gemma3_text", "Gemma3ForCausalLM"), ("gpt2", "GPT2LMHeadModel"),
        ("opt", "OPTForCausalLM"), ("gpt_neox", "GPTNeoXForCausalLM"), ("bloom", "BloomForCausalLM"),
        ("modernbert", "ModernBertForMaskedLM"))),
    *((name, "hidden_act", "relu", "(known: 'silu')") for name in ("mistral", "qwen3", "olmo2", "olmo3")),
    *((name, "hidden_activation", "relu", "(known: 'gelu_pytorch_tanh')") for name in ("gemma2",)),
    *((name, "use_bidirectional_attention", True, "(known: False)") for name in ("gemma2", "gemma3_text")),
    ("gemma3_text", "attn_logit_softcapping", 5.0, "(known: None)"),
    ("gpt2", "scale_attn_weights", False, "(known: True)"),
    ("gpt2", "add_cross_attention", True, "(known: False)"),
    ("opt", "do_layer_norm_before", False, "(known: True)"),
    ("opt", "_remove_final_layer_norm", True, "(known: False)"),
    ("opt", "layer_norm_elementwise_affine", False, "(known: True)"),
    ("opt", "layerdrop", 0.5, "(known: 0.0)"),
    ("opt", "word_embed_proj_dim", 767, "(known: 768)"),
    ("bloom", "apply_residual_connection_post_layernorm", True, "(known: False)"),
    ("modernbert", "embedding_dropout", 0.5, "(known: 0.0)"),
    ("modernbert", "classifier_activation", "relu", "(known: 'gelu')"),
    ("modernbert", "norm_bias", True, "(known: False)"),
    ("modernbert", "tie_word_embeddings", False, "(known: True)"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "key", "value", "known"), REFUSED)
def test_a_config_that_asks_for_other_maths_is_refused(
    tmp_path, model_type: str, key: str, value: Any, known: str
) -> None:
    """Alone in an otherwise empty config, with the values that would do; null is left out."""
    path = tmp_path / "config.json"
    needed = {"model_type": model_type, "rope_theta": 5e5}
    path.write_text(json.dumps(needed | {key: value}))
    with pytest.raises(KieloError) as caught:
        read_hf_config(path)
    assert str(caught.value) == f"{path}: not supported: {key} = {value!r} {known}"
    path.write_text(json.dumps(needed | {key: None}))
    assert read_hf_config(tmp_path).model_type == model_type

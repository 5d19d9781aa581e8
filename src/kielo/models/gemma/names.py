"""Gemma 2 and 3 in Hugging Face's form: parameter names, and `config.json` in and out; torch-free."""

from collections.abc import Mapping
from typing import Any

from kielo.models.decoder_count import layer_types
from kielo.models.gemma.count import has_head_norms
from kielo.models.hugging_face_config import DEFAULT_ROPE_THETA, ConfigReader, normalise_rope
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

_ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
# What transformers' configs take for a key that a config.json leaves out.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma2": {
        "positions": 8192,
        "vocab_size": 256_000,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "positions": 131_072,
        "vocab_size": 262_208,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}
_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = ("attention.q_norm", "attention.k_norm")


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            if ours in _HEAD_NORMS and not has_head_norms(config):
                continue
            is_biased = config.attention_bias and ours.startswith("attention.") and ours not in _HEAD_NORMS
            for kind in ("weight", "bias") if is_biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`.

    A cap of null is no cap; one that is left out is the family's, as in transformers.
    """
    read = ConfigReader(config, where)
    model_type = config["model_type"]
    left_out = _LEFT_OUT[model_type]
    read.only("architectures", [_ARCHITECTURES[model_type]])
    read.only("attention_dropout", 0.0)
    read.only("hidden_activation", "gelu_pytorch_tanh")
    read.only("use_bidirectional_attention", False)
    if model_type == "gemma3_text":
        read.only("attn_logit_softcapping", None)  # transformers passes it over there
    layers = read.layers("num_hidden_layers", default=26)
    positions = read.size("max_position_embeddings", default=left_out["positions"])
    values = {
        "model_type": model_type,
        "hidden_size": read.size("hidden_size", default=2304),
        "vocab_size": read.size("vocab_size", default=left_out["vocab_size"]),
        "intermediate_size": read.size("intermediate_size", default=9216),
        "num_hidden_layers": layers,
        "num_attention_heads": read.size("num_attention_heads", default=8),
        "num_key_value_heads": read.size("num_key_value_heads", default=4),
        "head_dim": read.size("head_dim", default=256),
        "max_position_embeddings": positions,
        "rms_norm_eps": read.number("rms_norm_eps", default=1e-6),
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=True),
        "attention_bias": read.switch("attention_bias", default=False),
        "mlp_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": read.number("initializer_range", default=0.02),
        "query_pre_attn_scalar": read.number("query_pre_attn_scalar", default=256),
    }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[cap] = read.number(cap, default=left_out[cap], null=None)
    if model_type == "gemma2":
        values |= read.windows(layers, full_every=2)
        values["rope_theta"], values["rope_scaling"] = read.rope(DEFAULT_ROPE_THETA, positions)
    else:
        values |= read.windows(layers, full_every=read.size("sliding_window_pattern", default=6))
        ropes = read.ropes("rope_theta", 1e6, "rope_local_base_freq", 1e4, positions)
        values["rope_theta"], values["rope_scaling"], values["rope_local_base_freq"] = ropes
    return Model(**values)


def hf_config(
    config: Model,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Makes the `config.json` of an export. dtype: that of the stored weights.

    RoPE and the dtype are in transformers 4's spelling, which transformers 4 and 5 both read.
    """
    base, scaling = normalise_rope(config.rope_theta, config.rope_scaling, config.max_position_embeddings)
    written = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": base,
        "rope_scaling": scaling,
        "layer_types": list(layer_types(config)),
        # transformers makes the windowed mask even where no layer uses it.
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "attention_bias": bool(config.attention_bias),
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.model_type == "gemma3_text":
        written["rope_local_base_freq"] = config.rope_local_base_freq
    return written

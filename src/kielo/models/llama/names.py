"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's form: names and `config.json` in and out; torch-free."""

from collections.abc import Mapping
from typing import Any

from kielo.models.decoder_count import layer_types
from kielo.models.hugging_face_config import DEFAULT_ROPE_THETA, ConfigReader, normalise_rope
from kielo.models.llama.count import attention_biases, has_head_norms
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers' configs take for a key that a config.json leaves out.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {"positions": 2048, "vocab_size": 32_000, "intermediate_size": 11_008, "key_heads": None},
    "mistral": {"positions": 131_072, "vocab_size": 32_000, "intermediate_size": 14_336, "key_heads": 8},
    "qwen2": {"positions": 32_768, "vocab_size": 151_936, "intermediate_size": 22_016, "key_heads": 32},
    "qwen3": {"positions": 32_768, "vocab_size": 151_936, "intermediate_size": 22_016, "key_heads": 32},
}
_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    bias, output_bias = attention_biases(config)
    biased = {
        "attention.q": bias, "attention.k": bias, "attention.v": bias, "attention.o": output_bias,
        "mlp.gate": config.mlp_bias, "mlp.up": config.mlp_bias, "mlp.down": config.mlp_bias,
    }  # fmt: skip
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            if ours.endswith(("q_norm", "k_norm")) and not has_head_norms(config):
                continue
            for kind in ("weight", "bias") if biased.get(ours) else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`."""
    read = ConfigReader(config, where)
    model_type = config["model_type"]
    left_out = _LEFT_OUT[model_type]
    read.only("architectures", [_ARCHITECTURES[model_type]])
    read.only("attention_dropout", 0.0)
    read.only("hidden_act", "silu")
    hidden = read.size("hidden_size", default=4096)
    heads, layers = read.size("num_attention_heads", default=32), read.layers("num_hidden_layers", default=32)
    # A Qwen 3's heads have a width of their own.
    head_dim = {"default": 128} if model_type == "qwen3" else {"default": None, "null": None}
    positions = read.size("max_position_embeddings", default=left_out["positions"])
    values = {
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=left_out["vocab_size"]),
        "intermediate_size": read.size("intermediate_size", default=left_out["intermediate_size"]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.size(
            "num_key_value_heads", default=left_out["key_heads"] or heads, null=heads
        ),
        "head_dim": read.size("head_dim", **head_dim) or read.head_dim(hidden, heads),
        "max_position_embeddings": positions,
        "rms_norm_eps": read.number("rms_norm_eps", default=1e-6),
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=False),
        # transformers lacks these keys for the other families; Qwen 2 always has biases.
        "attention_bias": model_type in ("llama", "qwen3") and read.switch("attention_bias", default=False),
        "mlp_bias": model_type == "llama" and read.switch("mlp_bias", default=False),
        "hidden_act": "silu",
        "initializer_range": read.number("initializer_range", default=0.02),
    } | _windows(read, model_type, layers)
    values["rope_theta"], values["rope_scaling"] = read.rope(DEFAULT_ROPE_THETA, positions)
    return Model(**values)


def _windows(read: ConfigReader, model_type: str, layers: int) -> dict[str, Any]:
    """Reads the windows: Mistral's is every layer's, or none if null; Qwen's starts at max_window_layers."""
    if model_type == "llama":
        return {}
    window = read.size("sliding_window", default=4096, null=None)
    if model_type == "mistral":
        return {"sliding_window": window}
    if not read.switch("use_sliding_window", default=False):
        window = None
    first = read.whole("max_window_layers", default=28)
    full = layers if window is None else min(first, layers)
    kinds = read.layer_types(["full_attention"] * full + ["sliding_attention"] * (layers - full))
    if window is None and "sliding_attention" in kinds:
        read.complain(
            "layer_types has sliding_attention, but use_sliding_window or sliding_window does not allow any"
        )
    return {} if window is None else {"sliding_window": window, "layer_types": kinds}


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
    rope_theta, rope_scaling = normalise_rope(
        config.rope_theta, config.rope_scaling, config.max_position_embeddings
    )
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
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.model_type in ("llama", "qwen3"):
        written["attention_bias"] = bool(config.attention_bias)
    if config.model_type == "llama":
        written["mlp_bias"] = bool(config.mlp_bias)
    if config.model_type == "mistral":
        written["sliding_window"] = config.sliding_window
    if config.model_type.startswith("qwen"):
        written |= {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
        }
        written["layer_types"] = list(layer_types(config))
    return written

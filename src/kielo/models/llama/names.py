"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's words: parameter names, and `config.json` in and out; torch-free."""

from collections.abc import Mapping
from typing import Any

from kielo.models.decoder_count import layer_types
from kielo.models.hugging_face_config import ConfigReader, normalise_rope
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
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
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
    """Our parameter name → its place in Hugging Face's files, in the model's order; no head where it is tied."""
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
    """A complete `Model` from the content of the `config.json` at `where`."""
    read = ConfigReader(config, where)
    model_type = config["model_type"]
    read.only("architectures", [_ARCHITECTURES[model_type]])
    read.only("attention_dropout", 0.0)
    read.only("hidden_act", "silu")
    heads, layers = read.required("num_attention_heads"), read.required("num_hidden_layers")
    hidden, positions = read.required("hidden_size"), read.optional("max_position_embeddings", default=_MAX_POSITIONS[model_type])
    values = {
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": read.required("vocab_size"),
        "intermediate_size": read.required("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # Qwen's configs take 32 where the key is missing, Mistral's 8; published files have it.
        "num_key_value_heads": read.optional("num_key_value_heads", default=heads),
        "head_dim": read.optional("head_dim", default=128 if model_type == "qwen3" else hidden // heads),
        "max_position_embeddings": positions,
        "rms_norm_eps": read.optional("rms_norm_eps", default=1e-6),
        "tie_word_embeddings": read.optional("tie_word_embeddings", default=False),
        "attention_bias": read.optional("attention_bias", default=False),
        "mlp_bias": read.optional("mlp_bias", default=False),
        "hidden_act": "silu",
        "initializer_range": read.optional("initializer_range", default=0.02),
    } | _windows(read, model_type, layers)
    read.done()
    values["rope_theta"], values["rope_scaling"] = normalise_rope(
        config.get("rope_theta"), config.get("rope_parameters") or config.get("rope_scaling"), positions, f"{where}: "
    )
    return Model(**values)


def _windows(read: ConfigReader, model_type: str, layers: int) -> dict[str, Any]:
    """Mistral's window is every layer's; Qwen's begins at layer max_window_layers, where it is in use at all."""
    window = read.optional("sliding_window")
    if model_type.startswith("qwen") and not read.optional("use_sliding_window", default=False):
        window = None
    if model_type == "llama" or window is None:
        return {}
    kinds = read.optional("layer_types")
    if kinds is None and model_type.startswith("qwen"):
        first = read.optional("max_window_layers", default=28)
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return {"sliding_window": window, "layer_types": tuple(kinds) if kinds else None}


def hf_config(
    config: Model,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The `config.json` of an export. `dtype` is what the weights are stored in.

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
        written |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
        written["layer_types"] = list(layer_types(config))
    return written

"""OLMo 2 and 3 in Hugging Face's form: parameter names, and `config.json` in and out; torch-free."""

from collections.abc import Mapping
from typing import Any

from kielo.models.decoder_count import layer_types
from kielo.models.hugging_face_config import DEFAULT_ROPE_THETA, ConfigReader, normalise_rope
from kielo.models.piece import Piece
from kielo.recipe.errors import KieloError
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

_ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
_LAYER_MODULES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            is_biased = config.attention_bias and ours.startswith("attention.") and not ours.endswith("norm")
            for kind in ("weight", "bias") if is_biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`.

    An OLMo 3 without `rope_theta` is refused: transformers 4 takes 10,000 and transformers 5 takes 500,000.
    """
    read = ConfigReader(config, where)
    model_type = config["model_type"]
    read.only("architectures", [_ARCHITECTURES[model_type]])
    read.only("attention_dropout", 0.0)
    read.only("hidden_act", "silu")
    hidden = read.size("hidden_size", default=4096)
    heads, layers = read.size("num_attention_heads", default=32), read.layers("num_hidden_layers", default=32)
    positions = read.size("max_position_embeddings", default=2048)
    values = {
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=50_304),
        "intermediate_size": read.size("intermediate_size", default=11_008),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.size("num_key_value_heads", default=heads, null=heads),
        "head_dim": read.size("head_dim", default=None, null=None) or read.head_dim(hidden, heads),
        "max_position_embeddings": positions,
        "rms_norm_eps": read.number("rms_norm_eps", default=1e-5),
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=False),
        "attention_bias": read.switch("attention_bias", default=False),
        "mlp_bias": False,
        "hidden_act": "silu",
        "initializer_range": read.number("initializer_range", default=0.02),
    }
    if model_type == "olmo2":
        base, scaling = read.rope(DEFAULT_ROPE_THETA, positions)
        return Model(**values, rope_theta=base, rope_scaling=scaling)
    values |= read.windows(layers, full_every=4)
    base, scaling, windowed_base = read.ropes("rope_theta", None, "rope_theta", None, positions)
    if windowed_base != base:
        raise KieloError(
            f"{where}: rope_parameters has a rope_theta of {base:g} for full and {windowed_base:g} for "
            "sliding attention; only one for both is supported"
        )
    return Model(**values, rope_theta=base, rope_scaling=scaling)


def hf_config(
    config: Model,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Makes the `config.json` of an export. dtype: that of the stored weights.

    RoPE and the dtype are in transformers 4's spelling, which transformers 4 and 5 both read; of an OLMo 3
    also in transformers 5's, which takes 500,000 as the base of windowed layers where it reads the old one.
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
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": base,
        "rope_scaling": scaling,
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
    if config.model_type == "olmo3":
        plain = {"rope_type": "default", "rope_theta": base}
        written["rope_parameters"] = {
            "full_attention": plain | (scaling or {}),
            "sliding_attention": plain,
        }
        written["layer_types"] = list(layer_types(config))
        # transformers makes the windowed mask even where no layer uses it.
        written["sliding_window"] = config.sliding_window or config.max_position_embeddings
    return written

"""GPT-NeoX in Hugging Face's form: parameter names, and `config.json` in and out; torch-free.

Dropout, which is 0 in published files, is not done and its keys are ignored.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.hugging_face_config import DEFAULT_ROPE_THETA, ConfigReader, normalise_rope
from kielo.models.piece import Piece, fused_by_head
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
}
# Masks and frequencies that older transformers saved among the weights.
IGNORED = (r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$")
BASE_MODEL_PREFIX = "gpt_neox."

_ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "attention.query_key_value",
    "attention.k": "attention.query_key_value",
    "attention.v": "attention.query_key_value",
    "attention.o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    pieces = {"embed.weight": Piece("gpt_neox.embed_in.weight", rows=config.vocab_size)}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            unbiased = ours.startswith("attention.") and not config.attention_bias
            for kind in ("weight",) if unbiased else ("weight", "bias"):
                stored = f"gpt_neox.layers.{layer}.{theirs}.{kind}"
                fused = fused_by_head(stored, config.head_dim)
                pieces[f"layers.{layer}.{ours}.{kind}"] = fused.get(
                    ours.removeprefix("attention."), Piece(stored)
                )
    pieces["norm.weight"] = Piece("gpt_neox.final_layer_norm.weight")
    pieces["norm.bias"] = Piece("gpt_neox.final_layer_norm.bias")
    if not config.tie_word_embeddings:
        # So it is in files; the live module of transformers 5 is lm_head.
        pieces["head.weight"] = Piece("embed_out.weight", rows=config.vocab_size)
    return pieces


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`."""
    read = ConfigReader(config, where)
    read.only("architectures", ["GPTNeoXForCausalLM"])
    hidden, heads = read.size("hidden_size", default=6144), read.size("num_attention_heads", default=64)
    positions = read.size("max_position_embeddings", default=2048)
    rotary_pct, theta = (
        read.number("rotary_pct", default=0.25),
        read.number("rotary_emb_base", default=DEFAULT_ROPE_THETA),
    )
    rope = read.rope_section()
    if isinstance(rope, Mapping) and rope.get("partial_rotary_factor") is not None:
        rotary_pct = rope["partial_rotary_factor"]
    if not isinstance(rotary_pct, float | int) or not 0 < rotary_pct <= 1:
        read.complain(f"rotary_pct = {rotary_pct!r} does not fit; expected a number above 0, up to 1")
    values = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=50_432),
        "intermediate_size": read.size("intermediate_size", default=24_576),
        "num_hidden_layers": read.layers("num_hidden_layers", default=44),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": read.head_dim(hidden, heads),
        "max_position_embeddings": positions,
        "layer_norm_epsilon": read.number("layer_norm_eps", default=1e-5),
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=False),
        "attention_bias": read.switch("attention_bias", default=True),
        "mlp_bias": True,
        "hidden_act": read.only("hidden_act", *_ACTIVATIONS),
        "use_parallel_residual": read.switch("use_parallel_residual", default=True),
        "rotary_pct": rotary_pct,
        "initializer_range": read.number("initializer_range", default=0.02),
    }
    read.done()
    values["rope_theta"], values["rope_scaling"] = normalise_rope(
        theta, rope, positions, f"{where}: ", rotary_pct
    )
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
    rope_theta, rope_scaling = normalise_rope(
        config.rope_theta, config.rope_scaling, config.max_position_embeddings
    )
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "layer_norm_eps": config.layer_norm_epsilon,
        "rotary_emb_base": rope_theta,
        "rotary_pct": config.rotary_pct,
        "rope_scaling": rope_scaling,
        "use_parallel_residual": config.use_parallel_residual,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "attention_bias": bool(config.attention_bias),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }

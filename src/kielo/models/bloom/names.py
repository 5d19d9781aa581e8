"""BLOOM in Hugging Face's form: parameter names, and `config.json` in and out; torch-free.

Dropout, which is 0 in published files, is not done and its keys are ignored. Distances have no bound, and the
config has none: max_position_embeddings is `seq_length`, the length of training, where a file has it.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.hugging_face_config import ConfigReader
from kielo.models.piece import Piece, fused_by_head
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}
IGNORED = ()
BASE_MODEL_PREFIX = "transformer."

_TRAINED_LENGTH = 2048  # of every BLOOM
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attention.query_key_value",
    "attention.k": "self_attention.query_key_value",
    "attention.v": "self_attention.query_key_value",
    "attention.o": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    pieces = {"embed.weight": Piece("transformer.word_embeddings.weight", rows=config.vocab_size)}
    for kind in ("weight", "bias"):
        pieces[f"embed_norm.{kind}"] = Piece(f"transformer.word_embeddings_layernorm.{kind}")
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _MODULES.items():
            for kind in ("weight", "bias"):
                stored = f"transformer.h.{layer}.{theirs}.{kind}"
                fused = fused_by_head(stored, config.head_dim)
                pieces[f"layers.{layer}.{ours}.{kind}"] = fused.get(
                    ours.removeprefix("attention."), Piece(stored)
                )
    for kind in ("weight", "bias"):
        pieces[f"norm.{kind}"] = Piece(f"transformer.ln_f.{kind}")
    if not config.tie_word_embeddings:
        pieces["head.weight"] = Piece("lm_head.weight", rows=config.vocab_size)
    return pieces


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`."""
    read = ConfigReader(config, where)
    read.only("architectures", ["BloomForCausalLM"])
    read.only("apply_residual_connection_post_layernorm", False)
    hidden, heads = (
        read.size("n_embed", "hidden_size", default=64),
        read.size("n_head", "num_attention_heads", default=8),
    )
    values = {
        "model_type": "bloom",
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=250_880),
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": read.layers("n_layer", "num_hidden_layers", default=2),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": read.head_dim(hidden, heads),
        "max_position_embeddings": read.size("seq_length", default=_TRAINED_LENGTH),
        "layer_norm_epsilon": read.number("layer_norm_epsilon", default=1e-5),
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=True),
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_new",
        "initializer_range": read.number("initializer_range", default=0.02),
    }
    read.done()
    return Model(**values)


def hf_config(
    config: Model,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Makes the `config.json` of an export. dtype: that of the stored weights."""
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "seq_length": config.max_position_embeddings,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }

"""GPT-2 in Hugging Face's form: parameter names, and `config.json` in and out; torch-free.

Dropout is a part of training, not of the model: a config's value is ignored, and exports say 0.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.hugging_face_config import ConfigReader
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}
# Causal masks that older transformers saved among the weights.
IGNORED = (r"\.attn\.(masked_)?bias$",)
BASE_MODEL_PREFIX = "transformer."

_ACTIVATIONS = ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu")
_LAYER_MODULES = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
# Queries, keys and values are stored side by side in one tensor.
_PLACES = {"attention.q": 0, "attention.k": 1, "attention.v": 2}


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head.

    Matrices are stored transposed there (Conv1D), embeddings and head are not.
    """
    pieces = {
        "embed.weight": Piece("transformer.wte.weight", rows=config.vocab_size),
        "position_table.weight": Piece("transformer.wpe.weight"),
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            for kind in ("weight", "bias"):
                pieces[f"layers.{layer}.{ours}.{kind}"] = Piece(
                    f"transformer.h.{layer}.{theirs}.{kind}",
                    first_row=_PLACES.get(ours, 0) * config.hidden_size,
                    transposed=kind == "weight" and not ours.endswith("norm"),
                )
    pieces["norm.weight"] = Piece("transformer.ln_f.weight")
    pieces["norm.bias"] = Piece("transformer.ln_f.bias")
    if not config.tie_word_embeddings:
        pieces["head.weight"] = Piece("lm_head.weight", rows=config.vocab_size)
    return pieces


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`."""
    read = ConfigReader(config, where)
    read.only("architectures", ["GPT2LMHeadModel"])
    read.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        read.only(key, False)
    hidden, heads = (
        read.size("n_embd", "hidden_size", default=768),
        read.size("n_head", "num_attention_heads", default=12),
    )
    values = {
        "model_type": "gpt2",
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=50_257),
        "intermediate_size": read.size("n_inner", default=4 * hidden, null=4 * hidden),
        "num_hidden_layers": read.layers("n_layer", "num_hidden_layers", default=12),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": read.head_dim(hidden, heads),
        "max_position_embeddings": read.size("n_positions", "max_position_embeddings", default=1024),
        "layer_norm_epsilon": read.number("layer_norm_epsilon", default=1e-5),
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=True),
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": read.only("activation_function", *_ACTIVATIONS),
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
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "activation_function": config.hidden_act,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }

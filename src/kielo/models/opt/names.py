"""OPT in Hugging Face's form: parameter names, and `config.json` in and out; torch-free.

Dropout is a part of training, not of the model: a config's value is ignored, and exports say 0.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.hugging_face_config import ConfigReader
from kielo.models.opt.count import EPSILON
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "relu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}
# A version number that fairseq's converter left among the weights.
IGNORED = (r"decoder\.version$",)
BASE_MODEL_PREFIX = "model."

_ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu")
_LAYER_MODULES = {
    "attention_norm": "self_attn_layer_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    names = {
        "embed.weight": "model.decoder.embed_tokens.weight",
        "position_table.weight": "model.decoder.embed_positions.weight",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            is_biased = config.attention_bias or ours.endswith("norm")
            for kind in ("weight", "bias") if is_biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.decoder.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.decoder.final_layer_norm.weight"
    names["norm.bias"] = "model.decoder.final_layer_norm.bias"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`.

    OPT-350m is refused by two keys: unlike the other published sizes it norms after each block and has an
    embedding of another width.
    """
    read = ConfigReader(config, where)
    read.only("architectures", ["OPTForCausalLM"])
    read.only("do_layer_norm_before", True)
    read.only("_remove_final_layer_norm", False)
    read.only("layer_norm_elementwise_affine", True)
    read.only("layerdrop", 0.0)
    hidden, heads = read.size("hidden_size", default=768), read.size("num_attention_heads", default=12)
    read.only("word_embed_proj_dim", hidden)
    bias = read.switch("enable_bias", default=True)
    values = {
        "model_type": "opt",
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=50_272),
        "intermediate_size": read.size("ffn_dim", default=3072),
        "num_hidden_layers": read.layers("num_hidden_layers", default=12),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": read.head_dim(hidden, heads),
        "max_position_embeddings": read.size("max_position_embeddings", default=2048),
        "layer_norm_epsilon": EPSILON,
        "tie_word_embeddings": read.switch("tie_word_embeddings", default=True),
        "attention_bias": bias,
        "mlp_bias": bias,
        "hidden_act": read.only("activation_function", *_ACTIVATIONS),
        "initializer_range": read.number("init_std", default=0.02),
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
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "word_embed_proj_dim": config.hidden_size,
        "ffn_dim": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "do_layer_norm_before": True,
        "activation_function": config.hidden_act,
        "enable_bias": bool(config.attention_bias),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "init_std": config.initializer_range,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }

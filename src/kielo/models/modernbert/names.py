"""ModernBERT in Hugging Face's form: parameter names, and `config.json` in and out; torch-free.

Files have queries, keys and values in one matrix, one below the other, and the MLP's gate above its `up`.
`local_attention` there is the width of a window to both sides, of which half is to each; `sliding_window`
here is that half and the token itself.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.hugging_face_config import ConfigReader, normalise_rope
from kielo.models.modernbert.count import FULL_EVERY, layer_types
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 65,
}
# Buffers that are computed here.
IGNORED = (r"\.rotary_emb\..*inv_freq$",)
BASE_MODEL_PREFIX = ""

_ARCHITECTURE = "ModernBertForMaskedLM"
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    hidden, inside = config.hidden_size, config.intermediate_size
    pieces = {
        "embed.weight": Piece("model.embeddings.tok_embeddings.weight", rows=config.vocab_size),
        "embed_norm.weight": Piece("model.embeddings.norm.weight"),
    }
    attention_kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    mlp_kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    for layer in range(config.num_hidden_layers):
        ours, stored = f"layers.{layer}", f"model.layers.{layer}"
        if layer:
            pieces[f"{ours}.attention_norm.weight"] = Piece(f"{stored}.attn_norm.weight")
        for number, part in enumerate("qkv"):
            for kind in attention_kinds:
                pieces[f"{ours}.attention.{part}.{kind}"] = Piece(
                    f"{stored}.attn.Wqkv.{kind}", number * hidden
                )
        for kind in attention_kinds:
            pieces[f"{ours}.attention.o.{kind}"] = Piece(f"{stored}.attn.Wo.{kind}")
        pieces[f"{ours}.mlp_norm.weight"] = Piece(f"{stored}.mlp_norm.weight")
        for number, part in enumerate(("gate", "up")):
            for kind in mlp_kinds:
                pieces[f"{ours}.mlp.{part}.{kind}"] = Piece(f"{stored}.mlp.Wi.{kind}", number * inside)
        for kind in mlp_kinds:
            pieces[f"{ours}.mlp.down.{kind}"] = Piece(f"{stored}.mlp.Wo.{kind}")
    pieces["norm.weight"] = Piece("model.final_norm.weight")
    pieces["transform.dense.weight"] = Piece("head.dense.weight")
    pieces["transform.norm.weight"] = Piece("head.norm.weight")
    if not config.tie_word_embeddings:
        pieces["head.weight"] = Piece("decoder.weight", rows=config.vocab_size)
    pieces["head.bias"] = Piece("decoder.bias", rows=config.vocab_size)
    return pieces


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`.

    What never differs between published models has to be so: no biases of norms and of the head's transform,
    one of the head, no scaling of RoPE, no dropout.
    """
    read = ConfigReader(config, where)
    read.only("architectures", [_ARCHITECTURE])
    for key in ("attention_dropout", "embedding_dropout", "mlp_dropout"):
        read.only(key, 0.0)
    for key in ("norm_bias", "classifier_bias"):
        read.only(key, False)
    read.only("decoder_bias", True)
    read.only("classifier_activation", "gelu")
    read.only("rope_scaling", None)
    hidden, heads = read.size("hidden_size", default=768), read.size("num_attention_heads", default=12)
    layers = read.layers("num_hidden_layers", default=22)
    positions = read.size("max_position_embeddings", default=8192)
    full_every = read.size("global_attn_every_n_layers", default=FULL_EVERY)
    values = {
        "model_type": "modernbert",
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=50_368),
        "intermediate_size": read.size("intermediate_size", default=1152),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": read.head_dim(hidden, heads),
        "max_position_embeddings": positions,
        "layer_norm_epsilon": read.number("norm_eps", default=1e-5),
        "tie_word_embeddings": read.only("tie_word_embeddings", True),
        "attention_bias": read.switch("attention_bias", default=False),
        "mlp_bias": read.switch("mlp_bias", default=False),
        "hidden_act": read.only("hidden_activation", *_ACTIVATIONS),
        "initializer_range": read.number("initializer_range", default=0.02),
        "sliding_window": read.size("local_attention", default=128) // 2 + 1,
        "layer_types": read.layer_types(_kinds(layers, full_every)),
    }
    theta, scaling, local_theta = read.ropes(
        "global_rope_theta", 160_000.0, "local_rope_theta", 10_000.0, positions
    )
    if scaling is not None:
        read.complain(f"asks for what Kielo does not do: a scaling of RoPE ({scaling['rope_type']})")
        read.done()
    return Model(**values, rope_theta=theta, rope_local_base_freq=local_theta)


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
    base, _ = normalise_rope(config.rope_theta, None, config.max_position_embeddings)
    kinds = layer_types(config)
    written = {
        "architectures": [_ARCHITECTURE],
        "model_type": "modernbert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_activation": config.hidden_act,
        "norm_eps": config.layer_norm_epsilon,
        "norm_bias": False,
        "global_rope_theta": base,
        "local_rope_theta": config.rope_local_base_freq,
        "layer_types": list(kinds),
        "local_attention": 2 * (config.sliding_window - 1),
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": bool(config.mlp_bias),
        "classifier_bias": False,
        "decoder_bias": True,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "bos_token_id": bos_token_id,
        "cls_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "sep_token_id": eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
    }
    regular = next((every for every in range(1, len(kinds) + 1) if kinds == _kinds(len(kinds), every)), None)
    # transformers 4 knows no other order of layers.
    return written if regular is None else written | {"global_attn_every_n_layers": regular}


def _kinds(layers: int, full_every: int) -> tuple[str, ...]:
    return tuple("sliding_attention" if number % full_every else "full_attention" for number in range(layers))

"""BLOOM as tables: sizes, FLOPs, styles of tensor ranks, names and keys in Hugging Face's form.

Dropout, which is 0 in published files, is not done and its keys are ignored. Distances have no bound, and the
config has none: max_position_embeddings is `seq_length`, the length of training, where a file has it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kielo.models import decoder_count
from kielo.models.config_keys import Entry, Key, NoWindows, Unread, WholeHeads, fixed, only, switch
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, ConfigReader
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    plain_mlp_parameters,
)
from kielo.models.piece import Piece, fused_by_head
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of a BLOOM (also FinGPT and Poro-34B), from its `[model]` section; torch-free.


TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False, has_alibi=True, mlp_ratio=4)


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention, MLP, and the weights and biases of two norms."""
    return (
        attention_parameters(config, True, True) + plain_mlp_parameters(config, True) + 4 * config.hidden_size
    )


def parameters(config: CompleteModel) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Counts the parameters that multiply a token: all but the embedding; the head counts, tied or not."""
    layers = config.num_hidden_layers * layer_parameters(config)
    return layers + 4 * config.hidden_size + embedding_parameters(config)


def flops_per_token(config: CompleteModel, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)


# Tensor-parallel plan of a BLOOM: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "embed_norm": "residual",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.inner.alibi": "slopes",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
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


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
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


class _FourTimes(Unread):
    """intermediate_size, which config.json lacks: it is four times hidden_size."""

    ours = ("intermediate_size",)

    def read(self, reader: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"intermediate_size": 4 * values["hidden_size"]}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.intermediate_size != 4 * model.hidden_size:
            yield (
                f"model.intermediate_size = {model.intermediate_size}: in a bloom it is four times "
                f"model.hidden_size, {4 * model.hidden_size}"
            )


KEYS: dict[str, tuple[Entry, ...]] = {
    "bloom": (
        only("architectures", ["BloomForCausalLM"], is_written=True),
        Key("vocab_size", kind=SIZE, default=250_880),
        Key("hidden_size", "hidden_size", "n_embed", kind=SIZE, default=64),
        _FourTimes(),
        Key("num_hidden_layers", "n_layer", "num_hidden_layers", kind=LAYERS, default=2),
        Key("num_attention_heads", "n_head", "num_attention_heads", kind=SIZE, default=8),
        WholeHeads(),
        NoWindows(),
        Key("max_position_embeddings", "seq_length", kind=SIZE, default=_TRAINED_LENGTH),
        Key("layer_norm_epsilon", kind=NUMBER, default=1e-5),
        fixed("hidden_act", *TANH_GELUS),
        switch("tie_word_embeddings", True),
        fixed("attention_bias", True),
        fixed("mlp_bias", True),
        only("apply_residual_connection_post_layernorm", False, is_written=True),
        Key("initializer_range", kind=NUMBER, default=0.02),
        Unread("slow_but_exact", attention_dropout=0.0, hidden_dropout=0.0),
    )
}

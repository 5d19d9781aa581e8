"""ModernBERT as tables: sizes, FLOPs, styles of tensor ranks, names and keys in Hugging Face's form.

Files have queries, keys and values in one matrix, one below the other, and the MLP's gate above its `up`.
`local_attention` there is the width of a window to both sides, of which half is to each; `sliding_window`
here is that half and the token itself.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.config_keys import (
    Choice,
    Entry,
    Key,
    RopeByKind,
    Unread,
    WholeHeads,
    Windows,
    fixed,
    only,
    switch,
)
from kielo.models.config_reader import LAYER_KINDS, LAYERS, NUMBER, SIZE, ConfigReader
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of a ModernBERT, by arithmetic on its `[model]` section; torch-free.


FULL_EVERY = 3  # layers, from the first one on


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=3, has_groups=False)


def layer_types(config: CompleteModel) -> tuple[str, ...]:
    """Return each layer's "full_attention" or "sliding_attention"; by default every third is full."""
    return config.layer_types or tuple(
        "sliding_attention" if number % FULL_EVERY else "full_attention"
        for number in range(config.num_hidden_layers)
    )


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer after the first, which has no norm before its attention."""
    bias = config.attention_bias
    return (
        attention_parameters(config, bias, bias)
        + gated_mlp_parameters(config, config.mlp_bias)
        + 2 * config.hidden_size
    )


def parameters(config: CompleteModel) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + config.hidden_size + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Counts the parameters that multiply a token: all but the embedding and its norm; the head counts."""
    hidden = config.hidden_size
    layers = config.num_hidden_layers * layer_parameters(config) - hidden
    transform = hidden**2 + hidden
    return layers + hidden + transform + embedding_parameters(config) + config.vocab_size


def flops_per_token(config: CompleteModel, sequence_length: int) -> int:
    """Compute the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that it is multiplied with; in attention 12 × width for each key that it sees: all s
    of a sequence, or on average those nearer than a window w, 2w - 1 - w(w - 1)/s.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 0
    for kind in layer_types(config):
        window = sequence_length
        if kind == "sliding_attention" and config.sliding_window is not None:
            window = min(config.sliding_window, sequence_length)
        pairs = sequence_length * (2 * window - 1) - window * (window - 1)
        attention += 12 * width * pairs // sequence_length
    return 6 * parameters_without_embedding(config) + attention


# Tensor-parallel plan of a ModernBERT: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean. The first layer's
# attention has no norm.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "embed_norm": "residual",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "residual",
    "transform.dense": "whole",
    "transform.norm": "residual",
    "head": "column",
}


# Buffers that are computed here.
IGNORED = (r"\.rotary_emb\..*inv_freq$",)
BASE_MODEL_PREFIX = ""

_WINDOW = 65
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
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


class _BothWays(Windows):
    """local_attention, and layer_types or global_attn_every_n_layers; the first layer is full."""

    def __init__(self) -> None:
        super().__init__(FULL_EVERY)

    def read(self, reader: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        every = reader.value(("global_attn_every_n_layers",), SIZE, FULL_EVERY)
        width = reader.value(("local_attention",), SIZE, 2 * (_WINDOW - 1))
        reader.only("sliding_window", (width // 2,))  # transformers 5 takes it for half of local_attention
        kinds = reader.layer_types(_kinds(values["num_hidden_layers"], every))
        return {"sliding_window": width // 2 + 1, "layer_types": kinds}

    def write(self, model: CompleteModel) -> dict[str, Any]:
        kinds = layer_types(model)
        written = {"layer_types": list(kinds), "local_attention": 2 * ((model.sliding_window or _WINDOW) - 1)}
        regular = (every for every in range(1, len(kinds) + 1) if kinds == _kinds(len(kinds), every))
        # transformers 4 knows no other order of layers.
        every = next(regular, None)
        return written if every is None else written | {"global_attn_every_n_layers": every}

    def defaults(self) -> dict[str, Any]:
        return {"sliding_window": _WINDOW}


def _kinds(layers: int, full_every: int) -> tuple[str, ...]:
    return tuple(LAYER_KINDS[number % full_every != 0] for number in range(layers))


# What never differs between published models must be so: no biases of norms and of the head's transform, one
# of the head, no scaling of RoPE, no dropout.
KEYS: dict[str, tuple[Entry, ...]] = {
    "modernbert": (
        only("architectures", ["ModernBertForMaskedLM"], is_written=True),
        Key("vocab_size", kind=SIZE, default=50_368),
        Key("hidden_size", kind=SIZE, default=768),
        Key("intermediate_size", kind=SIZE, default=1152),
        Key("num_hidden_layers", kind=LAYERS, default=22),
        Key("num_attention_heads", kind=SIZE, default=12),
        WholeHeads(),
        Key("max_position_embeddings", kind=SIZE, default=8192),
        Choice(*_ACTIVATIONS, ours="hidden_act", theirs="hidden_activation"),
        Key("layer_norm_epsilon", "norm_eps", kind=NUMBER, default=1e-5),
        only("norm_bias", False, is_written=True),
        RopeByKind(("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0), has_scaling=False),
        _BothWays(),
        switch("attention_bias", False),
        switch("mlp_bias", False),
        fixed("tie_word_embeddings", True, theirs="tie_word_embeddings"),
        only("classifier_bias", False, is_written=True),
        only("classifier_activation", "gelu"),
        only("decoder_bias", True, is_written=True),
        *(only(f"{part}_dropout", 0.0, is_written=True) for part in ("attention", "embedding", "mlp")),
        Key("initializer_range", kind=NUMBER, default=0.02),
        Unread(
            "initializer_cutoff_factor", "classifier_pooling", "deterministic_flash_attn",
            "sparse_prediction",
            "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad",
        ),
    )
}  # fmt: skip

"""GPT-NeoX as tables: sizes, FLOPs, styles of tensor ranks, names and keys in Hugging Face's form.

Dropout, which is 0 in published files, is not done and its keys are ignored.
"""

from collections.abc import Iterable

from kielo.models import decoder_count
from kielo.models.config_keys import (
    Choice,
    Entry,
    Key,
    NoWindows,
    Rope,
    Unread,
    WholeHeads,
    fixed,
    only,
    switch,
)
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, SWITCH
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    plain_mlp_parameters,
)
from kielo.models.piece import Piece, fused_by_head
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of a GPT-NeoX (and Pythia), by arithmetic on its `[model]` section; torch-free.


def rotary_size(config: CompleteModel) -> int:
    """Return how many numbers of each head RoPE rotates: the first ones."""
    return int(config.head_dim * config.rotary_pct)


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=2, has_groups=False, is_parallel=config.use_parallel_residual)


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention, MLP, and the weights and biases of two norms."""
    bias = config.attention_bias
    return (
        attention_parameters(config, bias, bias) + plain_mlp_parameters(config, True) + 4 * config.hidden_size
    )


def parameters(config: CompleteModel) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Counts the parameters that multiply a token: all but the embedding; the head counts, tied or not."""
    layers = config.num_hidden_layers * layer_parameters(config)
    return layers + 2 * config.hidden_size + embedding_parameters(config)


def flops_per_token(config: CompleteModel, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)


# Tensor-parallel plan of a GPT-NeoX: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
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


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
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


class _PairedRope(Rope):
    """RoPE of a share of each head, which must be a whole number of pairs."""

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.head_dim and (rotary_size(model) < 2 or rotary_size(model) % 2):
            yield (
                f"model.rotary_pct = {model.rotary_pct} of model.head_dim = {model.head_dim} is "
                f"{rotary_size(model)} numbers; rotary positions need pairs"
            )


KEYS: dict[str, tuple[Entry, ...]] = {
    "gpt_neox": (
        only("architectures", ["GPTNeoXForCausalLM"], is_written=True),
        Key("vocab_size", kind=SIZE, default=50_432),
        Key("hidden_size", kind=SIZE, default=6144),
        Key("intermediate_size", kind=SIZE, default=24_576),
        Key("num_hidden_layers", kind=LAYERS, default=44),
        Key("num_attention_heads", kind=SIZE, default=64),
        WholeHeads(),
        NoWindows(),
        Key("max_position_embeddings", kind=SIZE, default=2048),
        Key("layer_norm_epsilon", "layer_norm_eps", kind=NUMBER, default=1e-5),
        Choice(*_ACTIVATIONS, ours="hidden_act", theirs="hidden_act"),
        _PairedRope("rotary_emb_base", rotary_pct=0.25),
        Key("use_parallel_residual", kind=SWITCH, default=True),
        switch("tie_word_embeddings", False),
        switch("attention_bias", True),
        fixed("mlp_bias", True),
        Key("initializer_range", kind=NUMBER, default=0.02),
        Unread(attention_dropout=0.0, hidden_dropout=0.0),
    )
}

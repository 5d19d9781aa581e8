"""GPT-2 as tables: sizes, FLOPs, styles of tensor ranks, names and keys in Hugging Face's form.

Dropout is a part of training, not of the model: a config's value is ignored, and exports say 0.
"""

from kielo.models import decoder_count
from kielo.models.config_keys import Choice, Entry, Key, NoWindows, Unread, WholeHeads, fixed, only, switch
from kielo.models.config_reader import LAYERS, NUMBER, SIZE
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    plain_mlp_parameters,
)
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of a GPT-2, by arithmetic on its `[model]` section; torch-free.


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False)


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention, MLP, and two norms with weight and bias."""
    attention = attention_parameters(config, config.attention_bias, config.attention_bias)
    return attention + plain_mlp_parameters(config, config.mlp_bias) + 4 * config.hidden_size


def parameters(config: CompleteModel) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    positions = config.max_position_embeddings * config.hidden_size
    return input_embedding + positions + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Counts the parameters that multiply a token: all but both embeddings; the head counts, tied or not."""
    return (
        config.num_hidden_layers * layer_parameters(config)
        + 2 * config.hidden_size
        + embedding_parameters(config)
    )


def flops_per_token(config: CompleteModel, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)


# Tensor-parallel plan of a GPT-2: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "position_table": "positions",
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


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head.

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


KEYS: dict[str, tuple[Entry, ...]] = {
    "gpt2": (
        only("architectures", ["GPT2LMHeadModel"], is_written=True),
        Key("vocab_size", kind=SIZE, default=50_257),
        Key("hidden_size", "n_embd", "hidden_size", kind=SIZE, default=768),
        Key(
            "intermediate_size", "n_inner", kind=SIZE,
            default=lambda values: 4 * values["hidden_size"], null=lambda values: 4 * values["hidden_size"],
        ),
        Key("num_hidden_layers", "n_layer", "num_hidden_layers", kind=LAYERS, default=12),
        Key("num_attention_heads", "n_head", "num_attention_heads", kind=SIZE, default=12),
        WholeHeads(),
        NoWindows(),
        Key("max_position_embeddings", "n_positions", "max_position_embeddings", kind=SIZE, default=1024),
        Key("layer_norm_epsilon", kind=NUMBER, default=1e-5),
        Choice(*_ACTIVATIONS, ours="hidden_act", theirs="activation_function"),
        switch("tie_word_embeddings", True),
        fixed("attention_bias", True),
        fixed("mlp_bias", True),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("reorder_and_upcast_attn", False),
        Key("initializer_range", kind=NUMBER, default=0.02),
        Unread(
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "summary_first_dropout", "task_specific_params", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            n_ctx=lambda model: model.max_position_embeddings,  # llama.cpp's converter reads it
        ),
    )
}  # fmt: skip

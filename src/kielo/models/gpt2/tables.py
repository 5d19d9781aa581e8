"""GPT-2 as tables. Dropout is a part of training: a config's value is ignored, and exports say 0."""

from collections.abc import Mapping

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import LAYERS, NUMBER, SIZE
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = shared.PRE_NORM_PLAN | {"position_table": "positions"}

# Causal masks that older transformers saved among the weights.
IGNORED = (r"\.attn\.(masked_)?bias$",)
BASE_MODEL_PREFIX = "transformer."

_ACTIVATIONS = ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu")
_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
_LAYER_MODULES = {
    "attention_norm": "ln_1",
    **{f"attention.{part}": "attn.c_attn" for part in "qkv"},
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
# Queries, keys and values are stored side by side in one tensor.
_PLACES = {"attention.q": 0, "attention.k": 1, "attention.v": 2}


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False)


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    hidden = config.hidden_size
    return shared.OtherParameters(4 * hidden, 2 * hidden, config.max_position_embeddings * hidden)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return the pieces. Files have transposed matrices (Conv1D), but not embeddings and heads."""

    def piece(ours: str, stored: str) -> Piece:
        is_matrix = stored.endswith("weight") and not ours.endswith("norm")
        return Piece(stored, _PLACES.get(ours, 0) * config.hidden_size, transposed=is_matrix)

    first = {"embed.weight": "transformer.wte.weight", "position_table.weight": "transformer.wpe.weight"}
    last = {f"norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")}
    ends = first, last | {"head.weight": "lm_head.weight"}
    return shared.model_pieces(config, _LAYER_MODULES, _LAYER_MODULES, "transformer.h", ends, piece)


def _four_times(values: Mapping[str, int]) -> int:
    return 4 * values["hidden_size"]


KEYS: dict[str, tuple[keys.Entry, ...]] = {
    "gpt2": (
        keys.only("architectures", ["GPT2LMHeadModel"], is_written=True),
        keys.Key("vocab_size", kind=SIZE, default=50_257),
        keys.Key("hidden_size", "n_embd", "hidden_size", kind=SIZE, default=768),
        keys.Key("intermediate_size", "n_inner", kind=SIZE, default=_four_times, null=_four_times),
        keys.Key("num_hidden_layers", "n_layer", "num_hidden_layers", kind=LAYERS, default=12),
        keys.Key("num_attention_heads", "n_head", "num_attention_heads", kind=SIZE, default=12),
        keys.WholeHeads(),
        keys.NoWindows(),
        keys.Key(
            "max_position_embeddings", "n_positions", "max_position_embeddings", kind=SIZE, default=1024
        ),
        keys.Key("layer_norm_epsilon", kind=NUMBER, default=1e-5),
        keys.fixed("hidden_act", *_ACTIVATIONS, theirs="activation_function"),
        keys.switch("tie_word_embeddings", True),
        keys.fixed("attention_bias", True),
        keys.fixed("mlp_bias", True),
        keys.only("scale_attn_weights", True),
        keys.only("scale_attn_by_inverse_layer_idx", False),
        keys.only("reorder_and_upcast_attn", False),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
        keys.Unread(
            *(f"summary_{name}" for name in _SUMMARY),
            "task_specific_params",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            n_ctx=lambda model: model.max_position_embeddings,  # llama.cpp's converter reads it
        ),
    )
}

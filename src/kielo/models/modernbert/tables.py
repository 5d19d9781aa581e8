"""ModernBERT as tables: sizes, styles of tensor ranks, names and keys in Hugging Face's form.

In files `local_attention` is the width of a window to both sides; `sliding_window` here is half of it and the
token itself.
"""

from collections.abc import Mapping

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import LAYER_KINDS, NUMBER, SIZE, ConfigReader
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = (
    shared.PRE_NORM_PLAN
    | dict.fromkeys(("embed_norm", "norm", "transform.norm"), "residual")
    | {"transform.dense": "whole"}
)

# Buffers that are computed here.
IGNORED = (r"\.rotary_emb\..*inv_freq$",)
BASE_MODEL_PREFIX = ""

_WINDOW, _FULL_EVERY = 65, shared.FULL_EVERY["modernbert"]
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")


_FIRST_NAMES = {
    "embed.weight": "model.embeddings.tok_embeddings.weight",
    "embed_norm.weight": "model.embeddings.norm.weight",
}
_ATTENTION = {f"attention.{part}": "attn.Wqkv" for part in "qkv"} | {"attention.o": "attn.Wo"}
_MLP = {"mlp.gate": "mlp.Wi", "mlp.up": "mlp.Wi", "mlp.down": "mlp.Wo"}
_LAST_NAMES = {
    "norm.weight": "model.final_norm.weight",
    "transform.dense.weight": "head.dense.weight",
    "transform.norm.weight": "head.norm.weight",
    "head.weight": "decoder.weight",
    "head.bias": "decoder.bias",
}


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(mlp_matrices=3, has_groups=False)


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    hidden = config.hidden_size
    # The last norm, and the head's transform and bias; the first layer has no norm before its attention.
    output = hidden + (hidden**2 + hidden + config.vocab_size) - hidden
    return shared.OtherParameters(norms=2 * hidden, output=output, input=hidden)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    hidden = config.hidden_size
    rows = {"attention.k": hidden, "attention.v": 2 * hidden, "mlp.up": config.intermediate_size}

    def piece(ours: str, stored: str) -> Piece:
        return Piece(stored, rows.get(ours, 0))

    modules = {"attention_norm": "attn_norm"} | _ATTENTION | {"mlp_norm": "mlp_norm"} | _MLP
    biased = [*(_ATTENTION if config.attention_bias else ()), *(_MLP if config.mlp_bias else ())]
    ends = _FIRST_NAMES, _LAST_NAMES
    pieces = shared.model_pieces(config, modules, biased, "model.layers", ends, piece)
    del pieces["layers.0.attention_norm.weight"]
    return pieces


class _BothWays(keys.Windows):
    """local_attention, and layer_types or global_attn_every_n_layers. The first layer is full."""

    def __init__(self) -> None:
        super().__init__(_FULL_EVERY)

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        every = reader.value(("global_attn_every_n_layers",), SIZE, _FULL_EVERY)
        width = reader.value(("local_attention",), SIZE, 2 * (_WINDOW - 1))
        reader.only("sliding_window", (width // 2,))  # transformers 5 takes it for half of local_attention
        kinds = reader.layer_types(_kinds(values["num_hidden_layers"], every))
        return {"sliding_window": width // 2 + 1, "layer_types": kinds}

    def write(self, model: CompleteModel) -> dict[str, object]:
        kinds = shared.layer_types(model)
        written = {"layer_types": list(kinds), "local_attention": 2 * ((model.sliding_window or _WINDOW) - 1)}
        # transformers 4 knows no other order of layers.
        regular = (every for every in range(1, len(kinds) + 1) if kinds == _kinds(len(kinds), every))
        every = next(regular, None)
        return written if every is None else written | {"global_attn_every_n_layers": every}

    def defaults(self) -> dict[str, object]:
        return {"sliding_window": _WINDOW}


def _kinds(layers: int, full_every: int) -> tuple[str, ...]:
    return tuple(LAYER_KINDS[number % full_every != 0] for number in range(layers))


_UNREAD = """
    initializer_cutoff_factor classifier_pooling deterministic_flash_attn sparse_prediction
    sparse_pred_ignore_index reference_compile repad_logits_with_grad
"""
# All published models have: no biases of norms and of the head's transform, a bias of the head, no scaling of
# RoPE, no dropout. Other values are refused.
KEYS: dict[str, tuple[keys.Entry, ...]] = {
    "modernbert": (
        keys.only("architectures", ["ModernBertForMaskedLM"], is_written=True),
        *keys.sizes(50_368, hidden=768, inside=1152, layers=22, heads=12),
        keys.WholeHeads(),
        keys.Key("max_position_embeddings", kind=SIZE, default=8192),
        keys.fixed("hidden_act", *_ACTIVATIONS, theirs="hidden_activation"),
        keys.Key("layer_norm_epsilon", "norm_eps", kind=NUMBER, default=1e-5),
        keys.only("norm_bias", False, is_written=True),
        keys.RopeByKind(("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0), has_scaling=False),
        _BothWays(),
        keys.switch("attention_bias", False),
        keys.switch("mlp_bias", False),
        keys.fixed("tie_word_embeddings", True, theirs="tie_word_embeddings"),
        keys.only("classifier_bias", False, is_written=True),
        keys.only("classifier_activation", "gelu"),
        keys.only("decoder_bias", True, is_written=True),
        *(keys.only(f"{part}_dropout", 0.0, is_written=True) for part in ("attention", "embedding", "mlp")),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
        keys.Unread(*_UNREAD.split()),
    )
}

"""GPT-NeoX as tables. Keys of dropout, which is 0 in published files, are not read."""

from collections.abc import Iterable
from functools import partial

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import NUMBER, SIZE, SWITCH
from kielo.models.piece import Piece, fused_by_head
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = shared.PRE_NORM_PLAN

# Masks and frequencies that older transformers saved among the weights.
IGNORED = (r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$")
BASE_MODEL_PREFIX = "gpt_neox."

_ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


def megatron_modules(attention: str) -> dict[str, str]:
    """Return our modules of a layer → Megatron-LM's, which BLOOM's files have too, by attention's name."""
    return {
        "attention_norm": "input_layernorm",
        **{f"attention.{part}": f"{attention}.query_key_value" for part in "qkv"},
        "attention.o": f"{attention}.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }


def megatron_piece(config: CompleteModel, ours: str, stored: str) -> Piece:
    """Return a module's piece of a stored tensor. Queries, keys and values are fused head by head."""
    return fused_by_head(stored, config.head_dim).get(ours.removeprefix("attention."), Piece(stored))


_LAYER_MODULES = megatron_modules("attention")


def rotary_size(config: CompleteModel) -> int:
    """Return how many numbers of each head RoPE rotates, from the head's first number on."""
    return int(config.head_dim * config.rotary_pct)


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(
        mlp_matrices=2, has_groups=False, is_parallel=config.use_parallel_residual is not False
    )


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    return shared.OtherParameters(norms=4 * config.hidden_size, output=2 * config.hidden_size)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    has_bias = [ours for ours in _LAYER_MODULES if config.attention_bias or "attention." not in ours]
    norm = {f"norm.{kind}": f"gpt_neox.final_layer_norm.{kind}" for kind in ("weight", "bias")}
    # Files have embed_out; the live module of transformers 5 is lm_head.
    ends = {"embed.weight": "gpt_neox.embed_in.weight"}, norm | {"head.weight": "embed_out.weight"}
    piece = partial(megatron_piece, config)
    return shared.model_pieces(config, _LAYER_MODULES, has_bias, "gpt_neox.layers", ends, piece)


class _PairedRope(keys.Rope):
    """RoPE of a share of each head, which must be a whole number of pairs."""

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.head_dim and (rotary_size(model) < 2 or rotary_size(model) % 2):
            yield (
                f"model.rotary_pct = {model.rotary_pct} of model.head_dim = {model.head_dim} is "
                f"{rotary_size(model)} numbers; rotary positions need pairs"
            )


KEYS: dict[str, tuple[keys.Entry, ...]] = {
    "gpt_neox": (
        keys.only("architectures", ["GPTNeoXForCausalLM"], is_written=True),
        *keys.sizes(50_432, hidden=6144, inside=24_576, layers=44, heads=64),
        keys.WholeHeads(),
        keys.NoWindows(),
        keys.Key("max_position_embeddings", kind=SIZE, default=2048),
        keys.Key("layer_norm_epsilon", "layer_norm_eps", kind=NUMBER, default=1e-5),
        keys.fixed("hidden_act", *_ACTIVATIONS, theirs="hidden_act"),
        _PairedRope("rotary_emb_base", rotary_pct=0.25),
        keys.Key("use_parallel_residual", kind=SWITCH, default=True),
        keys.switch("tie_word_embeddings", False),
        keys.switch("attention_bias", True),
        keys.fixed("mlp_bias", True),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
        keys.Unread(attention_dropout=0.0, hidden_dropout=0.0),
    )
}

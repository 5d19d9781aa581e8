"""BLOOM as tables: sizes, styles of tensor ranks, names and keys in Hugging Face's form.

Kielo does not read the keys of dropout, which is 0 in published files. Distances have no bound, and the
config has none: max_position_embeddings is `seq_length`, the length of training, if a file has it.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, ConfigReader
from kielo.models.gpt_neox.tables import megatron_modules, megatron_piece
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = (
    shared.PRE_NORM_PLAN | shared.of_layers("slopes", "attention.inner.alibi") | {"embed_norm": "residual"}
)

IGNORED = ()
BASE_MODEL_PREFIX = "transformer."

_TRAINED_LENGTH = 2048  # of every BLOOM
_MODULES = megatron_modules("self_attention")


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False, has_alibi=True, mlp_ratio=4)


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    """Return the numbers. The embedding's norm counts among the output's."""
    return shared.OtherParameters(norms=4 * config.hidden_size, output=4 * config.hidden_size)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    first = {"embed.weight": "transformer.word_embeddings.weight"}
    last = {}
    for kind in ("weight", "bias"):
        first[f"embed_norm.{kind}"] = f"transformer.word_embeddings_layernorm.{kind}"
        last[f"norm.{kind}"] = f"transformer.ln_f.{kind}"
    last["head.weight"] = "lm_head.weight"
    piece = partial(megatron_piece, config)
    return shared.model_pieces(config, _MODULES, _MODULES, "transformer.h", (first, last), piece)


class _FourTimes(keys.Unread):
    """intermediate_size, which config.json lacks: it is four times hidden_size."""

    ours = ("intermediate_size",)

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        return {"intermediate_size": 4 * values["hidden_size"]}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.intermediate_size != 4 * model.hidden_size:
            yield (
                f"model.intermediate_size = {model.intermediate_size}: in a bloom it is four times "
                f"model.hidden_size, {4 * model.hidden_size}"
            )


KEYS: dict[str, tuple[keys.Entry, ...]] = {
    "bloom": (
        keys.only("architectures", ["BloomForCausalLM"], is_written=True),
        keys.Key("vocab_size", kind=SIZE, default=250_880),
        keys.Key("hidden_size", "hidden_size", "n_embed", kind=SIZE, default=64),
        _FourTimes(),
        keys.Key("num_hidden_layers", "n_layer", "num_hidden_layers", kind=LAYERS, default=2),
        keys.Key("num_attention_heads", "n_head", "num_attention_heads", kind=SIZE, default=8),
        keys.WholeHeads(),
        keys.NoWindows(),
        keys.Key("max_position_embeddings", "seq_length", kind=SIZE, default=_TRAINED_LENGTH),
        keys.Key("layer_norm_epsilon", kind=NUMBER, default=1e-5),
        keys.fixed("hidden_act", *shared.TANH_GELUS),
        keys.switch("tie_word_embeddings", True),
        keys.fixed("attention_bias", True),
        keys.fixed("mlp_bias", True),
        keys.only("apply_residual_connection_post_layernorm", False, is_written=True),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
        keys.Unread("slow_but_exact", attention_dropout=0.0, hidden_dropout=0.0),
    )
}

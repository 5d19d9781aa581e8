"""BLOOM as tables: sizes, styles of tensor ranks, names and keys in Hugging Face's form.

Kielo does not read the keys of dropout, which is 0 in published files. Distances have no bound, and the
config has none: max_position_embeddings is `seq_length`, the length of training, if a file has it.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from kielo.models.config_keys import Entry, Key, NoWindows, Unread, WholeHeads, fixed, only, switch
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, ConfigReader
from kielo.models.family_tables import PRE_NORM_PLAN, LayerParts, OtherParameters, model_pieces, of_layers
from kielo.models.gpt_neox.tables import megatron_modules, megatron_piece
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
TENSOR_PARALLEL_PLAN = (
    PRE_NORM_PLAN | of_layers("slopes", "attention.inner.alibi") | {"embed_norm": "residual"}
)

IGNORED = ()
BASE_MODEL_PREFIX = "transformer."

_TRAINED_LENGTH = 2048  # of every BLOOM
_MODULES = megatron_modules("self_attention")


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False, has_alibi=True, mlp_ratio=4)


def other_parameters(config: CompleteModel) -> OtherParameters:
    """Return the numbers. The embedding's norm counts among the output's."""
    return OtherParameters(norms=4 * config.hidden_size, output=4 * config.hidden_size)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    first = {"embed.weight": "transformer.word_embeddings.weight"}
    last = {}
    for kind in ("weight", "bias"):
        first[f"embed_norm.{kind}"] = f"transformer.word_embeddings_layernorm.{kind}"
        last[f"norm.{kind}"] = f"transformer.ln_f.{kind}"
    last["head.weight"] = "lm_head.weight"
    piece = partial(megatron_piece, config)
    return model_pieces(config, _MODULES, _MODULES, "transformer.h", (first, last), piece)


class _FourTimes(Unread):
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

"""OLMo 2 and 3 as tables: sizes, styles of tensor ranks, names and keys in Hugging Face's form."""

from operator import itemgetter

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import NUMBER, SIZE
from kielo.models.llama.tables import ATTENTION_MODULES, HEAD_NORM_MODULES, MLP_MODULES
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = (
    shared.MATRICES
    | shared.OUTPUT_NORMS
    | shared.of_layers("all_heads", "attention.q_norm", "attention.k_norm")
    | {"norm": "sequence"}
)

# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

_ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(mlp_matrices=3, has_head_norms=True, norms_inputs=False)


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    heads = config.num_attention_heads + config.num_key_value_heads
    return shared.OtherParameters(2 * config.hidden_size + heads * config.head_dim, config.hidden_size)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    modules = ATTENTION_MODULES | HEAD_NORM_MODULES | {"attention_post_norm": "post_attention_layernorm"}
    modules |= MLP_MODULES | {"mlp_post_norm": "post_feedforward_layernorm"}
    return shared.model_pieces(config, modules, ATTENTION_MODULES if config.attention_bias else ())


def _entries(model_type: str) -> tuple[keys.Entry, ...]:
    heads = itemgetter("num_attention_heads")
    # For an OLMo 3 without `rope_theta`, transformers 4 takes a base of 10,000, and transformers 5 takes
    # 500,000 in windowed layers, also if it reads the old spelling. So exports have both spellings.
    rope = ("rope_theta", None)
    return (
        keys.only("architectures", [_ARCHITECTURES[model_type]], is_written=True),
        *keys.sizes(50_304, hidden=4096, inside=11_008, layers=32, heads=32),
        keys.Key("num_key_value_heads", kind=SIZE, default=heads, null=heads),
        keys.HeadWidth(),
        keys.Key("max_position_embeddings", kind=SIZE, default=2048),
        keys.fixed("hidden_act", "silu", theirs="hidden_act"),
        keys.Key("rms_norm_eps", kind=NUMBER, default=1e-5),
        keys.Rope() if model_type == "olmo2" else keys.RopeByKind(rope, rope, writes_both=True),
        keys.NoWindows() if model_type == "olmo2" else keys.Windows(full_every=4),
        keys.switch("tie_word_embeddings", False),
        keys.switch("attention_bias", False),
        keys.fixed("mlp_bias", False),
        keys.only("attention_dropout", 0.0, is_written=True),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
    )


KEYS = {model_type: _entries(model_type) for model_type in _ARCHITECTURES}

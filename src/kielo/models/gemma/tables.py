"""Gemma 2 and 3 as tables: sizes, styles of tensor ranks, names and keys in Hugging Face's form."""

from collections.abc import Iterable

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import NUMBER, SIZE
from kielo.models.llama.tables import ATTENTION_MODULES, HEAD_NORM_MODULES, MLP_MODULES
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = shared.PRE_NORM_PLAN | shared.OUTPUT_NORMS | shared.HEAD_NORMS

# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

_ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def has_head_norms(config: CompleteModel) -> bool:
    """Return True for a Gemma 3, which norms queries and keys of each head; Gemma 2 caps their scores."""
    return config.model_type == "gemma3_text"


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(mlp_matrices=3, norms=4, has_head_norms=has_head_norms(config))


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    norms = 4 * config.hidden_size + 2 * config.head_dim * has_head_norms(config)
    return shared.OtherParameters(norms, config.hidden_size)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    modules = {"attention_norm": "input_layernorm"} | ATTENTION_MODULES
    modules |= HEAD_NORM_MODULES if has_head_norms(config) else {}
    modules |= {"attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    modules |= MLP_MODULES | {"mlp_post_norm": "post_feedforward_layernorm"}
    return shared.model_pieces(config, modules, ATTENTION_MODULES if config.attention_bias else ())


def _entries(model_type: str) -> tuple[keys.Entry, ...]:
    is_gemma2 = model_type == "gemma2"
    # A cap of null is no cap. If it is missing, it is the family's, as in transformers.
    caps: dict[str, float | None] = {"final_logit_softcapping": None}
    if is_gemma2:
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    patterns = ("sliding_window_pattern", "_sliding_window_pattern")
    return (
        keys.only("architectures", [_ARCHITECTURES[model_type]], is_written=True),
        *keys.sizes(256_000 if is_gemma2 else 262_208, hidden=2304, inside=9216, layers=26, heads=8),
        keys.Key("num_key_value_heads", kind=SIZE, default=4),
        _HeadsOfGemma(default=256),
        keys.Key("max_position_embeddings", kind=SIZE, default=8192 if is_gemma2 else 131_072),
        keys.fixed("hidden_act", "gelu_pytorch_tanh", theirs="hidden_activation"),
        keys.only("use_bidirectional_attention", False),
        keys.Key("rms_norm_eps", kind=NUMBER, default=1e-6),
        keys.Rope() if is_gemma2 else keys.RopeByKind(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        keys.Windows(2) if is_gemma2 else keys.Windows(6, *patterns),
        _ScoreScale("query_pre_attn_scalar", kind=NUMBER, default=256),
        *(keys.Key(name, kind=NUMBER, default=cap, null=None) for name, cap in caps.items()),
        # Gemma 3 does not apply it.
        *(() if is_gemma2 else (keys.only("attn_logit_softcapping", None, is_written=True),)),
        keys.switch("tie_word_embeddings", True),
        keys.switch("attention_bias", False),
        keys.fixed("mlp_bias", False),
        keys.only("attention_dropout", 0.0, is_written=True),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
    )


class _HeadsOfGemma(keys.HeadWidth):
    """The width of a head. transformers refuses a hidden_size that the heads do not divide."""

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.hidden_size % model.num_attention_heads:
            yield (
                f"model.hidden_size = {model.hidden_size} is no multiple of model.num_attention_heads = "
                f"{model.num_attention_heads}"
            )


class _ScoreScale(keys.Key):
    """The number whose root divides scores, by default head_dim. transformers reads whole numbers only."""

    def write(self, model: CompleteModel) -> dict[str, object]:
        return {"query_pre_attn_scalar": int(model.query_pre_attn_scalar or model.head_dim)}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.query_pre_attn_scalar is not None and model.query_pre_attn_scalar % 1:
            yield f"model.query_pre_attn_scalar = {model.query_pre_attn_scalar} is not a whole number"


KEYS = {model_type: _entries(model_type) for model_type in _ARCHITECTURES}

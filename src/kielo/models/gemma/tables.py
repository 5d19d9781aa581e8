"""Gemma 2 and 3 as tables: sizes, FLOPs, styles of tensor ranks, names and keys in Hugging Face's form."""

from collections.abc import Iterable
from typing import Any

from kielo.models import decoder_count
from kielo.models.config_keys import Entry, HeadWidth, Key, Rope, RopeByKind, Windows, fixed, only, switch
from kielo.models.config_reader import LAYERS, NUMBER, SIZE
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of a Gemma 2 or 3, by arithmetic on its `[model]` section; torch-free.


def has_head_norms(config: CompleteModel) -> bool:
    """Return True for a Gemma 3, which norms queries and keys of each head; Gemma 2 caps their scores."""
    return config.model_type == "gemma3_text"


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=3, norms=4, has_head_norms=has_head_norms(config))


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention, MLP, and the norms before and after each."""
    norms = 4 * config.hidden_size + 2 * config.head_dim * has_head_norms(config)
    bias = config.attention_bias
    return attention_parameters(config, bias, bias) + gated_mlp_parameters(config, False) + norms


def parameters(config: CompleteModel) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Counts the parameters that multiply a token: all but the embedding; the head counts, tied or not."""
    return (
        config.num_hidden_layers * layer_parameters(config)
        + config.hidden_size
        + embedding_parameters(config)
    )


def flops_per_token(config: CompleteModel, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)


# Tensor-parallel plan of a Gemma 2 or 3: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean. Entries for
# modules that a variant lacks are skipped.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.q_norm": "each_head",
    "layers.*.attention.k_norm": "each_head",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "residual",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "layers.*.mlp_post_norm": "residual",
    "norm": "sequence",
    "head": "column",
}


# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

_ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = ("attention.q_norm", "attention.k_norm")


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            if ours in _HEAD_NORMS and not has_head_norms(config):
                continue
            is_biased = config.attention_bias and ours.startswith("attention.") and ours not in _HEAD_NORMS
            for kind in ("weight", "bias") if is_biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def _entries(model_type: str) -> tuple[Entry, ...]:
    is_gemma2 = model_type == "gemma2"
    # A cap of null is no cap. If it is missing, it is the family's, as in transformers.
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return (
        only("architectures", [_ARCHITECTURES[model_type]], is_written=True),
        Key("vocab_size", kind=SIZE, default=256_000 if is_gemma2 else 262_208),
        Key("hidden_size", kind=SIZE, default=2304),
        Key("intermediate_size", kind=SIZE, default=9216),
        Key("num_hidden_layers", kind=LAYERS, default=26),
        Key("num_attention_heads", kind=SIZE, default=8),
        Key("num_key_value_heads", kind=SIZE, default=4),
        _HeadsOfGemma(default=256),
        Key("max_position_embeddings", kind=SIZE, default=8192 if is_gemma2 else 131_072),
        fixed("hidden_act", "gelu_pytorch_tanh", theirs="hidden_activation"),
        only("use_bidirectional_attention", False),
        Key("rms_norm_eps", kind=NUMBER, default=1e-6),
        Rope() if is_gemma2 else RopeByKind(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        Windows(2) if is_gemma2 else Windows(6, "sliding_window_pattern", "_sliding_window_pattern"),
        _ScoreScale("query_pre_attn_scalar", kind=NUMBER, default=256),
        *(
            Key(name, kind=NUMBER, default=cap if is_gemma2 else None, null=None)
            for name, cap in caps.items()
            if is_gemma2 or name != "attn_logit_softcapping"
        ),
        *(() if is_gemma2 else (only("attn_logit_softcapping", None, is_written=True),)),  # not applied there
        switch("tie_word_embeddings", True),
        switch("attention_bias", False),
        fixed("mlp_bias", False),
        only("attention_dropout", 0.0, is_written=True),
        Key("initializer_range", kind=NUMBER, default=0.02),
    )


class _HeadsOfGemma(HeadWidth):
    """The width of a head. transformers refuses a hidden_size that the heads do not divide."""

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.hidden_size % model.num_attention_heads:
            yield (
                f"model.hidden_size = {model.hidden_size} is no multiple of model.num_attention_heads = "
                f"{model.num_attention_heads}"
            )


class _ScoreScale(Key):
    """The number whose root divides scores, by default head_dim. transformers reads whole numbers only."""

    def write(self, model: CompleteModel) -> dict[str, Any]:
        return {"query_pre_attn_scalar": int(model.query_pre_attn_scalar or model.head_dim)}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.query_pre_attn_scalar is not None and model.query_pre_attn_scalar % 1:
            yield f"model.query_pre_attn_scalar = {model.query_pre_attn_scalar} is not a whole number"


KEYS = {model_type: _entries(model_type) for model_type in _ARCHITECTURES}

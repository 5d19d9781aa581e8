"""OLMo 2 and 3 as tables: sizes, FLOPs, styles of tensor ranks, names and keys in Hugging Face's form."""

from operator import itemgetter

from kielo.models import decoder_count
from kielo.models.config_keys import (
    Entry,
    HeadWidth,
    Key,
    NoWindows,
    Rope,
    RopeByKind,
    Windows,
    fixed,
    only,
    switch,
)
from kielo.models.config_reader import LAYERS, NUMBER, SIZE
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of an OLMo 2 or 3, by arithmetic on its `[model]` section; torch-free.


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=3, has_head_norms=True, norms_inputs=False)


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention, MLP, two norms after them, and the norms of queries and of keys."""
    norms = (
        2 * config.hidden_size + (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    )
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


# Tensor-parallel plan of an OLMo 2 or 3: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention.project": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.q_norm": "all_heads",
    "layers.*.attention.k_norm": "all_heads",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "residual",
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

_ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
_LAYER_MODULES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            is_biased = config.attention_bias and ours.startswith("attention.") and not ours.endswith("norm")
            for kind in ("weight", "bias") if is_biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def _entries(model_type: str) -> tuple[Entry, ...]:
    heads = itemgetter("num_attention_heads")
    # transformers 4 takes a base of 10,000 for an OLMo 3 without `rope_theta`, and transformers 5 500,000 in
    # windowed layers, also if it reads the old spelling: exports have both spellings.
    rope = ("rope_theta", None)
    return (
        only("architectures", [_ARCHITECTURES[model_type]], is_written=True),
        Key("vocab_size", kind=SIZE, default=50_304),
        Key("hidden_size", kind=SIZE, default=4096),
        Key("intermediate_size", kind=SIZE, default=11_008),
        Key("num_hidden_layers", kind=LAYERS, default=32),
        Key("num_attention_heads", kind=SIZE, default=32),
        Key("num_key_value_heads", kind=SIZE, default=heads, null=heads),
        HeadWidth(),
        Key("max_position_embeddings", kind=SIZE, default=2048),
        fixed("hidden_act", "silu", theirs="hidden_act"),
        Key("rms_norm_eps", kind=NUMBER, default=1e-5),
        Rope() if model_type == "olmo2" else RopeByKind(rope, rope, writes_both=True),
        NoWindows() if model_type == "olmo2" else Windows(full_every=4),
        switch("tie_word_embeddings", False),
        switch("attention_bias", False),
        fixed("mlp_bias", False),
        only("attention_dropout", 0.0, is_written=True),
        Key("initializer_range", kind=NUMBER, default=0.02),
    )


KEYS = {model_type: _entries(model_type) for model_type in _ARCHITECTURES}

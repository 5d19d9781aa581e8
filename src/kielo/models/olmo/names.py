"""OLMo 2 and 3 in Hugging Face's form: parameter names, and `config.json` in and out; torch-free."""

from operator import itemgetter

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
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

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


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
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

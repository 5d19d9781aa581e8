"""Llama, Mistral, Qwen2 and Qwen3 as tables: sizes, FLOPs, styles of tensor ranks, and names of weights."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from kielo.models import decoder_count
from kielo.models.config_keys import Entry, HeadWidth, Key, NoWindows, Rope, Windows, fixed, only, switch
from kielo.models.config_reader import LAYER_KINDS, LAYERS, NUMBER, SIZE, SWITCH, WHOLE, ConfigReader
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
    layer_types,
)
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of a Llama, Mistral, Qwen2 or Qwen3, from its `[model]` section; torch-free.
#
# The one source of the model FLOPs that the meter and the planner report.


def has_head_norms(config: CompleteModel) -> bool:
    """Return True for a Qwen3, which norms the queries and keys of each head."""
    return config.model_type == "qwen3"


def attention_biases(config: CompleteModel) -> tuple[bool, bool]:
    """Return (bias of queries, keys and values?, of the output?): Qwen2 has the first without the second."""
    return config.attention_bias, config.attention_bias and config.model_type != "qwen2"


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(mlp_matrices=3, has_head_norms=has_head_norms(config))


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention, MLP, their biases where the config has them, and the norms."""
    norms = 2 * config.hidden_size + 2 * config.head_dim * has_head_norms(config)
    attention = attention_parameters(config, *attention_biases(config))
    return attention + gated_mlp_parameters(config, config.mlp_bias) + norms


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


# Tensor-parallel plan of a Llama (Mistral, Qwen2, Qwen3): module name → tensor-parallel style.
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
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "norm": "sequence",
    "head": "column",
}


# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of Hugging Face's files, in the model's order, without a tied head."""
    bias, output_bias = attention_biases(config)
    biased = {
        "attention.q": bias, "attention.k": bias, "attention.v": bias, "attention.o": output_bias,
        "mlp.gate": config.mlp_bias, "mlp.up": config.mlp_bias, "mlp.down": config.mlp_bias,
    }  # fmt: skip
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_MODULES.items():
            if ours.endswith(("q_norm", "k_norm")) and not has_head_norms(config):
                continue
            for kind in ("weight", "bias") if biased.get(ours) else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = "model.norm.weight"
    if not config.tie_word_embeddings:
        names["head.weight"] = "lm_head.weight"
    rows = dict.fromkeys(("embed.weight", "head.weight"), config.vocab_size)
    return {ours: Piece(theirs, rows=rows.get(ours)) for ours, theirs in names.items()}


def _entries(model_type: str) -> tuple[Entry, ...]:
    vocab_size, positions, inside, key_heads = {
        "llama": (32_000, 2048, 11_008, None),
        "mistral": (32_000, 131_072, 14_336, 8),
        "qwen2": (151_936, 32_768, 22_016, 32),
        "qwen3": (151_936, 32_768, 22_016, 32),
    }[model_type]
    heads = itemgetter("num_attention_heads")
    return (
        only("architectures", [_ARCHITECTURES[model_type]], is_written=True),
        Key("vocab_size", kind=SIZE, default=vocab_size),
        Key("hidden_size", kind=SIZE, default=4096),
        Key("intermediate_size", kind=SIZE, default=inside),
        Key("num_hidden_layers", kind=LAYERS, default=32),
        Key("num_attention_heads", kind=SIZE, default=32),
        Key("num_key_value_heads", kind=SIZE, default=key_heads or heads, null=heads),
        # A Qwen 3's heads have a width of their own.
        HeadWidth(default=128) if model_type == "qwen3" else HeadWidth(),
        Key("max_position_embeddings", kind=SIZE, default=positions),
        fixed("hidden_act", "silu", theirs="hidden_act"),
        Key("rms_norm_eps", kind=NUMBER, default=1e-6),
        Rope(),
        switch("tie_word_embeddings", False),
        # transformers lacks these keys for the other families. Qwen 2 always has biases of q, k and v.
        switch("attention_bias", False)
        if model_type in ("llama", "qwen3")
        else fixed("attention_bias", model_type == "qwen2"),
        switch("mlp_bias", False) if model_type == "llama" else fixed("mlp_bias", False),
        {"llama": NoWindows(), "mistral": _OneWindow()}.get(model_type) or _QwenWindows(),
        only("attention_dropout", 0.0, is_written=True),
        Key("initializer_range", kind=NUMBER, default=0.02),
    )


class _OneWindow(NoWindows):
    """Mistral's window, of every layer, or none if it is null."""

    ours = ("sliding_window",)

    def read(self, reader: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        window = reader.value(("sliding_window",), SIZE, 4096, None)
        usual = (LAYER_KINDS[window is not None],) * values["num_hidden_layers"]
        if reader.layer_types(usual) != usual:
            reader.complain(
                "layer_types has other kinds of layers than sliding_window, which transformers passes over"
            )
        return {"sliding_window": window}

    def write(self, model: CompleteModel) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window}


class _QwenWindows(Windows):
    """A window of some layers, by default of those from max_window_layers on."""

    def __init__(self) -> None:
        super().__init__(full_every=1)

    def read(self, reader: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        window = reader.value(("sliding_window",), SIZE, 4096, None)
        if not reader.value(("use_sliding_window",), SWITCH, False):
            window = None
        first, layers = reader.value(("max_window_layers",), WHOLE, 28), values["num_hidden_layers"]
        full = layers if window is None else min(first, layers)
        kinds = reader.layer_types([LAYER_KINDS[number >= full] for number in range(layers)])
        if window is None and "sliding_attention" in kinds:
            reader.complain(
                "layer_types has sliding_attention, but use_sliding_window or sliding_window does not allow "
                "any"
            )
        return {} if window is None else {"sliding_window": window, "layer_types": kinds}

    def write(self, model: CompleteModel) -> dict[str, Any]:
        return {
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
            "layer_types": list(layer_types(model)),
        }


KEYS = {model_type: _entries(model_type) for model_type in _ARCHITECTURES}

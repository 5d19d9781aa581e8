"""Llama, Mistral, Qwen2 and Qwen3 as tables: sizes, styles of tensor ranks, names and keys of files."""

from collections.abc import Mapping
from operator import itemgetter

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import LAYER_KINDS, NUMBER, SIZE, SWITCH, WHOLE, ConfigReader
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

TENSOR_PARALLEL_PLAN = shared.PRE_NORM_PLAN | shared.HEAD_NORMS

# Buffers that older transformers saved among the weights; they are computed here.
IGNORED = (r"\.rotary_emb\.inv_freq$",)
BASE_MODEL_PREFIX = "model."

# Architecture, and the defaults of vocabulary, positions, the MLP's width and heads of keys.
_DEFAULTS = {
    "llama": ("LlamaForCausalLM", 32_000, 2048, 11_008, None),
    "mistral": ("MistralForCausalLM", 32_000, 131_072, 14_336, 8),
    "qwen2": ("Qwen2ForCausalLM", 151_936, 32_768, 22_016, 32),
    "qwen3": ("Qwen3ForCausalLM", 151_936, 32_768, 22_016, 32),
}
MLP_MODULES = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
ATTENTION_MODULES = {f"attention.{one}": f"self_attn.{one}_proj" for one in "qkvo"}
HEAD_NORM_MODULES = {f"attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}


def has_head_norms(config: CompleteModel) -> bool:
    return config.model_type == "qwen3"


def has_output_bias(config: CompleteModel) -> bool:
    """Return True if attention's output has a bias. Qwen2 has biases of queries, keys and values only."""
    return config.attention_bias and config.model_type != "qwen2"


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(mlp_matrices=3, has_head_norms=has_head_norms(config))


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    norms = 2 * config.hidden_size + 2 * config.head_dim * has_head_norms(config)
    return shared.OtherParameters(norms, config.hidden_size, has_output_bias=has_output_bias(config))


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    modules = {"attention_norm": "input_layernorm"} | ATTENTION_MODULES
    modules |= HEAD_NORM_MODULES if has_head_norms(config) else {}
    modules |= {"mlp_norm": "post_attention_layernorm"} | MLP_MODULES
    biased = ["attention.q", "attention.k", "attention.v"] if config.attention_bias else []
    biased += ["attention.o"] if has_output_bias(config) else []
    return shared.model_pieces(config, modules, [*biased, *(MLP_MODULES if config.mlp_bias else ())])


def _entries(model_type: str) -> tuple[keys.Entry, ...]:
    architecture, vocab_size, positions, inside, key_heads = _DEFAULTS[model_type]
    heads = itemgetter("num_attention_heads")
    return (
        keys.only("architectures", [architecture], is_written=True),
        *keys.sizes(vocab_size, hidden=4096, inside=inside, layers=32, heads=32),
        keys.Key("num_key_value_heads", kind=SIZE, default=key_heads or heads, null=heads),
        # A Qwen3's heads have a width of their own.
        keys.HeadWidth(default=128) if model_type == "qwen3" else keys.HeadWidth(),
        keys.Key("max_position_embeddings", kind=SIZE, default=positions),
        keys.fixed("hidden_act", "silu", theirs="hidden_act"),
        keys.Key("rms_norm_eps", kind=NUMBER, default=1e-6),
        keys.Rope(),
        keys.switch("tie_word_embeddings", False),
        # transformers lacks these keys for the other families. Qwen2 always has biases of q, k and v.
        keys.switch("attention_bias", False)
        if model_type in ("llama", "qwen3")
        else keys.fixed("attention_bias", model_type == "qwen2"),
        keys.switch("mlp_bias", False) if model_type == "llama" else keys.fixed("mlp_bias", False),
        {"llama": keys.NoWindows(), "mistral": _OneWindow()}.get(model_type) or _QwenWindows(),
        keys.only("attention_dropout", 0.0, is_written=True),
        keys.Key("initializer_range", kind=NUMBER, default=0.02),
    )


class _OneWindow(keys.NoWindows):
    """Mistral's window, which all layers have, or no layer if it is null."""

    ours = ("sliding_window",)

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        window = reader.value(("sliding_window",), SIZE, 4096, None)
        usual = (LAYER_KINDS[window is not None],) * values["num_hidden_layers"]
        if reader.layer_types(usual) != usual:
            reader.complain(
                "layer_types has other kinds of layers than sliding_window, but transformers ignores "
                "layer_types here"
            )
        return {"sliding_window": window}

    def write(self, model: CompleteModel) -> dict[str, object]:
        return {"sliding_window": model.sliding_window}


class _QwenWindows(keys.Windows):
    """A window of some layers, by default of the layers from max_window_layers on."""

    def __init__(self) -> None:
        super().__init__(full_every=1)

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
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

    def write(self, model: CompleteModel) -> dict[str, object]:
        return {
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
            "layer_types": list(shared.layer_types(model)),
        }


KEYS = {model_type: _entries(model_type) for model_type in _DEFAULTS}

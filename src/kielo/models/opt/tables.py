"""OPT as tables. Dropout is a part of training: a config's value is ignored, and exports say 0."""

from collections.abc import Iterable, Mapping

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, SWITCH, ConfigReader
from kielo.models.gpt2 import tables as gpt2
from kielo.models.gpt2.tables import TENSOR_PARALLEL_PLAN, layer_parts
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

__all__ = ["TENSOR_PARALLEL_PLAN", "layer_parts"]  # as GPT-2 has them

FIRST_POSITION = 2  # row of position 0 in the position embedding; no token uses the rows before
EPSILON = 1e-5  # of every norm: transformers has no key for it

# A version number that fairseq's converter left among the weights.
IGNORED = (r"decoder\.version$",)
BASE_MODEL_PREFIX = "model."

_ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu")
_FIRST_NAMES = {
    "embed.weight": "model.decoder.embed_tokens.weight",
    "position_table.weight": "model.decoder.embed_positions.weight",
}
_LAYER_MODULES = {
    "attention_norm": "self_attn_layer_norm",
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.o": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    """Return a GPT-2's numbers, and the rows of the position embedding that no token uses."""
    norms, output, positions, _ = gpt2.other_parameters(config)
    return shared.OtherParameters(norms, output, positions + FIRST_POSITION * config.hidden_size)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    biased = [ours for ours in _LAYER_MODULES if config.attention_bias or ours.endswith("norm")]
    last = {f"norm.{kind}": f"model.decoder.final_layer_norm.{kind}" for kind in ("weight", "bias")}
    ends = _FIRST_NAMES, last | {"head.weight": "lm_head.weight"}
    return shared.model_pieces(config, _LAYER_MODULES, biased, "model.decoder.layers", ends)


class _Biases(keys.Key):
    """enable_bias, of attention and MLP alike."""

    def __init__(self) -> None:
        super().__init__("attention_bias", "enable_bias", kind=SWITCH, default=True, is_family_default=True)
        self.ours = ("attention_bias", "mlp_bias")

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        found = super().read(reader, values)
        return found | {"mlp_bias": found["attention_bias"]}

    def defaults(self) -> dict[str, object]:
        return dict.fromkeys(self.ours, True)

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if model.mlp_bias not in (None, model.attention_bias):
            yield (
                f"model.mlp_bias = {model.mlp_bias!r}: an opt model has biases in attention and MLP, or in "
                f"neither (model.attention_bias = {model.attention_bias!r})"
            )


class _EmbeddingWidth(keys.Unread):
    """word_embed_proj_dim. OPT-350m is refused by it: its embedding has another width."""

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        reader.only("word_embed_proj_dim", (values["hidden_size"],))
        return {}

    def write(self, model: CompleteModel) -> dict[str, object]:
        return {"word_embed_proj_dim": model.hidden_size}


KEYS: dict[str, tuple[keys.Entry, ...]] = {
    "opt": (
        keys.only("architectures", ["OPTForCausalLM"], is_written=True),
        keys.Key("vocab_size", kind=SIZE, default=50_272),
        keys.Key("hidden_size", kind=SIZE, default=768),
        _EmbeddingWidth(),
        keys.Key("intermediate_size", "ffn_dim", kind=SIZE, default=3072),
        keys.Key("num_hidden_layers", kind=LAYERS, default=12),
        keys.Key("num_attention_heads", kind=SIZE, default=12),
        keys.WholeHeads(),
        keys.NoWindows(),
        keys.Key("max_position_embeddings", kind=SIZE, default=2048),
        keys.fixed("layer_norm_epsilon", EPSILON),
        keys.fixed("hidden_act", *_ACTIVATIONS, theirs="activation_function"),
        keys.switch("tie_word_embeddings", True),
        _Biases(),
        keys.only("do_layer_norm_before", True, is_written=True),  # False in OPT-350m
        keys.only("_remove_final_layer_norm", False),
        keys.only("layer_norm_elementwise_affine", True),
        keys.only("layerdrop", 0.0, is_written=True),
        keys.Key("initializer_range", "init_std", kind=NUMBER, default=0.02),
        keys.Unread(dropout=0.0, attention_dropout=0.0),
    )
}

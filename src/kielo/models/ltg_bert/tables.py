"""LTG-BERT as tables: sizes, FLOPs, styles of tensor ranks, names and keys in the published form.

transformers has no classes for it. Published files are made for remote code, Ltgbert* (HPLT) and Norbert*
(NorBERT 3), and have no model_type. With an export goes Kielo's own (`modeling_ltg_bert.py`), LtgBert*.

Two things in published files mislead. Nothing says how positions are cut into heads (`position_heads`): that
follows from the classes, or from the repository's name where it is one of the University of Oslo's; Kielo's
own files have a key for it. And HPLT trained with layer_norm_eps 1e-5 and no dropout, but its files say 1e-7
and 0.1: layer_norm_eps is taken as it stands, because the published code computes with it, and dropout is
ignored. Exports say what was trained with.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kielo.models.config_keys import Entry, Key, NoWindows, Unread, WholeHeads, fixed, only
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, ConfigReader
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters and FLOPs of an LTG-BERT, by arithmetic on its `[model]` section; torch-free.


# Parameters that each pipeline stage needs.
OF_ALL_STAGES = ("relative_table.weight", "relative_norm.weight", "relative_norm.bias")
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def layer_parts(config: CompleteModel) -> LayerParts:
    return LayerParts(
        mlp_matrices=3,
        norms=3,
        is_rotary=False,
        has_groups=False,
        has_mlp_norm=True,
        relative_rows=relative_rows(config),
    )


def relative_rows(config: CompleteModel) -> int:
    """Counts the rows of the table of relative positions."""
    return 2 * config.position_bucket_size - 1


def layer_parameters(config: CompleteModel) -> int:
    """Counts one layer: attention with biases, MLP without, and the one norm with weight and bias."""
    return (
        attention_parameters(config, True, True)
        + gated_mlp_parameters(config, False)
        + 2 * config.hidden_size
    )


def parameters(config: CompleteModel) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    positions = (relative_rows(config) + 2) * config.hidden_size
    return input_embedding + positions + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Counts the parameters that multiply a token: all but both tables; the head counts, tied or not."""
    transform = config.hidden_size**2 + config.hidden_size
    head = embedding_parameters(config) + config.vocab_size
    return config.num_hidden_layers * layer_parameters(config) + transform + head


def flops_per_token(config: CompleteModel, sequence_length: int) -> int:
    """Compute the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that it is multiplied with; in attention 12 × width for each key, of which it sees
    all, before and after it, and for each relative position, by which query and key are multiplied.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 12 * width * (sequence_length + relative_rows(config))
    return 6 * parameters_without_embedding(config) + config.num_hidden_layers * attention


# Tensor-parallel plan of an LTG-BERT: module name → tensor-parallel style.
#
# `*` stands for a layer's number; `models/parameter_shapes.py` says what the styles mean. Norms that are
# not named have no weights and norm each token by itself. The table of relative positions and its norm are
# on every rank, which computes them from the same numbers.


TENSOR_PARALLEL_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "layers.*.attention.project": "gather",
    "layers.*.attention.project_positions": "whole_input",
    "layers.*.attention.position_heads": "position_heads",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.attention_post_norm": "residual",
    "layers.*.mlp.project": "gather",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.norm": "features",
    "layers.*.mlp.down": "row",
    "transform.dense": "whole",
    "head": "column",
}


# Rows of distances, which are computed here.
IGNORED = (r"\.attention\.position_indices$",)
BASE_MODEL_PREFIX = ""
# The head is a tensor of its own in the files, with the embedding's values.
STORES_TIED_HEAD = True

_MODULES = {
    "q": "attention.in_proj_qk",
    "k": "attention.in_proj_qk",
    "v": "attention.in_proj_v",
    "o": "attention.out_proj",
}
# Python files beside this one that go along with an export.
REMOTE_CODE = ("modeling_ltg_bert.py",)
_CODE = "modeling_ltg_bert.LtgBert"
_CLASSES = {"concatenated": "Ltgbert", "interleaved": "Norbert"}
# Repositories whose classes are named Ltgbert* too, and whose positions are interleaved.
_INTERLEAVED = ("ltg/bnc-bert", "ltg/norbert3")
_OWN_KEY = "position_heads"
_TASKS = ("MaskedLM", "SequenceClassification", "TokenClassification")


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    """Return our name → the piece of the published files, in the model's order, without a tied head."""
    rows = config.vocab_size
    pieces = {"embed.weight": Piece("embedding.word_embedding.weight", rows=rows)}
    for layer in range(config.num_hidden_layers):
        stored = f"transformer.layers.{layer}"
        for ours, theirs in _MODULES.items():
            first = config.hidden_size if ours == "k" else 0
            for kind in ("weight", "bias"):
                pieces[f"layers.{layer}.attention.{ours}.{kind}"] = Piece(f"{stored}.{theirs}.{kind}", first)
        for kind in ("weight", "bias"):
            pieces[f"layers.{layer}.attention_post_norm.{kind}"] = Piece(
                f"{stored}.attention.post_layer_norm.{kind}"
            )
        # The first half of the rows is multiplied with the activation of the second.
        pieces[f"layers.{layer}.mlp.gate.weight"] = Piece(
            f"{stored}.mlp.mlp.1.weight", config.intermediate_size
        )
        pieces[f"layers.{layer}.mlp.up.weight"] = Piece(f"{stored}.mlp.mlp.1.weight")
        pieces[f"layers.{layer}.mlp.down.weight"] = Piece(f"{stored}.mlp.mlp.4.weight")
    for kind in ("weight", "bias"):
        pieces[f"transform.dense.{kind}"] = Piece(f"classifier.nonlinearity.1.{kind}")
    if not config.tie_word_embeddings:
        pieces["head.weight"] = Piece("classifier.nonlinearity.5.weight", rows=rows)
    pieces["head.bias"] = Piece("classifier.nonlinearity.5.bias", rows=rows)
    pieces["relative_table.weight"] = Piece("embedding.relative_embedding")
    for kind in ("weight", "bias"):
        pieces[f"relative_norm.{kind}"] = Piece(f"embedding.relative_layer_norm.{kind}")
    return pieces


class _PositionHeads(Unread):
    """How positions are cut into heads, which also chooses the classes of the remote code."""

    ours = (_OWN_KEY,)

    def read(self, reader: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        named = str((reader.get("architectures"), reader.get("auto_map")))
        from_oslo = str(reader.get("_name_or_path")).startswith(_INTERLEAVED)
        usual = "interleaved" if _CLASSES["interleaved"] in named or from_oslo else "concatenated"
        known = ("LtgBert", *_CLASSES.values())
        reader.only("architectures", [[f"{name}ForMaskedLM"] for name in known])
        return {_OWN_KEY: reader.only(_OWN_KEY, (usual, *_CLASSES))}

    def write(self, model: CompleteModel) -> dict[str, Any]:
        automatic = {"AutoConfig": "Config", "AutoModel": "Model"}
        automatic |= {f"AutoModelFor{task}": f"For{task}" for task in _TASKS}
        return {
            "model_type": "ltg_bert",
            "architectures": ["LtgBertForMaskedLM"],
            "auto_map": {key: f"{_CODE}{kind}" for key, kind in automatic.items()},
            _OWN_KEY: model.position_heads,
        }


class _Buckets(Key):
    """The number of buckets of distances: an even number, of which longer sequences need more than half."""

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        bucket, positions = model.position_bucket_size, model.max_position_embeddings
        if bucket % 2:
            yield (
                f"model.position_bucket_size = {bucket} is odd; half of it are distances with rows of their "
                "own"
            )
        if positions is not None and positions <= bucket // 2 + 1:
            yield (
                f"model.max_position_embeddings = {positions} is no more than half of "
                f"model.position_bucket_size = {bucket}, and 1. Fix: position_bucket_size = "
                f"{max(2, (positions - 2) // 2 * 2)}, or longer sequences"
            )


KEYS: dict[str, tuple[Entry, ...]] = {
    "ltg_bert": (
        _PositionHeads(),
        # Three keys that differ between models are required.
        Key("vocab_size", kind=SIZE, default=None),
        Key("hidden_size", kind=SIZE, default=768),
        Key("intermediate_size", kind=SIZE, default=None),
        Key("num_hidden_layers", kind=LAYERS, default=12),
        Key("num_attention_heads", kind=SIZE, default=12),
        WholeHeads(),
        NoWindows(),
        Key("max_position_embeddings", kind=SIZE, default=512),
        _Buckets("position_bucket_size", kind=SIZE, default=32),
        Key("layer_norm_epsilon", "layer_norm_eps", kind=NUMBER, default=None),
        fixed("hidden_act", *TANH_GELUS),
        only("hidden_act", "gelu_new"),
        fixed("tie_word_embeddings", True),
        fixed("attention_bias", True),
        fixed("mlp_bias", False),
        Unread("output_all_encoded_layers", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    )
}

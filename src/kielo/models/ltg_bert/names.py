"""LTG-BERT in the published form: parameter names, and `config.json` in and out; torch-free.

The files are made for classes of remote code, Ltgbert* (HPLT) and Norbert* (NorBERT 3), and have no
model_type. Two things in them mislead. Nothing says how positions are cut into heads (`position_heads`): that
follows from the classes, or from the repository's name where it is one of the University of Oslo's; Kielo's
own files have a key for it. And HPLT trained with layer_norm_eps 1e-5 and no dropout, but its files say 1e-7
and 0.1: layer_norm_eps is taken as it stands, because the published code computes with it, and dropout is
ignored. Exports say what was trained with.
"""

from collections.abc import Mapping
from typing import Any

from kielo.models.hugging_face_config import ConfigReader
from kielo.models.piece import Piece
from kielo.recipe.sections import Model

DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": False,
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
_CLASSES = {"concatenated": "Ltgbert", "interleaved": "Norbert"}
# Repositories whose classes are named Ltgbert* too, and whose positions are interleaved.
_INTERLEAVED = ("ltg/bnc-bert", "ltg/norbert3")
_OWN_KEY = "position_heads"


def to_hugging_face(config: Model) -> dict[str, Piece]:
    """Returns our name → the piece of the published files, in the model's order, without a tied head."""
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


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """Makes a complete `Model` from the content of the `config.json` at `where`."""
    read = ConfigReader(config, where)
    read.only("hidden_act", "gelu_new")
    read.only("architectures", *([f"{name}ForMaskedLM"] for name in _CLASSES.values()))
    for key in ("vocab_size", "intermediate_size", "layer_norm_eps"):  # they differ between models
        if key not in config:
            read.complain(f"lacks {key}")
    hidden, heads = (
        read.size("hidden_size", default=768),
        read.size("num_attention_heads", default=12),
    )
    values = {
        "model_type": "ltg_bert",
        "hidden_size": hidden,
        "vocab_size": read.size("vocab_size", default=1),
        "intermediate_size": read.size("intermediate_size", default=1),
        "num_hidden_layers": read.layers("num_hidden_layers", default=12),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": read.head_dim(hidden, heads),
        "max_position_embeddings": read.size("max_position_embeddings", default=512),
        "layer_norm_epsilon": read.number("layer_norm_eps", default=1.0),
        "position_bucket_size": read.size("position_bucket_size", default=32),
        "position_heads": read.only(_OWN_KEY, _usual_heads(config), *_CLASSES),
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": False,
        "hidden_act": "gelu_new",
    }
    read.done()
    return Model(**values)


def _usual_heads(config: Mapping[str, Any]) -> str:
    named = str((config.get("architectures"), config.get("auto_map")))
    from_oslo = str(config.get("_name_or_path")).startswith(_INTERLEAVED)
    return "interleaved" if _CLASSES["interleaved"] in named or from_oslo else "concatenated"


def hf_config(
    config: Model,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Makes the `config.json` of an export. dtype: that of the stored weights."""
    name = _CLASSES[config.position_heads]
    code = name.lower()
    automatic = {"AutoModel": "Model"} | {
        f"AutoModelFor{task}": f"For{task}"
        for task in (
            "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering",
            "MultipleChoice",
        )
    }  # fmt: skip
    return {
        "architectures": [f"{name}ForMaskedLM"],
        "auto_map": {"AutoConfig": f"configuration_{code}.{name}Config"}
        | {key: f"modeling_{code}.{name}{kind}" for key, kind in automatic.items()},
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "position_bucket_size": config.position_bucket_size,
        _OWN_KEY: config.position_heads,
        "layer_norm_eps": config.layer_norm_epsilon,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
    }

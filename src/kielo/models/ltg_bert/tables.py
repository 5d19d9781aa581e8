"""LTG-BERT as tables: sizes, styles of tensor ranks, names and keys in the published form.

Published files are made for remote code, Ltgbert* (HPLT) and Norbert* (NorBERT 3), and have no model_type. An
export contains Kielo's own code, LtgBert*. How positions are cut into heads (`position_heads`) follows from
the classes, or from a repository's name; only Kielo's files have a key for it. HPLT trained with
layer_norm_eps 1e-5 and no dropout, but its files say 1e-7 and 0.1. Kielo ignores dropout, and reads
layer_norm_eps, because the published code computes with it.
"""

from collections.abc import Iterable, Mapping

from kielo.models import config_keys as keys
from kielo.models import family_tables as shared
from kielo.models.config_reader import NUMBER, SIZE, ConfigReader
from kielo.models.piece import Piece
from kielo.recipe.sections import CompleteModel

# Parameters that each pipeline stage needs.
OF_ALL_STAGES = ("relative_table.weight", "relative_norm.weight", "relative_norm.bias")

# Norms that are not named have no weights and norm each token by itself. The table of relative positions and
# its norm are on every rank, which computes them from the same numbers.
TENSOR_PARALLEL_PLAN = (
    shared.MATRICES
    | shared.of_layers("whole_input", "attention.project_positions")
    | shared.of_layers("position_heads", "attention.position_heads")
    | shared.of_layers("residual", "attention_post_norm")
    | shared.of_layers("features", "mlp.norm")
    | {"transform.dense": "whole"}
)

# Rows of distances, which are computed here.
IGNORED = (r"\.attention\.position_indices$",)
BASE_MODEL_PREFIX = ""
# The head is a tensor of its own in the files, with the embedding's values.
STORES_TIED_HEAD = True

_ATTENTION = {
    "attention.q": "attention.in_proj_qk",
    "attention.k": "attention.in_proj_qk",
    "attention.v": "attention.in_proj_v",
    "attention.o": "attention.out_proj",
    "attention_post_norm": "attention.post_layer_norm",
}
_MLP = {"mlp.gate": "mlp.mlp.1", "mlp.up": "mlp.mlp.1", "mlp.down": "mlp.mlp.4"}
_LAST_NAMES = {
    "transform.dense.weight": "classifier.nonlinearity.1.weight",
    "transform.dense.bias": "classifier.nonlinearity.1.bias",
    "head.weight": "classifier.nonlinearity.5.weight",
    "head.bias": "classifier.nonlinearity.5.bias",
    "relative_table.weight": "embedding.relative_embedding",
    "relative_norm.weight": "embedding.relative_layer_norm.weight",
    "relative_norm.bias": "embedding.relative_layer_norm.bias",
}
# Python files of this folder that exports contain.
REMOTE_CODE = ("modeling_ltg_bert.py",)
_CODE = "modeling_ltg_bert.LtgBert"
_CLASSES = {"concatenated": "Ltgbert", "interleaved": "Norbert"}
# Repositories with interleaved positions whose classes are named Ltgbert* too.
_INTERLEAVED = ("ltg/bnc-bert", "ltg/norbert3")
_OWN_KEY = "position_heads"
_TASKS = ("MaskedLM", "SequenceClassification", "TokenClassification")


def relative_rows(config: CompleteModel) -> int:
    return 2 * config.position_bucket_size - 1


def layer_parts(config: CompleteModel) -> shared.LayerParts:
    return shared.LayerParts(
        mlp_matrices=3,
        norms=3,
        is_rotary=False,
        has_groups=False,
        has_mlp_norm=True,
        relative_rows=relative_rows(config),
    )


def other_parameters(config: CompleteModel) -> shared.OtherParameters:
    hidden = config.hidden_size
    # One norm of a layer has weights. The head has a transform and a bias.
    output = hidden**2 + hidden + config.vocab_size
    return shared.OtherParameters(2 * hidden, output, input=(relative_rows(config) + 2) * hidden)


def to_hugging_face(config: CompleteModel) -> dict[str, Piece]:
    # The first half of the MLP's rows is multiplied with the activation of the second.
    rows = {"attention.k": config.hidden_size, "mlp.gate": config.intermediate_size}

    def piece(ours: str, stored: str) -> Piece:
        return Piece(stored, rows.get(ours, 0))

    ends = {"embed.weight": "embedding.word_embedding.weight"}, _LAST_NAMES
    return shared.model_pieces(config, _ATTENTION | _MLP, _ATTENTION, "transformer.layers", ends, piece)


class _PositionHeads(keys.Unread):
    """How positions are cut into heads, which also chooses the classes of the remote code."""

    ours = (_OWN_KEY,)

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        named = str((reader.get("architectures"), reader.get("auto_map")))
        from_oslo = str(reader.get("_name_or_path")).startswith(_INTERLEAVED)
        usual = "interleaved" if _CLASSES["interleaved"] in named or from_oslo else "concatenated"
        known = ("LtgBert", *_CLASSES.values())
        reader.only("architectures", [[f"{name}ForMaskedLM"] for name in known])
        return {_OWN_KEY: reader.only(_OWN_KEY, (usual, *_CLASSES))}

    def write(self, model: CompleteModel) -> dict[str, object]:
        automatic = {"AutoConfig": "Config", "AutoModel": "Model"}
        automatic |= {f"AutoModelFor{task}": f"For{task}" for task in _TASKS}
        return {
            "model_type": "ltg_bert",
            "architectures": ["LtgBertForMaskedLM"],
            "auto_map": {key: f"{_CODE}{kind}" for key, kind in automatic.items()},
            _OWN_KEY: model.position_heads,
        }


class _Buckets(keys.Key):
    """The number of buckets of distances: an even number. Sequences are longer than half of it."""

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


KEYS: dict[str, tuple[keys.Entry, ...]] = {
    "ltg_bert": (
        _PositionHeads(),
        # Three keys that differ between models are required.
        *keys.sizes(None, hidden=768, inside=None, layers=12, heads=12),
        keys.WholeHeads(),
        keys.NoWindows(),
        keys.Key("max_position_embeddings", kind=SIZE, default=512),
        _Buckets("position_bucket_size", kind=SIZE, default=32),
        keys.Key("layer_norm_epsilon", "layer_norm_eps", kind=NUMBER, default=None),
        keys.fixed("hidden_act", *shared.TANH_GELUS),
        keys.only("hidden_act", "gelu_new"),
        keys.fixed("tie_word_embeddings", True),
        keys.fixed("attention_bias", True),
        keys.fixed("mlp_bias", False),
        keys.Unread("output_all_encoded_layers", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    )
}

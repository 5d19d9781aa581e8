"""Every parameter of a model with its shape, from the `[model]` section alone; torch-free.

Names are those of a family's `names.py`; a test holds that shapes are those of its `model.py`.
"""

from kielo.models.families import module
from kielo.recipe.sections import Model

_INTO_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}


def parameter_shapes(config: Model) -> dict[str, tuple[int, ...]]:
    """Name → whole shape, in the model's order, for a complete `config`; a tied head is not there."""
    family = config.model_type
    words, names = module(family, "layout").TENSOR_AXIS, module(family, "names").to_hugging_face(config)
    return {name: _shape(config, name, words) for name in names}


def layout_word(words: dict[str, str], module_name: str) -> str | None:
    """The word of a family's layout table for a module; None for one that it does not name."""
    return words.get(".".join("*" if part.isdigit() else part for part in module_name.split(".")))


def _shape(config: Model, name: str, words: dict[str, str]) -> tuple[int, ...]:
    module_name, _, kind = name.rpartition(".")
    last, hidden = module_name.rpartition(".")[2], config.hidden_size
    if last in ("q_norm", "k_norm"):
        heads = getattr(config, _INTO_HEADS[last[0]]) if layout_word(words, module_name) == "all_heads" else 1
        return (heads * config.head_dim,)
    if last.endswith("norm"):
        return (hidden,)
    outputs, inputs = _matrix(config, last)
    return (outputs, inputs) if kind == "weight" else (outputs,)


def _matrix(config: Model, last: str) -> tuple[int, int]:
    """(rows, columns) of the matrix in the module that is called so."""
    hidden, middle = config.hidden_size, config.intermediate_size
    if last in _INTO_HEADS:
        return getattr(config, _INTO_HEADS[last]) * config.head_dim, hidden
    if last == "position_table":
        first = getattr(module(config.model_type, "count"), "FIRST_POSITION", 0)
        return first + config.max_position_embeddings, hidden
    return {
        "o": (hidden, config.num_attention_heads * config.head_dim),
        "gate": (middle, hidden),
        "up": (middle, hidden),
        "down": (hidden, middle),
        "embed": (config.vocab_rows, hidden),
        "head": (config.vocab_rows, hidden),
    }[last]

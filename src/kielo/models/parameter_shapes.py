"""Every parameter of a model with its shape, from the `[model]` section alone; torch-free.

Names are those of a family's `names.py`; a test compares the shapes with those of its `model.py`.
"""

from kielo.models.families import module
from kielo.models.tensor_parallel_styles import style_of
from kielo.recipe.sections import Model

_INTO_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}


def parameter_shapes(config: Model) -> dict[str, tuple[int, ...]]:
    """Returns name → whole shape, in the model's order, for a complete `config`; a tied head is left out."""
    family = config.model_type
    plan = module(family, "tensor_parallel_plan").TENSOR_PARALLEL_PLAN
    names = module(family, "names").to_hugging_face(config)
    return {name: _shape(config, name, plan) for name in names}


def _shape(config: Model, name: str, plan: dict[str, str]) -> tuple[int, ...]:
    module_name, _, kind = name.rpartition(".")
    last, hidden = module_name.rpartition(".")[2], config.hidden_size
    if last in ("q_norm", "k_norm"):
        heads = getattr(config, _INTO_HEADS[last[0]]) if style_of(plan, module_name) == "all_heads" else 1
        return (heads * config.head_dim,)
    if last.endswith("norm"):
        return (hidden,)
    outputs, inputs = _matrix(config, last)
    return (outputs, inputs) if kind == "weight" else (outputs,)


def _matrix(config: Model, last: str) -> tuple[int, int]:
    """Returns (rows, columns) of the matrix in a module, by the last part of the module's name."""
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
        "relative_table": (2 * config.position_bucket_size - 1, hidden),
        "dense": (hidden, hidden),
    }[last]

"""Every parameter of a model with its shape, and the styles that split it over tensor ranks; torch-free."""

from kielo.models.families import module
from kielo.recipe.sections import CompleteModel

# The styles of a family's tensor-parallel plan: how a module is split over the tensor axis; torch-free.
#
# `parallel/tensor_parallel.py` turns each into one of torch's parallel styles, and `resolve` and `plan`
# count bytes with the same plan.


STYLES: dict[str, str] = {
    "vocabulary": "the embedding: its rows are split",
    "positions": "the embedding of positions: its weight is whole, its output is split along the sequence",
    "column": "output features are split (weight dim 0, and the bias)",
    "row": "input features are split (weight dim 1); the bias is whole",
    "gather": "no weight: the input of several matrices is gathered along the sequence, once for all",
    "sequence": "the weight is whole, its input is split along the sequence; gradients are summed",
    "whole": "a matrix whose weight is whole, its input is split along the sequence; gradients are summed",
    "residual": "as `sequence`, for a norm whose output is added to the residual stream",
    "each_head": "the weight is whole and norms each head by itself; gradients are summed",
    "all_heads": "the weight is split as the heads are, and norms all of them together",
    "whole_input": "no weight: the input of several matrices is whole on each rank, its gradient is summed",
    "features": "no weight: a norm over features that are split",
    "position_heads": "no weight: each rank has the relative positions of its heads",
    "slopes": "no weight: each rank has the ALiBi slopes of its heads",
}


def style_of(plan: dict[str, str], module_name: str) -> str | None:
    """The style that a family's plan gives a module; None for a module that it does not name."""
    return plan.get(".".join("*" if part.isdigit() else part for part in module_name.split(".")))


# Every parameter of a model with its shape, from the `[model]` section alone; torch-free.
#
# Names are those of a family's `tables.py`; a test compares the shapes with those of its `model.py`.


_INTO_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}


def parameter_shapes(config: CompleteModel) -> dict[str, tuple[int, ...]]:
    """Return name → whole shape, in the model's order, for a complete `config`; a tied head is left out."""
    family = config.model_type
    plan = module(family, "tables").TENSOR_PARALLEL_PLAN
    names = module(family, "tables").to_hugging_face(config)
    return {name: _shape(config, name, plan) for name in names}


def _shape(config: CompleteModel, name: str, plan: dict[str, str]) -> tuple[int, ...]:
    module_name, _, kind = name.rpartition(".")
    last, hidden = module_name.rpartition(".")[2], config.hidden_size
    if last in ("q_norm", "k_norm"):
        heads = getattr(config, _INTO_HEADS[last[0]]) if style_of(plan, module_name) == "all_heads" else 1
        return (heads * config.head_dim,)
    if last.endswith("norm"):
        return (hidden,)
    outputs, inputs = _matrix(config, last)
    return (outputs, inputs) if kind == "weight" else (outputs,)


def _matrix(config: CompleteModel, last: str) -> tuple[int, int]:
    """Return (rows, columns) of the matrix in a module, by the last part of the module's name."""
    hidden, middle = config.hidden_size, config.intermediate_size
    if last in _INTO_HEADS:
        return getattr(config, _INTO_HEADS[last]) * config.head_dim, hidden
    if last == "position_table":
        first = getattr(module(config.model_type, "tables"), "FIRST_POSITION", 0)
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

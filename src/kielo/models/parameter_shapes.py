"""The parameters of a model, from its `[model]` section: shapes, numbers, FLOPs, styles; torch-free."""

from kielo.models.families import module
from kielo.models.family_tables import LayerParts, OtherParameters, layer_types
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel

# The styles of a family's tensor-parallel plan: how a module is split over the tensor axis.
# `parallel/tensor_parallel.py` makes torch's styles of them. `resolve` and `plan` count bytes by them.
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
_INTO_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}


def style_of(plan: dict[str, str], module_name: str) -> str | None:
    """Return the style that a family's plan gives a module, None for a module that the plan does not name."""
    return plan.get(".".join("*" if part.isdigit() else part for part in module_name.split(".")))


def parameter_shapes(config: CompleteModel) -> dict[str, tuple[int, ...]]:
    """Return name → whole shape, in the model's order. A tied head is left out."""
    tables = module(config.model_type, "tables")
    names = tables.to_hugging_face(config)
    return {name: _shape(config, name, tables.TENSOR_PARALLEL_PLAN) for name in names}


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


# Numbers of parameters, by arithmetic: rows that pad the vocabulary do not count, because they are neither
# trained nor published.


def parameters(config: CompleteModel) -> int:
    """Return the number of all parameters. A tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return input_embedding + _others(config).input + parameters_without_embedding(config)


def parameters_without_embedding(config: CompleteModel) -> int:
    """Return the number of parameters that multiply a token. The head counts, tied or not."""
    head = config.vocab_size * config.hidden_size
    return config.num_hidden_layers * layer_parameters(config) + _others(config).output + head


def layer_parameters(config: CompleteModel) -> int:
    """Return the number of parameters of a layer (of a ModernBERT a layer after the first)."""
    others, hidden = _others(config), config.hidden_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    has_output_bias = config.attention_bias if others.has_output_bias is None else others.has_output_bias
    attention = 2 * hidden * (q_width + kv_width)
    attention += (q_width + 2 * kv_width) * config.attention_bias + hidden * has_output_bias
    inside, matrices = config.intermediate_size, _parts(config).mlp_matrices
    mlp = matrices * hidden * inside + ((matrices - 1) * inside + hidden) * config.mlp_bias
    return attention + mlp + others.norms


def token_flops(config: CompleteModel, sequence_length: int) -> int:
    """Compute the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that a token is multiplied with (Kaplan et al. 2020, arXiv:2001.08361), and 12 ×
    width for each key that a query sees on average. In a sequence s, of a window w, that is w - w²/2s if
    attention is causal (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, counts all s), else 2w - 1 - w(w
    - 1)/s.
    """
    width = config.num_attention_heads * config.head_dim
    is_encoder, relative_rows = FAMILIES[config.model_type].is_encoder, _parts(config).relative_rows
    attention = 0
    for kind in layer_types(config):
        window = sequence_length
        if kind == "sliding_attention" and config.sliding_window is not None:
            window = min(config.sliding_window, sequence_length)
        if is_encoder:
            pairs = sequence_length * (2 * window - 1) - window * (window - 1)
            attention += 12 * width * pairs // sequence_length + 12 * width * relative_rows
        else:
            attention += 6 * width * window * (2 * sequence_length - window) // sequence_length
    return 6 * parameters_without_embedding(config) + attention


def _others(config: CompleteModel) -> OtherParameters:
    return module(config.model_type, "tables").other_parameters(config)


def _parts(config: CompleteModel) -> LayerParts:
    return module(config.model_type, "tables").layer_parts(config)

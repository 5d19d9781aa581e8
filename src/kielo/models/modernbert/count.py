"""Parameters and FLOPs of a ModernBERT, by arithmetic on its `[model]` section; torch-free."""

from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.recipe.sections import Model

FULL_EVERY = 3  # layers, from the first one on


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(mlp_matrices=3, has_groups=False)


def layer_types(config: Model) -> tuple[str, ...]:
    """Returns each layer's "full_attention" or "sliding_attention"; by default every third is full."""
    return config.layer_types or tuple(
        "sliding_attention" if number % FULL_EVERY else "full_attention"
        for number in range(config.num_hidden_layers)
    )


def layer_parameters(config: Model) -> int:
    """Counts one layer after the first, which has no norm before its attention."""
    bias = bool(config.attention_bias)
    return (
        attention_parameters(config, bias, bias)
        + gated_mlp_parameters(config, bool(config.mlp_bias))
        + 2 * config.hidden_size
    )


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + config.hidden_size + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Counts the parameters that multiply a token: all but the embedding and its norm; the head counts."""
    hidden = config.hidden_size
    layers = config.num_hidden_layers * layer_parameters(config) - hidden
    transform = hidden**2 + hidden
    return layers + hidden + transform + embedding_parameters(config) + config.vocab_size


def flops_per_token(config: Model, sequence_length: int) -> int:
    """Computes the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that it is multiplied with; in attention 12 × width for each key that it sees: all s
    of a sequence, or on average those nearer than a window w, 2w - 1 - w(w - 1)/s.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 0
    for kind in layer_types(config):
        window = sequence_length
        if kind == "sliding_attention":
            window = min(config.sliding_window, sequence_length)
        pairs = sequence_length * (2 * window - 1) - window * (window - 1)
        attention += 12 * width * pairs // sequence_length
    return 6 * parameters_without_embedding(config) + attention

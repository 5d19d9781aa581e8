"""Parameters and FLOPs of an LTG-BERT, by arithmetic on its `[model]` section; torch-free."""

from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.recipe.sections import Model

# Parameters that each pipeline stage needs.
OF_ALL_STAGES = ("relative_table.weight", "relative_norm.weight", "relative_norm.bias")
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(
        mlp_matrices=3,
        norms=3,
        is_rotary=False,
        has_groups=False,
        has_mlp_norm=True,
        relative_rows=relative_rows(config),
    )


def relative_rows(config: Model) -> int:
    """Counts the rows of the table of relative positions."""
    return 2 * config.position_bucket_size - 1


def layer_parameters(config: Model) -> int:
    """Counts one layer: attention with biases, MLP without, and the one norm with weight and bias."""
    return (
        attention_parameters(config, True, True)
        + gated_mlp_parameters(config, False)
        + 2 * config.hidden_size
    )


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    positions = (relative_rows(config) + 2) * config.hidden_size
    return input_embedding + positions + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Counts the parameters that multiply a token: all but both tables; the head counts, tied or not."""
    transform = config.hidden_size**2 + config.hidden_size
    head = embedding_parameters(config) + config.vocab_size
    return config.num_hidden_layers * layer_parameters(config) + transform + head


def flops_per_token(config: Model, sequence_length: int) -> int:
    """Computes the model FLOPs of one trained token, forward and backward, without recomputation.

    6 for each parameter that it is multiplied with; in attention 12 × width for each key, of which it sees
    all, before and after it, and for each relative position, by which query and key are multiplied.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 12 * width * (sequence_length + relative_rows(config))
    return 6 * parameters_without_embedding(config) + config.num_hidden_layers * attention

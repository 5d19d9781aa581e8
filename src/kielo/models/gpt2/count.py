"""Parameters and FLOPs of a GPT-2, by arithmetic on its `[model]` section; torch-free."""

from kielo.models import decoder_count
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    plain_mlp_parameters,
)
from kielo.recipe.sections import Model


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False)


def layer_parameters(config: Model) -> int:
    """Counts one layer: attention, MLP, and two norms with weight and bias."""
    attention = attention_parameters(config, bool(config.attention_bias), bool(config.attention_bias))
    return attention + plain_mlp_parameters(config, bool(config.mlp_bias)) + 4 * config.hidden_size


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    positions = config.max_position_embeddings * config.hidden_size
    return input_embedding + positions + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Counts the parameters that multiply a token: all but both embeddings; the head counts, tied or not."""
    return (
        config.num_hidden_layers * layer_parameters(config)
        + 2 * config.hidden_size
        + embedding_parameters(config)
    )


def flops_per_token(config: Model, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)

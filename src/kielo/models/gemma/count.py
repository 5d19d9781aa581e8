"""Parameters and FLOPs of a Gemma 2 or 3, by arithmetic on its `[model]` section; torch-free."""

from kielo.models import decoder_count
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.recipe.sections import Model


def has_head_norms(config: Model) -> bool:
    """Returns True for a Gemma 3, which norms queries and keys of each head; Gemma 2 caps their scores."""
    return config.model_type == "gemma3_text"


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(mlp_matrices=3, norms=4, has_head_norms=has_head_norms(config))


def layer_parameters(config: Model) -> int:
    """Counts one layer: attention, MLP, and the norms before and after each."""
    norms = 4 * config.hidden_size + 2 * config.head_dim * has_head_norms(config)
    bias = bool(config.attention_bias)
    return attention_parameters(config, bias, bias) + gated_mlp_parameters(config, False) + norms


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Counts the parameters that multiply a token: all but the embedding; the head counts, tied or not."""
    return (
        config.num_hidden_layers * layer_parameters(config)
        + config.hidden_size
        + embedding_parameters(config)
    )


def flops_per_token(config: Model, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)

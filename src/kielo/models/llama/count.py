"""Parameters and FLOPs of a Llama, Mistral, Qwen2 or Qwen3, from its `[model]` section; torch-free.

The one source of the model FLOPs that the meter and the planner report.
"""

from kielo.models import decoder_count
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    gated_mlp_parameters,
)
from kielo.recipe.sections import Model


def has_head_norms(config: Model) -> bool:
    """Returns True for a Qwen3, which norms the queries and keys of each head."""
    return config.model_type == "qwen3"


def attention_biases(config: Model) -> tuple[bool, bool]:
    """Returns (bias of queries, keys and values?, of the output?): Qwen2 has the first without the second."""
    return bool(config.attention_bias), bool(config.attention_bias) and config.model_type != "qwen2"


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(mlp_matrices=3, has_head_norms=has_head_norms(config))


def layer_parameters(config: Model) -> int:
    """Counts one layer: attention, MLP, their biases where the config has them, and the norms."""
    norms = 2 * config.hidden_size + 2 * config.head_dim * has_head_norms(config)
    attention = attention_parameters(config, *attention_biases(config))
    return attention + gated_mlp_parameters(config, bool(config.mlp_bias)) + norms


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

"""Parameters and FLOPs of a GPT-NeoX (and Pythia), by arithmetic on its `[model]` section; torch-free."""

from kielo.models import decoder_count
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    plain_mlp_parameters,
)
from kielo.recipe.sections import Model


def rotary_size(config: Model) -> int:
    """Returns how many numbers of each head RoPE rotates: the first ones."""
    return int(config.head_dim * config.rotary_pct)


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(mlp_matrices=2, has_groups=False)


def layer_parameters(config: Model) -> int:
    """Counts one layer: attention, MLP, and the weights and biases of two norms."""
    bias = bool(config.attention_bias)
    return (
        attention_parameters(config, bias, bias) + plain_mlp_parameters(config, True) + 4 * config.hidden_size
    )


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Counts the parameters that multiply a token: all but the embedding; the head counts, tied or not."""
    layers = config.num_hidden_layers * layer_parameters(config)
    return layers + 2 * config.hidden_size + embedding_parameters(config)


def flops_per_token(config: Model, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)

"""Parameters and FLOPs of a BLOOM (also FinGPT and Poro-34B), from its `[model]` section; torch-free."""

from kielo.models import decoder_count
from kielo.models.decoder_count import (
    LayerParts,
    attention_parameters,
    embedding_parameters,
    plain_mlp_parameters,
)
from kielo.recipe.sections import Model

TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def layer_parts(config: Model) -> LayerParts:
    return LayerParts(mlp_matrices=2, is_rotary=False, has_groups=False, has_alibi=True, mlp_ratio=4)


def layer_parameters(config: Model) -> int:
    """Counts one layer: attention, MLP, and the weights and biases of two norms."""
    return (
        attention_parameters(config, True, True) + plain_mlp_parameters(config, True) + 4 * config.hidden_size
    )


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    input_embedding = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return input_embedding + parameters_without_embedding(config)


def parameters_without_embedding(config: Model) -> int:
    """Counts the parameters that multiply a token: all but the embedding; the head counts, tied or not."""
    layers = config.num_hidden_layers * layer_parameters(config)
    return layers + 4 * config.hidden_size + embedding_parameters(config)


def flops_per_token(config: Model, sequence_length: int) -> int:
    return decoder_count.flops_per_token(config, parameters_without_embedding(config), sequence_length)

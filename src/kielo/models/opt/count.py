"""Parameters and FLOPs of an OPT, by arithmetic on its `[model]` section; torch-free.

They are a GPT-2's, plus two rows of the position embedding that no token uses.
"""

from kielo.models import decoder_count
from kielo.models.decoder_count import only, only_all_heads
from kielo.models.gpt2 import count as gpt2
from kielo.models.gpt2.count import flops_per_token, layer_parts, parameters_without_embedding
from kielo.recipe.sections import Model

__all__ = [
    "FIRST_POSITION",
    "check",
    "flops_per_token",
    "layer_parts",
    "parameters",
    "parameters_without_embedding",
]

FIRST_POSITION = 2  # row of position 0 in the position embedding
EPSILON = 1e-5  # of every norm: transformers has no key for it


def check(config: Model) -> None:
    """Raises KieloError naming every key that is missing or does not fit the others."""
    fixed = only(config, layer_norm_epsilon=EPSILON, mlp_bias=config.attention_bias, rope_scaling=None)
    decoder_count.check(config, layer_parts(config), others=[*only_all_heads(config), *fixed])


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    return gpt2.parameters(config) + FIRST_POSITION * config.hidden_size

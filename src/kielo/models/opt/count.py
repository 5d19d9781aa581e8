"""Parameters and FLOPs of an OPT, by arithmetic on its `[model]` section; torch-free.

They are a GPT-2's, plus two rows of the position embedding that no token uses.
"""

from kielo.models.gpt2 import count as gpt2
from kielo.models.gpt2.count import flops_per_token, layer_parts, parameters_without_embedding
from kielo.recipe.sections import Model

__all__ = [
    "FIRST_POSITION",
    "flops_per_token",
    "layer_parts",
    "parameters",
    "parameters_without_embedding",
]

FIRST_POSITION = 2  # row of position 0 in the position embedding
EPSILON = 1e-5  # of every norm: transformers has no key for it


def parameters(config: Model) -> int:
    """Counts all parameters; a tied head counts once."""
    return gpt2.parameters(config) + FIRST_POSITION * config.hidden_size

"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656) and OLMo 3 (OLMo Team 2025, arXiv:2512.13961) on one device.

Outputs of attention and MLP are normed; queries, and keys, all heads together. OLMo 3 has windows.
"""

from functools import partial

from kielo.models.blocks.attention import Attention
from kielo.models.blocks.decoder import Decoder, DecoderLayer, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.recipe.sections import CompleteModel


class Layer(DecoderLayer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        make_norm = partial(RMSNorm, epsilon=config.rms_norm_eps)
        super().__init__(
            Attention(config, norms="width", make_norm=make_norm),
            GatedMLP(config.hidden_size, config.intermediate_size, bias=False),
            make_output_norm=partial(make_norm, config.hidden_size),
        )


class Olmo(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        rope, local_rope = (
            RotaryEmbedding(config.rope_theta, config.head_dim, scaling, config.max_position_embeddings)
            for scaling in (config.rope_scaling, None)
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, partial(Layer, config), norm, DecoderOptions(rope, local_rope))


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Draw within 3 deviations (OLMo 2's paper; `init_cutoff_factor` of github.com/allenai/OLMo)."""
    return Normal(config.initializer_range, cutoff=3.0)

"""Llama (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, arXiv:2407.21783) on one device.

Also Mistral (Jiang et al. 2023, arXiv:2310.06825) with a window, Qwen2 (Yang et al. 2024, arXiv:2407.10671)
with biases, and Qwen3 (Yang et al. 2025, arXiv:2505.09388) with norms of queries and keys.
"""

from functools import partial
from typing import Literal

from kielo.models.blocks.attention import Attention
from kielo.models.blocks.decoder import Decoder, DecoderLayer, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule, depth_scaled
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.llama.tables import has_head_norms, has_output_bias
from kielo.recipe.sections import CompleteModel


class Layer(DecoderLayer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        make_norm = partial(RMSNorm, epsilon=config.rms_norm_eps)
        norms: Literal["head"] | None = "head" if has_head_norms(config) else None
        super().__init__(
            Attention(config, None, norms, make_norm, has_output_bias(config)),
            GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias),
            partial(make_norm, config.hidden_size),
        )


class Llama(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        rope = RotaryEmbedding(
            config.rope_theta, config.head_dim, config.rope_scaling, config.max_position_embeddings
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, partial(Layer, config), norm, DecoderOptions(rope))


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Scale by depth (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.3)."""
    return Normal(depth_scaled(name, config))

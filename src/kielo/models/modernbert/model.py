"""ModernBERT (Warner et al. 2024, arXiv:2412.13663) on one device.

An encoder: every third layer attends to all of the text, the others to a window with a RoPE base of its own.
The first layer reads the normed embedding without another norm.
"""

from functools import partial

from torch import nn

from kielo.models.blocks.attention import Attention
from kielo.models.blocks.decoder import Decoder, DecoderLayer, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule, depth_scaled
from kielo.models.blocks.mlp import GatedMLP, Transform
from kielo.models.blocks.norm import LayerNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.recipe.sections import CompleteModel


class Layer(DecoderLayer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__(
            Attention(config),
            GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
            partial(make_norm, config),
        )
        if number == 0:
            self.attention_norm = nn.Identity()


class ModernBert(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        head_dim, positions = config.head_dim, config.max_position_embeddings
        super().__init__(
            config,
            partial(Layer, config),
            make_norm(config),
            DecoderOptions(
                rope=RotaryEmbedding(config.rope_theta, head_dim, None, positions),
                local_rope=RotaryEmbedding(config.rope_local_base_freq, head_dim, None, positions),
                embed_norm=make_norm(config),
                is_causal=False,
                transform=Transform(config.hidden_size, False, make_norm(config)),
                has_head_bias=True,
            ),
        )


def make_norm(config: CompleteModel) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_epsilon, has_bias=False)


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Follow Hugging Face's ModernBERT: scale by depth, the head's transform too, within two deviations."""
    return Normal(depth_scaled(name, config, "transform.dense.weight"), cutoff=2.0)

"""ModernBERT (Warner et al. 2024, arXiv:2412.13663) on one device.

An encoder: every third layer attends to all of the text, the others to a window with a RoPE base of its own.
The first layer reads the normed embedding without another norm.
"""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from kielo.models.blocks.attention import Attention
from kielo.models.blocks.decoder import Decoder, DecoderOptions, LayerKind, PreNormLayer
from kielo.models.blocks.init import Normal, by_rule, depth_scaled
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import LayerNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.family_tables import layer_types
from kielo.recipe.sections import CompleteModel


class Layer(PreNormLayer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__(
            partial(make_norm, config),
            Attention(config),
            GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act),
        )
        self.kind = layer_types(config)[number]
        if number == 0:
            self.attention_norm = nn.Identity()


class Transform(nn.Module):
    """The part of the head before its matrix: matrix, GELU, norm. Data in and out: [b, s, d]."""

    def __init__(self, config: CompleteModel) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = make_norm(config)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x_bsd)))


class ModernBert(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        head_dim, positions = config.head_dim, config.max_position_embeddings
        kinds = {
            "full_attention": LayerKind(),
            "sliding_attention": LayerKind(config.sliding_window, "local_rope"),
        }
        super().__init__(
            config,
            partial(Layer, config),
            make_norm(config),
            {kind: kinds[kind] for kind in layer_types(config)},
            DecoderOptions(
                rope=RotaryEmbedding(config.rope_theta, head_dim, None, positions),
                local_rope=RotaryEmbedding(config.rope_local_base_freq, head_dim, None, positions),
                embed_norm=make_norm(config),
                is_causal=False,
                transform=Transform(config),
                has_head_bias=True,
            ),
        )


def make_norm(config: CompleteModel) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_epsilon, has_bias=False)


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Follow Hugging Face's ModernBERT: scale by depth, the head's transform too, within two deviations."""
    return Normal(depth_scaled(name, config, "transform.dense.weight"), cutoff=2.0)

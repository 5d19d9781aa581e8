"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and Gemma 3 (Gemma Team 2025, arXiv:2503.19786) on one device.

Norms are before and after attention and MLP. Gemma 2 caps attention scores and logits. Gemma 3 norms the
queries and keys of each head, and its windowed layers have a RoPE base of their own.
"""

import math
from functools import partial
from typing import Literal

from torch import Tensor, nn

from kielo.models.blocks.attention import Attention, InnerAttention, Mask
from kielo.models.blocks.decoder import Decoder, DecoderOptions, LayerKind
from kielo.models.blocks.dropout import ATTENTION, MLP, Noise, drop
from kielo.models.blocks.init import Normal, by_rule
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.family_tables import layer_types
from kielo.models.gemma.tables import has_head_norms
from kielo.recipe.sections import CompleteModel


class Layer(nn.Module):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__()
        self.kind = layer_types(config)[number]
        make_norm = partial(RMSNorm, epsilon=config.rms_norm_eps, is_zero_centred=True)
        scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        norms: Literal["head"] | None = "head" if has_head_norms(config) else None
        self.attention_norm = make_norm(config.hidden_size)
        self.attention = Attention(
            config, InnerAttention(scale, config.attn_logit_softcapping), norms, make_norm
        )
        self.attention_post_norm = make_norm(config.hidden_size)
        self.mlp_norm = make_norm(config.hidden_size)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, bias=False, activation="gelu_pytorch_tanh"
        )
        self.mlp_post_norm = make_norm(config.hidden_size)

    def forward(
        self, x_bsd: Tensor, cos: Tensor, sin: Tensor, mask: Mask, noise: Noise | None = None
    ) -> Tensor:
        attended_bsd = self.attention(self.attention_norm(x_bsd), cos, sin, mask)
        x_bsd = x_bsd + drop(self.attention_post_norm(attended_bsd), noise, ATTENTION)
        return x_bsd + drop(self.mlp_post_norm(self.mlp(self.mlp_norm(x_bsd))), noise, MLP)


class Gemma(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        head_dim, positions = config.head_dim, config.max_position_embeddings
        rope = RotaryEmbedding(config.rope_theta, head_dim, config.rope_scaling, positions)
        local_rope = None
        windowed = LayerKind(config.sliding_window)
        if config.model_type == "gemma3_text":
            local_rope = RotaryEmbedding(config.rope_local_base_freq, head_dim, None, positions)
            windowed = LayerKind(config.sliding_window, "local_rope")
        super().__init__(
            config,
            partial(Layer, config),
            RMSNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True),
            {"full_attention": LayerKind(), "sliding_attention": windowed},
            DecoderOptions(rope, local_rope, embed_scale=math.sqrt(config.hidden_size)),
        )


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Follow Hugging Face's Gemma. A norm after each residual matrix makes a division by depth needless."""
    return Normal(config.initializer_range, norm=0.0)

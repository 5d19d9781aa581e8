"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and Gemma 3 (Gemma Team 2025, arXiv:2503.19786) on one device.

Norms are before and after attention and MLP. Gemma 2 caps attention scores and logits. Gemma 3 norms the
queries and keys of each head, and its windowed layers have a RoPE base of their own.
"""

import math
from functools import partial
from typing import Literal

from kielo.models.blocks.attention import Attention, InnerAttention
from kielo.models.blocks.decoder import Decoder, DecoderLayer, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.gemma.tables import has_head_norms
from kielo.recipe.sections import CompleteModel


class Layer(DecoderLayer):
    def __init__(self, config: CompleteModel, number: int) -> None:
        make_norm = partial(RMSNorm, epsilon=config.rms_norm_eps, is_zero_centred=True)
        scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        norms: Literal["head"] | None = "head" if has_head_norms(config) else None
        norm = partial(make_norm, config.hidden_size)
        super().__init__(
            Attention(config, InnerAttention(scale, config.attn_logit_softcapping), norms, make_norm),
            GatedMLP(config.hidden_size, config.intermediate_size, False, "gelu_pytorch_tanh"),
            norm,
            norm,
        )


class Gemma(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        head_dim, positions = config.head_dim, config.max_position_embeddings
        rope = RotaryEmbedding(config.rope_theta, head_dim, config.rope_scaling, positions)
        local_rope = None
        if config.model_type == "gemma3_text":
            local_rope = RotaryEmbedding(config.rope_local_base_freq, head_dim, None, positions)
        super().__init__(
            config,
            partial(Layer, config),
            RMSNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True),
            DecoderOptions(rope, local_rope, embed_scale=math.sqrt(config.hidden_size)),
        )


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Follow Hugging Face's Gemma. A norm after each residual matrix makes a division by depth needless."""
    return Normal(config.initializer_range, norm=0.0)

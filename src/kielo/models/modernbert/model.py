"""ModernBERT (Warner et al. 2024, arXiv:2412.13663) on one device.

An encoder: attention sees both sides, in every third layer all of the text and else a window, each with a
RoPE base of its own. The MLP is gated (GeGLU), norms have no biases, and the first layer reads the normed
embedding without another norm. The head has a transform before it and a bias. Data in and out: as of every
`blocks.decoder.Decoder`. Shape letters: b = batch, s = sequence, d = hidden size.
"""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from kielo.models.blocks.attention import Attention, AttentionOptions, Mask
from kielo.models.blocks.decoder import Decoder, DecoderOptions, LayerKind
from kielo.models.blocks.dropout import ATTENTION, MLP, Noise, drop
from kielo.models.blocks.init import constant, seeded_normal
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import LayerNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.modernbert.tables import layer_types
from kielo.models.piece import Box
from kielo.recipe.sections import CompleteModel

_CUTOFF = 2.0  # standard deviations of the first weights


class Layer(nn.Module):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__()
        self.kind = layer_types(config)[number]
        heads = config.num_attention_heads
        options = AttentionOptions(config.hidden_size, heads, heads, config.head_dim, config.attention_bias)
        self.attention_norm = make_norm(config) if number else nn.Identity()
        self.attention = Attention(options)
        self.mlp_norm = make_norm(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, config.hidden_act)

    def forward(
        self, x_bsd: Tensor, cos: Tensor, sin: Tensor, mask: Mask, noise: Noise | None = None
    ) -> Tensor:
        weights = None if noise is None else noise.weights
        attended_bsd = self.attention(self.attention_norm(x_bsd), cos, sin, mask, weights)
        x_bsd = x_bsd + drop(attended_bsd, noise, ATTENTION)
        return x_bsd + drop(self.mlp(self.mlp_norm(x_bsd)), noise, MLP)


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
    """Make a norm with a weight and no bias."""
    return LayerNorm(config.hidden_size, config.layer_norm_epsilon, has_bias=False)


def initial_value(
    name: str, shape: Sequence[int], config: CompleteModel, seed: int, box: Box | None = None
) -> Tensor:
    """Return the first values of a box of one parameter (None: all of it), fp32 on the CPU.

    They follow from seed, name, whole shape and config alone. As in Hugging Face's ModernBERT: norms are 1,
    biases 0, matrices normal with `initializer_range`, cut off at two deviations; the two matrices of each
    layer that write to the residual stream, and the head's transform, are divided by √(2 × layers). Rows that
    pad the vocabulary are 0.
    """
    if name.endswith(".bias"):
        return constant(0.0, shape, box)
    if name.endswith("norm.weight"):
        return constant(1.0, shape, box)
    deviation = config.initializer_range
    if name.endswith((".attention.o.weight", ".mlp.down.weight", "transform.dense.weight")):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    rows = config.vocab_size if name in ("embed.weight", "head.weight") else None
    return seeded_normal(name, shape, deviation, seed, rows, cutoff=_CUTOFF, box=box)

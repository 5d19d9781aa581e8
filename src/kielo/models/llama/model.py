"""Llama (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, arXiv:2407.21783) on one device.

Also models that differ from it by a switch: Mistral (Jiang et al. 2023, arXiv:2310.06825) by its window,
Qwen2 (Yang et al. 2024, arXiv:2407.10671) by biases of queries, keys and values, Qwen3 (Yang et al. 2025,
arXiv:2505.09388) by norms of queries and keys.

Data in and out: as of every `blocks.decoder.Decoder`. Shape letters: b = batch, s = sequence, d = hidden
size.
"""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from kielo.models.blocks.attention import Attention, AttentionOptions, Mask
from kielo.models.blocks.decoder import Decoder, DecoderOptions, LayerKind
from kielo.models.blocks.dropout import ATTENTION, MLP, Noise, drop
from kielo.models.blocks.init import constant, seeded_normal
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.rope import RotaryEmbedding
from kielo.models.decoder_count import layer_types
from kielo.models.llama.tables import attention_biases, has_head_norms
from kielo.models.piece import Box
from kielo.recipe.sections import CompleteModel


class Layer(nn.Module):
    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__()
        self.kind = layer_types(config)[number]
        make_norm = partial(RMSNorm, epsilon=config.rms_norm_eps)
        bias, output_bias = attention_biases(config)
        options = AttentionOptions(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias,
            output_bias,
            norms="head" if has_head_norms(config) else None,
        )
        self.attention_norm = make_norm(config.hidden_size)
        self.attention = Attention(options, make_norm=make_norm)
        self.mlp_norm = make_norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, x_bsd: Tensor, cos: Tensor, sin: Tensor, mask: Mask, noise: Noise | None = None
    ) -> Tensor:
        attended_bsd = self.attention(self.attention_norm(x_bsd), cos, sin, mask)
        x_bsd = x_bsd + drop(attended_bsd, noise, ATTENTION)
        return x_bsd + drop(self.mlp(self.mlp_norm(x_bsd)), noise, MLP)


class Llama(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        rope = RotaryEmbedding(
            config.rope_theta, config.head_dim, config.rope_scaling, config.max_position_embeddings
        )
        kinds = {"full_attention": LayerKind(), "sliding_attention": LayerKind(config.sliding_window)}
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, partial(Layer, config), norm, kinds, DecoderOptions(rope))


def initial_value(
    name: str, shape: Sequence[int], config: CompleteModel, seed: int, box: Box | None = None
) -> Tensor:
    """Return the first values of a box of one parameter (None: all of it), fp32 on the CPU.

    They follow from seed, name, whole shape and config alone. Norms are 1, biases 0, matrices normal with
    `initializer_range`; the two matrices of each layer that write to the residual stream are divided by √(2 ×
    layers), so that its variance does not grow with depth (Radford et al. 2019, "Language Models are
    Unsupervised Multitask Learners", section 2.3). Rows that pad the vocabulary are 0.
    """
    if name.endswith(".bias"):
        return constant(0.0, shape, box)
    if name.endswith("norm.weight"):
        return constant(1.0, shape, box)
    standard_deviation = config.initializer_range
    if name.endswith((".attention.o.weight", ".mlp.down.weight")):
        standard_deviation /= math.sqrt(2 * config.num_hidden_layers)
    rows = config.vocab_size if name in ("embed.weight", "head.weight") else None
    return seeded_normal(name, shape, standard_deviation, seed, rows, box=box)

"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") on one device.

Also the GPT of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), whose head may be a matrix of its own.
Positions begin at 0 in each document where attention stays inside documents, else they continue through a
packed sequence.

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
from kielo.models.blocks.mlp import PlainMLP
from kielo.models.blocks.norm import LayerNorm
from kielo.models.piece import Box
from kielo.recipe.sections import CompleteModel


class Layer(nn.Module):
    kind = "full_attention"

    def __init__(self, config: CompleteModel, number: int) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        options = AttentionOptions(hidden, heads, heads, config.head_dim, config.attention_bias)
        self.attention_norm = LayerNorm(hidden, config.layer_norm_epsilon)
        self.attention = Attention(options)
        self.mlp_norm = LayerNorm(hidden, config.layer_norm_epsilon)
        self.mlp = PlainMLP(hidden, config.intermediate_size, config.mlp_bias, config.hidden_act)

    def forward(self, x_bsd: Tensor, cos: None, sin: None, mask: Mask, noise: Noise | None = None) -> Tensor:
        attended_bsd = self.attention(self.attention_norm(x_bsd), cos, sin, mask)
        x_bsd = x_bsd + drop(attended_bsd, noise, ATTENTION)
        return x_bsd + drop(self.mlp(self.mlp_norm(x_bsd)), noise, MLP)


class GPT2(Decoder):
    def __init__(self, config: CompleteModel) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        options = DecoderOptions(learned_positions=config.max_position_embeddings)
        super().__init__(config, partial(Layer, config), norm, {Layer.kind: LayerKind()}, options)


def initial_value(
    name: str, shape: Sequence[int], config: CompleteModel, seed: int, box: Box | None = None
) -> Tensor:
    """Return the first values of a box of one parameter (None: all of it), fp32 on the CPU.

    They follow from seed, name, whole shape and config alone. Norms are 1, biases 0, matrices and both
    embeddings normal with `initializer_range`; the two matrices of each layer that write to the residual
    stream are divided by √(2 × layers) (the paper's section 2.3; Megatron-LM's and Hugging Face's code, which
    agree; OpenAI's own code has half the deviation for positions). Rows that pad the vocabulary are 0.
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

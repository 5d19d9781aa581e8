"""LTG-BERT (Samuel et al. 2023, arXiv:2303.09859) on one device: NorBERT 3 and HPLT's encoders.

Attention has relative positions, whose table has no dropout, and norms before and after. Shape letters: b =
batch, s = sequence, d = hidden size, r = rows of relative positions.
"""

import math
from functools import partial

from torch import Tensor, nn

from kielo.models.blocks.decoder import Decoder, DecoderLayer, DecoderOptions
from kielo.models.blocks.init import Normal, by_rule
from kielo.models.blocks.mlp import GatedMLP, Transform
from kielo.models.blocks.norm import LayerNorm
from kielo.models.blocks.relative_attention import RelativeAttention, RelativeMaskMaker
from kielo.models.ltg_bert.tables import OF_ALL_STAGES, relative_rows
from kielo.recipe.sections import CompleteModel


class Layer(DecoderLayer):
    """A layer whose attention takes the relative positions [r, d] and their mask."""

    def __init__(self, config: CompleteModel, number: int) -> None:
        hidden, inside = config.hidden_size, config.intermediate_size
        super().__init__(
            RelativeAttention(hidden, config.head_dim, config.position_heads),
            GatedMLP(hidden, inside, False, config.hidden_act, plain_norm(config, inside)),
            partial(plain_norm, config, hidden),
        )
        self.attention_post_norm = LayerNorm(hidden, config.layer_norm_epsilon)


class LtgBert(Decoder):
    """A decoder's frame for layers that share the table of relative positions."""

    of_all_stages = OF_ALL_STAGES

    def __init__(self, config: CompleteModel) -> None:
        embed_norm, before, after = (plain_norm(config, config.hidden_size) for _ in range(3))
        options = DecoderOptions(
            embed_norm=embed_norm,
            is_causal=False,
            transform=Transform(config.hidden_size, True, after, before),
            has_head_bias=True,
        )
        super().__init__(config, partial(Layer, config), None, options)
        self.relative_table = nn.Embedding(relative_rows(config), config.hidden_size)
        self.relative_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.make_relative_mask = RelativeMaskMaker(
            config.position_bucket_size, config.max_position_embeddings
        )

    def forward(
        self,
        tokens_bs: Tensor,
        documents_bs: Tensor | None = None,
        positions_s: Tensor | None = None,
        dropout_keys_b2: Tensor | None = None,
    ) -> Tensor:
        """Return the states [b, s, d] that the head's matrix multiplies, as `Decoder.forward` does.

        In documents with negative numbers each token sees only itself and the tokens before it (GPT-BERT,
        Charpentier and Samuel 2024, arXiv:2410.24159). Sequences are whole (`resolve/rules.py`).
        """
        length = tokens_bs.shape[1] if positions_s is None else positions_s.numel()
        mask = self.make_relative_mask(documents_bs, length, tokens_bs.device)
        noise = self.make_noise(dropout_keys_b2, positions_s, length)
        relative_rd = self.relative_norm(self.relative_table.weight)
        x_bsd = self.embedded(tokens_bs, None, None, noise)
        for number, layer in self.layers.items():
            of_layer = None if noise is None else noise.of_layer(int(number))
            x_bsd = layer(x_bsd, relative_rd, mask, of_layer)
        return self.ended(x_bsd, noise)


def plain_norm(config: CompleteModel, size: int) -> LayerNorm:
    """Make a norm without weight and bias."""
    return LayerNorm(size, config.layer_norm_epsilon, has_weights=False)


@by_rule
def initial_value(name: str, config: CompleteModel) -> Normal:
    """Follow the authors. The MLP's matrices of layer i, from 0, are divided by √(2 + 2i)."""
    deviation = math.sqrt(2 / (5 * config.hidden_size))
    if ".mlp." in name:
        deviation /= math.sqrt(2 + 2 * int(name.split(".")[1]))
    return Normal(deviation, cutoff=2.0)

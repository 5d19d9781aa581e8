"""Llama (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, arXiv:2407.21783) on one device.

Data in: token ids [b, s]; data out: hidden states [b, s, d] after the last norm. The head is applied by whoever
needs logits, so that a loss can do it in chunks. Shape letters: b = batch, s = sequence, d = hidden size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kielo.models.blocks.attention import Attention, AttentionMask
from kielo.models.blocks.init import seeded_normal
from kielo.models.blocks.mlp import GatedMLP
from kielo.models.blocks.norm import RMSNorm
from kielo.models.blocks.position import RotaryPositions
from kielo.models.llama.count import check
from kielo.recipe.sections import Model


class Layer(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.attention_bias,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x_bsd: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x_bsd = x_bsd + self.attention(self.attention_norm(x_bsd), cos, sin, mask)
        return x_bsd + self.mlp(self.mlp_norm(x_bsd))


class Llama(nn.Module):
    """`config` must be complete (vocab_size, num_key_value_heads, head_dim, max_position_embeddings set).

    `embed`, `norm` and `head` may be set to None and entries of `layers` deleted: a pipeline stage keeps only
    what it runs, and layer 1 stays "1" when layer 0 is gone.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        check(config)
        self.config = config
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(number): Layer(config) for number in range(config.num_hidden_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head: nn.Linear | None = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.positions = RotaryPositions(
            config.rope_theta, config.head_dim, config.rope_scaling, config.max_position_embeddings
        )
        self.mask = AttentionMask()
        self.tie()

    def tie(self) -> None:
        """Makes head and look-up table one tensor where the config says so; again after `to_empty` parts them."""
        if self.config.tie_word_embeddings and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def reset_buffers(self, device: torch.device | str) -> None:
        """Refills what is computed and never saved (the RoPE tables), once the model has left the meta device."""
        self.positions.reset_buffers(device)

    def forward(
        self, tokens_bs: Tensor, documents_bs: Tensor | None = None, positions_s: Tensor | None = None
    ) -> Tensor:
        """Hidden states [b, s, d] after the last norm: `self.head` makes logits of them.

        `documents_bs` numbers the document of each token; attention then stays inside documents. `positions_s` is
        the place of each column in its sequence, for ranks that hold a part of it; None: 0 … s - 1. A stage
        without `embed` takes hidden states [b, s, d] in place of tokens.
        """
        # The length is the tokens': the hidden states of a tensor rank are shorter.
        cos, sin = self.positions(tokens_bs.shape[1] if positions_s is None else positions_s)
        mask = self.mask(documents_bs, positions_s)
        x_bsd = tokens_bs if self.embed is None else self.embed(tokens_bs)
        for layer in self.layers.values():
            x_bsd = layer(x_bsd, cos, sin, mask)
        return x_bsd if self.norm is None else self.norm(x_bsd)


def initial_value(name: str, shape: Sequence[int], config: Model, seed: int) -> Tensor:
    """First value of one parameter, fp32 on the CPU, from nothing but seed, name, whole shape and config.

    Norms are 1, biases 0, matrices normal with `initializer_range`; the two matrices of each layer that write to
    the residual stream are divided by √(2 × layers), so that its variance does not grow with depth (Radford et
    al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3).
    """
    if name.endswith(".bias"):
        return torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    if name.endswith("norm.weight"):
        return torch.ones(tuple(shape), dtype=torch.float32, device="cpu")
    standard_deviation = config.initializer_range
    if name.endswith((".attention.o.weight", ".mlp.down.weight")):
        standard_deviation /= math.sqrt(2 * config.num_hidden_layers)
    return seeded_normal(name, shape, standard_deviation, seed)


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fills a model that is whole on one device; a sharded one is filled by `parallel`, with the same values."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, model.config, seed))

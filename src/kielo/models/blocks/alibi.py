"""Attention with linear biases (ALiBi): scores fall with distance, with a slope of its own for each head.

Press et al. 2021, arXiv:2108.12409. Data in: distances [q, n] of keys before their queries; data out: biases
[h, q, n] to add to scores. Shape letters: h = heads, q = queries, n = keys.
"""

import math

import torch
from torch import Tensor, nn


class Alibi(nn.Module):
    """ALiBi biases of `num_heads` heads from `first_head` on, of `total_heads`: those of one tensor rank.

    The slopes are not saved; `reset_buffers` fills them after a model leaves the meta device.
    """

    slopes: Tensor

    def __init__(self, total_heads: int) -> None:
        super().__init__()
        self.total_heads, self.first_head, self.num_heads = total_heads, 0, total_heads
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device | str) -> None:
        all_slopes = torch.tensor(slopes(self.total_heads), dtype=torch.float32, device="cpu")
        own = all_slopes[self.first_head : self.first_head + self.num_heads]
        self.register_buffer("slopes", own.to(device), persistent=False)

    def of(self, heads: slice | None) -> Tensor:
        """Returns the slopes [h] in fp32 of some of this rank's heads, None for all."""
        return self.slopes if heads is None else self.slopes[heads]


def biases(slopes_h: Tensor, distance_qn: Tensor) -> Tensor:
    """Returns biases [h, q, n] in fp32, 0 on the diagonal."""
    return -slopes_h[:, None, None] * distance_qn


def slopes(num_heads: int) -> list[float]:
    """Computes a slope for each head: 2^(-8 i / h) for powers of two.

    For other numbers every second slope of the next power of two fills up (the authors' code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return first + between

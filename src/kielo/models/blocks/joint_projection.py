"""Linears that share their input: queries, keys and values, or an MLP's gate and up. Data in: [b, s, d]."""

from collections.abc import Sequence

from torch import Tensor, nn


class JointProjection(nn.Module):
    """Several linears of one input, which stay modules of the block. `parallel` replaces this module."""

    def forward(self, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        return tuple(linear(x_bsd) for linear in linears)

"""Linears that share their input: queries, keys and values, or an MLP's gate and up. Data in: [b, s, d]."""

from collections.abc import Sequence

from torch import Tensor, nn


class JointProjection(nn.Module):
    """Several linears of one input. `parallel` replaces this module, which has no parameters.

    The linears stay modules of the block, so names of parameters do not depend on it.
    """

    def forward(self, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        return tuple(linear(x_bsd) for linear in linears)

"""The gated feed-forward part, SwiGLU (Shazeer 2020, arXiv:2002.05202). Data in and out: [b, s, d]."""

from torch import Tensor, nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_bsd)) * self.up(x_bsd))

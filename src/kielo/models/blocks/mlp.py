"""The feed-forward part of a layer. Data in and out: [b, s, d]."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from kielo.models.blocks.joint_projection import JointProjection

# Activations by Hugging Face's names (`hidden_act`). "new", "fast" and "tanh" are one formula there too.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """SwiGLU and similar gated MLPs (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.project = JointProjection()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_bsd: Tensor) -> Tensor:
        gate, up = self.project(x_bsd, (self.gate, self.up))
        return self.down(self.activation(gate) * up)


class PlainMLP(nn.Module):
    """An MLP of two matrices and an activation (Vaswani et al. 2017, arXiv:1706.03762, section 3.3)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.project = JointProjection()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_bsd: Tensor) -> Tensor:
        (up,) = self.project(x_bsd, (self.up,))
        return self.down(self.activation(up))

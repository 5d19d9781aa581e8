"""The feed-forward part of a layer, and linears that share their input. Data in and out: [b, s, d]."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kielo.models.family_tables import TANH_GELUS

# Activations by Hugging Face's names (`hidden_act`), where "new", "fast" and "tanh" are one formula too.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    **dict.fromkeys(TANH_GELUS, partial(F.gelu, approximate="tanh")),
}


class JointProjection(nn.Module):
    """Several linears of one input, which stay modules of the block. `kielo.parallel` replaces the module."""

    def forward(self, x_bsd: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        return tuple(linear(x_bsd) for linear in linears)


class NamedActivation(nn.Module):
    """An activation function by its name. keeps_result: autograd keeps its result in place of its input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]
        self.keeps_result = name == "relu"


class Activation(NamedActivation):
    def forward(self, up: Tensor) -> Tensor:
        return self.function(up)


class GatedActivation(NamedActivation):
    """activation(gate) × up. Keeps gate and up for the backward, which computes activation(gate) again."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        # A compiler decides itself which tensors to keep.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.function(gate) * up
        return _Gated.apply(gate, up, self.function)


class _Gated(torch.autograd.Function):
    """`apply(gate, up, function)`. Autograd alone would keep function(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.function = function
        return function(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.function(gate)
        (gradient_gate,) = torch.autograd.grad(activated, gate, gradient * up)
        return gradient_gate, gradient * activated.detach(), None


class GatedMLP(nn.Module):
    """SwiGLU and the like (Shazeer 2020, arXiv:2002.05202); norm: inside (NormFormer, arXiv:2110.09456)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: str = "silu",
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.project = JointProjection()
        self.activation = GatedActivation(activation)
        self.norm = norm

    def forward(self, x_bsd: Tensor) -> Tensor:
        gate, up = self.project(x_bsd, (self.gate, self.up))
        inside = self.activation(gate, up)
        return self.down(inside if self.norm is None else self.norm(inside))


class PlainMLP(nn.Module):
    """An MLP of two matrices and an activation (Vaswani et al. 2017, arXiv:1706.03762, section 3.3)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.project = JointProjection()
        self.activation = Activation(activation)

    def forward(self, x_bsd: Tensor) -> Tensor:
        (up,) = self.project(x_bsd, (self.up,))
        return self.down(self.activation(up))


class Transform(nn.Module):
    """The part of an encoder's head before its matrix: a norm `before`, matrix, GELU, norm."""

    def __init__(self, size: int, bias: bool, norm: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = nn.Identity() if before is None else before
        self.dense, self.norm = nn.Linear(size, size, bias=bias), norm

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(self.before(x_bsd))))

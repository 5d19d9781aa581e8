"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): activations divided by their root mean square.

Data in: [..., d] in any precision; data out: the same shape and precision, computed in fp32 inside.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The cast back comes before the weight, as in Hugging Face's Llama: in bf16 the order is visible."""
        wide = x.float()
        inverse_root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * inverse_root).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"

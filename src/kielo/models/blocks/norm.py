"""Norms of activations. Data in: [..., d] in any precision; data out: the same shape and precision.

RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) divides by the root mean square, LayerNorm (Ba et al.
2016, arXiv:1607.06450) subtracts the mean first.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm, computed in fp32 inside.

    is_zero_centred: the factor is 1 + weight, applied before the cast back (Gemma).
    """

    def __init__(self, size: int, epsilon: float, is_zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if is_zero_centred else torch.ones(size))
        self.epsilon = epsilon
        self.is_zero_centred = is_zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """Norms x. The cast back precedes the weight, as in Hugging Face's Llama: bf16 shows the order."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        if self.is_zero_centred:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, with weight and bias."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__(size, eps=epsilon)

    @property
    def epsilon(self) -> float:
        return self.eps

"""Rotary position embedding (RoPE): positions turn each pair of query and key numbers by an angle.

Su et al. 2021, arXiv:2104.09864, with the halves of a head as the pairs (as in Hugging Face's Llama weights), and
its stretched forms "linear" (Chen et al. 2023, arXiv:2306.15595) and "llama3" (Dubey et al. 2024, arXiv:2407.21783).
Data in: query or key [b, h, s, k]; data out: the same shape, turned.
Shape letters: b = batch, h = heads, s = sequence, k = head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kielo.models.families import normalise_rope
from kielo.recipe.errors import KieloError


def inverse_frequencies(
    rope_theta: float, head_dim: int, rope_scaling: dict[str, Any] | None, max_position_embeddings: int
) -> Tensor:
    """Radians per position of each pair, [head_dim / 2], fp32 on the CPU."""
    base, scaling = normalise_rope(rope_theta, rope_scaling, max_position_embeddings)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended by their wavelength."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original_length = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept_share = (original_length / wavelengths - low) / (high - low)
    blended = (1 - kept_share) * frequencies / factor + kept_share * frequencies
    stretched = torch.where(wavelengths > original_length / low, frequencies / factor, blended)
    return torch.where(wavelengths < original_length / high, frequencies, stretched)


class RotaryPositions(nn.Module):
    """Tables of cosines and sines for every position up to `max_position_embeddings`.

    The length comes from the configuration, never from an input: a pipeline or context rank sees only a part of
    the sequence. The tables are not saved; `reset_buffers` fills them after a model leaves the meta device.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, rope_theta: float, head_dim: int, rope_scaling: dict[str, Any] | None, max_position_embeddings: int
    ) -> None:
        super().__init__()
        self.rope_theta = rope_theta
        self.head_dim = head_dim
        self.rope_scaling = rope_scaling
        self.max_position_embeddings = max_position_embeddings
        self.reset_buffers(torch.get_default_device())

    @property
    def inverse_frequencies(self) -> Tensor:
        """What the tables are made of, [head_dim / 2], fp32 on the CPU."""
        return inverse_frequencies(
            self.rope_theta, self.head_dim, self.rope_scaling, self.max_position_embeddings
        )

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes the tables on the CPU in fp32 (so that every kind of device gets the same) and moves them."""
        positions = torch.arange(self.max_position_embeddings, dtype=torch.float32, device="cpu")
        if torch.device(device).type == "meta":
            cos = sin = torch.empty(self.max_position_embeddings, self.head_dim // 2, device="meta")
        else:
            angles = torch.outer(positions, self.inverse_frequencies)
            cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def forward(self, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines), each [s, head_dim / 2], of the positions 0 … s - 1 for a length s, or of those in int64 [s].

        Positions in a tensor are not looked at: on a GPU that would wait for it.
        """
        if isinstance(positions, Tensor):
            return self.cos[positions], self.sin[positions]
        sequence_length = positions
        if sequence_length > self.max_position_embeddings:
            raise KieloError(
                f"a sequence of {sequence_length} tokens is longer than model.max_position_embeddings = "
                f"{self.max_position_embeddings}: shorten it or raise that key"
            )
        return self.cos[:sequence_length], self.sin[:sequence_length]


def rotate(x_bhsk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (i, i + k/2) of each head by its position's angle. cos, sin: [s, k/2]."""
    first, second = x_bhsk.chunk(2, dim=-1)
    cos, sin = cos.to(x_bhsk.dtype), sin.to(x_bhsk.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

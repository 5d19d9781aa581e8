"""Rotary position embedding (RoPE): pairs of query and key numbers are rotated by their position's angle.

Su et al. 2021, arXiv:2104.09864, with the halves of a head as the pairs (as in Hugging Face's Llama weights),
and its scaled forms "linear" (Chen et al. 2023, arXiv:2306.15595), "llama3" (Dubey et al. 2024,
arXiv:2407.21783) and "yarn" (Peng et al. 2023, arXiv:2309.00071). Data in: query or key [b, s, h, k]; data
out: the same shape, rotated. Shape letters: b = batch, h = heads, s = sequence, k = head_dim.
"""

import math

import torch
from torch import Tensor, nn

from kielo.models.rope_scaling import Scaling, normalise_rope
from kielo.recipe.errors import KieloError


def inverse_frequencies(
    rope_theta: float, head_dim: int, rope_scaling: Scaling | None, max_position_embeddings: int
) -> Tensor:
    """Compute the radians per position of each pair, [head_dim / 2], fp32 on the CPU."""
    base, scaling = normalise_rope(rope_theta, rope_scaling, max_position_embeddings)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return _yarn_frequencies(base, exponents, scaling)
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: Scaling) -> Tensor:
    """Scale long wavelengths by `factor`, keep short wavelengths, and blend the wavelengths between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original_length = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept_share = (original_length / wavelengths - low) / (high - low)
    blended = (1 - kept_share) * frequencies / factor + kept_share * frequencies
    scaled = torch.where(wavelengths > original_length / low, frequencies / factor, blended)
    return torch.where(wavelengths < original_length / high, frequencies, scaled)


def _yarn_frequencies(base: float, exponents: Tensor, scaling: Scaling) -> Tensor:
    """Keep pairs that rotate often, scale the slowest, with a ramp between (the paper's section 3.2)."""
    size, original_length = 2 * len(exponents), scaling["original_max_position_embeddings"]

    def pair_that_rotates(times: float) -> float:
        return size * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_that_rotates(scaling["beta_fast"])), 0)
    last = min(math.ceil(pair_that_rotates(scaling["beta_slow"])), size - 1)
    pairs = torch.arange(len(exponents), dtype=torch.float32, device="cpu")
    kept_share = 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    periods = base**exponents
    return 1.0 / (scaling["factor"] * periods) * (1 - kept_share) + 1.0 / periods * kept_share


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines of all the config's positions, as a rank's input is only a part of them."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, rope_theta: float, head_dim: int, rope_scaling: Scaling | None, max_position_embeddings: int
    ) -> None:
        super().__init__()
        self.rope_theta, self.rope_scaling = normalise_rope(rope_theta, rope_scaling, max_position_embeddings)
        self.head_dim, self.max_position_embeddings = head_dim, max_position_embeddings
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device | str) -> None:
        """Compute the tables in fp32 on the CPU, so that they are the same on all kinds of device."""
        positions = torch.arange(self.max_position_embeddings, dtype=torch.float32, device="cpu")
        if torch.device(device).type == "meta":
            cos = sin = torch.empty(self.max_position_embeddings, self.head_dim // 2, device="meta")
        else:
            rope = self.rope_theta, self.head_dim, self.rope_scaling, self.max_position_embeddings
            angles = torch.outer(positions, inverse_frequencies(*rope))
            # Yarn lengthens queries and keys by a factor each, which sharpens attention.
            factor = (self.rope_scaling or {}).get("attention_factor", 1.0)
            cos, sin = angles.cos() * factor, angles.sin() * factor
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def forward(self, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [s, head_dim / 2] each, of 0 … s - 1 or of int64 [s], unchecked."""
        if isinstance(positions, Tensor):
            return self.cos[positions], self.sin[positions]
        refuse_longer(positions, self.max_position_embeddings)
        return self.cos[:positions], self.sin[:positions]

    def widened(self, positions: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the tables that `rotate` takes, [s, r] in `dtype`; once a forward, not once a layer."""
        cos, sin = self(positions)
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def refuse_longer(length: int, max_positions: int) -> None:
    if length > max_positions:
        raise KieloError(
            f"a sequence of {length} tokens is longer than model.max_position_embeddings = {max_positions}. "
            "Fix: a shorter sequence, or a larger model.max_position_embeddings"
        )


def rotate(x_bshk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (i, i + r/2) of each head by its position's angle. cos, sin: [s, r], with r <= k."""
    size = cos.shape[-1]
    if size < x_bshk.shape[-1]:
        return torch.cat((rotate(x_bshk[..., :size], cos, sin), x_bshk[..., size:]), dim=-1)
    # One roll gives the other half of each pair, without a concatenation: three passes over memory.
    return x_bshk * cos[:, None] + x_bshk.roll(size // 2, dims=-1) * sin[:, None]

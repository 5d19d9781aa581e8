"""Dropout (Srivastava et al. 2014) whose masks follow from keys and positions, and from no generator's state.

Each element of hidden states has 32 bits of its own: a hash of its sequence's key, the place in the model,
its position in the whole sequence and its column. Where they are below the rate the element becomes 0; the
others are divided by the share that stays. So a rank makes the bits of what it holds, a layer that the
backward computes again has the same ones, and every layout, micro-batch and resumed run drops the same
elements, on processors as on GPUs.

Shape letters: b = batch, p = places of dropout in the model, s = sequence, d = hidden size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

# MurmurHash3's finaliser of 32 bits (Appleby 2011), and 2^32 / golden ratio, as signed numbers.
_MULTIPLIERS = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
# Places of a layer, after those of the layers before it and of the embedding.
ATTENTION, MLP = range(2)
_PLACES_OF_LAYER = 2


@dataclass(frozen=True)
class Noise:
    """The keys and positions that dropout follows from, in a forward or in one layer of it.

    rate: share of elements that are dropped. keys_bp2: two keys for each sequence and place, int32.
    positions_s: the position in its sequence of each column that this rank holds, int32.
    """

    rate: float
    keys_bp2: Tensor
    positions_s: Tensor

    def of_layer(self, number: int) -> "Noise":
        """Returns the noise of a layer, whose places are `ATTENTION` and `MLP`."""
        first = 1 + _PLACES_OF_LAYER * number
        return replace(self, keys_bp2=self.keys_bp2[:, first : first + _PLACES_OF_LAYER])

    def of_embedding(self, x_bsd: Tensor) -> Tensor:
        """Drops elements of what the first layer takes."""
        return drop(x_bsd, self, 0)

    def of_head(self, x_bsd: Tensor) -> Tensor:
        """Drops elements of what an encoder's head takes."""
        return drop(x_bsd, self, self.keys_bp2.shape[1] - 1)


class NoiseMaker(nn.Module):
    """Makes the noise of a forward; a module, so that tensor parallelism can say which columns a rank holds.

    rate: share of elements that are dropped; no noise is made where it is 0. part, parts: hidden states are
    part `part` of `parts` along the sequence.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_places = 2 + _PLACES_OF_LAYER * num_layers
        self.rate, self.part, self.parts = 0.0, 0, 1

    def forward(self, keys_b2: Tensor | None, positions_s: Tensor | None, length: int) -> Noise | None:
        """Returns None without keys, as in evaluation. keys_b2: of each sequence, int32.

        positions_s: of the sequence's columns, before hidden states are split; None for 0 … length - 1.
        """
        if keys_b2 is None or not self.rate:
            return None
        device = keys_b2.device
        if positions_s is None:
            positions_s = torch.arange(length, device=device)
        places_p1 = torch.arange(1, self.num_places + 1, dtype=torch.int32, device=device)[:, None]
        both_bp2 = keys_b2[:, None] + places_p1 * _GOLDEN
        positions_s = positions_s.to(torch.int32).chunk(self.parts)[self.part]
        return Noise(self.rate, _scrambled(both_bp2, both_bp2.flip(-1)), positions_s)


def drop(x_bsd: Tensor, noise: Noise | None, place: int) -> Tensor:
    """Returns hidden states with elements dropped, if there is noise. place: which of its keys."""
    if noise is None:
        return x_bsd
    size = x_bsd.shape[-1]
    columns_d = torch.arange(size, dtype=torch.int32, device=x_bsd.device)
    elements_sd = noise.positions_s[:, None] * size + columns_d
    one_b11, other_b11 = noise.keys_bp2[:, place, :, None, None].unbind(1)
    bits_bsd = _scrambled(elements_sd ^ one_b11, other_b11)
    is_kept = bits_bsd >= round(noise.rate * 2**32) - 2**31
    return torch.where(is_kept, x_bsd * (1 / (1 - noise.rate)), 0.0)


def _scrambled(bits: Tensor, key: Tensor) -> Tensor:
    """Returns int32 whose every bit depends on all of `bits` and `key`: products of int32 wrap around."""
    bits = (bits ^ _shifted(bits, 16)) * _MULTIPLIERS[0] ^ key
    bits = (bits ^ _shifted(bits, 13)) * _MULTIPLIERS[1]
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shifts int32 to the right, with zeros from the left."""
    return (bits >> by) & (2 ** (32 - by) - 1)

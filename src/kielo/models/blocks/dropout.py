"""Dropout (Srivastava et al. 2014) whose masks follow from keys and positions, without a generator's state.

Each element of hidden states has 32 bits: a hash of its sequence's key, the place in the model, its position
in the whole sequence and its column. A weight of attention has such bits by layer, head, query and key. So
every layout, micro-batch, recomputed layer and resumed run drops the same elements, on CPUs as on GPUs.

Shape letters: b = batch, p = places of dropout in the model, l = layers, h = heads, s = sequence, q =
queries, n = keys of attention, d = hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

# MurmurHash3's finaliser of 32 bits (Appleby 2011), and 2^32 / golden ratio, as signed numbers.
_MULTIPLIERS = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
# Places of a layer, after the places of the embedding and of the layers before.
ATTENTION, MLP = range(2)
_PLACES_OF_LAYER = 2


class WeightNoise(NamedTuple):
    """Keys and positions that dropout of attention's weights follows from, in all layers or in one.

    rate: share of weights that are dropped. keys_blh2: two keys for each sequence, layer and head, int32.
    positions_q: the position in its sequence of each query, int32; keys of attention have 0, 1, ….
    """

    rate: float
    keys_blh2: Tensor
    positions_q: Tensor

    def of_layer(self, number: int) -> "WeightNoise":
        return WeightNoise(self.rate, self.keys_blh2[:, number : number + 1], self.positions_q)

    def of_heads(self, heads: slice) -> "WeightNoise":
        return WeightNoise(self.rate, self.keys_blh2[:, :, heads], self.positions_q)

    def of_queries(self, queries: slice) -> "WeightNoise":
        return WeightNoise(self.rate, self.keys_blh2, self.positions_q[queries])

    def is_kept(self, length: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return a function of numbers of sequence, head, query and key, True for weights that stay."""
        one_bh, other_bh = self.keys_blh2[:, 0, :, 0].contiguous(), self.keys_blh2[:, 0, :, 1].contiguous()
        first_kept, positions_q = _first_kept(self.rate), self.positions_q

        def is_kept(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            element = positions_q[query] * length + key.to(torch.int32)
            return _scrambled(element ^ one_bh[b, h], other_bh[b, h]) >= first_kept

        return is_kept


@dataclass(frozen=True)
class Noise:
    """Keys and positions that dropout follows from, in a forward or in one layer of it.

    rate: share of elements that are dropped. keys_bp2: two keys for each sequence and place, int32.
    positions_s: the position in its sequence of each column that this rank holds, int32. weights: the noise
    of attention's weights, None for no dropout there.
    """

    rate: float
    keys_bp2: Tensor
    positions_s: Tensor
    weights: WeightNoise | None = None

    def of_layer(self, number: int) -> "Noise":
        """Return the noise of a layer, whose places are `ATTENTION` and `MLP`."""
        first = 1 + _PLACES_OF_LAYER * number
        weights = None if self.weights is None else self.weights.of_layer(number)
        return replace(self, keys_bp2=self.keys_bp2[:, first : first + _PLACES_OF_LAYER], weights=weights)

    def of_embedding(self, x_bsd: Tensor) -> Tensor:
        return drop(x_bsd, self, 0)

    def of_head(self, x_bsd: Tensor) -> Tensor:
        return drop(x_bsd, self, self.keys_bp2.shape[1] - 1)


class NoiseMaker(nn.Module):
    """A module that makes the noise of a forward. Tensor parallelism sets which part a rank holds.

    rate, weight_rate: shares of dropped elements of hidden states and of attention's weights. part, parts:
    hidden states are part `part` of `parts` along the sequence. heads: the numbers of this rank's heads.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.num_layers, self.num_places = num_layers, 2 + _PLACES_OF_LAYER * num_layers
        self.rate, self.weight_rate, self.part, self.parts = 0.0, 0.0, 0, 1
        self.heads = range(num_heads)

    def forward(self, keys_b2: Tensor | None, positions_s: Tensor | None, length: int) -> Noise | None:
        """Return None without keys, as in evaluation. `positions_s` is None for 0 … length - 1."""
        if keys_b2 is None or not (self.rate or self.weight_rate):
            return None
        if positions_s is None:
            positions_s = torch.arange(length, device=keys_b2.device)
        positions_s = positions_s.to(torch.int32)
        weights = None
        if self.weight_rate:
            # Places of their own, after the places of hidden states.
            keys_bl2 = _keys_of(keys_b2, range(self.num_places, self.num_places + self.num_layers))
            weights = WeightNoise(self.weight_rate, _keys_of(keys_bl2, self.heads), positions_s)
        keys_bp2 = _keys_of(keys_b2, range(self.num_places))
        return Noise(self.rate, keys_bp2, positions_s.chunk(self.parts)[self.part], weights)


def drop(x_bsd: Tensor, noise: Noise | None, place: int) -> Tensor:
    """Return hidden states with elements dropped, if there is noise. place: the number of its key."""
    if noise is None or not noise.rate:
        return x_bsd
    size = x_bsd.shape[-1]
    columns_d = torch.arange(size, dtype=torch.int32, device=x_bsd.device)
    elements_sd = noise.positions_s[:, None] * size + columns_d
    one_b11, other_b11 = noise.keys_bp2[:, place, :, None, None].unbind(1)
    bits_bsd = _scrambled(elements_sd ^ one_b11, other_b11)
    return torch.where(bits_bsd >= _first_kept(noise.rate), x_bsd * (1 / (1 - noise.rate)), 0.0)


def drop_weights(weights_bhqn: Tensor, noise: WeightNoise) -> Tensor:
    """Return attention's weights with some dropped. `noise` is a layer's for these heads and queries."""
    numbers = [torch.arange(size, device=weights_bhqn.device) for size in weights_bhqn.shape]
    batch, heads, queries, keys = numbers
    places = batch[:, None, None, None], heads[:, None, None], queries[:, None], keys
    is_kept = noise.is_kept(weights_bhqn.shape[-1])(*places)
    return torch.where(is_kept, weights_bhqn * (1 / (1 - noise.rate)), 0.0)


def _first_kept(rate: float) -> int:
    return round(rate * 2**32) - 2**31


def _keys_of(keys: Tensor, numbers: range) -> Tensor:
    """Return two keys of each number under two keys: [..., 2] → [..., numbers, 2]."""
    numbers_n1 = torch.arange(numbers.start + 1, numbers.stop + 1, dtype=torch.int32, device=keys.device)
    both = keys[..., None, :] + numbers_n1[:, None] * _GOLDEN
    return _scrambled(both, both.flip(-1))


def _scrambled(bits: Tensor, key: Tensor) -> Tensor:
    """Return int32 whose every bit depends on all bits of `bits` and `key`. Products of int32 wrap around."""
    bits = (bits ^ _shifted(bits, 16)) * _MULTIPLIERS[0] ^ key
    bits = (bits ^ _shifted(bits, 13)) * _MULTIPLIERS[1]
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift int32 to the right, with zeros from the left."""
    return (bits >> by) & (2 ** (32 - by) - 1)

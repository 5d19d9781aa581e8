"""A keyed shuffle of 0..n-1 that is computed, not stored: (index, size, key) -> where the index goes.

An alternating Feistel network over the smallest power of two that holds `size` is a bijection whatever its
round function does; indices that land outside are sent through again until they land inside (cycle walking,
Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), which keeps it a bijection on 0..size-1.
Memory is that of the vector asked for, at any size. Integers only, so every machine gives the same answer.
"""

import numpy as np
import xxhash

ROUNDS = 6  # even; four are enough in theory for a large domain, six also mix domains of a few indices well
LARGEST_SIZE = 1 << 52  # bit lengths are read off float64 exponents, which are exact up to here
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: successive multiples are spread evenly (Knuth)
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_ROUND_CONSTANTS = [np.uint64(_GOLDEN * (number + 1) % 2**64) for number in range(ROUNDS)]


def key_from(*parts: int | str) -> int:
    """Returns a 64-bit key of the parts, the same in every process and version of Python (unlike `hash`)."""
    return xxhash.xxh3_64_intdigest("\x1f".join(str(part) for part in parts).encode())


def scramble(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection of 64 bits. uint64 [n] -> uint64 [n]."""
    values = values ^ (values >> np.uint64(30))
    values *= _MULTIPLIER  # arrays of uint64 wrap around silently, as wanted
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def keys_of_epochs(key: np.ndarray | np.uint64, epoch: np.ndarray) -> np.ndarray:
    """Returns one key for each (key, epoch). uint64 [n], int64 [n] -> uint64 [n]."""
    return scramble(key + epoch.astype(np.uint64) * np.uint64(_GOLDEN))


def permute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray | int) -> np.ndarray:
    """Returns the place of each index under the permutation of 0..size-1 that `key` names.

    index: int64 [n], each 0 <= index < size; size and key: scalars or [n], so that one call serves many
    permutations. Returns int64 [n]. Raises ValueError for an index or a size out of range.
    """
    index = np.atleast_1d(np.asarray(index, dtype=np.int64))
    size = np.broadcast_to(np.asarray(size, dtype=np.int64), index.shape)
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), index.shape)
    if len(index) == 0:
        return index.copy()
    if index.min() < 0 or (index >= size).any():
        raise ValueError("permute: an index is outside 0..size-1")
    if size.max() > LARGEST_SIZE:
        raise ValueError(f"permute: size {size.max()} is above 2^52")
    size, network = size.astype(np.uint64), _Network(size, key)
    result = network.apply(index.astype(np.uint64), slice(None))
    outside = np.flatnonzero(result >= size)
    while len(outside):  # at most half of the network's domain is outside, so this halves each time
        walked = network.apply(result[outside], outside)
        result[outside] = walked
        outside = outside[walked >= size[outside]]
    return result.astype(np.int64)


class _Network:
    """Feistel networks, one for each element, over 2^bits >= size indices; halves may differ by one bit."""

    def __init__(self, size: np.ndarray, key: np.ndarray):
        bits = np.maximum(np.frexp((size - 1).astype(np.float64))[1], 2).astype(np.uint64)
        one = np.uint64(1)
        self.right_bits = bits >> one
        self.right_mask = (one << self.right_bits) - one
        self.left_mask = (one << (bits - self.right_bits)) - one
        self.key = key

    def apply(self, index: np.ndarray, which: np.ndarray | slice) -> np.ndarray:
        right_bits, right_mask = self.right_bits[which], self.right_mask[which]
        left_mask, key = self.left_mask[which], self.key[which]
        left, right = index >> right_bits, index & right_mask
        for number in range(0, ROUNDS, 2):
            left ^= _round(right, key, number) & left_mask
            right ^= _round(left, key, number + 1) & right_mask
        return (left << right_bits) | right


def _round(half: np.ndarray, key: np.ndarray, number: int) -> np.ndarray:
    """Mixes (half, key, round) to 32 bits: half of `scramble`, enough for a round and half its time."""
    values = half * _MULTIPLIER
    values += key
    values += _ROUND_CONSTANTS[number]
    values ^= values >> np.uint64(32)
    values *= _MULTIPLIER
    values >>= np.uint64(32)  # the high bits are the well-mixed ones; a half has at most 26
    return values

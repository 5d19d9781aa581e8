"""The order of training data as a pure function: (seed, phase, sample number) → (source, epoch, sequence).

Nothing is drawn, stored or locked: any rank computes any sample, so a stopped run resumes with the same
samples on any number of ranks. The resume state is (phase, sample number).

A source is a stream of tokens, cut into text blocks of the *longest* sequence length of the run. Each epoch
permutes the blocks, and a shorter sequence length splits a block into consecutive sequences. So a phase can
end anywhere, and the next phase, with another length, batch or mixture, continues there: at most one block of
each source is half used, and its used tokens are reported as seen. The tokens after the last whole block come
at the end of each epoch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
import xxhash

ROUNDS = 6  # even; four are enough in theory for a large domain, six also mix domains of a few indices well
LARGEST_SIZE = 1 << 52  # bit lengths are the exponents of float64, which are exact up to here
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: successive multiples are spread evenly (Knuth)
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_ROUND_CONSTANTS = [np.uint64(_GOLDEN * (number + 1) % 2**64) for number in range(ROUNDS)]
LARGEST_PERIOD = 1 << 18


def key_from(*parts: int | str) -> int:
    """Return a 64-bit key of the parts, equal in all processes and versions of Python (unlike `hash`)."""
    return xxhash.xxh3_64_intdigest("\x1f".join(str(part) for part in parts).encode())


def scramble(values: np.ndarray) -> np.ndarray:
    """Return the finaliser of SplitMix64 (Steele et al. 2014), a bijection: uint64 [n] → uint64 [n]."""
    values = values ^ (values >> np.uint64(30))
    values *= _MULTIPLIER  # arrays of uint64 wrap around silently, as wanted
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def keys_of_epochs(key: np.ndarray | np.uint64, epoch: np.ndarray) -> np.ndarray:
    """Return a key for each (key, epoch): uint64 [n], int64 [n] → uint64 [n]."""
    return scramble(key + epoch.astype(np.uint64) * np.uint64(_GOLDEN))


def permute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray | int) -> np.ndarray:
    """Return the place, int64 [n], of each index under the permutation of 0..size-1 that `key` names.

    The shuffle is computed, not stored: an alternating Feistel network over the smallest power of two that is
    at least `size` is a bijection for any round function. Indices that land outside go through again until
    they land inside (cycle walking, Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). index:
    int64 [n], each 0 <= index < size. size, key: scalars or [n], so a call serves many permutations. Raises
    ValueError for an index or a size out of range.
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
    """Feistel networks, one for each element, over 2^bits >= size indices. Halves may differ by one bit."""

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
    """Mix (half, key, round) to 32 bits: half of `scramble`, enough for a round and half its time."""
    values = half * _MULTIPLIER
    values += key
    values += _ROUND_CONSTANTS[number]
    values ^= values >> np.uint64(32)
    values *= _MULTIPLIER
    values >>= np.uint64(32)  # the high bits are mixed well, and a half has at most 26
    return values


def share_out(weights: Sequence[float | Fraction], total: int) -> np.ndarray:
    """Return whole numbers, int64 [sources], that add up to `total`, by largest remainders."""
    exact = [Fraction(weight) for weight in weights]  # a float is a fraction: nothing is rounded
    if not exact or min(exact) <= 0 or len(exact) > total:
        raise ValueError(f"share_out: {len(exact)} weights, which must be positive, for {total} samples")
    shares = [weight * total / sum(exact) for weight in exact]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (quotas[i] - shares[i], i))
    for source in by_remainder[: total - sum(quotas)]:
        quotas[source] += 1
    for source in range(len(quotas)):  # a source that is too small is not silently left out
        if quotas[source] == 0:
            quotas[quotas.index(max(quotas))] -= 1
            quotas[source] = 1
    return np.array(quotas, dtype=np.int64)


def exact_shares(weights: Sequence[float]) -> list[Fraction]:
    """Return the share of each source. A weight is the decimal number that a person would type."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@lru_cache(maxsize=8)
def chairman_assignment(quotas: tuple[int, ...]) -> np.ndarray:
    """Return the source, int32 [sum of quotas], of each sample of a period.

    After n samples source i has had n * quotas[i] / period to within 1 - 1 / (2 * sources - 2), the best
    possible (Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32). A sample of a source
    is released when the source is far enough behind, and due before it is too far behind. The released sample
    that is due first is next. Takes 0.3 s for 2^18 samples.
    """
    num_sources, period = len(quotas), sum(quotas)
    if num_sources == 1:
        return np.zeros(period, dtype=np.int32)
    quota, parts = np.array(quotas, dtype=np.int64), 2 * num_sources - 2
    source = np.repeat(np.arange(num_sources), quota)
    turn = np.arange(period) - np.repeat(np.cumsum(quota) - quota, quota)
    released = -(-(turn * parts + 1) * period // (parts * quota[source]))
    due = (turn * parts + parts - 1) * period // (parts * quota[source]) + 1
    by_release = np.argsort(released, kind="stable")
    waiting = (due * num_sources + source)[by_release].tolist()  # one number: sooner due is smaller
    release, next_released = released[by_release].tolist(), 0
    heap: list[int] = []
    schedule: list[int] = []
    for sample in range(1, period + 1):
        while next_released < period and release[next_released] <= sample:
            heappush(heap, waiting[next_released])
            next_released += 1
        schedule.append(heappop(heap) % num_sources)
    return np.array(schedule, dtype=np.int32)


class Mixture:
    """The schedule of a phase, which gives each sample a source. quotas: int64 [sources], of a period.

    Shares with a common denominator of at most 2^18, as people type them, are exact, with the denominator as
    the period. Others are shared out over 2^18 samples by largest remainders (Hamilton's method), each within
    2^-18. Every prefix of n samples has n times the share of each source, to within one sample. The k-th
    sample of a source gets turn k, so the drawn samples of a source are a prefix: a phase can end at any
    sample, and one offset for each source describes its end.
    """

    def __init__(self, weights: Sequence[float]):
        shares = exact_shares(weights)
        denominator = math.lcm(*(share.denominator for share in shares))
        self.period_samples = denominator if denominator <= LARGEST_PERIOD else LARGEST_PERIOD
        self.quotas = share_out(shares, self.period_samples)
        self._source = chairman_assignment(tuple(self.quotas.tolist()))
        # For each place of the period, the number of earlier places with its source.
        first_of_source = np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
        self._turn = np.empty(self.period_samples, dtype=np.int32)
        by_source = np.argsort(self._source, kind="stable")
        self._turn[by_source] = np.arange(self.period_samples) - first_of_source

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return source [n] and turn [n] of samples of the phase, int64 [n]. A source's first turn is 0."""
        period, place = np.divmod(index, self.period_samples)
        source = self._source[place].astype(np.int64)
        return source, period * self.quotas[source] + self._turn[place]

    def taken(self, num_samples: int) -> list[int]:
        periods, rest = divmod(num_samples, self.period_samples)
        part = np.bincount(self._source[:rest], minlength=len(self.quotas))
        return [periods * int(quota) + int(count) for quota, count in zip(self.quotas, part, strict=True)]


@dataclass(frozen=True)
class OrderSource:
    name: str
    num_tokens: int  # one less than its stream has: the tokens with a next token
    weight: float


@dataclass(frozen=True)
class Phase:
    """A range of a run's steps with one sequence length, batch and mixture."""

    number: int
    first_sample: int
    sequence_length: int
    longest_sequence_length: int  # of the whole run, a multiple of every phase's length
    offsets: Mapping[str, int] = field(default_factory=dict)  # source → tokens drawn before, of all epochs
    is_shuffled: bool = True  # False: each epoch has the order of its stream


@dataclass(frozen=True)
class Located:
    source: np.ndarray
    epoch: np.ndarray
    sequence: np.ndarray  # sequence i of a source at length s predicts tokens i*s+1 .. i*s+s of its stream
    seen_tokens: np.ndarray  # first tokens that an earlier phase has trained on (only at a phase's start)


class Order:
    """The order of a phase. Memory does not grow with the samples or the sizes of the sources."""

    def __init__(self, seed: int, phase: Phase, sources: Sequence[OrderSource]):
        length, longest = phase.sequence_length, phase.longest_sequence_length
        if length <= 0 or longest % length:
            raise ValueError(f"sequence length {length} must divide the longest of the run, {longest}")
        if not sources or any(not 0 < source.num_tokens <= LARGEST_SIZE for source in sources):
            raise ValueError("each source needs between 1 and 2^52 tokens: " + repr(list(sources)))
        if len({source.name for source in sources}) != len(sources):
            raise ValueError("two sources have one name: " + repr([source.name for source in sources]))
        self.seed, self.phase, self.sources = seed, phase, tuple(sources)
        self.mixture = Mixture([source.weight for source in sources])
        self._sequences_per_block = longest // length
        tokens = np.array([source.num_tokens for source in sources], dtype=np.int64)
        self._num_sequences = -(-tokens // length)
        self._whole_blocks = tokens // longest
        # Without phase and length, because the next phase must find the same permutation.
        self._key = np.array([key_from("text", seed, source.name) for source in sources], dtype=np.uint64)
        offset = np.array([phase.offsets.get(source.name, 0) for source in sources], dtype=np.int64)
        first_epoch, drawn = np.divmod(offset, tokens)
        self._first_draw = first_epoch * self._num_sequences + drawn // length
        self._seen_tokens = drawn % length

    def locate(self, samples: np.ndarray) -> Located:
        """Locate global samples, int64 [n], none before the phase's first sample."""
        index = np.atleast_1d(np.asarray(samples, dtype=np.int64)) - self.phase.first_sample
        if len(index) and index.min() < 0:
            raise ValueError(f"phase {self.phase.number} starts at sample {self.phase.first_sample}")
        source, turn = self.mixture.locate(index)
        epoch, place = np.divmod(turn + self._first_draw[source], self._num_sequences[source])
        block, within = np.divmod(place, self._sequences_per_block)
        whole = np.flatnonzero(block < self._whole_blocks[source])  # the rest is the stream's tail
        shuffled, its_source = block.copy(), source[whole]
        keys = keys_of_epochs(self._key[its_source], epoch[whole])
        if self.phase.is_shuffled:
            shuffled[whole] = permute(block[whole], self._whole_blocks[its_source], keys)
        seen_tokens = np.where(turn == 0, self._seen_tokens[source], 0)
        return Located(source, epoch, shuffled * self._sequences_per_block + within, seen_tokens)

    def offsets_at(self, sample: int) -> dict[str, int]:
        """Return the tokens drawn from each source, of earlier phases too, before global `sample`."""
        offsets = dict(self.phase.offsets)
        taken = self.mixture.taken(sample - self.phase.first_sample)
        for number, source in enumerate(self.sources):
            if taken[number]:
                draws = int(self._first_draw[number]) + taken[number]
                epoch, place = divmod(draws, int(self._num_sequences[number]))
                offsets[source.name] = epoch * source.num_tokens + place * self.phase.sequence_length
        return offsets

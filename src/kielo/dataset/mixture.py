"""The mixture of sources: weights -> a periodic schedule that gives each sample a source, with exact quotas.

A period of 2^18 samples is shared out by largest remainders (Hamilton's method), so over whole periods the
mixture is exact. Inside it, blocks of 256 samples get their quotas by earliest deadline (Tijdeman 1980, "The
chairman assignment problem"; it is optimal for unit tasks), so that after every single block each source has
had its share to within one sample. The order inside a block is shuffled. The schedule is a table of fixed
size (2 MB), whatever the number of samples.

The k-th sample of a source gets turn k, so what has been drawn of a source is always a prefix. Therefore a
phase can end at any sample, and one offset for each source describes where it ended.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from kielo.dataset.permutation import scramble

BLOCK_SAMPLES = 256
BLOCKS_PER_PERIOD = 1024


def share_out(weights: Sequence[float], total: int) -> np.ndarray:
    """Returns whole numbers, int64 [sources], that add up to `total`, by largest remainders; none is 0.

    A source too small for the period still gets one sample in it: a text that the user named is never
    silently left out. Ties go to the earlier source.
    """
    exact = [Fraction(weight) for weight in weights]  # a float is a fraction: no rounding anywhere
    if not exact or min(exact) <= 0 or len(exact) > total:
        raise ValueError(
            f"share_out: {len(exact)} weights, all of which must be positive, for {total} samples"
        )
    shares = [weight * total / sum(exact) for weight in exact]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (quotas[i] - shares[i], i))
    for source in by_remainder[: total - sum(quotas)]:
        quotas[source] += 1
    for source in range(len(quotas)):
        if quotas[source] == 0:
            quotas[quotas.index(max(quotas))] -= 1
            quotas[source] = 1
    return np.array(quotas, dtype=np.int64)


def share_out_blocks(quotas: np.ndarray, num_blocks: int) -> np.ndarray:
    """Returns the number of samples of each source in each block: int64 [num_blocks, sources].

    Every row adds up to the block's size and every column to its quota; after b blocks source i has had
    floor or ceiling of quotas[i] * b / num_blocks.
    """
    block_samples, left_over = divmod(int(quotas.sum()), num_blocks)
    if left_over:
        raise ValueError(f"share_out_blocks: {quotas.sum()} samples do not fill {num_blocks} blocks")
    counts = np.empty((num_blocks, len(quotas)), dtype=np.int64)
    given = np.zeros(len(quotas), dtype=np.int64)
    for block in range(1, num_blocks + 1):
        now = np.maximum(given, quotas * block // num_blocks)  # what is due by now
        room = block_samples * block - int(now.sum())
        if room:
            released = np.flatnonzero(now * num_blocks < quotas * block)  # may have one more, not due yet
            deadline = -(-(now[released] + 1) * num_blocks // quotas[released])
            now[released[np.argsort(deadline, kind="stable")[:room]]] += 1
        counts[block - 1] = now - given
        given = now
    return counts


class Mixture:
    """The schedule of one phase. `quotas` int64 [sources]: samples of each source in one period."""

    def __init__(self, weights: Sequence[float], key: int):
        alone = len(weights) == 1
        blocks = 1 if alone else BLOCKS_PER_PERIOD
        self.block_samples = 1 if alone else BLOCK_SAMPLES
        self.period_samples = blocks * self.block_samples
        self.quotas = share_out(weights, self.period_samples)
        counts = share_out_blocks(self.quotas, blocks)
        self._source = self._shuffle_in_blocks(counts, key)
        self._turn = _turns(self._source, self.quotas)

    def _shuffle_in_blocks(self, counts: np.ndarray, key: int) -> np.ndarray:
        blocks, sources = counts.shape
        ordered = np.repeat(np.tile(np.arange(sources), blocks), counts.ravel()).reshape(blocks, -1)
        noise = scramble(np.arange(ordered.size, dtype=np.uint64) + np.array([key], dtype=np.uint64))
        places = np.argsort(noise.reshape(blocks, -1), axis=1, kind="stable")
        return np.take_along_axis(ordered, places, axis=1).ravel().astype(np.int32)

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns source [n] and turn [n] of samples of the phase, int64 [n]; a source's first turn is 0."""
        period, place = np.divmod(index, self.period_samples)
        source = self._source[place].astype(np.int64)
        return source, period * self.quotas[source] + self._turn[place]

    def taken(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each source among the first `num_samples` of the phase."""
        periods, rest = divmod(num_samples, self.period_samples)
        part = np.bincount(self._source[:rest], minlength=len(self.quotas))
        return [periods * int(quota) + int(count) for quota, count in zip(self.quotas, part)]


def _turns(source: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """Counts, for each place of the period, the earlier places with the same source."""
    first_of_source = np.repeat(np.cumsum(quotas) - quotas, quotas)
    turns = np.empty(len(source), dtype=np.int32)
    turns[np.argsort(source, kind="stable")] = np.arange(len(source)) - first_of_source
    return turns

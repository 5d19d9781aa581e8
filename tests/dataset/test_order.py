"""Promises of the data order, as properties over seeds, sizes, mixtures and phases."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kielo.dataset.mixture import (
    BLOCK_SAMPLES,
    BLOCKS_PER_PERIOD,
    LARGEST_PERIOD,
    Mixture,
    chairman_assignment,
    share_out,
    share_out_blocks,
)
from kielo.dataset.order import Order, OrderSource, Phase
from kielo.dataset.permutation import permute

FEW = settings(max_examples=40, deadline=None)
FEWER = settings(max_examples=15, deadline=None)  # a mixture of several sources takes some 50 ms to build
weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)
seeds = st.integers(0, 2**63)


def make_order(seed, tokens, weights, length=4, longest=4, first_sample=0, offsets=None, number=1):
    sources = [OrderSource(f"s{i}", n, w) for i, (n, w) in enumerate(zip(tokens, weights))]
    return Order(seed, Phase(number, first_sample, length, longest, offsets or {}), sources)


@FEW
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size, key):
    """Every index of 0..size-1 is met exactly once, at any size and key."""
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_permutation_mixes_and_is_fixed_for_ever():
    """Small domains reach all their permutations evenly; and one recorded result: another would change
    everyone's runs."""
    keys = np.arange(24_000, dtype=np.uint64)
    images = np.stack([permute(np.full(len(keys), i), 4, keys) for i in range(4)], axis=1)
    kinds, counts = np.unique(images @ [64, 16, 4, 1], return_counts=True)
    assert len(kinds) == 24 and counts.min() > 700 and counts.max() < 1300  # 1000 expected
    assert permute(np.arange(8), 1000, 1).tolist() == [895, 762, 559, 326, 46, 972, 56, 142]


def test_permutation_at_the_largest_sizes():
    """Beyond 32 bits nothing overflows: in range, no two indices meet, and no trace of the order is left."""
    size = 10**15 + 7
    index = np.concatenate([np.arange(100_000), size - 1 - np.arange(100_000)])
    places = permute(index, size, 2**64 - 1)
    assert places.min() >= 0 and places.max() < size and len(np.unique(places)) == len(index)
    assert abs(np.corrcoef(index[:100_000], places[:100_000])[0, 1]) < 0.02
    assert abs(places.mean() / size - 0.5) < 0.01


@FEW
@given(seed=seeds, epoch=st.integers(0, 3), tokens=st.integers(1, 700), sequences_per_block=st.integers(1, 5))
def test_an_epoch_reads_every_sequence_once(seed, epoch, tokens, sequences_per_block):
    """One epoch of a source is a bijection on its sequences, the stream's tail and several lengths
    included."""
    length = 4
    count = -(-tokens // length)
    order = make_order(seed, [tokens], [1.0], length, longest=length * sequences_per_block)
    located = order.locate(np.arange(epoch * count, (epoch + 1) * count))
    assert (located.epoch == epoch).all()
    assert np.array_equal(np.sort(located.sequence), np.arange(count))


def test_epochs_and_sources_are_shuffled_differently():
    """Another epoch, seed or source gives another order of the text."""
    order = make_order(1, [4000, 4000], [1, 1])
    located = order.locate(np.arange(4000))
    runs = [
        located.sequence[(located.source == s) & (located.epoch == e)].tolist()
        for s in (0, 1)
        for e in (0, 1)
    ]
    runs.append(make_order(2, [4000], [1]).locate(np.arange(1000)).sequence.tolist())
    assert len({tuple(run[:900]) for run in runs}) == 5


@FEWER
@given(weights=weights)
def test_every_prefix_has_its_shares(weights):
    """After each of the first 1,000 samples every source has had its weight's share to within one sample, and
    so it is of the period's quotas after each sample of two periods."""
    mixture = Mixture(weights, "every_sample", 0)
    period = mixture.period_samples
    source, _ = mixture.locate(np.arange(2 * period))
    number = np.arange(1, 2 * period + 1)
    for i, weight in enumerate(weights):
        had = np.cumsum(source == i)
        assert np.abs(had - number * (mixture.quotas[i] / period)).max() <= 1
        if min(weights) / sum(weights) * LARGEST_PERIOD > 1:  # a smaller one gets a sample it has no share in
            assert np.abs(had - number * (weight / sum(weights)))[:1000].max() <= 1
    assert np.array_equal(np.bincount(source[:period], minlength=len(weights)), mixture.quotas)


def test_shares_of_tens_of_sources_and_of_typed_weights():
    """Forty sources of very different size keep Tijdeman's bound; typed weights have exact, short periods."""
    quotas = share_out([1.3**i for i in range(40)], LARGEST_PERIOD)
    had = np.cumsum(np.eye(40, dtype=np.int32)[chairman_assignment(tuple(quotas.tolist()))], axis=0)
    due = np.arange(1, LARGEST_PERIOD + 1)[:, None] * (quotas / LARGEST_PERIOD)
    assert np.abs(had - due).max() <= 1 - 1 / 78 + 1e-9
    assert Mixture([0.55, 0.25, 0.2], "every_sample", 0).period_samples == 20
    assert Mixture([1, 1, 1], "every_sample", 0).quotas.tolist() == [1, 1, 1]
    thirds = Mixture([2, 1], "every_sample", 0).locate(np.arange(9, 15))
    assert [part.tolist() for part in thirds] == [[0, 1, 0, 0, 1, 0], [6, 3, 7, 8, 4, 9]]


@FEWER
@given(seed=seeds, weights=weights)
def test_the_order_of_earlier_runs_has_exact_blocks(seed, weights):
    """blocks_of_256: every period holds exactly the largest-remainder quotas, every block those that the
    schedule says, and after any number of blocks each source has had its share to within one sample."""
    mixture = Mixture(weights, "blocks_of_256", seed)
    quotas = share_out(weights, mixture.period_samples)
    assert quotas.sum() == mixture.period_samples
    exact = np.array(weights) / sum(weights) * mixture.period_samples
    assert np.abs(quotas - exact).max() < 1 or quotas.min() == 1
    for period in (0, 3):
        start = period * mixture.period_samples
        source, _ = mixture.locate(np.arange(start, start + mixture.period_samples))
        assert np.array_equal(np.bincount(source, minlength=len(weights)), quotas)
        if len(weights) == 1:
            continue
        blocks = np.stack([np.bincount(b, minlength=len(weights)) for b in source.reshape(-1, BLOCK_SAMPLES)])
        assert np.array_equal(blocks, share_out_blocks(quotas, BLOCKS_PER_PERIOD))
        due = quotas * np.arange(1, len(blocks) + 1)[:, None] / len(blocks)
        assert np.abs(blocks.cumsum(axis=0) - due).max() < 1


@FEW
@given(st.lists(st.integers(1, 60), min_size=2, max_size=9), st.integers(2, 40), st.integers(1, 40))
def test_blocks_can_always_be_filled(parts, num_blocks, block_samples):
    """Whatever the quotas, earliest deadline fills every block exactly and keeps every prefix within one
    sample."""
    total = num_blocks * block_samples
    if total < len(parts):
        return
    quotas = share_out(parts, total)
    counts = share_out_blocks(quotas, num_blocks)
    assert counts.min() >= 0 and (counts.sum(axis=1) == block_samples).all()
    assert np.array_equal(counts.sum(axis=0), quotas)
    ahead = counts.cumsum(axis=0) * num_blocks - quotas * np.arange(1, num_blocks + 1)[:, None]
    assert np.abs(ahead).max() < num_blocks


def test_largest_remainders():
    """Hamilton's method by hand, and a source that is tiny but named is not left out."""
    assert share_out([41.6, 26.6, 31.8], 10).tolist() == [4, 3, 3]
    assert share_out([1, 1, 1], 256).tolist() == [86, 85, 85]
    assert share_out([1e12, 1.0], 256).tolist() == [255, 1]


@FEWER
@given(seed=seeds, sizes=st.lists(st.integers(1, 900), min_size=1, max_size=4), first=st.integers(0, 10**6))
def test_no_sample_twice_and_none_left_out(seed, sizes, first):
    """Each source's draws under a mixture are a prefix of its epochs:
    no sequence comes twice within an epoch.
    """
    order = make_order(seed, sizes, range(1, len(sizes) + 1), first_sample=first)
    located = order.locate(np.arange(first, first + 3000))
    for number, tokens in enumerate(sizes):
        mine, count = located.source == number, -(-tokens // 4)
        drawn = located.epoch[mine] * count + located.sequence[mine]
        assert len(np.unique(drawn)) == len(drawn)
        complete, rest = divmod(len(drawn), count)
        assert np.bincount(located.epoch[mine], minlength=complete).tolist() == [count] * complete + [
            rest
        ] * (rest > 0)


@FEWER
@given(
    seed=seeds,
    tokens=st.lists(st.integers(30, 400), min_size=1, max_size=3),
    phases=st.lists(st.tuples(st.sampled_from([2, 3, 4, 6, 12]), st.integers(0, 90)), min_size=2, max_size=4),
)
def test_phases_neither_repeat_nor_drop_text(seed, tokens, phases):
    """Lengths and mixtures change at any sample; each token is still trained on once in an epoch before any
    is again."""
    longest, first, offsets = 12, 0, {}
    times = [np.zeros(count, dtype=int) for count in tokens]
    for number, (length, num_samples) in enumerate(phases):
        mix = [1 + (number + i) % 3 for i in range(len(tokens))]
        order = make_order(seed, tokens, mix, length, longest, first, offsets, number)
        located = order.locate(np.arange(first, first + num_samples))
        for source, sequence, seen in zip(located.source, located.sequence, located.seen_tokens):
            times[source][sequence * length + seen : (sequence + 1) * length] += 1
        first += num_samples
        offsets = order.offsets_at(first)
        for source in range(len(tokens)):
            assert times[source].max() - times[source].min() <= 1
            assert times[source].sum() == offsets.get(f"s{source}", 0)


def test_a_trillion_samples_take_no_memory():
    """Built and asked at sample 10^12 in a few megabytes: there is no index."""
    tracemalloc.start()
    order = make_order(1, [10**12 * 4, 10**11 * 4], [10, 1])
    located = order.locate(np.arange(10**12, 10**12 + 4096))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 40_000_000
    assert located.sequence.min() >= 0 and located.sequence.max() < 10**12
    assert len(np.unique(located.sequence * 2 + located.source)) == 4096


def test_samples_before_the_phase_are_refused():
    """A phase answers for its own samples only."""
    with pytest.raises(ValueError, match="starts at sample 10"):
        make_order(1, [100], [1], first_sample=10).locate(np.array([9]))
    with pytest.raises(ValueError, match="must divide"):
        make_order(1, [100], [1], length=4, longest=6)

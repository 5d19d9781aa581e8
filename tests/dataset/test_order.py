"""Promises of the data order, as properties over seeds, sizes, mixtures and phases."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kielo.dataset.order import (
    LARGEST_PERIOD,
    LARGEST_SIZE,
    Mixture,
    Order,
    OrderSource,
    Phase,
    chairman_assignment,
    key_from,
    permute,
    share_out,
)

FEW = settings(max_examples=40, deadline=None)
FEWER = settings(max_examples=15, deadline=None)  # a mixture of several sources takes some 50 ms to build
weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)
seeds = st.integers(0, 2**63)


def make_order(seed, tokens, weights, length=4, longest=4, first_sample=0, offsets=None, number=1):
    sources = [OrderSource(f"s{i}", n, w) for i, (n, w) in enumerate(zip(tokens, weights))]
    return Order(seed, Phase(number, first_sample, length, longest, offsets or {}), sources)


def plain_scramble(value):
    """SplitMix64's finaliser (Steele et al. 2014) on one number."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 % 2**64
    value ^= value >> 27
    value = value * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def plain_permute(index, size, key):
    """The Feistel network of order.py on one number, round by round, until it is inside."""
    bits = max(2, (size - 1).bit_length())
    right_bits = bits // 2
    while True:
        halves = [index >> right_bits, index & (1 << right_bits) - 1]
        for number in range(6):
            to = number % 2  # the left half first
            golden = 0x9E3779B97F4A7C15 * (number + 1)
            mixed = (halves[1 - to] * 0xBF58476D1CE4E5B9 + key + golden) % 2**64
            mixed = (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 % 2**64 >> 32
            halves[to] ^= mixed & (1 << (right_bits if to else bits - right_bits)) - 1
        index = halves[0] << right_bits | halves[1]
        if index < size:
            return index


def plain_key(*parts):
    return xxhash.xxh3_64_intdigest("\x1f".join(map(str, parts)).encode())


def plain_sequence(seed, name, epoch, place, whole_blocks, per_block=1):
    """The sequence at a place of an epoch: its text block is permuted, unless it is the stream's tail."""
    block, within = divmod(place, per_block)
    if block < whole_blocks:
        key = plain_scramble((plain_key("text", seed, name) + epoch * 0x9E3779B97F4A7C15) % 2**64)
        block = plain_permute(block, whole_blocks, key)
    return block * per_block + within


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 37, 1000, 2**20 + 1, 2**33, LARGEST_SIZE])
def test_the_permutation_is_the_published_network(size):
    """Number by number what a network of plain integers gives, at each key: it is fixed for ever."""
    index = sorted(
        {0, 1, size // 3, size // 2, size - 1} & set(range(size)) if size < 99 else {0, 7, size - 1}
    )
    for key in (0, 1, 2**64 - 1, key_from("text", 7, "s0")):
        assert permute(np.array(index), size, key).tolist() == [plain_permute(i, size, key) for i in index]


def test_permutations_of_several_sizes_and_keys_at_once_and_what_is_refused():
    """Each element has its own size and key; none, and numbers outside, by the smallest border."""
    index, size, key = [0, 4, 8, 63], [1, 5, 9, 64], [3, 2**63, 5, 9]
    expected = [plain_permute(*one) for one in zip(index, size, key)]
    assert permute(np.array(index), np.array(size), np.array(key, np.uint64)).tolist() == expected
    assert permute(3, 8, 1).tolist() == [plain_permute(3, 8, 1)]
    assert permute(np.array([], int), 8, 1).tolist() == []
    for wrong, of in (([-1], 8), ([8], 8), ([0, 9, 1], 9)):
        with pytest.raises(ValueError, match=r"outside 0\.\.size-1"):
            permute(np.array(wrong), of, 1)
    with pytest.raises(ValueError, match=r"size 4503599627370497 is above 2\^52"):
        permute(np.array([0]), LARGEST_SIZE + 1, 1)


def test_keys_are_those_of_their_parts():
    assert key_from("text", 7, "s0") == plain_key("text", 7, "s0") != key_from("text", 7, "s", 0)


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


@pytest.mark.parametrize("tokens", [4, 31, 32, 33, 40])
def test_every_whole_block_is_shuffled_and_the_tail_comes_last(tokens):
    """Sequences of four epochs, one by one, with the last block whole, cut short, and one token longer."""
    order = make_order(7, [tokens], [1.0], length=4, longest=8)
    count = -(-tokens // 4)
    located = order.locate(np.arange(4 * count))
    places = [divmod(sample, count) for sample in range(4 * count)]
    assert located.epoch.tolist() == [epoch for epoch, _ in places]
    assert located.sequence.tolist() == [plain_sequence(7, "s0", *at, tokens // 8, 2) for at in places]
    if tokens == 32:
        assert {one for (_, place), one in zip(places, located.sequence.tolist()) if place == 6} != {6}


def test_a_phase_in_the_middle_by_hand():
    """Sample by sample: source, epoch, sequence and seen tokens of a phase that begins within blocks, and the
    offsets of the next phase after each sample; a source that this phase leaves out keeps its own.

    s0 has 10 tokens (sequences of 4, 4 and 2), two epochs and 3 tokens of them drawn; s1 has 26, of which 6.
    """
    before = {"s0": 23, "s1": 6, "gone": 9}
    order = make_order(7, [10, 26], [2, 1], 4, 8, first_sample=5, offsets=before, number=3)
    located = order.locate(np.arange(5, 11))
    assert located.source.tolist() == [0, 1, 0, 0, 1, 0]
    assert located.epoch.tolist() == [2, 0, 2, 2, 0, 3]
    s1 = [plain_sequence(7, "s1", 0, place, 3, 2) for place in (1, 2)]
    assert located.sequence.tolist() == [0, s1[0], 1, 2, s1[1], 0]
    assert located.seen_tokens.tolist() == [3, 2, 0, 0, 0, 0]
    offsets = [(23, 6), (24, 6), (24, 8), (28, 8), (30, 8), (30, 12), (34, 12)]
    for sample, (s0, s1) in enumerate(offsets, 5):
        assert order.offsets_at(sample) == {"s0": s0, "s1": s1, "gone": 9}
    assert order.offsets_at(5) is not before
    assert make_order(7, [10], [1], offsets={"gone": 9}).offsets_at(2) == {"s0": 8, "gone": 9}
    assert order.locate(7).sequence.tolist() == [1] and order.locate(np.array([], int)).source.tolist() == []


def test_sources_that_no_order_can_have():
    """By the smallest border: no source, no token, more than 2^52 tokens, one name twice, odd lengths."""
    assert make_order(1, [1], [1]).locate(0).sequence.tolist() == [0]
    assert make_order(1, [LARGEST_SIZE], [1]).locate(0).epoch.tolist() == [0]
    for tokens in ([], [0], [LARGEST_SIZE + 1], [5, 0]):
        with pytest.raises(ValueError, match="between 1 and 2\\^52 tokens"):
            make_order(1, tokens, [1] * len(tokens))
    with pytest.raises(ValueError, match="two sources have one name"):
        Order(1, Phase(1, 0, 4, 4), [OrderSource("a", 5, 1), OrderSource("a", 6, 1)])
    for length, longest in ((0, 4), (-4, 4), (3, 4), (8, 4)):
        with pytest.raises(ValueError, match="must divide the longest"):
            make_order(1, [100], [1], length, longest)
    assert make_order(1, [100], [1], first_sample=10).locate(10).sequence.shape == (1,)


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
    mixture = Mixture(weights)
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
    assert Mixture([0.55, 0.25, 0.2]).period_samples == 20
    assert Mixture([1, 1, 1]).quotas.tolist() == [1, 1, 1]
    thirds = Mixture([2, 1]).locate(np.arange(9, 15))
    assert [part.tolist() for part in thirds] == [[0, 1, 0, 0, 1, 0], [6, 3, 7, 8, 4, 9]]


def plain_assignment(quotas):
    """Tijdeman's schedule in fractions: of the sources far enough behind that which must be next."""
    period, bound = sum(quotas), Fraction(1, 2 * len(quotas) - 2)
    had, schedule = [0] * len(quotas), []

    def behind(source, sample):
        return Fraction(sample * quotas[source], period) - had[source]

    for sample in range(1, period + 1):
        released = [source for source in range(len(quotas)) if behind(source, sample) >= bound]
        # The first sample before which the source would be too far behind.
        due = {
            source: next(n for n in range(sample, 2 * period + 1) if behind(source, n) > 1 - bound)
            for source in released
        }
        chosen = min(released, key=lambda source: (due[source], source))
        schedule.append(chosen)
        had[chosen] += 1
    return schedule


@pytest.mark.parametrize(
    "quotas", [(1, 1), (3, 2, 1), (7, 1), (5, 3, 3, 1), (2, 9, 4), (1, 1, 1, 1, 1), (13, 6, 6, 5, 1, 1)]
)
def test_the_schedule_is_tijdemans(quotas):
    """Sample by sample what the rule in fractions gives."""
    assert chairman_assignment(quotas).tolist() == plain_assignment(quotas)


def test_a_schedule_of_one_source():
    assert chairman_assignment((3,)).tolist() == [0, 0, 0]


def test_a_period_is_the_common_denominator_up_to_its_bound():
    """At 2^18 it is that, above it 2^18, with shares by largest remainders; turns go on from period to
    period, and what was taken is counted over both.
    """
    at, above = (Mixture([1, n - 1]) for n in (LARGEST_PERIOD, LARGEST_PERIOD + 1))
    assert at.period_samples == above.period_samples == LARGEST_PERIOD == 262_144
    assert at.quotas.tolist() == above.quotas.tolist() == [1, LARGEST_PERIOD - 1]
    assert Mixture([1, LARGEST_PERIOD - 2]).period_samples == LARGEST_PERIOD - 1
    small = Mixture([3, 2, 1])
    assert small.quotas.tolist() == [3, 2, 1]
    schedule = plain_assignment((3, 2, 1)) * 3
    source, turn = small.locate(np.arange(18))
    assert source.tolist() == schedule and source.dtype == np.int64
    assert turn.tolist() == [schedule[:n].count(one) for n, one in enumerate(schedule)]
    for number in range(18):
        assert small.taken(number) == [schedule[:number].count(one) for one in range(3)]


def test_largest_remainders():
    """Hamilton's method by hand, and a source that is tiny but named is not left out."""
    assert share_out([41.6, 26.6, 31.8], 10).tolist() == [4, 3, 3]
    assert share_out([1, 1, 1], 256).tolist() == [86, 85, 85]
    assert share_out([1e12, 1.0], 256).tolist() == [255, 1]
    assert share_out([1e12, 2e12, 1.0, 1.0], 4).tolist() == [1, 1, 1, 1]  # as many as samples
    assert share_out([1, 3], 2).tolist() == [1, 1] and share_out([3, 1, 3, 1], 4).tolist() == [1, 1, 1, 1]
    assert share_out([1, 1, 6], 9).tolist() == [1, 1, 7] and share_out([7], 3).tolist() == [3]
    for weights, total in (([], 3), ([1, 0], 3), ([1, -1e-9], 3), ([1, 1, 1], 2)):
        with pytest.raises(ValueError, match=f"{len(weights)} weights, .*, for {total} samples"):
            share_out(weights, total)


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
@example(seed=1, tokens=[30, 31, 37], phases=[(4, 5), (6, 0), (2, 1), (12, 2)])  # sources that get no sample
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

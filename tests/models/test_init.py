"""First values: each element's follows from its place in the whole parameter, and all are normal."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from kielo.models.blocks import init
from kielo.models.blocks.init import constant, seeded_normal

FIRST = [-0.56068367, 1.0900843, -0.27685079, -0.27248615, -0.64169598, -0.73544621, -0.56815577, -0.34576365]
SHAPE, ROWS = (70, 1000), 67  # more numbers than a chunk, in rows that no counter divides


@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 70), slice(0, 1000)),
        (slice(33, 51), slice(0, 1000)),
        (slice(0, 70), slice(333, 337)),
        (slice(61, 70), slice(501, 1000)),
        (slice(68, 70), slice(0, 1000)),
        (slice(70, 70), slice(0, 1000)),
        (slice(5, 6), slice(999, 1000)),
    ],
    ids=str,
)
@pytest.mark.parametrize("cutoff", [None, 3.0])
def test_a_box_has_the_values_of_the_whole(box, cutoff) -> None:
    """Bitwise; the padding is 0 in both."""
    whole = seeded_normal("a", SHAPE, 0.5, 7, ROWS, cutoff)
    assert torch.equal(seeded_normal("a", SHAPE, 0.5, 7, ROWS, cutoff, box), whole[box])
    assert whole[:ROWS].ne(0).all() and not whole[ROWS:].any()


@pytest.mark.parametrize("columns", [slice(0, 1001), slice(3, 1000)], ids=["rows", "parts of rows"])
def test_numbers_do_not_depend_on_the_threads_that_draw_them(columns, monkeypatch) -> None:
    """Three threads draw the large box. One draws each of the small boxes, which the other tests hold."""
    shape, threads = (2200, 1001), []

    class Pool(init.ThreadPoolExecutor):
        def __init__(self, number):
            threads.append(number)
            super().__init__(number)

    monkeypatch.setattr(init, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found = seeded_normal("a", shape, 0.5, 7, box=(slice(0, 2200), columns))
    for begin in range(0, 2200, 550):
        rows = slice(begin, begin + 550)
        assert torch.equal(found[rows], seeded_normal("a", shape, 0.5, 7, box=(rows, columns)))
    assert threads == [3]


def test_vectors_and_three_dims_have_boxes_too() -> None:
    for shape, box in [((100,), (slice(13, 77),)), ((5, 7, 11), (slice(1, 4), slice(2, 5), slice(3, 9)))]:
        assert torch.equal(seeded_normal("b", shape, 1.0, 7, box=box), seeded_normal("b", shape, 1.0, 7)[box])
        assert torch.equal(constant(1.0, shape, box), torch.ones(shape)[box])


def test_the_numbers_are_normal() -> None:
    """Mean, deviation, the largest distance from the normal distribution (Kolmogorov–Smirnov at one in a
    thousand), and numbers far out, of a million; other names and seeds give others.
    """
    n = 10**6
    values = seeded_normal("c", (1000, 1000), 0.02, 3).flatten().double() / 0.02
    assert abs(values.mean()) < 4 / math.sqrt(n) and abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert largest_distance(torch.special.ndtr(values)) < 1.95 / math.sqrt(n)
    assert 4.4 < values.abs().max() < 6.4
    lagged = [(values[lag:] * values[:-lag]).mean().abs() for lag in (1, 2, 4, 8, 1000)]
    assert max(lagged) < 4 / math.sqrt(n)
    for name, seed in (("d", 3), ("c", 4)):
        other = seeded_normal(name, (1000, 1000), 1.0, seed).flatten().double()
        assert (values * other).mean().abs() < 4 / math.sqrt(n)


def test_the_cutoff_cuts_the_distribution() -> None:
    values = seeded_normal("c", (1000, 1000), 0.02, 3, cutoff=3.0).flatten().double() / 0.02
    edges = torch.special.ndtr(torch.tensor([-3.0, 3.0], dtype=torch.float64))
    uniform = (torch.special.ndtr(values) - edges[0]) / (edges[1] - edges[0])
    assert largest_distance(uniform) < 1.95 / math.sqrt(10**6)
    assert 2.999 < values.abs().max() <= 3 * (1 + 1e-6)


def test_the_first_numbers_stay_the_same() -> None:
    """A run that begins anew with another version of Kielo or numpy begins with the same weights."""
    found = seeded_normal("embed.weight", (4, 2), 1.0, 3).flatten().tolist()
    assert found == pytest.approx(FIRST, rel=1e-6)


@pytest.mark.parametrize(
    "box", [(slice(512, 1024), slice(0, 1024)), (slice(0, 4096), slice(128, 256))], ids=["rows", "columns"]
)
def test_a_part_costs_a_part(box, monkeypatch) -> None:
    """An eighth draws an eighth of the numbers, and at most 14 more a run; it takes no more memory than its
    own values and 4 MiB.
    """
    numbers = []

    class CountingPhilox(np.random.Philox):
        def random_raw(self, size):
            numbers.append(2 * size)
            return super().random_raw(size)

    monkeypatch.setattr(init, "Philox", CountingPhilox)
    tracemalloc.start()
    values = seeded_normal("e", (4096, 1024), 1.0, 1, box=box)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.numel() == 2**19
    assert 2**19 <= sum(numbers) <= 2**19 + 14 * len(numbers)
    assert peak < values.nbytes + 4 * 2**20


def largest_distance(uniform: torch.Tensor) -> float:
    """The largest difference of an empirical distribution from the even one on 0 to 1."""
    steps = torch.arange(1, len(uniform) + 1, dtype=torch.float64) / len(uniform)
    return (uniform.sort().values - steps).abs().max().item()

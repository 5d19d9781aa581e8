"""Sequences shared out over ranks and micro-batches: what schedules accept, and how much is empty."""

from itertools import product

import numpy as np
import pytest

from kielo.recipe.sections import Layout
from kielo.resolve.shares import Shares, micro_batches_needed, preferred_size
from kielo.resolve.stages import SCHEDULES, micro_batch_complaint, num_stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_least_number_that_the_schedule_accepts(schedule):
    """By trying every number from the one that is needed on."""
    for ranks, sequences, size in product((2, 3, 4), range(1, 30), (1, 2, 3)):
        layout = Layout(pipeline=ranks, pipeline_schedule=schedule)
        stages = num_stages(layout)
        truth = next(
            number
            for number in range(-(-sequences // size), 100)
            if micro_batch_complaint(schedule, number, ranks, stages) is None
        )
        assert micro_batches_needed(layout, sequences, size) == truth, (ranks, sequences, size)


@pytest.mark.parametrize(
    ("sequences", "most", "expected"),
    [(342, 4, 3), (347, 4, 4), (341, 4, 3), (8, 3, 2), (7, 4, 1), (1, 4, 1)],
)
def test_the_size_that_leaves_little_empty(sequences, most, expected):
    """A divisor, unless one twice as large leaves less than 1/128 empty."""
    sizes = np.arange(1, min(sequences, most) + 1)
    rows = sizes * -(-sequences // sizes)
    assert preferred_size(sizes, rows[:, None], np.ones((len(sizes), 1), bool)) == [expected]


def test_what_an_uneven_step_takes_is_said():
    """With all ranks' numbers where they are few."""
    assert str(Shares(1024, 3, 1, 342)) == (
        "3 data-parallel ranks: 342, 341, 341 sequences; 0.2% of the work is empty"
    )
    many = str(Shares(1024, 96, 1, 11))
    assert many.startswith("96 data-parallel ranks: 11 sequences on 64 of them and 10 on the others; 3.0%")
    assert str(Shares(1024, 4, 2, 128)) == ""

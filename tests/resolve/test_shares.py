"""Sequences shared out over ranks and micro-batches: what schedules accept, and how much is empty."""

from itertools import product

import numpy as np
import pytest

from kielo.recipe.sections import Layout
from kielo.resolve.shares import Shares, least_accepted, micro_batches_needed, preferred_size, uneven_steps
from kielo.resolve.stages import SCHEDULES, micro_batch_complaint, num_stages
from tests.resolve.golden_runs import golden_resolved


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
    assert str(Shares(7, 2, 4, 1)) == "2 data-parallel ranks: 4, 3 sequences; 12.5% of the work is empty"


@pytest.mark.parametrize(
    ("rows", "may", "expected"),
    [
        ([128, 128, 129, 128], [1, 1, 1, 1], 4), ([128, 128, 129, 129], [1, 1, 1, 1], 4),
        ([127, 127, 128, 128], [1, 1, 1, 1], 2), ([128, 130, 129, 130], [1, 1, 1, 1], 3),
        ([128, 128, 129, 130], [1, 1, 1, 1], 2), ([128, 129, 129, 129], [1, 1, 0, 0], 2),
        ([128, 128, 128, 128], [0, 0, 0, 0], 0), ([128, 128, 128, 128], [1, 0, 0, 0], 1),
        ([256, 258, 300, 300], [1, 1, 1, 1], 2), ([200, 128, 128, 128], [1, 1, 1, 0], 3),
    ],
)  # fmt: skip
def test_a_size_twice_as_large_may_add_one_in_128(rows, may, expected):
    """The borders: one row more of 128 and not of 127, a size that is twice as large and not one less."""
    found = preferred_size(np.arange(1, 5), np.array(rows)[:, None], np.array(may, bool)[:, None])
    assert found == [expected]


@pytest.mark.parametrize(
    ("at_least", "ranks", "stages", "in_rounds", "expected"),
    [
        (3, 4, 4, False, 4), (5, 4, 4, False, 5), (3, 4, 0, True, 3), (4, 4, 0, True, 4), (5, 4, 0, True, 5),
        (9, 4, 0, True, 10), (11, 4, 0, True, 12), (13, 4, 0, True, 15), (16, 4, 0, True, 16),
    ],
)  # fmt: skip
def test_pipelines_accept_rounds(at_least, ranks, stages, in_rounds, expected):
    """As many micro-batches as stages; equal rounds of as many as there are ranks, or more."""
    assert least_accepted(np.array(at_least), ranks, stages, in_rounds) == expected


def test_the_share_that_is_empty_is_of_the_steps_work():
    """By the row: 1,024 of 3 × 342; of one rank; and of a batch ramp all its steps together."""
    assert Shares(1024, 3, 1, 342).empty_share == 1 - 1024 / 1026
    assert Shares(7, 1, 4, 2).empty_share == 1 / 8
    assert str(Shares(7, 1, 4, 2)) == "1 data-parallel rank: 7 sequences each; 12.5% of the work is empty"
    assert str(Shares(8, 4, 3, 1)) == "4 data-parallel ranks: 2 sequences each; 33.3% of the work is empty"
    assert str(Shares(9, 4, 3, 1)).startswith("4 data-parallel ranks: 3, 2, 2, 2 sequences; 25.0%")
    assert str(Shares(9, 5, 2, 1)).startswith("5 data-parallel ranks: 2 sequences on 4 of them and 1 on the")
    resolved = golden_resolved("tiny")
    (phase, *_), (placed, *_) = resolved.identity.phases, resolved.placement.phases
    layout = resolved.placement.layout.model_copy(update={"shard": 3, "replicate": 2})
    placed = placed.model_copy(update={"micro_batch_sequences": 2, "micro_batches_per_step": 1})

    def said(*steps: tuple[int, int, int]) -> list[str]:
        """steps: (number of the phase, steps, sequences a step)."""
        phases = tuple(
            phase.model_copy(update={"number": number, "steps": many, "sequences_per_step": sequences})
            for number, many, sequences in steps
        )
        identity = resolved.identity.model_copy(update={"phases": phases})
        placement = resolved.placement.model_copy(
            update={"layout": layout, "phases": (placed,) * len(phases)}
        )
        return uneven_steps(resolved.model_copy(update={"identity": identity, "placement": placement}))

    last = (
        "9 sequences a step on 6 data-parallel ranks: 2 sequences on 3 of them and 1 on the others; 25.0% of "
        "the work is empty"
    )
    assert said((1, 5, 12)) == [] and said((1, 5, 9)) == [last] and said((1, 5, 12), (2, 5, 9)) == [last]
    # 2 steps of 12 with 6 empty, and 4 steps with 3
    ramp = f"in the steps of the batch ramp, {(2 * 6 + 4 * 3) / (6 * 12):.1%} of the work is empty sequences"
    assert said((1, 2, 6), (1, 4, 9), (1, 5, 12)) == [ramp]
    assert said((1, 2, 6), (1, 4, 9), (1, 5, 9)) == [last, ramp] and said((1, 2, 12), (1, 5, 12)) == []


def test_work_of_a_ramp_is_by_the_micro_batches_of_each_size():
    """On six ranks, two sequences at once: 12 rows with 6 empty in two steps, 24 with 4 empty in four."""
    resolved = golden_resolved("tiny")
    (phase, *_), (placed, *_) = resolved.identity.phases, resolved.placement.phases
    sizes = [(2, 6, 1), (4, 20, 2), (5, 24, 2)]
    phases = tuple(
        phase.model_copy(update={"number": 1, "steps": steps, "sequences_per_step": sequences})
        for steps, sequences, _ in sizes
    )
    places = tuple(
        placed.model_copy(update={"micro_batch_sequences": 2, "micro_batches_per_step": number})
        for *_, number in sizes
    )
    layout = resolved.placement.layout.model_copy(update={"shard": 3, "replicate": 2})
    changed = resolved.model_copy(
        update={
            "identity": resolved.identity.model_copy(update={"phases": phases}),
            "placement": resolved.placement.model_copy(update={"layout": layout, "phases": places}),
        }
    )
    share = (2 * 6 + 4 * 4) / (2 * 12 + 4 * 24)
    assert uneven_steps(changed) == [
        f"in the steps of the batch ramp, {share:.1%} of the work is empty sequences"
    ]

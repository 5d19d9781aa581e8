"""Learning rates are what the formulas say, by hand."""

import math
from types import SimpleNamespace

import pytest

from kielo.recipe.learning_rate_schedules import LEARNING_RATE_SCHEDULES
from kielo.train.schedule import learning_rate


def segment(schedule: str, **changes: object) -> SimpleNamespace:
    values = {
        "first_token": 0,
        "tokens": 110,
        "peak": 1.0,
        "final": 0.1,
        "warmup_tokens": 10,
        "decay_tokens": 20,
    }
    return SimpleNamespace(schedule=schedule, **(values | changes))


def rates(*segments: SimpleNamespace, tokens_per_step: int = 1):
    return learning_rate(
        SimpleNamespace(learning_rates=segments, phases=[SimpleNamespace(tokens_per_step=tokens_per_step)])
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # tokens:     1    5    10   60                                100
        ("cosine", [0.1, 0.5, 1.0, 0.1 + 0.9 * 0.5, 0.1 + 0.9 * 0.0244717418]),  # (1 + cos(0.9 π)) / 2
        ("linear", [0.1, 0.5, 1.0, 0.55, 0.19]),
        ("wsd", [0.1, 0.5, 1.0, 1.0, 0.55]),  # decays over tokens 90 … 110
    ],
)
def test_five_steps_and_the_ends(schedule: str, expected: list[float]) -> None:
    """Warm-up to the peak, the shape at half and near its end, the final rate at the last step
    and after it.
    """
    rate = rates(segment(schedule))
    assert [rate(tokens) for tokens in (1, 5, 10, 60, 100)] == pytest.approx(expected, rel=1e-9)
    assert rate(110) == rate(500) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", LEARNING_RATE_SCHEDULES)
def test_every_schedule_ends_at_the_final_rate(schedule: str) -> None:
    """Whatever is in the table comes down from the peak to the final rate,
    and never leaves what lies between.
    """
    rate = rates(segment(schedule))
    after_warmup = [rate(tokens) for tokens in range(10, 111)]
    assert after_warmup[0] == 1.0 and after_warmup[-1] == pytest.approx(0.1)
    assert after_warmup == sorted(after_warmup, reverse=True)


def test_edges() -> None:
    """No warm-up begins just below the peak, one step is enough."""
    assert rates(segment("linear", warmup_tokens=0))(1) == pytest.approx(1 - 0.9 / 110)
    assert rates(segment("wsd", decay_tokens=0))(110) == 1.0
    assert rates(segment("cosine", tokens=1, warmup_tokens=0))(1) == pytest.approx(0.1)


def test_steps_of_one_size_have_bitwise_the_rates_of_counting_steps() -> None:
    """Whatever the size: 3,000 tokens a step give the very numbers of warm-up and cosine in whole steps."""
    sizes = {"tokens": 110 * 3000, "warmup_tokens": 10 * 3000, "decay_tokens": 100 * 3000}
    rate = rates(segment("cosine", peak=3e-4, final=3e-5, **sizes), tokens_per_step=3000)
    for step in range(1, 111):
        by_hand = 3e-4 * step / 10
        if step >= 10:
            by_hand = 3e-5 + (3e-4 - 3e-5) * (0.5 * (1.0 + math.cos(math.pi * (step - 10) / 100)))
        assert rate(step * 3000) == by_hand


def test_a_later_segment_warms_up_from_where_the_one_before_ended() -> None:
    """Rewarming: continuous at the border, to the new peak, and down again; by its own shares."""
    rate = rates(
        segment("cosine"), segment("linear", first_token=110, tokens=50, peak=0.5, final=0.0, warmup_tokens=5)
    )
    assert rate(110) == pytest.approx(0.1)
    assert [rate(110 + tokens) for tokens in (1, 5, 50, 80)] == pytest.approx([0.1 + 0.4 / 5, 0.5, 0.0, 0.0])


def test_each_segment_has_its_own_rates_up_to_its_last_token() -> None:
    """Three segments by hand: the second keeps its peak and the third begins there, not at the second's final
    rate; a segment's last token is its own, and the next one's first is not.
    """
    rate = rates(
        segment("linear", tokens=20, warmup_tokens=0),
        segment("wsd", first_token=20, tokens=30, peak=3.0, final=0.5, warmup_tokens=10, decay_tokens=0),
        segment("linear", first_token=50, tokens=20, peak=2.0, final=0.0, warmup_tokens=4),
        segment("linear", first_token=70, tokens=10, peak=5.0, final=1.0, warmup_tokens=0),
    )
    by_hand = {
        0: 1.0, 10: 0.55, 20: 0.1,
        21: 0.1 + 2.9 / 10, 25: 0.1 + 2.9 / 2, 30: 3.0, 40: 3.0, 50: 3.0,
        51: 2.75, 53: 2.25, 54: 2.0, 62: 1.0, 70: 0.0,
        71: 4.6, 75: 3.0, 80: 1.0, 81: 1.0,
    }  # fmt: skip
    assert {tokens: rate(tokens) for tokens in by_hand} == pytest.approx(by_hand)


def test_steps_of_other_sizes_are_counted_in_what_they_have_in_common() -> None:
    """Tokens of 6 and 4: the unit is 2, and a step's end between two units has the rate of the lower."""
    identity = SimpleNamespace(
        learning_rates=[segment("linear", tokens=120, warmup_tokens=12, decay_tokens=0)],
        phases=[SimpleNamespace(tokens_per_step=size) for size in (6, 4)],
    )
    rate = learning_rate(identity)
    assert [rate(tokens) for tokens in (6, 10, 11, 12)] == pytest.approx([0.5, 5 / 6, 5 / 6, 1.0])
    assert rate(66) == pytest.approx(0.55) and rate(67) == rate(66) != rate(68)

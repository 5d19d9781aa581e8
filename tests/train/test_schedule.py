"""Learning rates are what the formulas say, by hand."""

from types import SimpleNamespace

import pytest

from kielo.recipe.errors import KieloError
from kielo.train.schedule import learning_rate


def settings(schedule: str, **changes: object) -> SimpleNamespace:
    values = {"learning_rate": 1.0, "final_learning_rate": 0.1, "total_steps": 110, "warmup_steps": 10, "decay_steps": 20}
    return SimpleNamespace(schedule=schedule, **(values | changes))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # steps:      1    5    10   60                                100
        ("cosine", [0.1, 0.5, 1.0, 0.1 + 0.9 * 0.5, 0.1 + 0.9 * 0.0244717418]),  # (1 + cos(0.9 π)) / 2
        ("linear", [0.1, 0.5, 1.0, 0.55, 0.19]),
        ("wsd", [0.1, 0.5, 1.0, 1.0, 0.55]),  # decays over steps 90 … 110
    ],
)
def test_five_steps_and_the_ends(schedule: str, expected: list[float]) -> None:
    """Warm-up to the peak, the shape at half and near its end, the final rate at the last step and after it."""
    rate = learning_rate(settings(schedule))
    assert [rate(step) for step in (1, 5, 10, 60, 100)] == pytest.approx(expected, rel=1e-9)
    assert rate(110) == rate(500) == pytest.approx(0.1)


def test_edges() -> None:
    """No warm-up begins just below the peak, one step is enough, an unknown word is refused with the known ones."""
    assert learning_rate(settings("linear", warmup_steps=0))(1) == pytest.approx(1 - 0.9 / 110)
    assert learning_rate(settings("wsd", decay_steps=0))(110) == 1.0
    assert learning_rate(settings("cosine", total_steps=1, warmup_steps=0))(1) == pytest.approx(0.1)
    with pytest.raises(KieloError, match="cosine, linear, wsd"):
        learning_rate(settings("polynomial"))

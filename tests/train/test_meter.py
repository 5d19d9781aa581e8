"""The figures of a step's row, by a clock that the test moves; and what a finished run must have."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kielo.artifact.metrics import PassedOver
from kielo.recipe.errors import KieloError
from kielo.train import meter as meter_module
from kielo.train.meter import Meter, StepRow, passed_over_row
from kielo.train.watch.checks import refuse_unsound_loss, refuse_unsound_weights

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return clock


def figures(lap: dict[str, float | None]) -> list[float | None]:
    """Tokens per second, TFLOP/s and MFU, seconds and seconds left, each written out by hand below."""
    names = ("tokens_per_second", "tflops_per_second", "mfu", "seconds", "seconds_left")
    return [lap[name] for name in names]


def test_speed_is_that_of_the_steps_since_the_last_lap(now: list[float]) -> None:
    """Of two ranks; FLOPs are those of each token's phase; pauses and passed-over tokens are left out."""
    meter = Meter(ranks=2, total_tokens=1000, device=CPU)
    now[0] = 500.0
    meter.start(0)
    meter.use(3e12, 0, peak_tflops=60.0, planned_tokens_per_second=20.0)
    now[0] += 4.0
    lap = meter.lap(40)
    assert figures(lap) == pytest.approx([10.0, 15.0, 0.25, 4.0, 96.0])
    assert lap["planned_tokens_per_second"] == 20.0
    # 20 tokens of this phase, and 20 of one with twice the FLOPs, on a device without a known peak
    meter.use(6e12, 60, peak_tflops=None)
    now[0] += 2.0
    with meter.paused():
        now[0] += 100.0
    now[0] += 2.0
    lap = meter.lap(80)
    assert figures(lap) == pytest.approx([10.0, 180 / 4 / 2, None, 8.0, 92.0])
    assert lap["planned_tokens_per_second"] is None
    meter.pass_over(90, 190)
    now[0] += 5.0
    assert figures(meter.lap(200)) == pytest.approx([4.0, 20 * 6 / 5 / 2, None, 13.0, 200.0])


def test_work_that_is_discarded_has_taken_its_time(now: list[float]) -> None:
    """After going back from 300 tokens to 200, what is done again counts, and all of the time."""
    meter = Meter(1, 1000, CPU)
    meter.use(1e12, 0, 10.0)
    meter.start(100)
    now[0] += 10.0
    meter.lap(200)
    now[0] += 10.0
    meter.use(1e12, 300, 10.0)
    meter.go_back(200)
    now[0] += 10.0
    assert figures(meter.lap(240)) == pytest.approx([2.0, 2.0, 0.2, 30.0, 380.0])


def test_a_clock_that_stands_still_divides_by_no_zero(now: list[float]) -> None:
    lap = Meter(1, 1000, CPU).lap(0)
    assert figures(lap) == pytest.approx([0.0, 0.0, None, 1e-9, 1e12])


def test_a_row_has_the_numbers_of_its_step(now: list[float]) -> None:
    state = SimpleNamespace(step=7, tokens=280, samples=14)
    meter = Meter(1, 1000, CPU)
    now[0] += 28.0
    make_row = StepRow(meter, SimpleNamespace(skipped=3, without_labels=1))
    make_row.phase = 2
    row = make_row(state, torch.tensor(1.5), torch.tensor(0.25), 1e-3)
    assert (row.step, row.tokens, row.samples, row.phase, row.skipped) == (7, 280, 14, 2, 3)
    assert row.without_labels == 1
    assert (row.loss, row.gradient_norm, row.learning_rate, row.tokens_per_second) == (1.5, 0.25, 1e-3, 10.0)
    assert passed_over_row(state, 2, 5, "spike") == PassedOver(
        step=7, tokens=280, samples=14, phase=2, passed_over_from=5, passed_over_for="spike"
    )


def test_weights_that_are_not_finite_are_named_and_how_many_more() -> None:
    """An infinity of either sign and NaN; a parameter without elements on this rank is sound."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "abcd"})
    model["e"] = nn.Parameter(torch.ones(0))
    refuse_unsound_weights(model, CPU)
    with torch.no_grad():
        for name, value in (("c", math.nan), ("b", -math.inf), ("d", math.inf)):
            model[name][1] = value
            first = "b" if name != "c" else "c"
            more = {"c": "", "b": " and 1 more", "d": " and 2 more"}[name]
            with pytest.raises(KieloError, match=rf"NaN or infinities: {first}{more}\. The run is not"):
                refuse_unsound_weights(model, CPU)
    refuse_unsound_weights(nn.Module(), CPU)


@pytest.mark.parametrize("loss", (math.nan, math.inf))
def test_a_run_ends_with_a_finite_held_out_loss(loss: float) -> None:
    refuse_unsound_loss(20, 2.5)
    refuse_unsound_loss(20, None)
    with pytest.raises(KieloError, match=f"step 20, the last: the held-out loss is {loss}"):
        refuse_unsound_loss(20, loss)

"""The guard counts steps that are not finite, ends a run of too many in a row, and goes on from its state."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Fp8, TrainIdentity
from kielo.train.watch import checks
from kielo.train.watch.checks import Guard, GuardState

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def guard(most: int = 3, remembered: int = 4) -> Guard:
    settings = TrainIdentity(max_skipped_steps_in_a_row=most, fp8=Fp8(watch_steps=remembered))
    return Guard(CPU, settings)


def take(guard: Guard, *rows: tuple[float, float]) -> list[tuple[float, bool]]:
    """For each row (loss, norm): (what the optimiser is told, whether the host sees a bad step)."""
    return [
        (guard.check(torch.tensor(loss), torch.tensor(norm)).item(), guard.was_bad()) for loss, norm in rows
    ]


def test_a_step_is_left_out_if_its_loss_or_its_norm_is_not_finite() -> None:
    """Bad steps are counted in all and in a row; a sound one ends the row."""
    watch = guard()
    rows = [(1.0, 2.0), (NAN, 2.0), (1.0, INF), (1.0, 1.0), (-INF, 1.0)]
    bad, sound = (1.0, True), (0.0, False)
    assert take(watch, *rows) == [sound, bad, bad, sound, bad]
    assert (watch.bad_in_a_row, watch.skipped, watch.steps_behind) == (1, 3, 0)


def test_steps_without_a_label_are_counted_and_not_remembered() -> None:
    """Such a step is sound; a loss of 0 with a gradient, as after an overflow, is a step with labels."""
    watch = guard()
    assert take(watch, (2.0, 1.0), (0.0, 0.0), (0.0, 0.5), (0.0, 0.0)) == [(0.0, False)] * 4
    assert (watch.without_labels, watch.skipped) == (2, 0)
    assert watch.last(4) == [(2.0, 1.0), (0.0, 0.5)] and watch.last(1) == []
    later = guard()
    later.restore(GuardState.read(json.loads(json.dumps(asdict(watch.state())))))
    take(later, (0.0, 0.0))
    assert later.without_labels == 3 and later.last(9) == [(2.0, 1.0), (0.0, 0.5)]
    later.restore(GuardState.read({"in_a_row": 0, "skipped": 1}))  # of a version that did not count them
    assert (later.without_labels, later.skipped) == (0, 1)


def test_a_run_ends_with_as_many_bad_steps_in_a_row_as_are_allowed() -> None:
    """Not with one fewer. The first of them is named, from step 1 on, to the caller too."""
    watch, named = guard(most=3), []

    def way_on(first: int) -> str:
        named.append(first)
        return "A way on. "

    watch.stop_if_diverged(1, way_on)  # before anything was read
    for step in (7, 8):
        take(watch, (NAN, 1.0))
        watch.stop_if_diverged(step, way_on)
    take(watch, (NAN, 1.0))
    with pytest.raises(KieloError) as caught:
        watch.stop_if_diverged(9, way_on)
    message = str(caught.value)
    assert named == [7] and message.startswith("step 9: the loss or the gradient norm was not finite 3 steps")
    assert "(train.max_skipped_steps_in_a_row = 3), so the run stops. A way on. Fix: " in message
    assert "train.skip_steps = [[7, 9]]" in message and "`kielo data RECIPE --step 7`" in message
    with pytest.raises(KieloError, match=r"skip_steps = \[\[1, 2\]\]"):
        watch.stop_if_diverged(2)  # three bad steps in a row are said to begin at step 1 at the earliest


class OneStepLate:
    """Reads as a GPU does: the numbers of the step before."""

    steps_behind = 1

    def __init__(self, device: torch.device):
        self.before: list[float] | None = None

    def read(self, numbers: torch.Tensor) -> list[float] | None:
        found, self.before = self.before, numbers.tolist()
        return found


def test_a_guard_that_reads_a_step_late_names_the_first_bad_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 7 and 8 are bad, which is known after step 9. A resume reads nothing from before it."""
    monkeypatch.setattr(checks, "DelayedReader", OneStepLate)
    watch = guard(most=2)
    assert [seen for _, seen in take(watch, (1.0, 1.0), (NAN, 1.0), (NAN, 1.0))] == [False, False, True]
    watch.stop_if_diverged(8)
    assert [seen for _, seen in take(watch, (1.0, 1.0))] == [True] and watch.steps_behind == 1
    with pytest.raises(KieloError, match=r"skip_steps = \[\[7, 9\]\]"):
        watch.stop_if_diverged(9)
    take(watch, (NAN, 1.0))
    watch.restore(GuardState(0, 2))
    assert [seen for _, seen in take(watch, (1.0, 1.0))] == [False]


def test_the_last_steps_are_remembered_oldest_first() -> None:
    """As many as fit: fewer, just as many and more steps than the ring holds."""
    watch = guard(remembered=3)
    assert watch.last(5) == []
    rows = [(float(step), 10.0 * step) for step in range(1, 8)]
    for number, row in enumerate(rows, start=1):
        take(watch, row)
        assert watch.last(5) == rows[max(0, number - 3) : number]
        assert watch.last(2) == rows[max(0, number - 2) : number]
    assert watch.last(0) == []


@pytest.mark.parametrize("taken", (2, 3, 7))
@pytest.mark.parametrize("kept", (2, 4))
def test_a_resumed_guard_goes_on_as_if_it_had_not_stopped(taken: int, kept: int) -> None:
    """Its state goes through JSON, with NaN; into a ring of its size or a smaller one."""
    rows = [(1.0, 2.0), (NAN, 3.0), (INF, 4.0), (4.0, 5.0), (NAN, 6.0), (6.0, NAN), (NAN, 8.0), (8.0, 9.0)]
    whole, resumed = guard(9, 4), guard(9, kept)
    take(whole, *rows[:taken])
    take(resumed, (9.0, 9.0), (NAN, 9.0), (9.0, 9.0))
    state = json.loads(json.dumps(asdict(whole.state()), allow_nan=False))
    assert state["in_a_row"] == whole.bad_in_a_row and state["skipped"] == whole.skipped
    resumed.restore(GuardState.read(state))
    for row in (None, *rows[taken:]):
        if row is not None:
            assert take(resumed, row) == take(whole, row)
        assert (resumed.bad_in_a_row, resumed.skipped) == (whole.bad_in_a_row, whole.skipped)
        # What was not finite before the stop is NaN after it.
        ours, theirs = (torch.tensor(watch.last(kept)).nan_to_num(-1, -1, -1) for watch in (resumed, whole))
        assert torch.equal(ours, theirs)


def test_the_state_of_a_version_without_a_ring_is_taken() -> None:
    watch = guard()
    take(watch, (1.0, 1.0))
    watch.restore(GuardState.read({"in_a_row": 2, "skipped": 5}))
    assert (watch.bad_in_a_row, watch.skipped, watch.last(4)) == (2, 5, [])
    assert watch.state() == GuardState(2, 5, 0, [])

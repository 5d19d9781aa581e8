"""A turn of the training loop, by stand-ins that note what is asked of them, in its order."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.train.loop import fit, optimiser_step
from kielo.train.parts import PhaseParts, StepParts
from kielo.train.state import State
from kielo.train.watch.checks import Divergence, NotFinite, TakenStep
from kielo.train.watch.spikes import WentBack


class Noted:
    """Notes calls in `done`, as (name, arguments…)."""

    def __init__(self, done: list[tuple], name: str, answers: dict[str, Any]):
        self.done, self.of, self.answers = done, name, answers

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.done.append((f"{self.of}.{name}", *given))
            answer = self.answers.get(f"{self.of}.{name}")
            return answer(*given) if callable(answer) else answer

        return call


class Looping:
    """A run after step 4; `answers`: what its parts say, by name, or None."""

    def __init__(self, **answers: Any):
        self.done: list[tuple] = []
        given = {name.replace("__", "."): answer for name, answer in answers.items()}

        def part(name: str) -> Noted:
            return Noted(self.done, name, given)

        self.state = State(4, 400, 40, spikes=[WentBack(5, 5, 0.25)])
        self.device = None
        for name in ("speed_watch", "garbage", "profile", "resources", "log", "checkpoints", "replica_check"):
            setattr(self, name, part(name))
        self.checks = (part("first check"), part("second check"))
        self.guard, self.stop = part("guard"), part("stop")
        self.guard.steps_behind, self.stop.is_save_agreed = 1, given.get("save_agreed", False)
        self.meter = SimpleNamespace(paused=lambda: self.pause("the meter"))
        self.time_limits = SimpleNamespace(
            paused=self.pause, progress=SimpleNamespace(at_files=nullcontext),
            step_done=lambda step: self.done.append(("time_limits.step_done", step)),
        )  # fmt: skip
        self.alert = lambda *alert: self.done.append(("alert", *alert))
        self.learning_rate = lambda tokens: tokens / 100
        self.step_row = lambda *row: ("row", *row[1:])
        step = StepParts(
            lambda batch: self.done.append(("forward_backward", batch)) or "loss",
            lambda: self.done.append(("clip",)) or "norm",
            self.guard,
            part("optimiser"),
            (
                lambda batch: self.done.append(("on_gradients", batch)),
                lambda batch: self.done.append(("also on_gradients", batch)),
            ),
        )
        step.forward_backward.own_loss = "own loss"
        self.current = SimpleNamespace(
            step=step, layer_times="layer times", local_finite="local finite", heldout=part("heldout"),
            replicas="replicas", periodic=(part("statistics"),),
        )  # fmt: skip
        self.current.heldout.name, self.current.periodic[0].name = "held-out text", "statistics"
        self.feed = part("feed")

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        self.done.append(("pause", what))
        yield
        self.done.append(("go on", what))

    def fit(self, last_step: int) -> bool:
        return fit(self, PhaseParts(self.feed, last_step, 100, 10))


def taken(number: int) -> TakenStep:
    return TakenStep(number, "loss", "norm", "own loss", "local finite", "replicas")


def step(number: int) -> list[tuple]:
    """What a step does before anything is asked of it; the batch has the number of the step."""
    return [
        ("feed.take", number), ("speed_watch.begin", number, "layer times"), ("forward_backward", number),
        ("on_gradients", number), ("also on_gradients", number), ("clip",), ("guard.check", "loss", "norm"),
        ("optimiser.step", number * 0.25, "skip"), ("optimiser.zero_grad",),
        ("speed_watch.end", "layer times"),
    ]  # fmt: skip


def ordinary(number: int) -> list[tuple]:
    return [
        ("first check.after_step", taken(number)), ("second check.after_step", taken(number)),
        ("profile.step", number), ("time_limits.step_done", number), ("garbage.step", number),
    ]  # fmt: skip


TAKEN = {"feed__take": lambda number: number, "guard__check": "skip"}


def test_a_step_in_which_nothing_is_due() -> None:
    """The rate is that of its tokens, times the spike's factor; the last step says so to the comparison."""
    run = Looping(**TAKEN)
    assert run.fit(6) is False
    assert (run.state.step, run.state.tokens, run.state.samples) == (6, 600, 60)
    assert run.done == [
        call
        for number, is_last in ((5, False), (6, True))
        for call in [
            *step(number), *ordinary(number), ("log.due", number), ("heldout.due", number),
            ("statistics.due", number), ("resources.look", number), ("stop.agreed", number),
            ("checkpoints.due", number), ("checkpoints.is_copy_due", number),
            *([("replica_check.before_keeping", taken(number))] if is_last else []),
        ]
    ]  # fmt: skip
    run.done.clear()
    assert run.fit(6) is False and run.done == []


def in_pause(what: str, *calls: tuple) -> list[tuple]:
    return [("pause", "the meter"), ("pause", what), *calls, ("go on", what), ("go on", "the meter")]


def test_rows_are_logged_and_held_out_text_is_scored_beside_the_clock() -> None:
    """And after it what the caller of the training asked for."""
    rows = {f"{name}__row": lambda state, name=name: (name, state.step) for name in ("heldout", "statistics")}
    run = Looping(**TAKEN, log__due=True, heldout__due=True, statistics__due=True, **rows)
    assert run.fit(5) is False
    begin = len(step(5) + ordinary(5)) + 1
    assert run.done[begin : begin + 15] == [
        ("log.write", ("row", "loss", "norm", 1.25)), ("heldout.due", 5),
        *in_pause("held-out text", ("heldout.row", run.state), ("log.write", ("heldout", 5))),
        ("statistics.due", 5),
        *in_pause("statistics", ("statistics.row", run.state), ("log.write", ("statistics", 5))),
    ]  # fmt: skip


SAVED = in_pause("a save", ("checkpoints.save", "loss"), ("garbage.collect",))
COPIED = in_pause("a copy to memory", ("checkpoints.copy_to_memory", "loss"))


@pytest.mark.parametrize(
    ("answers", "asked", "after", "stops"),
    [
        ({"checkpoints__due": True, "checkpoints__is_copy_due": True}, ["due"], SAVED, False),
        ({"stop__agreed": True}, [], SAVED, True),
        ({"save_agreed": True}, [], SAVED, False),
        ({"checkpoints__is_copy_due": True}, ["due", "is_copy_due"], COPIED, False),
    ],
)
def test_a_step_after_which_the_state_is_kept(answers: dict, asked: list, after: list, stops: bool) -> None:
    """Once: a save is no copy too. Replicas are compared before; a stop ends the phase."""
    run = Looping(**TAKEN | answers)
    assert run.fit(6) is stops
    at = run.done.index(("stop.agreed", 5)) + 1
    expected = [
        *((f"checkpoints.{name}", 5) for name in asked), ("replica_check.before_keeping", taken(5)),
        *after,
    ]  # fmt: skip
    assert run.done[at : at + len(expected)] == expected
    assert run.state.step == (5 if stops else 6)
    assert run.done[at + len(expected) :][:1] == ([] if stops else [("feed.take", 6)])


def test_a_check_that_goes_back_ends_the_phase_before_anything_is_kept() -> None:
    """The checks after it are not asked any more."""
    back = lambda step: "go back"  # noqa: E731
    run = Looping(**TAKEN, **{"first check__after_step": back}, stop__agreed=True)
    assert run.fit(6) is False and run.done == [*step(5), ordinary(5)[0]]
    run = Looping(**TAKEN, replica_check__before_keeping=back, stop__agreed=True)
    assert run.fit(6) is False and run.done[-1][0] == "replica_check.before_keeping"


def test_a_step_that_was_not_finite_is_told_and_too_many_end_the_run() -> None:
    """The loss of the rank is noted first; what the host knows may be of the step before."""
    done, guard = [], SimpleNamespace(was_bad=lambda: True, steps_behind=1)
    finite = SimpleNamespace(note=lambda *of: done.append(of), seen=lambda behind: (5 - behind, "rank 1"))
    check = NotFinite(guard, lambda *alert: done.append(alert))
    step = replace(taken(5), local_finite=finite)
    assert check.after_step(step) == "continue"
    told = (4, "the step was not finite and is skipped. First seen by rank 1")
    assert done == [(5, "own loss"), told]
    guard.was_bad, guard.stop_if_diverged = lambda: False, lambda *asked: done.append(asked)
    assert check.after_step(step) == Divergence(guard, "way on").after_step(step) == "continue"
    assert done[2:] == [(5, "own loss"), (5, "way on")]


def test_one_step_alone() -> None:
    """As `kielo verify` takes it: without anything that looks at gradients."""
    run = Looping(**TAKEN)
    parts = StepParts(lambda batch: "loss", lambda: "norm", run.guard, run.current.step.optimiser)
    assert optimiser_step(parts, "batch", 0.5) == ("loss", "norm")
    assert run.done == [
        ("guard.check", "loss", "norm"),
        ("optimiser.step", 0.5, "skip"),
        ("optimiser.zero_grad",),
    ]

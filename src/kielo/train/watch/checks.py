"""What the loop asks after each step: may the run go on, or must it go back to an earlier checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kielo.parallel.replicas import Replicas
from kielo.train.watch.guard import Guard
from kielo.train.watch.local_finite import LocalFinite

Answer = Literal["go on", "go back"]


@dataclass(frozen=True)
class TakenStep:
    """A step that was taken, and the present model's watches. own_loss: this rank's part of the loss."""

    step: int
    loss: Tensor
    gradient_norm: Tensor
    own_loss: Tensor
    local_finite: LocalFinite
    replicas: Replicas


class Check(Protocol):
    """A check of each step. All ranks ask it together and get the same answer."""

    def after_step(self, taken: TakenStep) -> Answer:
        """Makes an earlier checkpoint the newest to go back. Raises KieloError to stop the run."""


class NotFinite:
    """Alerts of a step that was not finite, with the ranks that saw it first."""

    def __init__(self, guard: Guard, alert: Callable[[int, str], None]):
        self._guard, self._alert = guard, alert

    def after_step(self, taken: TakenStep) -> Answer:
        taken.local_finite.note(taken.step, taken.own_loss)
        if self._guard.was_bad():
            step, found = taken.local_finite.seen(self._guard.steps_behind)
            self._alert(step, f"the step was not finite, and is left out; first seen by {found}")
        return "go on"


class Divergence:
    """Stops the run after too many steps in a row that were not finite. way_on: see `Guard`."""

    def __init__(self, guard: Guard, way_on: Callable[[int], str]):
        self._guard, self._way_on = guard, way_on

    def after_step(self, taken: TakenStep) -> Answer:
        self._guard.stop_if_diverged(taken.step, self._way_on)
        return "go on"

"""Skip steps whose loss or gradient norm is not finite, and end a run with too many bad steps in a row.

Loss and gradient norm are the same on every rank. The flag for the optimiser stays on the device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainIdentity
from kielo.train.watch.delayed_reader import DelayedReader


def has_no_label(loss: Any, gradient_norm: Any) -> Any:
    """Return True for a step in which no label counted: loss and gradient are exactly 0."""
    return (loss == 0) & (gradient_norm == 0)


@dataclass(frozen=True)
class GuardState:
    """The counts of bad steps, and (loss, norm) of the last steps, None for a number that is not finite."""

    in_a_row: int
    skipped: int
    without_labels: int = 0
    last: Sequence[Sequence[float | None]] = ()

    @staticmethod
    def read(plain: Mapping[str, Any]) -> "GuardState":
        return GuardState(**{name: plain[name] for name in GuardState.__annotations__ if name in plain})


class Guard:
    """The counts of bad steps on the device, so that a sound step costs no wait. The host reads them late."""

    def __init__(self, device: torch.device, train: TrainIdentity):
        self.device = device
        self._max_in_a_row = train.max_skipped_steps_in_a_row
        # a ring of (loss, norm)
        self._remembered = torch.full((train.fp8.watch_steps, 2), math.nan, device=device)
        self._steps = 0  # checked so far; the ring has the last steps
        # bad in a row, bad so far, without a label so far
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._late = DelayedReader(device)
        self._read: list[float] | None = None

    def check(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        """Return a float32 scalar on the device, the same on all ranks: 1 if this step must be skipped."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(gradient_norm))
        self._counts[0] = (self._counts[0] + 1) * bad
        self._counts[1] += bad
        self._counts[2] += has_no_label(loss, gradient_norm)
        row = torch.stack((loss.float(), gradient_norm.float()))
        self._remembered[self._steps % len(self._remembered)] = row
        self._steps += 1
        return bad.to(torch.float32)

    @property
    def steps_behind(self) -> int:
        """By how many steps `was_bad` and `stop_if_diverged` are late."""
        return self._late.steps_behind

    def was_bad(self) -> bool:
        """Return True if the last finished step was bad. All ranks call it once after each step."""
        self._read = self._late.read(self._counts)
        return bool(self._read and self._read[0])

    def stop_if_diverged(self, step: int, way_on: Callable[[int], str] = lambda first_bad_step: "") -> None:
        """Raise KieloError after too many bad steps in a row. way_on: first bad step → how to resume."""
        counts = self._read
        if counts is None or counts[0] < self._max_in_a_row:
            return
        first_bad_step = max(1, step - self._late.steps_behind - int(counts[0]) + 1)
        raise KieloError(
            f"step {step}: the loss or the gradient norm was not finite {int(counts[0])} steps in a row "
            f"(train.max_skipped_steps_in_a_row = {self._max_in_a_row}), so the run stops. "
            f"{way_on(first_bad_step)}Fix: train.skip_steps = [[{first_bad_step}, {step}]] if the text is at "
            f"fault (see `kielo data RECIPE --step {first_bad_step}`). Or, in a new run, a lower "
            "train.learning_rate or a longer train.warmup_share"
        )

    @property
    def bad_in_a_row(self) -> int:
        """The bad steps since the last sound step. Waits for the device."""
        return int(self._counts[0].item())

    @property
    def skipped(self) -> int:
        """The skipped steps since step 1. Waits for the device."""
        return int(self._counts[1].item())

    @property
    def without_labels(self) -> int:
        """The steps without a counted label since step 1. Waits for the device."""
        return int(self._counts[2].item())

    def last(self, steps: int) -> list[tuple[float, float]]:
        """Return loss and norm of the last steps with a label, oldest first. Waits for the device."""
        size = len(self._remembered)
        rows = self._remembered.tolist()
        last = [rows[step % size] for step in range(max(0, self._steps - min(steps, size)), self._steps)]
        return [(loss, norm) for loss, norm in last if not has_no_label(loss, norm)]

    def state(self) -> GuardState:
        in_a_row, skipped, without_labels = self._counts.tolist()
        rows = self.last(len(self._remembered))
        last = [[value if math.isfinite(value) else None for value in row] for row in rows]
        return GuardState(in_a_row, skipped, without_labels, last)

    def restore(self, state: GuardState) -> None:
        self._counts.copy_(torch.tensor([state.in_a_row, state.skipped, state.without_labels]))
        self._late = DelayedReader(self._counts.device)  # counts of later steps may be under way
        last = state.last[-len(self._remembered) :]
        for number, row in enumerate(last):
            self._remembered[number] = torch.tensor([math.nan if value is None else value for value in row])
        self._steps = len(last)

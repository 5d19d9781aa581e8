"""Deliberate stops: a signal to any rank, a trigger file, a step limit or a cause ends the run after a whole
step.

`agreed(step)` gives the same answer on every rank.
"""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType

import torch
import torch.distributed as dist

from kielo.train.signals import INTERRUPTED, Handler, Presses, Triggers, give_signals_back, take_over_signals
from kielo.train.watch.checks import DelayedReader


class StoppedBeforeTraining(BaseException):
    """A signal came while the ranks met, so there is no step to finish and nothing to save."""


class Stop:
    """The wish to stop. It takes over the stop signals while it is entered.

    Enter it before the world starts: a signal before `use` raises StoppedBeforeTraining. A second Ctrl-C ends
    the process. is_telling: this rank prints that a signal came. triggers: the files that this rank looks at.
    """

    def __init__(
        self, step_limit: int | None = None, is_telling: bool = False, triggers: Triggers | None = None
    ):
        self.wanted, self.cause = False, ""
        self.is_save_agreed = self.is_settled = False  # settled: all ranks know of a stop, by `settle`
        self._is_save_wanted = False
        self._triggers, self._step_limit, self._is_telling = triggers, step_limit, is_telling
        self._presses = Presses()
        self._handlers_before: dict[int, Handler] = {}
        self._is_meeting = True
        self._device = torch.device("cpu")
        self._late = DelayedReader(self._device)
        self._at_files: Callable[[], AbstractContextManager[object]] = nullcontext

    def __enter__(self) -> "Stop":
        self._handlers_before = take_over_signals(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        give_signals_back(self._handlers_before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between any two instructions, also inside a collective or a print: do no more.
        if self._presses.is_second(number):
            self._tell("ended at once, unsaved. The same command resumes from the newest checkpoint")
            os._exit(INTERRUPTED)
        if self._is_meeting and not self.wanted:
            self.wanted = True
            raise StoppedBeforeTraining
        if not self.wanted:
            again = ". Ctrl-C again ends at once, unsaved" if number == signal.SIGINT else ""
            self._tell(f"{signal.Signals(number).name}: finishing the step and saving{again}")
        self.wanted = True

    def ask(self, cause: str) -> None:
        """Make all ranks stop after a step, as a signal does. The run's outcome names `cause`."""
        self.wanted, self.cause = True, self.cause or cause

    def _tell(self, text: str) -> None:
        if self._is_telling:
            with suppress(OSError):
                os.write(2, f"\nkielo: {text}\n".encode())

    def use(
        self, device: torch.device, at_files: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Set the device once all ranks have met. `at_files` is entered to read trigger files."""
        self._is_meeting, self._at_files = False, at_files
        self._device, self._late = device, DelayedReader(device)

    def look(self) -> bool:
        """Return True if this rank was asked to stop. It reads the trigger files."""
        if self._triggers is not None:
            with self._at_files():
                is_stop_wanted, is_save_wanted = self._triggers.look()
            if is_stop_wanted and not self.wanted:
                self._tell("triggers/stop: finishing the step and saving")
            self.wanted = self.wanted or is_stop_wanted
            self._is_save_wanted = self._is_save_wanted or is_save_wanted
        return self.wanted

    def settle(self) -> bool:
        """Return True on every rank if any rank was asked to stop. The run then stops after this step.

        All ranks call it in long work between steps, and wait for the device.
        """
        ranks_that_want = torch.full((1,), float(self.look()), device=self._device)
        dist.all_reduce(ranks_that_want)
        self.is_settled = self.is_settled or bool(ranks_that_want.item())
        self.wanted = self.wanted or self.is_settled
        return self.is_settled

    def agreed(self, step: int) -> bool:
        """Return True if the run must stop after `step`: at once on the CPU, one step later on a GPU.

        All ranks call it, because a rank that left alone would hang the rest. It sets `is_save_agreed`.
        """
        # filled on the device, because a copy from ordinary memory would make the host wait
        ranks_that_want = torch.zeros(2, device=self._device)
        if self.look():
            ranks_that_want[0].fill_(1)
        if self._is_save_wanted:
            ranks_that_want[1].fill_(1)
        self._is_save_wanted = False
        dist.all_reduce(ranks_that_want)
        seen = self._late.read(ranks_that_want)
        self.is_save_agreed = bool(seen and seen[1])
        return self.is_at_limit(step) or self.is_settled or bool(seen and seen[0])

    def is_at_limit(self, step: int) -> bool:
        return self._step_limit is not None and step >= self._step_limit

"""Stopping on purpose: a signal to any rank, or a step limit, ends the run after a step that all ranks agree on.

In: SIGTERM or SIGUSR1 (what Slurm, torchrun and people send). Out: `agreed(step)`, the same answer on every rank.
"""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from kielo.train.late import LateReader

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Remembers that a signal came. As a context it takes over the signals, from before the world is up (that can
    take minutes) to the end, and then gives them back. `step_limit`: stop after this step as if a signal had come.
    """

    def __init__(self, step_limit: int | None = None):
        self.wanted = False
        self._step_limit = step_limit
        self._handlers_before: dict[signal.Signals, object] = {}
        self._device = torch.device("cpu")
        self._late = LateReader(self._device)

    def __enter__(self) -> "Stop":
        self._handlers_before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing else here: a handler runs between any two instructions, also inside a collective.
        self.wanted = True

    def use(self, device: torch.device) -> None:
        """The device that the ranks' process group works on."""
        self._device, self._late = device, LateReader(device)

    def agreed(self, step: int) -> bool:
        """Whether to stop after `step`: at once on the CPU, one step later on a GPU (see `late.py`).

        Called by all ranks. A signal reaches them at different times, and a rank that left alone would hang the rest.
        """
        # Made on the device: copying a number there from ordinary memory would make the host wait.
        ranks_that_want = torch.full((1,), float(self.wanted), device=self._device)
        dist.all_reduce(ranks_that_want)
        seen = self._late.read(ranks_that_want)
        at_limit = self._step_limit is not None and step >= self._step_limit
        return at_limit or bool(seen and seen[0])

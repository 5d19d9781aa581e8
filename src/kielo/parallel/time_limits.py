"""Time limits of collectives: long until the first steps of a range are done, then short.

The first steps compile and connect; in a pipeline each stage compiles only when the one before it has sent
its output. Later a rank that stops answering must end the job soon. NCCL watches collectives and messages.
gloo (on CPUs) watches collectives; a message of a pipeline keeps the limit with which its group was made
(`Startup.group_timeout`; torch cannot change it later), and ends at once where the other process has ended.

The same moments tell the heartbeat what a rank does (`progress.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout  # the same in torch 2.10, 2.11 and 2.13

from kielo.parallel.progress import STEPS, Progress

_FIRST_STEPS = 2  # the third step is compiled and warm


class TimeLimits:
    """The time limits of `groups`, long at first.

    long_seconds, short_seconds: how long a rank may wait for another one in a collective, before and after
    the first steps of a range are done. progress: is told what this rank does.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        long_seconds: float,
        short_seconds: float,
        progress: Progress | None = None,
    ):
        self._groups, self._long, self._short = groups, long_seconds, short_seconds
        self.progress = progress or Progress(short_seconds, short_seconds, long_seconds, short_seconds)
        self.restart()

    def restart(self) -> None:
        """Sets the long limit; called before the parts of a range of steps are built."""
        self._steps = 0
        self._set(self._long)
        self.progress.begin("the build and the first steps")

    def step_done(self, step: int) -> None:
        """Counts a step of the range; after the first ones the short limit holds."""
        self._steps += 1
        self.progress.step_done(step)
        if self._steps == _FIRST_STEPS:
            self._set(self._short)
            self.progress.begin(STEPS)

    @property
    def still_seconds(self) -> float:
        """How long the ranks may show no progress now."""
        return self.progress.limits()[0]

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Sets the long limit for work between steps: held-out text (which compiles too) and saves."""
        self._set(self._long)
        with self.progress.during(doing):
            yield
        self._set(self._long if self._steps < _FIRST_STEPS else self._short)

    def _set(self, seconds: float) -> None:
        for group in self._groups:
            _set_pg_timeout(timedelta(seconds=seconds), group)

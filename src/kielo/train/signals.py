"""The signals that mean stop: SIGTERM, SIGUSR1, SIGINT and SIGHUP.

Slurm, torchrun and people send SIGTERM and SIGUSR1; Ctrl-C is SIGINT; a closed terminal sends SIGHUP.
Torch-free: what starts the ranks uses it as well.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130  # the exit code of a process that was ended by Ctrl-C
# One Ctrl-C may arrive twice: the terminal signals the whole process group, and a parent passes it on.
_SAME_PRESS_SECONDS = 1.0


def take_over_signals(note: Callable[[int, FrameType | None], None]) -> dict[int, object]:
    """Has `note` called for the signals that mean stop; returns the handlers before.

    SIGINT and SIGHUP that are ignored, as under nohup or in the background of a script, stay ignored.
    """
    taken = [signal.SIGTERM, signal.SIGUSR1]
    taken += [
        number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, note) for number in taken}


def give_signals_back(handlers_before: dict[int, object]) -> None:
    for number, handler in handlers_before.items():
        signal.signal(number, handler)


class Presses:
    """Distinguishes a second Ctrl-C from the first."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_second(self, number: int) -> bool:
        if number != signal.SIGINT:
            return False
        if self._first is None:
            self._first = time.monotonic()
        return time.monotonic() - self._first > _SAME_PRESS_SECONDS

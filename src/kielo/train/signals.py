"""Requests to a running training to save or stop: signals, and files in `RUN/triggers`. Torch-free.

Slurm, torchrun and people send SIGTERM and SIGUSR1, Ctrl-C SIGINT, a closed terminal SIGHUP. Files are for
people who cannot signal the processes: `save` saves after the step, `stop` also stops, until the file is
gone.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from kielo.recipe.errors import KieloError

INTERRUPTED = 130  # the exit code after Ctrl-C
REQUEUE = 75  # the exit code of a process that stopped on purpose and must be started again
# A Ctrl-C may arrive twice: the terminal signals the whole process group, and a parent passes it on.
_SAME_PRESS_SECONDS = 1.0
FOLDER = "triggers"
_LOOK_SECONDS = 5.0  # thousands of nodes must not ask their file system at every step

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None  # as in `signal`


def take_over_signals(note: Callable[[int, FrameType | None], None]) -> dict[int, Handler]:
    """Call `note` for the signals that mean stop, unless ignored. Return the handlers before."""
    ignorable = (signal.SIGINT, signal.SIGHUP)
    taken = [number for number in ignorable if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1, *taken)}


def give_signals_back(handlers_before: dict[int, Handler]) -> None:
    for number, handler in handlers_before.items():
        signal.signal(number, handler)


class Presses:
    def __init__(self) -> None:
        self._first: float | None = None

    def is_second(self, number: int) -> bool:
        if number != signal.SIGINT:
            return False
        if self._first is None:
            self._first = time.monotonic()
        return time.monotonic() - self._first > _SAME_PRESS_SECONDS


class Triggers:
    """The trigger files of one run, for its first rank. A `save` from before the start is ignored."""

    def __init__(self, run_folder: Path, look_seconds: float = _LOOK_SECONDS):
        self._stop, self._save = run_folder / FOLDER / "stop", run_folder / FOLDER / "save"
        self._look_seconds = look_seconds
        self._next_look = time.monotonic()
        self._saved_for = _changed_at(self._save)

    def refuse_start(self) -> None:
        if self._stop.exists():
            raise KieloError(f"{self._stop}: asks this run to stay stopped. Fix: remove that file")

    def look(self) -> tuple[bool, bool]:
        """Return (is a stop asked for, is a save asked for). Each touch of `save` is answered once."""
        if time.monotonic() < self._next_look:
            return False, False
        self._next_look = time.monotonic() + self._look_seconds
        changed_at = _changed_at(self._save)
        is_new = changed_at is not None and changed_at != self._saved_for
        self._saved_for = changed_at
        return self._stop.exists(), is_new


def _changed_at(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None

"""Requests to a running training to save or stop: signals, and files in `RUN/triggers`."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from kielo.recipe.errors import KieloError

# The signals that mean stop: SIGTERM, SIGUSR1, SIGINT and SIGHUP.
#
# Slurm, torchrun and people send SIGTERM and SIGUSR1; Ctrl-C is SIGINT; a closed terminal sends SIGHUP.
# Torch-free: what starts the ranks uses it as well.


INTERRUPTED = 130  # the exit code of a process that was ended by Ctrl-C
REQUEUE = 75  # the exit code of a process that stopped on purpose: to be started again
# One Ctrl-C may arrive twice: the terminal signals the whole process group, and a parent passes it on.
_SAME_PRESS_SECONDS = 1.0


Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None  # as `signal` has it


def take_over_signals(note: Callable[[int, FrameType | None], None]) -> dict[int, Handler]:
    """Has `note` called for the signals that mean stop; returns the handlers before.

    SIGINT and SIGHUP that are ignored, as under nohup or in the background of a script, stay ignored.
    """
    taken = [signal.SIGTERM, signal.SIGUSR1]
    taken += [
        number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, note) for number in taken}


def give_signals_back(handlers_before: dict[int, Handler]) -> None:
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


# Files that ask a running training for something: `RUN/triggers/save` and `RUN/triggers/stop`.
#
# For people who can write into the run's folder and cannot signal its processes: a colleague without the
# account that the job runs under. Touch `save`, and the run saves after its step; make `stop`, and it saves
# and stops, and starts no more until the file is gone. Kielo only looks at them.


FOLDER = "triggers"
_LOOK_SECONDS = 5.0  # a file system of thousands of nodes is not asked at every step


class Triggers:
    """The files of one run, looked at by its first rank. A `save` of before the start asks for nothing."""

    def __init__(self, run_folder: Path, look_seconds: float = _LOOK_SECONDS):
        self._stop, self._save = run_folder / FOLDER / "stop", run_folder / FOLDER / "save"
        self._look_seconds = look_seconds
        self._next_look = time.monotonic()
        self._saved_for = _changed_at(self._save)

    def refuse_start(self) -> None:
        """Raise KieloError where `stop` is there."""
        if self._stop.exists():
            raise KieloError(f"{self._stop}: asks this run to stay stopped; remove that file to go on")

    def look(self) -> tuple[bool, bool]:
        """Return (stop, save): whether each is asked for. Each touch of `save` is answered once."""
        if time.monotonic() < self._next_look:
            return False, False
        self._next_look = time.monotonic() + self._look_seconds
        changed_at = _changed_at(self._save)
        is_new = changed_at is not None and changed_at != self._saved_for
        self._saved_for = changed_at
        return self._stop.exists(), is_new


def _changed_at(file: Path) -> int | None:
    """Return the file's time of change in ns; None where there is none, or the file system gives none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None

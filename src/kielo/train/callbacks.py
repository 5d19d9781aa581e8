"""Callbacks of other packages: objects that see the rows, checkpoints and alerts of a run, on rank 0.

A package names a class or a function without arguments under the entry point group `kielo.callbacks`. What it
returns may have `on_row(row)`, `on_checkpoint(step, path)` and `on_alert(text)`. Each object has a thread of
its own, so that training never waits for it. The first error, or a call that takes too long, switches it off.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from queue import Empty, SimpleQueue

from kielo.artifact.attempt_files import ALERTS_NAME, Alert
from kielo.artifact.checkpoint_folder import saved_step, step_folders
from kielo.artifact.metrics import Row
from kielo.recipe.errors import KieloError, first_line

logger = logging.getLogger(__name__)
GROUP = "kielo.callbacks"
_LOOK_SECONDS = 2.0  # between two looks for checkpoints and alerts
_MOST_SECONDS = 60.0  # of a call
_MOST_SECONDS_AT_END = 5.0  # of all calls that are left when training ends: other ranks wait for rank 0


def callbacks_of_packages(folder: Path, alert: Callable[[int, str], None]) -> "list[Callback]":
    """Make the callbacks of the installed packages. An object that cannot be made is only an alert.

    folder: the run's `train`. `alert` gets the step and the reason why a callback is off.
    """
    made = []
    for entry in entry_points(group=GROUP):
        try:
            target = entry.load()()
        except Exception as error:  # of another package
            folder.mkdir(parents=True, exist_ok=True)  # it is made later, and the alert needs it
            alert(0, f"callback {entry.name} ({entry.value}) cannot be made: {_described(error)}")
            continue
        logger.info("callback %s (%s)", entry.name, entry.value)
        made.append(Callback(entry.name, target, folder, alert))
    return made


class Callback:
    """A sink of the log that passes rows, checkpoints and alerts to one object, in a thread of its own."""

    def __init__(
        self,
        name: str,
        target: object,
        folder: Path,
        alert: Callable[[int, str], None],
        most_seconds: float = _MOST_SECONDS,
    ) -> None:
        self._name, self._target, self._alert, self._most_seconds = name, target, alert, most_seconds
        self._checkpoints, self._alerts = folder / "checkpoints", folder / ALERTS_NAME
        self._is_on, self._step = True, 0
        self._known: Mapping[int, Path] = {}
        self._began: tuple[str, float] | None = None  # the call that runs, and since when
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        """Begin after `step`; what exists by then is not reported."""
        self._step = step
        if self._is_on:
            self._rows: SimpleQueue[Row | None] = SimpleQueue()
            self._known = self._complete()
            try:
                self._read = self._alerts.stat().st_size
            except OSError:  # no alerts yet
                self._read = 0
            self._thread = threading.Thread(target=self._work, name=f"callback {self._name}", daemon=True)
            self._thread.start()

    def write(self, row: Row) -> None:
        self._step = row.step
        if self._is_on:
            self._rows.put(row)
            self._end_if_stalled()

    def close(self) -> None:
        """Wait for the calls that are left, a few seconds in all. Then the others are given up."""
        if self._thread is None or not self._is_on:
            return
        self._rows.put(None)
        ends = time.monotonic() + _MOST_SECONDS_AT_END
        while self._is_on and self._thread.is_alive() and time.monotonic() < ends:
            self._thread.join(timeout=0.05)
            self._end_if_stalled()
        if self._thread.is_alive():
            self._switch_off(f"its calls took over {_MOST_SECONDS_AT_END:g} s when training ended")
        self._thread = None

    def _work(self) -> None:
        while self._is_on:
            try:
                row = self._rows.get(timeout=_LOOK_SECONDS)
            except Empty:
                self._look()
                continue
            if row is not None:
                self._call("on_row", row)
            self._look()
            if row is None:
                return

    def _look(self) -> None:
        """Report new checkpoints and alerts."""
        before, self._known = self._known, self._complete()
        for step in sorted(self._known.keys() - before.keys()):
            self._call("on_checkpoint", step, self._known[step])
        try:
            with open(self._alerts, "rb") as file:
                file.seek(self._read)
                lines = file.read()
        except OSError:
            return
        whole = lines[: lines.rfind(b"\n") + 1]  # a line may be half written
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                message = Alert.model_validate_json(line).message
            except ValueError:  # a person's line
                continue
            self._call("on_alert", message)

    def _complete(self) -> Mapping[int, Path]:
        """Return step → folder of the complete checkpoints."""
        try:
            folders = step_folders(self._checkpoints)
            return {saved_step(path): path for path in folders if (path / "manifest.json").is_file()}
        except (KieloError, OSError):  # a file system that does not answer now
            return self._known

    def _call(self, method: str, *arguments: object) -> None:
        function = getattr(self._target, method, None)
        if function is None or not self._is_on:
            return
        self._began = (method, time.monotonic())
        try:
            function(*arguments)
        except Exception as error:  # of another package
            self._switch_off(f"{method}: {_described(error)}")
        self._began = None

    def _end_if_stalled(self) -> None:
        if (began := self._began) and time.monotonic() - began[1] > self._most_seconds:
            self._switch_off(f"{began[0]} runs for more than {self._most_seconds:g} s")

    def _switch_off(self, why: str) -> None:
        if self._is_on:
            self._is_on = False
            self._alert(self._step, f"callback {self._name} is switched off: {why}")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"

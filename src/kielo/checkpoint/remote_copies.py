"""Copies of a run's checkpoints at an address, made beside the training by a process of its own.

The process is `kielo checkpoint copy RUN --to ADDRESS`, so that neither its threads nor its encryption take
time from a step. A copy that failed is tried again after the next checkpoint.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.folder_copies import not_copied
from kielo.recipe.errors import KieloError


class RemoteCopies:
    """The copies of the checkpoints in `folder`, on rank 0. on_alert(step, message) gets failures."""

    def __init__(self, folder: Path, address: str, on_alert: Callable[[int, str], None]) -> None:
        self.folder, self.address, self._on_alert = folder, address, on_alert
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object

    def begin(self, step: int) -> None:
        """Start to copy what is not copied yet, unless a copy is under way. Report a failure of the last."""
        if self._process is not None and self._process.poll() is None:
            return
        self._report(step)
        self._errors.truncate(0)
        self._errors.seek(0)
        nice = [program, "-n", "10"] if (program := shutil.which("nice")) else []
        command = [*nice, sys.executable, "-P", "-m", "kielo", "checkpoint", "copy", str(self.folder)]
        try:
            self._process = subprocess.Popen(
                [*command, "--to", self.address],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        except OSError as problem:
            self._on_alert(step, f"{self._begin_of_message()} ({problem.strerror}). {_AGAIN}")

    def kept(self) -> set[str]:
        """Return the names of checkpoints without a verified copy, which stay on this disk."""
        try:
            return {path.name for path in not_copied(self.folder, self.address)}
        except (OSError, KieloError):
            return {path.name for path in step_folders(self.folder)}

    def finish(self, step: int) -> None:
        """Wait until all checkpoints are copied. Report the checkpoints that could not be copied."""
        if self._process is not None:
            self._process.wait()
        if self.kept():
            self.begin(step)
            if self._process is not None:
                self._process.wait()
        self._report(step)
        if left := sorted(self.kept()):
            self._on_alert(
                step,
                f"not copied to {self.address}: {', '.join(left)}. Fix: kielo checkpoint copy {self.folder} "
                f"--to {self.address}",
            )

    def _report(self, step: int) -> None:
        if self._process is None or not self._process.returncode:
            return
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        self._process = None
        said = lines[-1].removeprefix("kielo: ") if lines else "no message"
        self._on_alert(step, f"{self._begin_of_message()}: {said}. {_AGAIN}")

    def _begin_of_message(self) -> str:
        return f"checkpoints could not be copied to {self.address}"


_AGAIN = "The copy is tried again after the next checkpoint"

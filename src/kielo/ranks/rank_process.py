"""The process of a rank, as another rank of its node sees it: its state, and where its threads are.

A process that is frozen is sent SIGUSR2, at which Python's faulthandler writes the stacks of all threads from
inside of the signal, without Python's lock, and SIGCONT. So `kill -USR2 PID` does no harm to a rank.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STACKS_SECONDS = 3.0  # until a frozen process has written its stacks
# The letters of proc(5), field "state".
_STATES = {
    "T": "it was stopped by a signal (SIGSTOP), a debugger or the scheduler",
    "t": "a debugger has stopped it",
    "D": "the kernel does not let it go on: a disk, a network file system or a driver",
    "Z": "it has ended",
    "": "it has ended",
}
_OTHER_STATE = "none of its Python threads runs: a library may hold Python's lock"


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank. stacks_file: its descriptor of the file into which SIGUSR2 writes stacks."""

    host: str
    pid: int
    stacks_file: int

    @classmethod
    def own(cls, stacks_file: int) -> "RankProcess":
        return cls(socket.gethostname(), os.getpid(), stacks_file)

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"

    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def state(self) -> str:
        """Returns in words why the process may be silent."""
        return _STATES.get(self._letter(), _OTHER_STATE)

    def stacks(self) -> str:
        """Returns the stacks of a silent process, by its faulthandler or py-spy; empty where neither can.

        A process that ends when it is woken is not waited for; what it wrote until then is returned.
        """
        text, file = "", Path(f"/proc/{self.pid}/fd/{self.stacks_file}")
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as written:
            os.kill(self.pid, signal.SIGUSR2)
            os.kill(self.pid, signal.SIGCONT)
            until, is_running = time.monotonic() + STACKS_SECONDS, True
            while not text and is_running and time.monotonic() < until:
                time.sleep(0.1)
                is_running = self._letter() not in ("", "Z")
                text = written.read()
        if not text and shutil.which("py-spy"):
            command = ["py-spy", "dump", "--nonblocking", "--pid", str(self.pid)]
            with suppress(OSError, subprocess.SubprocessError):
                text = subprocess.run(command, capture_output=True, text=True, timeout=STACKS_SECONDS).stdout
        return text

    def _letter(self) -> str:
        """Returns the letter of its state; empty where there is no such process."""
        with suppress(OSError):
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return text.rpartition(")")[2].split()[0]
        return ""

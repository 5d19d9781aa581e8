"""Processes of `kielo train` on this machine, one a rank: started, signals passed on, watched to their end.

They get the variables that torchrun would give them. torchrun itself is left out: it turns every exit code into 1, and a
stop on purpose into a page of traceback.
"""

import math
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import TextIO

from kielo.cli.main import REQUEUE

# Below 32768, where Linux starts to hand out ports to clients by itself, and above the registered services.
_PORTS = range(12_000, 32_000)
_LOOK_SECONDS = 0.05
# What one rank fails of, the others mostly fail of too, and say so. One that waits for it in a collective never would.
_FAIL_TOGETHER_SECONDS = 10.0


class Ranks:
    """`command` as `number` processes. Each has a session of its own, so that Ctrl-C at a terminal reaches it once, through
    `pass_on`.
    """

    def __init__(self, command: Sequence[str], number: int):
        self._command, self._number = command, number
        self._processes: list[subprocess.Popen] = []
        self._until = math.inf
        self.is_stopping = False

    def start(self, stdout: TextIO | None = None) -> None:
        everyone = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self._number)),
            **os.environ,
            "WORLD_SIZE": str(self._number),
            "LOCAL_WORLD_SIZE": str(self._number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        for rank in range(self._number):
            environment = everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(
                subprocess.Popen(self._command, env=environment, stdout=stdout, start_new_session=True)
            )
        if self.is_stopping:  # a signal came meanwhile
            self.pass_on(signal.SIGTERM)

    def pass_on(self, number: int) -> None:
        """Ask all ranks to stop."""
        self.is_stopping = True
        for process in self._processes:
            process.send_signal(number)

    def wait(self, shutdown_seconds: float) -> str:
        """Until all have ended; "" if none failed, else which did and how.

        Ranks that are still there so long after a signal, or when another one has failed, are killed.
        """
        failure = ""
        while any(process.poll() is None for process in self._processes):
            if not failure and (failure := self._failure()):
                self._limit(_FAIL_TOGETHER_SECONDS)
            if self.is_stopping:
                self._limit(shutdown_seconds)
            if time.monotonic() > self._until:
                self.kill()
                failure = failure or f"not all ranks had saved {shutdown_seconds:g} s after the signal, and were killed"
            time.sleep(_LOOK_SECONDS)
        return failure or self._failure()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _limit(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)

    def _failure(self) -> str:
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code not in (None, 0, REQUEUE):
                return f"rank {rank} ended with {_describe(code)}"
        return ""


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return name + (" (out of memory?)" if -code == signal.SIGKILL else "")


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port below 32000 on this machine")

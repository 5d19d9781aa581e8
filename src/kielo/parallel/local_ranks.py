"""Processes of `kielo train` on this machine, one a rank: started, signals passed on, watched to their end.

The processes are torch's own (`torch.distributed.elastic.multiprocessing`, what torchrun stands on), with the
variables that torchrun would give them. torchrun itself is left out: it turns every exit code into 1, and a
stop on purpose into a page of traceback.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.utils.distributed import get_free_port

_LOOK_SECONDS = 0.05
# start_processes takes signals over; those it is told of here, and it gives this one back at once.
_SIGNALS_VARIABLE, _UNUSED_SIGNAL = "TORCHELASTIC_SIGNALS_TO_HANDLE", signal.SIGQUIT


class Ranks:
    """`arguments` given to this Python in `number` processes. Each has a session of its own, so that Ctrl-C
    at a terminal reaches it once, through its parent. stop_code: exit code of a rank that stopped on purpose,
    which is no failure.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        number: int,
        stop_code: int,
        variables: Mapping[str, str] | None = None,
    ):
        self._arguments, self._number, self._stop_code = tuple(arguments), number, stop_code
        self._everyone = {
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number))
            ),
            "WORLD_SIZE": str(number),
            "LOCAL_WORLD_SIZE": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(get_free_port()),
        } | dict(variables or {})
        self._processes: PContext | None = None
        self._stop_signal: signal.Signals | None = None
        # Its lines say again, with exit codes as errors, what the ranks and their outcome tell.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def start(self, is_quiet: bool = False) -> None:
        """is_quiet: what the ranks print goes to stderr, so that stdout is the caller's alone."""
        everyone = range(self._number)
        with _stdout_to_stderr() if is_quiet else nullcontext(), _handlers_kept():
            self._processes = start_processes(
                "kielo",
                sys.executable,
                args=dict.fromkeys(everyone, self._arguments),
                envs={
                    rank: self._everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in everyone
                },
                logs_specs=DefaultLogsSpecs(),
            )

    def stop(self, number: int) -> None:
        """Have `wait` pass the signal `number` on to all ranks. A signal handler may call it, at
        any moment.
        """
        self._stop_signal = signal.Signals(number)

    @property
    def is_stopping(self) -> bool:
        return self._stop_signal is not None

    def wait(self, shutdown_seconds: int) -> str:
        """Until all have ended; "" if none failed, else which did and how.

        Once one has failed, torch ends the others. Ranks that are still there so long after a stop are
        killed.
        """
        while (ended := self._processes.wait(_LOOK_SECONDS, _LOOK_SECONDS)) is None:
            if self._stop_signal is not None:
                self._processes.close(self._stop_signal, shutdown_seconds)
        failures = [failure for failure in ended.failures.values() if failure.exitcode != self._stop_code]
        if not failures:
            return ""
        first = min(failures, key=lambda failure: failure.timestamp)
        return f"rank {first.local_rank} ended with {_describe(first.exitcode)}"

    def kill(self) -> None:
        if self._processes is not None:
            self._processes.close(signal.SIGKILL)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """The signal handlers stay those of the caller, who passes signals on and waits for the ranks' saves."""
    handler, variable = signal.getsignal(_UNUSED_SIGNAL), os.environ.get(_SIGNALS_VARIABLE)
    os.environ[_SIGNALS_VARIABLE] = _UNUSED_SIGNAL.name
    try:
        yield
    finally:
        signal.signal(_UNUSED_SIGNAL, handler)
        if variable is None:
            del os.environ[_SIGNALS_VARIABLE]
        else:
            os.environ[_SIGNALS_VARIABLE] = variable


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """For processes that are started meanwhile."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return name + (" (out of memory?)" if -code == signal.SIGKILL else "")

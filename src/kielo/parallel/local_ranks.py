"""Processes of `kielo train` on this machine, one a rank: they are started, get signals, and are watched.

torch starts them (`torch.distributed.elastic.multiprocessing`, on which torchrun is built), with the
variables that torchrun would set. torchrun itself is not used: it turns every exit code into 1, and an
intended stop into a page of traceback.
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
# start_processes handles the signals that this variable lists; the handler of this one is restored at once.
_SIGNALS_VARIABLE, _UNUSED_SIGNAL = "TORCHELASTIC_SIGNALS_TO_HANDLE", signal.SIGQUIT


class Ranks:
    """`number` processes of this Python with `arguments`.

    Each has a session of its own, so that Ctrl-C at a terminal reaches it once, through its parent.
    stop_code: exit code of a rank that stopped as asked, which is no failure.
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
        # Its lines repeat the ranks' own messages, with exit codes as errors.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def start(self, is_quiet: bool = False) -> None:
        """Starts the ranks. is_quiet: they print to stderr, so that only the caller uses stdout."""
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
        """Makes `wait` send the signal `number` to all ranks. A signal handler may call it at any moment."""
        self._stop_signal = signal.Signals(number)

    @property
    def is_stopping(self) -> bool:
        return self._stop_signal is not None

    def wait(self, shutdown_seconds: int) -> str:
        """Waits until all ranks have ended. Returns "" if none failed, else the first that did and its exit.

        Once one has failed, torch ends the others. Ranks that still run `shutdown_seconds` after a stop are
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
    """Keeps the signal handlers of the caller, which sends signals on and waits for the ranks' saves."""
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
    """Redirects stdout to stderr, for processes that are started inside."""
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

"""A process from which the ranks of this machine are forked: `python -m kielo.ranks.rank_template`.

It has imported what the ranks need and computed nothing, so a rank starts in milliseconds. As their parent it
watches the ranks. When its own parent is gone, it ends them. When it is gone itself, the kernel does.

    arguments   CONTROL REPORT MODULE...   descriptors of two pipes, and what to import
    CONTROL     one JSON object a line: {"start": [{variable: value} of each rank], "arguments": [...]},
                {"signal": number}
    REPORT      {"ended": rank, "code": exit code, or minus a signal's number}
                {"alive": process} every second while ranks run, so that a frozen process is noticed
"""

import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

_LOOK_SECONDS = 0.05
BEAT_SECONDS = 1.0
_SAVE_SECONDS = 8.0  # for ranks whose launcher was killed
_SET_SIGNAL_OF_PARENTS_DEATH = 1  # prctl(2)
_OF_THE_LAUNCHER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class RankTemplate:
    def __init__(self, control: int, report: int):
        self._control, self._report = control, report
        self._text = b""
        self._ranks: dict[int, int] = {}  # process → rank
        self._last_beat = 0.0
        # The launcher gets these signals too, and decides what the ranks get. Ignored signals stay ignored.
        self._handlers = {number: signal.signal(number, _ignore) for number in _OF_THE_LAUNCHER}

    def serve(self) -> Sequence[str] | None:
        """Return None at the end, and in a forked rank the arguments to run."""
        while True:
            if select.select([self._control], [], [], _LOOK_SECONDS)[0]:
                received = os.read(self._control, 2**16)
                if not received:
                    self._end_all()
                    return None
                *lines, self._text = (self._text + received).split(b"\n")
                messages = [json.loads(line) for line in lines]
                for message in messages:
                    if "signal" in message:
                        self._signal(message["signal"])
                        continue
                    stop = next((one["signal"] for one in messages if "signal" in one), None)
                    for rank, variables in enumerate(message["start"]):
                        if stop is not None:
                            self._tell(rank, -stop)
                        elif self._is_forked(rank, variables):
                            return message["arguments"]
            self._reap()
            self._beat()

    def _beat(self) -> None:
        """Report that it lives. Without ranks nobody listens, and the pipe would fill."""
        if self._ranks and time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._report_line({"alive": os.getpid()})

    def _is_forked(self, rank: int, variables: dict[str, str]) -> bool:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_LAUNCHER)  # until the rank has its own handlers
        process = os.fork()
        if process:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_LAUNCHER)
            self._ranks[process] = rank
            return False
        with suppress(OSError, AttributeError):  # only Linux has it
            ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
        os.close(self._control)
        os.close(self._report)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_LAUNCHER)
        os.environ.update(variables)
        return True

    def _signal(self, number: int) -> None:
        for process in self._ranks:
            os.kill(process, number)

    def _reap(self) -> None:
        for process in list(self._ranks):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self._tell(self._ranks.pop(process), os.waitstatus_to_exitcode(status))

    def _tell(self, rank: int, code: int) -> None:
        self._report_line({"ended": rank, "code": code})

    def _report_line(self, content: dict[str, int]) -> None:
        with suppress(BrokenPipeError):
            os.write(self._report, json.dumps(content).encode() + b"\n")

    def _end_all(self) -> None:
        self._signal(signal.SIGTERM)
        until = time.monotonic() + _SAVE_SECONDS
        while self._ranks and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            self._reap()
        self._signal(signal.SIGKILL)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN it is not inherited by a program that is started."""


def _run(arguments: Sequence[str]) -> None:
    """Do what `python ARGUMENTS...` would do, for `-m MODULE` and `-c CODE`."""
    kind, program, *rest = arguments
    sys.argv = [program if kind == "-m" else "-c", *rest]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    control, report, *modules = sys.argv[1:]
    template = RankTemplate(int(control), int(report))
    logging.disable(logging.WARNING)  # of libraries that are imported
    gc.disable()  # collections would take an eighth of the time of importing
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # ranks share its memory until somebody writes to it, as a collection does
    gc.enable()
    logging.disable(logging.NOTSET)
    asked = template.serve()
    if asked is not None:
        _run(asked)

"""Work that goes wrong in one worker while the others would never end; workers import it from here."""

import errno
import os
import signal
import threading
from collections.abc import Callable

from kielo.recipe.errors import KieloError


class Unsendable(Exception):
    """Cannot be made again from its arguments, so it cannot be sent to another process."""

    def __init__(self, first: int, second: int):
        super().__init__(f"{first} {second}")


def _raise(problem: BaseException) -> None:
    raise problem


FAULTS = {
    "our message": lambda: _raise(KieloError("text.txt, line 3: no")),
    "full disk": lambda: _raise(OSError(errno.ENOSPC, "No space left on device", "/full")),
    "bug": lambda: _raise(ZeroDivisionError("of our own")),
    "unsendable": lambda: _raise(Unsendable(1, 2)),
    "out of memory": lambda: _raise(MemoryError()),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashed": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
}


def faulty_work(fault: str) -> Callable[[int], None]:
    def work(number: int) -> None:
        if number == 1:
            FAULTS[fault]()
        threading.Event().wait()

    return work

"""Limits of time and memory for code that came with other people's files: a chat template is a program.

The limits hold for the calling thread's process while the code runs, and are put back after it.
"""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kielo.recipe.errors import KieloError

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OutOfTime(BaseException):
    """No Exception, so that what runs cannot catch it."""


@contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Runs the block for at most `seconds`, with at most `num_bytes` of memory more than there are.

    Raises KieloError where it needs more. Time is limited in the main thread alone, where Python's signals
    arrive; a call into C ends first.
    """
    with _limited_seconds(seconds), _limited_bytes(num_bytes):
        yield


@contextmanager
def _limited_seconds(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except OutOfTime:
        raise KieloError(f"did not end within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limited_bytes(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        limit = _address_space_bytes() + num_bytes
    except OSError:  # no /proc: not Linux
        yield
        return
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError:
        raise KieloError(f"needs more than {num_bytes / 1e9:g} GB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE_BYTES

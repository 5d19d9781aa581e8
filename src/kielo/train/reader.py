"""A thread that reads: one call after another, and it ends with the process, whatever it waits for."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_CLOSING_SECONDS = 5.0


class Reader:
    """Runs calls in a thread of its own. begin: is called there before the first."""

    def __init__(self, begin: Callable[[], None]):
        self._begin = begin
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> int | None:
        """The identifier of the thread."""
        return self._thread.ident

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        self._calls.put((future, call, arguments))
        return future

    def close(self) -> None:
        """Lets the call in progress end, unless it takes too long."""
        self._calls.put(None)
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        has_begun = False
        while (entry := self._calls.get()) is not None:
            future, call, arguments = entry
            try:
                if not has_begun:
                    self._begin()
                    has_begun = True
                future.set_result(call(*arguments))
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)

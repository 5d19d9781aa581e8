"""A text stream whose failure does not end the work: a terminal, a pipe or a file can vanish or fill up."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class FailsafeStream:
    def __init__(self, stream: TextIO):
        self._stream = stream
        self.failure: Exception | None = None

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, function: Callable[..., Any], *arguments: str) -> Any:
        if self.failure is not None:
            return None
        try:
            return function(*arguments)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self.failure = error
        # Neither the buffered text nor the output of child processes can be written any more.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        return None

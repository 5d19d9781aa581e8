"""Learns a vocabulary so that a signal ends it: `tokenizers` only returns to Python when it has finished.

Python runs the handlers of signals in its main thread alone. So another thread learns, and the main thread
waits.
"""

from collections.abc import Iterable, Iterator
from threading import Event, Thread

from tokenizers import Tokenizer
from tokenizers.trainers import Trainer

_SECONDS_TO_END = 1.0


def learn_stoppably(tokenizer: Tokenizer, texts: Iterable[str], trainer: Trainer) -> None:
    """Trains the tokenizer. An exception of a signal's handler ends the wait, and soon the reading of texts.

    What the thread computes after the last text goes on until the process ends, and is not used.
    """
    problems: list[BaseException] = []
    stop = Event()

    def learn() -> None:
        try:
            tokenizer.train_from_iterator(_until(stop, texts), trainer)
        except BaseException as problem:
            problems.append(problem)

    thread = Thread(target=learn, name="tokenizer", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        # A thread that reads texts when Python ends would be cut down within Rust.
        stop.set()
        thread.join(_SECONDS_TO_END)
        raise
    if problems:
        raise problems[0]


def _until(stop: Event, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if stop.is_set():
            raise InterruptedError
        yield text

"""Watched worker processes of this machine: batches of work → their results, in the same order.

The first error ends all workers, a pipe that closes without an answer shows that its worker was killed, and a
worker whose parent is gone ends itself. A pool of `multiprocessing` waits for ever for a killed worker, may
lock up when an error ends it, and outlives a signal to its parent.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kielo.artifact.json_object import JsonTable
from kielo.recipe.errors import KieloError

# One thread for each worker: several pools of threads on the same cores slow each other down.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LESS_MEMORY = "Fix: fewer corpus.workers, or a smaller corpus.max_document_bytes"
END_SECONDS = 10  # in which a worker ends that has closed its pipe
RESULTS_AHEAD = 4  # results for each worker that wait for earlier batches, at most

Work = Callable[[Any], Any]


class WorkerEnded(KieloError):
    """A worker ended without an answer."""


@dataclass(frozen=True)
class Worker:
    """A process that answers each batch. Messages have its `name`."""

    name: str
    process: BaseProcess
    pipe: Connection

    def send(self, batch: Any) -> None:
        """Give the worker a batch. If the worker is dead, `receive` raises."""
        with suppress(OSError):
            self.pipe.send(batch)

    def receive(self) -> Any:
        """Return the next answer, or raise it if it is an exception. Raises WorkerEnded without an answer."""
        try:
            content = self.pipe.recv()
        except (EOFError, OSError):  # OSError: in the middle of the answer
            self.process.join(END_SECONDS)
            raise WorkerEnded(f"{self.name} {ending(self.process.exitcode)}") from None
        if isinstance(content, BaseException):
            raise content
        return content

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class _Task:
    number: int
    batch: Any
    tries_left: int


def results_in_order(
    make: Callable[[], Work], batches: Iterable[Any], workers: int, what: str, tries: int = 1
) -> Generator[Any, None, None]:
    """Yield work(batch) for each batch in turn, from as many workers, each with its own work = make().

    One worker is this process. Batches, results and `make` are pickled, and RESULTS_AHEAD limits them. `what`
    begins the workers' names. `tries` is the number of attempts of a batch if its worker is killed. Raise the
    first exception of a worker, KieloError if it ran out of memory, and WorkerEnded.
    """
    if workers == 1:
        work = make()
        for batch in batches:
            yield _done(work, batch, f"{what} worker 0 of 1")
        return
    names = [f"{what} worker {number} of {workers}" for number in range(workers)]
    team: list[Worker] = []
    at_work: dict[Worker, _Task] = {}
    source = enumerate(batches)
    following = next(source, None)
    try:
        if following is not None:
            for name in names:
                team.append(start_worker(name, make))
        idle, turn = deque(team), 0
        results: dict[int, Any] = {}
        while following is not None or at_work or results:
            while idle and following is not None and following[0] < turn + RESULTS_AHEAD * workers:
                _give(idle.popleft(), _Task(*following, tries), at_work)
                following = next(source, None)
            if turn in results:
                yield results.pop(turn)
                turn += 1
                continue
            by_pipe: dict[object, Worker] = {worker.pipe: worker for worker in at_work}
            for pipe in wait([worker.pipe for worker in at_work]):
                worker = by_pipe[pipe]
                task = at_work.pop(worker)
                try:
                    results[task.number] = worker.receive()
                    idle.append(worker)
                except WorkerEnded:
                    task.tries_left -= 1
                    if not task.tries_left:
                        raise
                    worker.end()
                    team[team.index(worker)] = another = start_worker(worker.name, make)
                    _give(another, task, at_work)
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.end()


def _give(worker: Worker, task: _Task, at_work: dict[Worker, _Task]) -> None:
    at_work[worker] = task
    worker.send(task.batch)


def start_worker(
    name: str, make: Callable[[], Work], environment: Mapping[str, str] = WORKER_ENVIRONMENT
) -> Worker:
    # Spawned: a fork server would live as long as this process.
    context = multiprocessing.get_context("spawn")
    pipe, worker_end = context.Pipe()
    # With our copy of the worker's end closed, the pipe closes when the worker ends, however it does.
    with worker_end, environment_of_worker(environment), without_main_file(), without_interrupts():
        process = context.Process(target=serve, args=(make, worker_end, name), name=name, daemon=True)
        process.start()
    return Worker(name, process, pipe)


def serve(make: Callable[[], Work], pipe: Connection, name: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(ConnectionError, EOFError):  # kielo has ended, and the files may be gone
        try:
            work = make()
        except Exception as problem:
            pipe.send(_as_sent(problem, name))
            return
        while True:
            batch = pipe.recv()
            try:
                content = _done(work, batch, name)
            except Exception as problem:
                content = _as_sent(problem, name)
            pipe.send(content)


def _done(work: Work, batch: Any, name: str) -> Any:
    try:
        return work(batch)
    except MemoryError:
        raise KieloError(f"{name}: out of memory. {LESS_MEMORY}") from None


def end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
    os._exit(1)


def _as_sent(problem: Exception, name: str) -> Exception:
    """Return the exception if it can be pickled. An unexpected one has the worker's traceback as a note."""
    if not isinstance(problem, KieloError | OSError):
        problem.add_note(f"In {name}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return RuntimeError(f"{name}:\n{''.join(traceback.format_exception(problem))}")
    return problem


def ending(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return f"was killed by SIGKILL, mostly by the kernel because memory ran out. {LESS_MEMORY}"
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}. Fix: the same command again"
    return f"ended without an answer (exit code {exit_code}). Its own message is above"


@contextmanager
def without_main_file() -> Iterator[None]:
    """Keep workers from importing the caller's main file, which could start itself again in each of them."""
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    held: JsonTable = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.pop("__spec__", None)
        main.__dict__.update(held)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that never get Ctrl-C, which a terminal sends to all. This process ends them."""
    resource_tracker.ensure_running()  # started with the first process, it would let SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment_of_worker(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

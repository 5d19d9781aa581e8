"""Worker processes of this machine: batches of work → their results, in the same order.

The pool is the standard library's. Its workers do not import the caller's main file, never get Ctrl-C, and
the kernel kills them with their parent. The first error ends all of them, and a killed worker is named.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Any, Protocol, Self

from kielo.artifact.json_object import JsonTable
from kielo.recipe.errors import KieloError

# One thread for each worker: several pools of threads on the same cores slow each other down.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LESS_MEMORY = "Fix: fewer corpus.workers, or a smaller corpus.max_document_bytes"
RESULTS_AHEAD = 4  # batches for each worker that are at work or wait for earlier batches, at most
_SET_SIGNAL_OF_PARENTS_DEATH = 1  # prctl(2)

Work = Callable[[Any], Any]
_made: list[Work] = []  # in a worker: its work, once it is made


class TaskPool(Protocol):
    """A pool that does tasks: a `WorkerPool`, or a pool on a cluster (`ray_pool.py`)."""

    def results(self, batches: Iterable[Any]) -> Generator[Any, None, None]: ...


class WorkerEnded(KieloError):
    """A worker ended without an answer."""

    exit_code: int | None = None


WATCH_SECONDS = 1.0  # between looks at workers without an answer


@dataclass
class _Task:
    batch: Any
    tries_left: int
    future: Future


class WorkerPool:
    """Processes that call work(batch), each with its own work = make(). One worker is this process.

    Batches, results and `make` are pickled. `what` begins the workers' names.
    """

    def __init__(
        self,
        make: Callable[[], Work],
        workers: int,
        what: str,
        environment: Mapping[str, str] = WORKER_ENVIRONMENT,
    ):
        self._make, self._workers, self._what = make, workers, what
        self._context = _Context([f"{what} worker {number} of {workers}" for number in range(workers)])
        self._context.environment = dict(environment)
        self._executor: ProcessPoolExecutor | None = None
        self._work: Work | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def results(self, batches: Iterable[Any], tries: int = 1) -> Generator[Any, None, None]:
        """Yield work(batch) for each batch in turn. At most RESULTS_AHEAD batches a worker are taken ahead.

        tries: attempts of a batch if a worker is killed. Raise the first exception of a worker, KieloError if
        it ran out of memory, and WorkerEnded. After an exception the pool has ended.
        """
        try:
            yield from self._here(batches) if self._workers == 1 else self._there(batches, tries)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End all workers, also in the middle of their work."""
        for process in self._context.started:
            process.kill()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        for process in self._context.started:
            process.join()
        self._context.started.clear()

    def call(self, batch: Any) -> Any:
        """Return work(batch) of a process, also of a pool of one worker."""
        (result,) = self._there([batch], tries=1)
        return result

    def _here(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._work = self._work or self._make()
            yield _done(self._work, batch, f"{self._what} worker 0 of 1")

    def _there(self, batches: Iterable[Any], tries: int) -> Iterator[Any]:
        source, pending = iter(batches), deque[_Task]()
        is_over = False
        while True:
            while not is_over and len(pending) < RESULTS_AHEAD * self._workers:
                try:
                    batch = next(source)
                except StopIteration:
                    is_over = True
                    break
                pending.append(_Task(batch, tries, self._submit(batch)))
            if not pending:
                return
            at_work = [task.future for task in pending if not task.future.done()]
            ended = [task.future for task in pending if task.future not in at_work]
            problem = next(filter(None, (future.exception() for future in ended)), None)
            if isinstance(problem, BrokenProcessPool):
                self._begin_again(pending)
            elif problem is not None:
                raise problem
            elif pending[0].future in ended:
                yield pending.popleft().future.result()
            else:
                self._wait(at_work)

    def _wait(self, at_work: Sequence[Future]) -> None:
        """Wait for the first result, or for the end of a worker.

        The executor's own thread (Python 3.11) watches the workers that it knew when it last woke up. It
        overlooks the end of a worker that was started after that, until another worker ends.
        """
        while not wait(at_work, timeout=WATCH_SECONDS, return_when=FIRST_COMPLETED).done:
            if any(process.exitcode is not None for process in self._context.started):
                for process in self._context.started:
                    process.terminate()

    def _submit(self, batch: Any) -> Future:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._workers, mp_context=self._context, initializer=end_with_parent
            )
        try:
            return self._executor.submit(_work_on, self._make, batch)
        except BrokenProcessPool as problem:
            future: Future = Future()
            future.set_exception(problem)
            return future

    def _begin_again(self, pending: deque[_Task]) -> None:
        """Give the batches without a result to new workers. Raises WorkerEnded after the last try."""
        lost = [task for task in pending if not task.future.done() or task.future.exception() is not None]
        ended = list(self._context.started)
        assert self._executor is not None
        self._executor.shutdown(wait=True)  # which ends the other workers
        problem = _first_to_end(ended)
        self.end()
        for task in lost:
            task.tries_left -= 1
            if not task.tries_left:
                raise problem
        for task in lost:
            task.future = self._submit(task.batch)


def results_in_order(
    make: Callable[[], Work], batches: Iterable[Any], workers: int, what: str, tries: int = 1
) -> Generator[Any, None, None]:
    """Yield the results of a `WorkerPool` that ends with them."""
    with WorkerPool(make, workers, what) as pool:
        yield from pool.results(batches, tries)


class _Context(SpawnContext):
    """Spawned processes with names, which are started without our main file and Ctrl-C."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names
        self.environment: dict[str, str] = {}
        self.started: list[_Process] = []

    def Process(self, *args: Any, **keys: Any) -> "_Process":  # type: ignore[override]  # noqa: N802
        keys["name"] = self._names[len(self.started) % len(self._names)]
        process = _Process(*args, **keys)
        process.environment = self.environment
        self.started.append(process)
        return process


class _Process(SpawnProcess):
    environment: dict[str, str]

    def start(self) -> None:
        with environment_of_worker(self.environment), without_main_file(), without_interrupts():
            super().start()


def _work_on(make: Callable[[], Work], batch: Any) -> Any:
    name = multiprocessing.current_process().name
    try:
        if not _made:
            _made.append(make())
        return _done(_made[0], batch, name)
    except Exception as problem:
        raise _as_sent(problem, name) from None


def _done(work: Work, batch: Any, name: str) -> Any:
    try:
        return work(batch)
    except MemoryError:
        raise KieloError(f"{name}: out of memory. {LESS_MEMORY}") from None


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    with suppress(AttributeError, OSError):  # other systems than Linux
        ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before
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


def _first_to_end(processes: list[_Process]) -> WorkerEnded:
    """Return how the worker ended that broke the pool. The pool ended the others by SIGTERM."""
    by_pool = (0, -signal.SIGTERM)
    process = next((process for process in processes if process.exitcode not in by_pool), processes[0])
    problem = WorkerEnded(f"{process.name} {ending(process.exitcode)}")
    problem.exit_code = process.exitcode
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

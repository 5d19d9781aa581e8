"""Executor of datatrove steps on processes of this machine, each of them watched.

Steps and a number of workers -> what each step counted, summed over the workers. datatrove's own local
executor is not used: its pool waits for ever for a worker that was killed, may lock up when an error ends it,
and outlives a signal to its parent. Here a worker is a process with a pipe. The first error, or the first
pipe that closes without an answer, ends all workers; and a worker whose parent is gone ends itself.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from kielo.corpus.step import CorpusStep
from kielo.recipe.errors import KieloError

# One thread for each worker: several pools of threads on the same cores only get in each other's way.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LESS_MEMORY = "fewer corpus.workers, or a smaller corpus.max_document_bytes, need less memory"
# A worker has closed its pipe, so it ends now.
END_SECONDS = 10


def run_pipeline(steps: Sequence[CorpusStep], workers: int) -> list[dict[str, int]]:
    """Run the steps over all ranks; returns for each step its counts by label.

    With one worker everything happens in this process. The first exception of a worker ends the others and is
    raised here. Raises KieloError for a worker that was killed or ran out of memory.
    """
    if workers == 1:
        return _run_rank(steps, 0, 1)
    processes: list[BaseProcess] = []
    answers: dict[Connection, int] = {}
    totals: list[Counter[str]] = [Counter() for _ in steps]
    try:
        with _environment(WORKER_ENVIRONMENT), _without_main_file(), _without_interrupts():
            for rank in range(workers):
                process, answer = _start_worker(steps, rank, workers)
                processes.append(process)
                answers[answer] = rank
        while answers:
            for answer in wait(list(answers)):
                rank = answers.pop(answer)
                for total, counts in zip(
                    totals, _receive(answer, processes[rank], rank, workers), strict=True
                ):
                    total.update(counts)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return [dict(total) for total in totals]


def _start_worker(steps: Sequence[CorpusStep], rank: int, workers: int) -> tuple[BaseProcess, Connection]:
    # Spawned: a fork server would stay for as long as this process does.
    context = multiprocessing.get_context("spawn")
    answer, worker_end = context.Pipe(duplex=False)
    # With our copy of the worker's end closed, the pipe closes when the worker ends, however it does.
    with worker_end:
        process = context.Process(
            target=_work, args=(steps, rank, workers, worker_end), name=f"corpus worker {rank}", daemon=True
        )
        process.start()
    return process, answer


def _receive(answer: Connection, process: BaseProcess, rank: int, workers: int) -> list[dict[str, int]]:
    with answer:
        try:
            content = answer.recv()
        except (EOFError, OSError):  # OSError: in the middle of the answer
            process.join(END_SECONDS)
            raise KieloError(f"corpus worker {rank} of {workers} {_ending(process.exitcode)}") from None
    if isinstance(content, BaseException):
        raise content
    return content


def _ending(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return f"was killed by SIGKILL, mostly by the kernel because memory ran out; {LESS_MEMORY}"
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}; the same command begins the corpus again"
    return f"ended without an answer (exit code {exit_code}); its own message is above"


def _work(steps: Sequence[CorpusStep], rank: int, workers: int, answer: Connection) -> None:
    """Run one worker; send its counts, or its exception."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        content = _run_rank(steps, rank, workers)
    except Exception as problem:
        content = _as_sent(problem, rank, workers)
    with suppress(BrokenPipeError):  # kielo has ended: nobody reads it, and the files may be gone
        answer.send(content)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _as_sent(problem: Exception, rank: int, workers: int) -> Exception:
    """Returns the exception if it can be sent; an unexpected one gets the worker's traceback as a note."""
    if not isinstance(problem, KieloError | OSError):
        problem.add_note(f"In corpus worker {rank} of {workers}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return RuntimeError(
            f"corpus worker {rank} of {workers}:\n{''.join(traceback.format_exception(problem))}"
        )
    return problem


def _run_rank(steps: Sequence[CorpusStep], rank: int, world_size: int) -> list[dict[str, int]]:
    """Run the steps on one rank's share, each step fed by the one before; returns their counts."""
    try:
        documents = None
        for step in steps:
            documents = step(documents, rank, world_size)
        deque(documents, maxlen=0)
    except MemoryError:
        raise KieloError(f"corpus worker {rank} of {world_size}: out of memory; {LESS_MEMORY}") from None
    return [{label: int(metric.total) for label, metric in step.stats.stats.items()} for step in steps]


@contextmanager
def _without_main_file() -> Iterator[None]:
    """Keep the workers from importing the caller's main file again.

    A spawned process does so to find what was defined there. Nothing of ours is, and a script without
    `if __name__ == "__main__"` would start itself again in each worker.
    """
    main = sys.modules["__main__"]
    held = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.pop("__spec__", None)
        main.__dict__.update(held)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that never get Ctrl-C, which a terminal sends to all; this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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

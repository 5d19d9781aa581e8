"""The tasks of a corpus on a cluster of Ray that somebody has: a pool as in `process_pool.py`.

A task of the corpus is a task of Ray on one CPU. Ray gives it to another process if its process or node is
lost. Results are files in the work folder, so all nodes have to share the run's disk. A process of its own
talks to Ray, because Ray ends the process that talks to it when the head node is lost.
"""

import json
import multiprocessing
import os
import platform
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kielo.artifact.manifest import installed_versions
from kielo.corpus.process_pool import (
    WORKER_ENVIRONMENT,
    Work,
    end_with_parent,
    without_interrupts,
    without_main_file,
)
from kielo.recipe.errors import KieloError

TRIES = 4  # of a task whose process or node is lost
LEAST_AHEAD, AHEAD_OF_CPU = 64, 4  # tasks that Ray has at once
CONNECT_SECONDS = 120.0
WATCH_SECONDS, PATIENCE_SECONDS = 5.0, 60.0  # between looks at the cluster; without a CPU, or a finished task
_OWN_VARIABLES = "KIELO_"
_WHAT = 'corpus.engine = "ray"'
_KEPT, _AGAIN = "Finished tasks are kept", "then the same command again"
_LOST = (
    f"{_WHAT}: the connection to Ray was lost, mostly because the head node ended. {_KEPT}. Fix: start Ray, "
    f"{_AGAIN}"
)


def refuse_missing() -> Any:
    """Return the package. Raises KieloError without it."""
    try:
        import ray
    except ImportError:
        raise KieloError(f"{_WHAT} needs a package. Fix: pip install 'kielo[ray]'") from None
    return ray


class RayPool:
    """Tasks on the cluster of Ray at RAY_ADDRESS, or else on the cluster that has this machine.

    `make` makes the function that does a task, once in each process. packages: must have the versions on each
    node that they have here. plan: a file of the run, which each node must see at this place. Kielo's
    variables of the environment are the same there as here.
    """

    def __init__(self, make: Callable[[], Work], packages: Sequence[str], plan: Path):
        versions = json.dumps(installed_versions(tuple(packages)))
        self._what = make, os.getcwd(), versions, str(plan.absolute()), _own_variables() | WORKER_ENVIRONMENT
        self._process: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """End the connection to Ray. Ray then ends its processes of this corpus."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def results(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield a result for each batch, in the order in which they are done. Raises the first exception."""
        if not (tasks := list(batches)):
            return
        try:
            self._start().send(tasks)
            for _ in tasks:
                yield self._received()
        except BaseException:
            self.end()
            raise

    def _start(self) -> Connection:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_talk_to_ray, args=(other, *self._what), daemon=True)
            with without_main_file(), without_interrupts():
                self._process.start()
            other.close()
            if not self._pipe.poll(CONNECT_SECONDS):
                raise _no_cluster(f"no answer in {CONNECT_SECONDS:g} s")
            self._received()
        assert self._pipe is not None
        return self._pipe

    def _received(self) -> Any:
        assert self._pipe is not None
        try:
            found = self._pipe.recv()
        except (EOFError, OSError):
            raise KieloError(_LOST) from None
        if isinstance(found, Exception):
            raise found
        return found


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OWN_VARIABLES)}


def _talk_to_ray(pipe: Connection, *what: Any) -> None:
    # Before Ray is imported. A process that its memory monitor kills does not count as one of max_retries.
    os.environ.setdefault("RAY_task_oom_retries", str(TRIES - 1))
    end_with_parent()
    os.dup2(2, 1)  # Ray writes to both
    try:
        with suppress(EOFError):  # the pool ended
            _connect()
            pipe.send(None)
            while True:
                for found in _results(what, pipe.recv()):
                    pipe.send(found)
    except Exception as problem:
        pipe.send(_as_sent(problem))


def _connect() -> None:
    ray = refuse_missing()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as problem:
        raise _no_cluster(_first_line(problem)) from None


def _no_cluster(why: str) -> KieloError:
    address = os.environ.get("RAY_ADDRESS")
    place = f"RAY_ADDRESS = {address}" if address else "this machine"
    return KieloError(
        f"{_WHAT}: no cluster of Ray at {place} ({why}). Fix: RAY_ADDRESS=HOST:PORT of its head "
        "node, or `ray start --head` here"
    )


def _results(what: tuple[Any, ...], batches: Sequence[Any]) -> Iterator[Any]:
    import ray

    remote: Any = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_work_on)
    left, waiting, without_cpu, without_result = iter(batches), list[Any](), 0.0, 0.0
    while True:
        cpus = ray.cluster_resources().get("CPU", 0)
        most = max(LEAST_AHEAD, int(AHEAD_OF_CPU * cpus))
        waiting += [remote.remote(*what, batch) for batch in islice(left, most - len(waiting))]
        if not waiting:
            return
        done, waiting = ray.wait(waiting, num_returns=1, timeout=WATCH_SECONDS)
        without_result = 0.0 if done else without_result + WATCH_SECONDS
        without_cpu = 0.0 if done or cpus >= 1 else without_cpu + WATCH_SECONDS
        if without_cpu >= PATIENCE_SECONDS:
            raise KieloError(
                f"{_WHAT}: the cluster has no CPU. {_KEPT}. Fix: `ray start --address=HOST:PORT` on a node, "
                f"{_AGAIN}"
            )
        if without_result >= PATIENCE_SECONDS and cpus >= 1 and ray.available_resources().get("CPU", 0) < 1:
            _say_once(f"corpus: Ray's {cpus:g} CPUs are at work for these tasks or for others: waiting")
        for task in done:
            yield ray.get(task)


@cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _as_sent(problem: Exception) -> Exception:
    """Return what a problem of Ray or of a task is for a person. A bug keeps its traceback."""
    from ray import exceptions

    if isinstance(problem, exceptions.RayTaskError):
        cause = problem.cause
        if isinstance(cause, KieloError | OSError):
            return cause
        if isinstance(cause, MemoryError):
            return KieloError(
                f"{_WHAT}: a task ran out of memory. {_KEPT}. Fix: a smaller corpus.max_document_bytes"
            )
        if "No module named 'kielo'" in str(problem):
            return KieloError(f"{_WHAT}: a node has no Kielo. Fix: the same environment on each node")
        return RuntimeError(f"a task of Ray failed:\n{problem}")
    lost = exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError
    if isinstance(problem, lost):
        return KieloError(
            f"{_WHAT}: a task lost its process {TRIES} times, mostly because memory ran out. {_KEPT}. Fix: "
            f"nodes with 1 GB of memory a CPU, or `ray start --num-cpus` with a smaller number, {_AGAIN}"
        )
    if isinstance(problem, KieloError):
        return problem
    if isinstance(problem, exceptions.RayError | OSError):
        return KieloError(f"{_LOST} ({_first_line(problem)})")
    return RuntimeError("".join(traceback.format_exception(problem)))


def _first_line(problem: Exception) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0].rstrip(".")


# --- In a process of Ray ---


_made: list[Work] = []  # by the first task: a process of Ray is of one pool alone


def _work_on(
    make: Callable[[], Work],
    folder: str,
    versions: str,
    plan: str,
    environment: Mapping[str, str],
    batch: Any,
) -> Any:
    if not _made:
        _refuse_other_node(folder, versions, Path(plan))
        os.chdir(folder)  # paths of recipes may be relative
        for name in _own_variables():
            del os.environ[name]
        os.environ.update(environment)
        _made.append(make())
    return _made[0](batch)


def _refuse_other_node(folder: str, versions: str, plan: Path) -> None:
    node, wanted = platform.node(), json.loads(versions)
    found = installed_versions(tuple(wanted))
    if differing := [name for name in wanted if found.get(name) != wanted[name]]:
        name = differing[0]
        raise KieloError(
            f"{_WHAT}: node {node} has {name} {found.get(name)}, and {wanted[name]} is wanted. Fix: the same "
            "environment on each node"
        )
    if not Path(folder).is_dir():
        raise KieloError(
            f"{_WHAT}: node {node} has no folder {folder}. Fix: start from a folder of a disk that all nodes "
            "share"
        )
    if not plan.is_file():
        raise KieloError(
            f"{_WHAT}: node {node} does not see {plan.parent}. Fix: the run on a disk that all nodes share"
        )

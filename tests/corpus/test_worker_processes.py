"""Workers, without processes: threads answer through the same pipes, so that order and bounds can be seen."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from kielo.corpus import worker_processes
from kielo.corpus.worker_processes import (
    WORKER_ENVIRONMENT,
    Worker,
    WorkerEnded,
    results_in_order,
)
from kielo.recipe.errors import KieloError


class Process:
    """Stands for a worker's process, and notes what is done to it in its team."""

    exitcode = -9

    def __init__(self, team, name):
        self.team, self.name = team, name

    def kill(self):
        self.team.killed.append(self.name)

    def join(self, limit=None):
        self.team.joined.append(self.name)


class Team:
    """Stands for `start_worker`: each worker is a thread that runs `serve`. killed, joined: which were."""

    def __init__(self):
        self.started, self.killed, self.joined, self.pipes = [], [], [], []

    def start(self, name, make):
        pipe, worker_end = worker_processes.multiprocessing.Pipe()
        self.started.append(name)
        self.pipes.append(pipe)
        process = Process(self, name)
        serve = worker_processes.serve
        threading.Thread(target=serve, args=(make, worker_end, name), daemon=True).start()
        return Worker(name, process, pipe)


@pytest.fixture
def team(monkeypatch):
    made = Team()
    monkeypatch.setattr(worker_processes, "start_worker", made.start)
    monkeypatch.setattr(worker_processes, "end_with_parent", lambda: None)
    return made


def doubled(batch):
    if isinstance(batch, BaseException):
        raise batch
    return 2 * batch


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_are_in_the_order_of_the_batches(team, workers):
    """However long each takes; each worker makes its own work once, and all end when all is done."""
    made, gates = [], [threading.Event() for _ in range(9)]
    gates[8].set()

    def make():
        made.append(threading.current_thread())

        def work(number):
            if workers == 3 and number % 3 == 0:  # waits for the next one
                gates[number + 1].wait(5)
            gates[number].set()
            return 2 * number

        return work

    assert list(results_in_order(make, range(9), workers, "pack")) == list(range(0, 18, 2))
    assert len(made) == workers
    names = [f"pack worker {number} of {workers}" for number in range(workers)] if workers > 1 else []
    assert team.started == names and team.killed == 2 * names and team.joined == names
    assert all(pipe.closed for pipe in team.pipes)
    team.started.clear()
    assert list(results_in_order(make, [], workers, "pack")) == [] and team.started == []


def test_so_many_batches_are_taken_ahead_and_no_more(team):
    """While the first result is not taken: four for each worker, and one that waits."""
    taken = []

    def batches():
        for number in range(40):
            taken.append(number)
            yield number

    results = results_in_order(lambda: doubled, batches(), 2, "pack")
    assert next(results) == 0
    for turn in range(1, 20):
        assert next(results) == 2 * turn
        assert len(taken) <= turn + 2 * 4 + 1
    slow = threading.Event()

    def make():
        return lambda number: slow.wait(5) and 0 if number == 0 else 2 * number

    taken.clear()
    others = results_in_order(make, batches(), 2, "pack")
    threading.Timer(0.1, slow.set).start()
    assert next(others) == 0 and len(taken) == 2 * 4 + 1
    others.close()
    assert list(results_in_order(lambda: doubled, range(3), 5, "pack")) == [0, 2, 4]


def test_the_first_exception_is_raised_as_it_is(team):
    """Unexpected ones with the worker's traceback, and those that cannot be sent as their text."""
    for problem in (KieloError("bad text"), OSError(errno.ENOSPC, "full")):
        with pytest.raises(type(problem)) as refusal:
            list(results_in_order(lambda: doubled, [1, problem], 2, "pack"))
        assert str(refusal.value) == str(problem) and not hasattr(refusal.value, "__notes__")
    with pytest.raises(KeyError) as refusal:
        list(results_in_order(lambda: doubled, [1, KeyError("x")], 2, "pack"))
    assert (
        refusal.value.__notes__[0].startswith("In pack worker ")
        and "KeyError: 'x'" in refusal.value.__notes__[0]
    )

    def unsendable(batch):
        error = ValueError("odd")
        error.handle = threading.Lock()
        raise error

    with pytest.raises(RuntimeError, match=r"(?s)^pack worker . of 2:\n.*ValueError: odd"):
        list(results_in_order(lambda: unsendable, [1], 2, "pack"))

    def fails():
        raise KieloError("no tokenizer")

    with pytest.raises(KieloError, match="no tokenizer"):
        list(results_in_order(fails, [1, 2], 2, "pack"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_without_memory_is_named(team, workers):
    with pytest.raises(
        KieloError, match=rf"pack worker \d of {workers}: out of memory. Fix: fewer corpus.workers"
    ):
        list(results_in_order(lambda: doubled, [MemoryError()], workers, "pack"))


@pytest.mark.parametrize("tries", [1, 2, 3])
def test_batches_of_a_worker_that_was_killed_are_given_out_again(team, monkeypatch, tries):
    """So many times; then it is named, by what ended it."""
    deaths = {"left": tries - 1}
    serve = worker_processes.serve

    def dying(make, pipe, name):
        if deaths["left"] <= 0:
            return serve(make, pipe, name)
        with suppress(EOFError, OSError):  # one that got no batch is ended
            pipe.recv()
            deaths["left"] -= 1
            pipe.close()

    monkeypatch.setattr(worker_processes, "serve", dying)
    assert list(results_in_order(lambda: doubled, [5], 2, "pack", tries)) == [10]
    assert len(team.started) == 2 + tries - 1 and len(set(team.started)) == 2
    deaths["left"] = 99
    with pytest.raises(WorkerEnded, match="pack worker . of 2 was killed by SIGKILL"):
        list(results_in_order(lambda: doubled, [5], 2, "pack", tries))
    assert deaths["left"] == 99 - tries and all(pipe.closed for pipe in team.pipes)
    if tries == 1:
        with pytest.raises(WorkerEnded):  # once, if nothing else is said
            list(results_in_order(lambda: doubled, [5], 2, "pack"))
        assert deaths["left"] == 97


def test_an_answer_is_waited_for_no_longer_than_a_worker_ends():
    """Ten seconds after its pipe has closed."""
    pipe, worker_end = worker_processes.multiprocessing.Pipe()
    worker_end.close()
    limits = []
    process = SimpleNamespace(join=limits.append, exitcode=3)
    with pytest.raises(WorkerEnded, match="^w ended without an answer .exit code 3.. Its own message"):
        Worker("w", process, pipe).receive()
    assert limits == [10]


def test_how_a_worker_is_started(monkeypatch):
    """Spawned, as a daemon, with one thread and without Ctrl-C; its end of the pipe is closed here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = {}

    class Spawned:
        def __init__(self, target, args, name, daemon):
            seen.update(target=target, args=args, name=name, daemon=daemon)

        def start(self):
            seen.update(
                threads=os.environ["OMP_NUM_THREADS"],
                main=sys.modules["__main__"].__spec__,
                blocked=signal.pthread_sigmask(signal.SIG_BLOCK, []),
                is_closed=seen["args"][1].closed,
            )

    pipes = worker_processes.multiprocessing.Pipe()
    contexts = {"spawn": SimpleNamespace(Pipe=lambda: pipes, Process=Spawned)}
    monkeypatch.setattr(worker_processes.multiprocessing, "get_context", contexts.__getitem__)
    worker = worker_processes.start_worker("pack worker 1 of 2", doubled)
    assert (worker.name, worker.pipe) == ("pack worker 1 of 2", pipes[0])
    assert isinstance(worker.process, Spawned)
    assert (seen["target"], seen["name"], seen["daemon"]) == (worker_processes.serve, worker.name, True)
    assert seen["args"] == (doubled, pipes[1], "pack worker 1 of 2")
    assert (seen["threads"], seen["main"], seen["is_closed"]) == ("1", None, False)
    assert signal.SIGINT in seen["blocked"]
    assert pipes[1].closed and not pipes[0].closed and os.environ["OMP_NUM_THREADS"] == "7"


def blocked_signals():
    """Return a work that ignores its batch."""
    return lambda batch: signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_the_first_worker_of_a_process_gets_no_interrupt():
    """Python starts its resource tracker with the first process, and then unblocks SIGINT by itself."""
    script = f"""
from kielo.corpus.worker_processes import start_worker
from {__name__} import blocked_signals
workers = [start_worker(name, blocked_signals) for name in "ab"]
for worker in workers:
    worker.send(None)
    print(*sorted(worker.receive()))
    worker.end()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (f"{int(signal.SIGINT)}\n" * 2, 0), done.stderr


def test_a_worker_ends_with_its_parent(monkeypatch):
    """A thread of its own, which does not hold the process, waits for the parent; then the worker exits."""
    watched = threading.Event()
    threads = []

    def watch():
        threads.append(threading.current_thread())
        watched.set()

    end_with_parent = worker_processes.end_with_parent
    monkeypatch.setattr(worker_processes, "end_with_parent", watch)
    pipe, worker_end = worker_processes.multiprocessing.Pipe()
    pipe.close()
    worker_processes.serve(lambda: doubled, worker_end, "w")
    assert watched.wait(5) and threads[0].daemon and threads[0] is not threading.current_thread()
    done = []
    monkeypatch.setattr(
        worker_processes.multiprocessing, "parent_process", lambda: SimpleNamespace(sentinel=7)
    )
    monkeypatch.setattr(worker_processes, "wait", lambda sentinels: done.append(sentinels))
    monkeypatch.setattr(worker_processes.os, "_exit", done.append)
    end_with_parent()
    assert done == [[7], 1]


def test_what_ended_a_worker_in_words():
    ending = worker_processes.ending
    assert ending(-9).startswith("was killed by SIGKILL, mostly by the kernel")
    assert ending(-15) == "was ended by SIGTERM. Fix: the same command again"
    for code in (0, 1, None):
        assert ending(code) == f"ended without an answer (exit code {code}). Its own message is above"


def test_what_is_changed_for_the_start_of_a_worker_comes_back(monkeypatch):
    """The environment, the main file and Ctrl-C, also when the start fails."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    main = sys.modules["__main__"]
    before = {name: main.__dict__.get(name, ...) for name in ("__file__", "__spec__")}
    monkeypatch.setitem(main.__dict__, "__file__", "script.py")
    monkeypatch.setitem(main.__dict__, "__spec__", "spec")
    with (
        pytest.raises(KeyError),
        worker_processes.environment_of_worker(WORKER_ENVIRONMENT),
        worker_processes.without_main_file(),
        worker_processes.without_interrupts(),
    ):
        assert {name: os.environ[name] for name in WORKER_ENVIRONMENT} == WORKER_ENVIRONMENT
        assert WORKER_ENVIRONMENT["OMP_NUM_THREADS"] == "1"
        assert "__file__" not in main.__dict__ and main.__spec__ is None
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        raise KeyError
    assert os.environ["OMP_NUM_THREADS"] == "7" and "OPENBLAS_NUM_THREADS" not in os.environ
    assert (main.__file__, main.__spec__) == ("script.py", "spec")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    monkeypatch.delitem(main.__dict__, "__file__")  # as in an interactive session
    with worker_processes.without_main_file():
        assert main.__spec__ is None
    assert "__file__" not in main.__dict__ and main.__spec__ == "spec"
    monkeypatch.delitem(main.__dict__, "__spec__")
    with worker_processes.without_main_file():
        assert main.__spec__ is None
    assert "__spec__" not in main.__dict__
    monkeypatch.undo()
    assert {name: main.__dict__.get(name, ...) for name in before} == before

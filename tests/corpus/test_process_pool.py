"""Worker processes: the order of results, exceptions, killed workers, and what workers get from here."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kielo.corpus import process_pool
from kielo.corpus.process_pool import WORKER_ENVIRONMENT, WorkerEnded, WorkerPool, results_in_order
from kielo.recipe.errors import KieloError


def doubler():
    return doubled


def doubled(batch):
    if isinstance(batch, BaseException):
        raise batch
    return 2 * batch


def unsendable():
    def work(batch):
        error = ValueError("odd")
        error.handle = threading.Lock()
        raise error

    return work


def without_tokenizer():
    raise KieloError("no tokenizer")


class Dying:
    """Work that is killed as often as its file has marks left."""

    def __init__(self, file):
        self.file = file

    def __call__(self):
        return self.work

    def work(self, batch):
        if marks := Path(self.file).read_text():
            Path(self.file).write_text(marks[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * batch


def settings():
    """Return a work that says what its process has."""

    def work(batch):
        main = sys.modules["__main__"]
        return (
            signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
            os.environ["OMP_NUM_THREADS"],
            getattr(main, "__file__", None),
            multiprocessing.current_process().name,
        )

    return work


def test_results_are_in_order_and_few_batches_are_taken_ahead(monkeypatch):
    """Four for each worker. All processes end with the results. A pool can be asked again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    taken = []

    def batches():
        for number in range(40):
            taken.append(number)
            yield number

    with WorkerPool(doubler, 2, "pack") as pool:
        for turn, result in enumerate(pool.results(batches())):
            assert result == 2 * turn and len(taken) <= turn + 2 * 4
        assert turn == 39 and list(pool.results([5])) == [10] and list(pool.results([])) == []
        with pytest.raises(KeyError) as refusal:
            list(pool.results([1, KeyError("x")]))
        (note,) = refusal.value.__notes__
        assert note.startswith("In pack worker ") and "KeyError: 'x'" in note
    assert not multiprocessing.active_children()
    with WorkerPool(settings, 1, "pack") as pool:
        assert pool.call(0) == (True, "1", None, "pack worker 0 of 1")
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_one_worker_is_this_process():
    taken = iter(range(3))
    results = results_in_order(lambda: doubled, taken, 1, "pack")
    assert next(results) == 0 and next(taken) == 1 and next(results) == 4
    with pytest.raises(KieloError, match="pack worker 0 of 1: out of memory. Fix: fewer corpus.workers"):
        list(results_in_order(lambda: doubled, [MemoryError()], 1, "pack"))


@pytest.mark.parametrize(
    "make, batch, kind, message",
    [
        (doubler, KieloError("bad text"), KieloError, "^bad text$"),
        (doubler, OSError(errno.ENOSPC, "full"), OSError, "full"),
        (
            doubler,
            MemoryError(),
            KieloError,
            r"pack worker \d of 2: out of memory. Fix: fewer corpus.workers",
        ),
        (unsendable, 1, RuntimeError, r"(?s)^pack worker . of 2:\n.*ValueError: odd"),
        (without_tokenizer, 1, KieloError, "no tokenizer"),
    ],
)
@pytest.mark.full
def test_the_first_exception_is_raised_as_it_is(make, batch, kind, message):
    with pytest.raises(kind, match=message):
        list(results_in_order(make, [batch], 2, "pack"))


@pytest.mark.full
@pytest.mark.parametrize("tries", [1, 2, 3])
def test_batches_of_a_killed_worker_are_given_out_again(tmp_path, tries):
    """At most that many times; then the worker is named, by what ended it."""
    marks = tmp_path / "marks"
    marks.write_text("x" * (tries - 1))
    assert list(results_in_order(Dying(marks), [5, 6], 2, "pack", tries)) == [10, 12]
    marks.write_text("x" * 9)
    with pytest.raises(WorkerEnded, match="pack worker . of 2 was killed by SIGKILL") as refusal:
        list(results_in_order(Dying(marks), [5], 2, "pack", tries))
    assert len(marks.read_text()) == 9 - tries and refusal.value.exit_code == -9


def waiting():
    def work(file):
        Path(file).write_text(str(os.getpid()))
        time.sleep(600)

    return work


@pytest.mark.full
def test_a_worker_ends_with_its_parent(tmp_path):
    """The parent is killed and ends nothing itself."""
    script = f"""
from kielo.corpus.process_pool import WorkerPool
from {__name__} import waiting
WorkerPool(waiting, 1, "w").call({str(tmp_path / "pid")!r})
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    worker = Path("/proc") / (tmp_path / "pid").read_text()
    for _ in range(200):
        if not worker.exists() or ") Z " in (worker / "stat").read_text():
            return
        time.sleep(0.05)
    raise AssertionError("the worker lives")


def test_what_ended_a_worker_in_words():
    ending = process_pool.ending
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
        process_pool.environment_of_worker(WORKER_ENVIRONMENT),
        process_pool.without_main_file(),
        process_pool.without_interrupts(),
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
    with process_pool.without_main_file():
        assert main.__spec__ is None
    assert "__file__" not in main.__dict__ and main.__spec__ == "spec"
    monkeypatch.delitem(main.__dict__, "__spec__")
    with process_pool.without_main_file():
        assert main.__spec__ is None
    assert "__spec__" not in main.__dict__
    monkeypatch.undo()
    assert {name: main.__dict__.get(name, ...) for name in before} == before

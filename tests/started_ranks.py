"""Real ranks on one machine: `run_ranks(fn, 4, ...)` runs fn on 4 gloo ranks and returns their results.

torch is imported once, in a fork server that never runs a computation; every rank is forked from it, in
milliseconds. (Forking the pytest process itself would inherit torch's thread pools, and can hang.)
"""

import faulthandler
import gc
import multiprocessing.util
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

from kielo.ranks.local_ranks import free_port

_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "kielo.train.run",
    "kielo.models.llama.model",
    "kielo.models.llama.tables",
    "numpy",
    "pydantic",
    "pytest",
)


def preload(has_cuda: bool) -> list[str]:
    """Returns the modules that the server imports. has_cuda: torch is a build for GPUs.

    torchao looks at the GPU when it is imported, and a process that was forked afterwards cannot use CUDA:
    there each rank imports it for itself.
    """
    return [*_PRELOAD, *([] if has_cuda else ["torchao.float8"])]


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Call `fn(*args)` on `num_ranks` processes, each with one torch thread and torchrun's variables set.

    `fn` is a function of a module (not a lambda or an inner function) and starts its world itself, usually
    with `kielo.ranks.world.start_world(60, "cpu")`; whatever world it leaves is ended for it. `args` and
    results are pickled. Returns the results in the order of the ranks.

    Raises RuntimeError with every failed rank's traceback, its lines prefixed by the rank, or naming the
    ranks that were still running after `timeout_seconds` (their stacks are on stderr).
    """
    context = _forking()
    port = free_port()
    # Plain pickle: torch's own between processes passes file descriptors, which die with their process.
    parcel = pickle.dumps((fn, args))
    processes, pipes = [], []
    for rank in range(num_ranks):
        variables = _torchrun_variables(rank, num_ranks, port)
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(parcel, rank, variables, theirs, timeout_seconds))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    outcomes = _collect(pipes, timeout_seconds)
    for process in processes:
        process.join(1 if len(outcomes) == num_ranks else 0)
        if process.is_alive():
            process.kill()
            process.join()
    return _results(outcomes, num_ranks, timeout_seconds)


def listen_at_a_short_path() -> None:
    """Has `multiprocessing` keep its sockets in /tmp where TMPDIR is too long for them.

    A path has at most 107 bytes, of which the names take 37. Python does this by itself from 3.14 on.
    """
    usual = tempfile.gettempdir()
    tempfile.tempdir = usual if len(os.fsencode(usual)) <= 70 else "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # is made once, and kept
    finally:
        tempfile.tempdir = usual


@cache
def _forking() -> ForkServerContext:
    """Returns the context of the server once that has imported all: on a slow disk or beside much other work
    it takes a minute, which is none of a rank's.
    """
    import torch

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload(torch.backends.cuda.is_built()))
    listen_at_a_short_path()
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def _torchrun_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _rank_main(
    parcel: bytes, rank: int, variables: dict[str, str], pipe: Connection, timeout_seconds: float
) -> None:
    os.environ.update(variables)
    gc.freeze()  # else a collection writes to, and so copies, all that the server has imported: 0.2 s
    faulthandler.dump_traceback_later(timeout_seconds, exit=False)
    import torch

    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(parcel)
        message = pickle.dumps((True, fn(*args)))
    except BaseException:
        lines = traceback.format_exc().rstrip().splitlines()
        message = pickle.dumps((False, "\n".join(f"[rank {rank}] {line}" for line in lines)))
    pipe.send_bytes(message)
    if "kielo.ranks.world" in sys.modules:
        sys.modules["kielo.ranks.world"].end_world(wait_seconds=5)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread stuck in a collective must not keep a finished rank alive


def _collect(pipes: list[Connection], timeout_seconds: float) -> dict[int, tuple[bool, Any]]:
    """Gathers what the ranks sent; after the first failure the others get two more seconds to
    fail for themselves.
    """
    until = time.monotonic() + timeout_seconds
    outcomes: dict[int, tuple[bool, Any]] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), left):
            rank = open_pipes.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, f"[rank {rank}] ended without a word (killed?)")
            if not outcomes[rank][0]:
                until = min(until, time.monotonic() + 2)
    return outcomes


def _results(outcomes: dict[int, tuple[bool, Any]], num_ranks: int, timeout_seconds: float) -> list[Any]:
    failures = [outcome for _, (ok, outcome) in sorted(outcomes.items()) if not ok]
    silent = [rank for rank in range(num_ranks) if rank not in outcomes]
    if silent and not failures:
        failures = [f"no result within {timeout_seconds:g} s"]
    if silent:
        failures.append(f"still running when it was stopped: rank {', '.join(map(str, silent))}")
    if failures:
        raise RuntimeError("\n".join(failures))
    return [outcomes[rank][1] for rank in range(num_ranks)]

"""4,096 clients of torch's real store connect and agree, on one machine: the protocol, not a network.

Each client is a thread with a connection of its own, and does what a rank does before its first communicator.
"""

import os
import resource
import threading
import time

import pytest
import torch.distributed as dist

from kielo.ranks.communicator import who_is_missing
from kielo.ranks.local_ranks import free_port
from kielo.ranks.rendezvous import Rendezvous
from kielo.ranks.world import connect, once_a_node
from kielo.recipe.errors import KieloError
from tests.started_ranks import run_ranks

CLIENTS, PROCESSES, RANKS_PER_NODE = 4096, 4, 8
LIMIT_SECONDS = 300.0
ABSENT = {7, 8, 4000}
BAD_NODE = 77


def clients_of_a_process(port: int) -> dict:
    """Runs this process's share of the clients, and returns what they got and how long it took."""
    number = int(os.environ["RANK"])
    share = range(CLIENTS // PROCESSES * number, CLIENTS // PROCESSES * (number + 1))
    answers: dict[int, tuple[str, str]] = {}
    seconds: dict[str, list[float]] = {"connected": [], "agreed": [], "asked": []}
    worked: list[int] = []
    open_files: list[int] = []
    started = time.monotonic()

    def client(rank: int) -> None:
        place = Rendezvous(rank, CLIENTS, rank % RANKS_PER_NODE, "127.0.0.1", port)
        store = dist.PrefixStore("kielo/0", connect(place, LIMIT_SECONDS))
        seconds["connected"].append(time.monotonic() - started)

        def work_for_the_node() -> None:
            worked.append(rank)
            if rank // RANKS_PER_NODE == BAD_NODE:
                raise KieloError(f"no weights on node {BAD_NODE}")

        try:
            once_a_node("find the weights", work_for_the_node, place, store, LIMIT_SECONDS)
            refusal = "none"
        except KieloError as error:
            refusal = str(error)
        seconds["agreed"].append(time.monotonic() - started)
        if rank not in ABSENT:
            store.set(f"arrived/world/{rank}", b"1")
        if store.add("settled", 1) == CLIENTS:
            store.set("all", b"1")
        store.wait(["all"])
        answers[rank] = refusal, who_is_missing("world", range(CLIENTS), store)
        if rank == share[0]:
            open_files.append(len(os.listdir("/proc/self/fd")))
        seconds["asked"].append(time.monotonic() - started)
        if store.add("leaving", 1) == CLIENTS:
            store.set("left", b"1")
        store.wait(["left"])  # rank 0 serves the store until all have their answers

    threads = [threading.Thread(target=client, args=(rank,)) for rank in share]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return {
        "answers": set(answers.values()),
        "answered": len(answers),
        "worked": sorted(worked),
        "seconds": {what: max(times) for what, times in seconds.items()},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "open_files": open_files[0],
    }


@pytest.mark.full
def test_4096_clients_of_the_real_store_agree():
    """All get one verdict of the nodes and one list of the missing, and each node works once."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files < 4 * CLIENTS:
        pytest.skip(f"rank 0 needs about {4 * CLIENTS} open files, and {most_files} are allowed")
    found = run_ranks(clients_of_a_process, PROCESSES, free_port(), timeout_seconds=2 * LIMIT_SECONDS)
    missing = "ranks 7, 8, 4000 did not arrive, 4093 of 4096 did"
    ((refusal, said),) = set().union(*(one["answers"] for one in found))
    assert refusal == f"no weights on node {BAD_NODE}" and said.startswith(missing)
    assert sum(one["answered"] for one in found) == CLIENTS
    assert [rank for one in found for rank in one["worked"]] == list(range(0, CLIENTS, RANKS_PER_NODE))
    print({what: max(one["seconds"][what] for one in found) for what in found[0]["seconds"]})
    print([(round(one["peak_mb"]), one["open_files"]) for one in found])

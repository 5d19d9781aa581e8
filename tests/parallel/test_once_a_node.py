"""One rank of each node works for all: once a node, with the same answer on all ranks,
and never waited for without end.
"""

import os
from pathlib import Path

from kielo.parallel import world as room
from kielo.parallel.once_a_node import once_a_node
from kielo.parallel.rendezvous import Rendezvous, find_rendezvous
from kielo.parallel.world import meet
from kielo.recipe.errors import KieloError
from tests.ranks import run_ranks


def fetch_on_rank(folder: Path) -> str:
    room.LINGER_SECONDS = 1.0
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % 2)  # two nodes of two ranks

    def fetch() -> None:
        (folder / f"rank {rank}").touch()
        if rank == 2:
            raise KieloError("no network")

    try:
        place = find_rendezvous()
        once_a_node("find weights", fetch, place, meet(place, 30), 30)
    except KieloError as error:
        return str(error)
    return "found"


def test_where_one_node_cannot_fetch_all_ranks_say_so(tmp_path: Path) -> None:
    """The same message everywhere, and nobody asks again."""
    assert run_ranks(fetch_on_rank, 4, tmp_path) == ["no network"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0", "rank 2"]


def wait_in_vain() -> str:
    place = find_rendezvous()
    store = meet(place, 30)
    if place.rank == 0:
        store.wait(["told"])  # it serves the store, and does nothing for its node
        return ""
    try:
        once_a_node("find weights", lambda: None, place, store, 0.1)
    except KieloError as error:
        return str(error)
    finally:
        store.set("told", "1")
    return "done"


def test_a_rank_that_waits_has_a_limit_and_says_so() -> None:
    """A node whose rank never comes to an end is not waited for without end."""
    assert "rank 1: waited 0.1 s for one rank of each node to find weights" in run_ranks(wait_in_vain, 2)[1]


def test_one_process_asks_nobody() -> None:
    """A world of one rank acts, and waits for nobody."""
    done: list[int] = []
    place = Rendezvous(0, 1, 0)
    once_a_node("act", lambda: done.append(1), place, meet(place, 0), 0)
    assert done == [1]

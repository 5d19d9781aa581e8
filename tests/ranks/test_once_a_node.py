"""One rank of each node works for all: once a node, with the same answer on all ranks,
and never waited for without end.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kielo.ranks import world as module
from kielo.ranks import world as room
from kielo.ranks.rendezvous import Rendezvous, find_rendezvous
from kielo.ranks.world import meet, once_a_node
from kielo.recipe.errors import KieloError
from tests.started_ranks import run_ranks


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


def fail() -> None:
    raise ValueError("odd")


@pytest.mark.parametrize(
    ("local_rank", "action", "complaint", "told", "acts"),
    [
        (0, list, None, None, True), (1, fail, None, None, False),
        (0, fail, None, "ValueError: odd", True), (1, list, "no network", "no network", False),
        (0, fail, "no network", "no network", True),
    ],
)  # fmt: skip
def test_the_last_of_three_ranks_gives_the_verdict(
    local_rank: int, action: Any, complaint: str | None, told: str | None, acts: bool, monkeypatch
) -> None:
    """The first complaint is that of all; a rank that complains stays for the others."""
    place, store, done = Rendezvous(2, 3, local_rank), dist.HashStore(), []
    monkeypatch.setattr(module, "linger", done.append)
    ours = dist.PrefixStore("once_a_node/find weights", store)
    ours.add("settled", 2)
    if complaint:
        ours.set("complaint", complaint)

    def act() -> None:
        done.append("acted")
        action()

    if told is None:
        once_a_node("find weights", act, place, store, 5.0)
    else:
        with pytest.raises(KieloError) as caught:
            once_a_node("find weights", act, place, store, 5.0)
        assert str(caught.value) == told
    assert done == ["acted"] * acts + [place] * (told is not None)
    assert ours.get("verdict").decode() == (told or "")


def test_a_rank_before_the_last_has_no_verdict() -> None:
    """It waits in vain, and says for what."""
    place, store = Rendezvous(1, 3, 1), dist.HashStore()
    dist.PrefixStore("once_a_node/act", store).add("settled", 1)
    with pytest.raises(KieloError) as caught:
        once_a_node("act", list, place, store, 0.01)
    assert str(caught.value) == (
        "rank 1: waited 0.01 s for one rank of each node to act, and not all have ended"
    )


def test_the_second_of_two_ranks_leaves_it_to_the_first() -> None:
    place, store, done = Rendezvous(1, 2, 1), dist.HashStore(), []
    dist.PrefixStore("once_a_node/act", store).add("settled", 1)
    once_a_node("act", lambda: done.append("acted"), place, store, 5.0)
    assert done == []

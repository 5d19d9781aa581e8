"""A slow link between nodes is named by the copies that cross it; noise is none, nor is a slow rank."""

import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kielo.checkpoint import node_memory
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.node_memory import COPIES, LEAST_BYTES, Arrival, SlowLink, SlowLinks, slow_links
from kielo.ranks.world import make_host_group, start_world
from tests.started_ranks import run_ranks

HOSTS = [f"nid{rank // 2}" for rank in range(8)]


def arrivals(seconds: list[float]) -> list[Arrival]:
    return [Arrival(2 * LEAST_BYTES, of_rank) for of_rank in seconds]


def test_a_link_over_which_all_ranks_of_a_node_are_slow() -> None:
    """A slow link is named from the third copy on, once; again only after it was not slow. One slow rank of a
    node is no link.
    """
    usual = [0.02, 0.03, 0.02, 0.02, 0.02, 0.02, 0.02, 0.09]
    slow = [*usual[:4], 0.05, 0.06, *usual[6:]]
    links = SlowLinks(HOSTS, 2)
    assert [links.look(arrivals(usual)) for _ in range(2 * COPIES)] == [None] * 2 * COPIES
    told = [links.look(arrivals(slow)) for _ in range(2 * COPIES)]
    assert [message is not None for message in told] == [False, False, True, False, False, False]
    assert "from nid1 to nid2 is slow" in told[2] and "336 MB/s, over the median link at 839" in told[2]
    assert "can lose 60% of their speed" in told[2]  # 1 - 0.02 / 0.05
    assert links.look(arrivals(usual)) is None
    assert [links.look(arrivals(slow)) is not None for _ in range(COPIES)] == [False, False, True]


def test_the_link_to_the_first_node_is_from_the_last() -> None:
    links = SlowLinks(HOSTS, 2)
    told = [links.look(arrivals([0.1, 0.1] + [0.02] * 6)) for _ in range(COPIES)][-1]
    assert told is not None and "from nid3 to nid0 is slow" in told


def test_a_link_is_slow_from_twice_the_usual_time_on() -> None:
    """Take the second of three links as usual, the lower middle one of four, by its fastest copy."""
    assert (COPIES, LEAST_BYTES) == (3, 8_388_608)
    assert slow_links([[1.0, 2.0, 4.0], [2.0, 1.0, 4.0]]) == [SlowLink(2, 4.0, 2.0)]
    assert slow_links([[1.0, 2.0, 4.0], [2.0, 1.0, 3.9]]) == []
    assert slow_links([[1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 8.0]]) == [SlowLink(3, 6.0, 2.0)]


def test_the_message_about_a_link() -> None:
    """Rates of a rank: 8 MiB in 0.05 s beside 0.02 s; a piece of just that size is judged."""
    links, told = SlowLinks([f"nid{rank // 2}" for rank in range(6)], 2), []
    for _ in range(COPIES):
        told.append(
            links.look([Arrival(8_388_608, of_rank) for of_rank in (0.02, 0.09, 0.02, 0.02, 0.06, 0.05)])
        )
    assert told == [None, None, (
        "the link from nid1 to nid2 is slow: a rank's bytes arrive at 168 MB/s, over the median link "
        "at 419 MB/s. Collectives between nodes wait for it, and can lose 60% of their speed. Fix: leave one "
        "of these nodes out"
    )]  # fmt: skip


def test_noise_is_no_link() -> None:
    """Heavy-tailed, half of the usual time in the mean: 0 of 4,000 links."""
    for seed in range(500):
        times = 1 + np.random.default_rng(seed).pareto(3, (COPIES, 8))
        assert slow_links(times.tolist()) == []


def test_small_pieces_and_ranks_without_any_are_not_judged() -> None:
    links = SlowLinks(HOSTS, 2)
    for one in (Arrival(LEAST_BYTES - 1, 9.0), None):
        for _ in range(COPIES):
            assert links.look([*arrivals([0.02] * 7), one]) is None


def copy_over_a_slow_link(folder: Path) -> list[str]:
    """Copies on three nodes of a rank each, of which the second is late with all that it sends."""
    node_memory.MEMORY_FOLDER = folder / "shm"
    world, isend = start_world(60, "cpu"), dist.isend
    socket.gethostname = lambda: f"nid{world.rank}"

    def late(*arguments, **named):
        if world.rank == 1:
            time.sleep(0.3)
        return isend(*arguments, **named)

    dist.isend = late
    alerts: list[str] = []
    checkpointer = Checkpointer(
        folder / "run",
        group=make_host_group(world, "checkpoint", 60),
        on_alert=lambda step, message: alerts.append(message),
    )
    checkpointer.use_memory(0)
    mesh = init_device_mesh("cpu", (3,))
    tensors = {"model/rows": distribute_tensor(torch.ones(3, LEAST_BYTES // 4), mesh, [Shard(0)])}
    checkpointer.save(100, tensors, {"step": 100})
    for step in range(101, 101 + COPIES):
        checkpointer.copy_to_memory(step, tensors, {"step": step})
    checkpointer.close()
    return alerts


@pytest.mark.full
def test_a_late_sender_is_named_by_copies_in_memory(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (told,), *others = run_ranks(copy_over_a_slow_link, 3, tmp_path)
    assert "from nid1 to nid2 is slow" in told and others == [[], []]

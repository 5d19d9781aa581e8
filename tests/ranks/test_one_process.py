"""The world of a process, with store, clock and devices in memory: who waits for whom, and for how long."""

import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kielo.ranks import world as room
from kielo.ranks.rendezvous import Rendezvous
from kielo.ranks.world import (
    World,
    connect,
    end_world,
    enter_world,
    leave_together,
    linger,
    make_host_group,
    meet,
    start_world,
)
from kielo.recipe.errors import KieloError

CPU = torch.device("cpu")
FAR = Rendezvous(2, 4, 3, "nid7", 29_500)


class Store:
    """Counts in memory; `others` leave one at each look at the count."""

    def __init__(self, others: int = 0, is_gone: bool = False):
        self.others, self.is_gone, self.left, self.done = others, is_gone, 0, []

    def add(self, key: str, number: int) -> int:
        if self.is_gone:
            raise RuntimeError
        assert key == "leaving"
        self.left += number
        if number == 0 and self.others:
            self.others, self.left = self.others - 1, self.left + 1
        return self.left

    def set(self, key: str, value: str) -> None:
        self.done.append((key, value))

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.done.append((*keys, limit.total_seconds()))
        raise RuntimeError  # it took too long, which is no reason to fail


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds: float) -> None:
        found.now += seconds
        found.slept.append(seconds)

    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=sleep))
    return found


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Enters a world whose communicator is up at once; returns the arguments of its start."""

    def entered(rank: int, size: int, store: Store) -> list[Any]:
        started: list[Any] = []
        monkeypatch.setattr(room, "raise_communicator", lambda *arguments: started.extend(arguments))
        monkeypatch.setattr(room, "keep_flight_record", lambda: started.append("noted"))
        world = World(rank, size, 0, CPU, 30.0, store)
        assert enter_world(world, "gloo") is world
        return started

    yield entered
    end_world(0.0)


@pytest.mark.parametrize(
    ("rank", "size", "others", "seconds"),
    [(0, 3, 2, 0.02), (0, 3, 1, 4.0), (1, 3, 0, 0.0), (0, 1, 0, 0.0), (0, 2, 1, 0.01)],
)
def test_rank_0_leaves_last_but_does_not_wait_for_ever(enter, clock, rank, size, others, seconds) -> None:
    """It looks again each hundredth of a second, for four seconds here; others do not wait."""
    store = Store(others)
    noted, startup, name, ranks, _ = enter(rank, size, store)
    assert (noted, name, ranks, startup.timeout_seconds) == ("noted", "world", range(size), 30.0)
    end_world(4.0)
    assert clock.now - 100.0 == pytest.approx(seconds, abs=0.0101 if seconds == 4.0 else 1e-9)
    assert store.left == (0 if size == 1 else 1 + others)
    end_world(4.0)  # there is none any more
    assert store.left == (0 if size == 1 else 1 + others)


def test_the_group_of_all_ranks_meets_in_the_worlds_store(enter, monkeypatch) -> None:
    """Its limit is longer than that of its start."""
    asked: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *backend, **where: asked.append((*backend, where)))
    store = Store()
    *_, make = enter(2, 3, store)
    assert make() is dist.group.WORLD
    limit = timedelta(seconds=30, minutes=30)
    assert asked == [("gloo", {"store": store, "rank": 2, "world_size": 3, "timeout": limit})]


def test_a_world_is_real_and_does_not_show_its_store() -> None:
    world = World(1, 3, 0, CPU, 30.0, Store())
    assert not world.is_rehearsed and "store" not in repr(world)
    assert world == World(1, 3, 0, CPU, 30.0, Store()) and world != World(2, 3, 0, CPU, 30.0, Store())


def test_rank_0_waits_ten_seconds_where_nothing_is_said(enter, clock) -> None:
    enter(0, 2, Store())
    end_world()
    assert clock.now - 100.0 == pytest.approx(10.0, abs=0.0101)


def test_a_store_that_is_gone_does_not_hold_anybody_up(enter, clock) -> None:
    enter(0, 3, Store(is_gone=True))
    end_world(4.0)
    assert clock.slept == []


def test_ranks_leave_once_rank_0_is_done(enter) -> None:
    """At most for the time that is given; one rank alone asks nobody."""
    for rank, size, done in (
        (0, 2, [("rank 0 is done", "1")]), (1, 2, [("rank 0 is done", 7.0)]), (0, 1, []),
    ):  # fmt: skip
        store = Store()
        enter(rank, size, store)
        leave_together(7.0)
        assert store.done == done
    end_world(0.0)
    leave_together(7.0)
    assert store.done == []


@pytest.mark.parametrize(
    ("devices", "local_rank", "found"),
    [
        (1, 3, "cuda:0"), (4, 3, "cuda:3"), (4, 0, "cuda:0"),
        (3, 3, "local rank 3 has no GPU: this node shows 3. Fix: start 3 ranks a node"),
        (0, 0, 'device "cuda" was asked for, but this build of torch sees no GPU. Fix: device = "cpu"'),
    ],
)  # fmt: skip
def test_each_local_rank_has_a_device_of_its_own(devices, local_rank, found, monkeypatch) -> None:
    """A task that is shown one alone takes that; where no kind is named, a GPU is taken if there is one."""
    place, made, current = Rendezvous(1, 8, local_rank, "nid7", 29_500), [], []
    monkeypatch.setattr(room, "find_rendezvous", lambda: place)
    monkeypatch.setattr(room, "meet", lambda place, seconds: seconds)
    monkeypatch.setattr(room, "enter_world", lambda world, backend: made.append(backend) or world)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    if not found.startswith("cuda:"):
        with pytest.raises(KieloError) as caught:
            start_world(30.0, "cuda")
        assert str(caught.value) == found and current == []
    for kind in ("cuda", None)[: 2 * found.startswith("cuda:")]:
        world = start_world(30.0, kind)
        assert str(world.device) == found and current.pop() == world.device and made.pop() == "nccl"
        assert (world.rank, world.size, world.local_rank, world.store) == (1, 8, local_rank, 30.0)
    assert str(start_world(30.0, "cpu").device) == "cpu" and made == ["gloo"] and current == []


def test_a_start_that_fails_keeps_rank_0_for_the_others(monkeypatch, clock) -> None:
    """For three seconds, unless it is alone, or the launcher serves the store."""

    def fail(world: World, backend: str) -> World:
        raise KieloError("nobody came")

    monkeypatch.setattr(room, "enter_world", fail)
    monkeypatch.setattr(room, "meet", lambda place, seconds: None)
    monkeypatch.setattr(room, "find_rendezvous", lambda: Rendezvous(0, 2, 0))
    with pytest.raises(KieloError, match="nobody came"):
        start_world(30.0, "cpu")
    assert clock.slept == [3.0]
    for place in (Rendezvous(0, 1, 0), Rendezvous(1, 2, 0), Rendezvous(0, 2, 0, store_is_running=True)):
        linger(place)
    assert clock.slept == [3.0]


@pytest.mark.parametrize(
    ("rank", "is_running", "serves"),
    [(0, False, True), (0, True, False), (1, False, False), (1, True, False)],
)
def test_rank_0_serves_the_store_unless_the_launcher_does(rank, is_running, serves, monkeypatch) -> None:
    """Waiting for the others is left to those who start communicators."""
    made, files = [], []
    monkeypatch.setattr(room, "allow_open_files", files.append)
    monkeypatch.setattr(dist, "TCPStore", lambda *place, **options: made.append((*place, options)))
    place = Rendezvous(rank, 4, 1, "nid7", 29_500, is_running)
    connect(place, 12.0)
    options = {"is_master": serves, "timeout": timedelta(seconds=12), "wait_for_workers": False}
    assert made == [("nid7", 29_500, options | {"multi_tenant": True, "master_listen_fd": None})]
    assert files == [place]


def test_a_rank_alone_needs_no_port_and_one_that_finds_nobody_says_where(monkeypatch) -> None:
    assert isinstance(connect(Rendezvous(0, 1, 0), 1.0), dist.HashStore)

    def refuse(*place: Any, **options: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(room, "allow_open_files", lambda place: None)
    monkeypatch.setattr(dist, "TCPStore", refuse)
    with pytest.raises(KieloError) as caught:
        connect(FAR, 12.0)
    assert str(caught.value) == (
        "rank 2: no meeting at nid7:29500 within 12 s (refused). Fix: let rank 0 run there, with "
        "that port free and open"
    )


def test_ranks_of_an_attempt_meet_once(monkeypatch) -> None:
    """Another attempt has keys of its own in the same store."""
    store = dist.HashStore()
    monkeypatch.setattr(room, "connect", lambda *asked: store if asked[1] == 3.0 else None)
    first = meet(FAR, 3.0)
    assert meet(FAR, 3.0) is first
    first.set("here", "1")
    second = meet(Rendezvous(2, 4, 3, "nid7", 29_500, attempt="1"), 3.0)
    assert second is not first and not second.check(["here"]) and store.check(["kielo/0/here"])
    end_world(0.0)
    assert meet(FAR, 3.0) is not first
    end_world(0.0)


def test_a_host_group_connects_lazily_and_has_a_limit_of_its_own(monkeypatch) -> None:
    """Over all ranks, on the CPU whatever the world's device; one rank needs none."""
    world = World(1, 3, 0, torch.device("cuda", 0), 30.0, Store())
    assert make_host_group(World(0, 1, 0, CPU, 30.0, Store()), "checkpoint", 9.0) is None
    seen: list[Any] = []
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)

    def new_group(ranks: list[int], **options: Any) -> str:
        seen.append((ranks, options, os.environ["TORCH_GLOO_LAZY_INIT"]))
        return "group"

    def raise_it(startup: Any, name: str, ranks: Any, make: Callable[[], Any]) -> Any:
        seen.append((startup.device.type, startup.timeout_seconds, name, list(ranks)))
        return make()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(room, "raise_communicator", raise_it)
    assert make_host_group(world, "checkpoint", 9.0) == "group"
    options = {"timeout": timedelta(seconds=9, minutes=30), "backend": "gloo", "group_desc": "checkpoint"}
    assert seen == [("cpu", 9.0, "checkpoint", [0, 1, 2]), ([0, 1, 2], options, "1")]
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ

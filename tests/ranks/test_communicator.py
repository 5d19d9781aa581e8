"""Ranks that did not arrive are found by few questions and named; how many files a rank may need."""

import resource
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from kielo.ranks import communicator, process_settings
from kielo.ranks.communicator import (
    NoCommunicator,
    Startup,
    raise_communicator,
    warm_messages,
    who_is_missing,
)
from kielo.ranks.process_settings import allow_open_files, open_files_needed
from kielo.recipe.errors import KieloError


class Store:
    """What the ranks need of torch's store; counts the questions for marks."""

    def __init__(self, *arrived: int):
        self.values, self.questions = {f"arrived/tensor/{rank}": b"1" for rank in arrived}, 0

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        self.values[key] = self.values.get(key, 0) + number
        return self.values[key]

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def clone(self) -> "Store":
        return self

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], limit: timedelta) -> None:
        assert limit == timedelta(seconds=3) and self.check(keys)


ALL = range(8)
HINT = "or raise train.start_timeout_seconds if they are merely slow"


@pytest.mark.parametrize(
    ("arrived", "text"),
    [
        ((0, 1, 2, 4, 5, 6, 7), f"rank 3 did not arrive, 7 of 8 did. Fix: look at the log of rank 3, {HINT}"),
        ((1, 2, 3, 4, 5, 6), "ranks 0, 7 did not arrive, 6 of 8 did. Fix: look at the log of ranks 0, 7, "
         + HINT),
        (tuple(ALL), "all 8 ranks arrived, but could not communicate. Fix: check the network interface "
         "(NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME) and train.start_timeout_seconds"),
    ],
)  # fmt: skip
def test_missing_ranks_are_named_to_all_by_the_first_that_asks(arrived, text, monkeypatch) -> None:
    """The others read its text, although a rank has come meanwhile."""
    monkeypatch.setattr(communicator, "nodes_of_ranks", lambda ranks: [])
    store = Store(*arrived)
    assert who_is_missing("tensor", ALL, store) == text
    store.values["arrived/tensor/3"] = b"1"
    questions = store.questions
    assert who_is_missing("tensor", ALL, store) == text and store.questions == questions + 1


def test_few_questions_find_a_rank_among_many(monkeypatch) -> None:
    """One, and two for each half that lacks some: 1 + 2 × 10 for one of 1024; one more waits for the text."""
    monkeypatch.setattr(communicator, "nodes_of_ranks", lambda ranks: [])
    store = Store(*(rank for rank in range(1024) if rank != 700))
    told = who_is_missing("tensor", range(1024), store)
    assert told.startswith("rank 700 did not arrive, 1023 of 1024 did") and store.questions == 21 + 1


def test_nodes_are_named_and_no_more_than_32_of_anything(monkeypatch) -> None:
    monkeypatch.setattr(communicator, "nodes_of_ranks", lambda ranks: [f"nid{rank}" for rank in ranks])
    told = who_is_missing("tensor", range(34), Store())
    assert (
        told.startswith("ranks 0, 1, ") and ", 31 and 2 more did not arrive, 0 of 34 did (they are on" in told
    )
    assert "nid31 and 2 more). Fix: look at" in told
    assert ", 31 and 1 more did not arrive, 0 of 33" in who_is_missing("tensor", range(33), Store())
    told = who_is_missing("tensor", range(32), Store())
    assert ", 31 did not arrive, 0 of 32 did" in told and "more" not in told


def test_a_store_that_is_gone_is_told() -> None:
    def gone(*_: object) -> None:
        raise RuntimeError

    store = SimpleNamespace(add=gone, check=gone)
    assert who_is_missing("tensor", ALL, store).startswith(
        "the store on rank 0 is gone, so rank 0 ended first"
    )


def test_a_group_waits_longer_than_its_start() -> None:
    limit = Startup(0, None, torch.device("cpu"), 90.0).group_timeout
    assert limit == timedelta(seconds=90, minutes=30)


@pytest.mark.parametrize("said", ["can't start new thread", "gloo: Resource temporarily unavailable"])
def test_a_limit_of_processes_is_no_fault_of_the_network(said: str) -> None:
    def make() -> None:
        raise RuntimeError(said)

    startup = Startup(0, Store(*range(4)), torch.device("cpu"), 30.0)
    with pytest.raises(KieloError, match="'tensor' failed: the system gives you no more processes") as caught:
        raise_communicator(startup, "tensor", range(4), make)
    assert "network" not in str(caught.value)


@pytest.mark.parametrize("size", (2, 3, 4))
def test_the_first_allreduce_must_count_all_ranks(size: int, monkeypatch) -> None:
    """It counts three here."""
    monkeypatch.setattr(communicator, "dist", SimpleNamespace(all_reduce=lambda count, group: count.add_(2)))
    monkeypatch.setattr(communicator, "nodes_of_ranks", lambda ranks: [])
    monkeypatch.setattr(communicator, "hosts_of_ranks", lambda ranks: [f"nid{rank}" for rank in ranks])
    for rank, hosts in ((0, ("nid1",)), (2, ())):
        startup = Startup(rank, Store(0, *range(2, 9)), torch.device("cpu"), 30.0)
        if size == 3:
            assert raise_communicator(startup, "tensor", range(size), lambda: "group") == "group"
            continue
        with pytest.raises(NoCommunicator) as caught:
            raise_communicator(startup, "tensor", range(size), lambda: "group")
        said = f"communicator 'tensor' failed (its first all-reduce counted 3 ranks instead of {size})"
        assert (
            str(caught.value).startswith(f"rank {rank}: {said}: rank 1 did not arrive")
            and caught.value.hosts == hosts
        )
        assert startup.store.values[f"arrived/tensor/{rank}"] == b"1"


@pytest.mark.parametrize(
    ("rank", "is_running", "files"), [(1, False, 512), (1, True, 512), (0, True, 612), (0, False, 912)]
)
def test_files_of_a_rank(rank: int, is_running: bool, files: int) -> None:
    """512 of its own, and sockets of rank 0: one for each of 100 ranks, and three more if it is the store."""
    place = SimpleNamespace(rank=rank, size=100, store_is_running=is_running)
    assert open_files_needed(place) == files


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((256, 4096), (4096, 4096)),
        ((4096, 4096), None),
        ((256, 912), (912, 912)),
        ((256, UNLIMITED), (2**20, UNLIMITED)),
        ((256, 2**21), (2**20, 2**21)),
        ((2**20, 2**21), None),
        ((UNLIMITED, UNLIMITED), None),
        ((256, 911), "rank 0 of 100 needs up to 912 open files and sockets, but the hard limit is 911"),
    ],
)
def test_the_limit_of_files_is_raised_as_far_as_is_allowed(limits, raised, monkeypatch) -> None:
    """To 2^20 at most; too little is refused."""
    done = []
    monkeypatch.setattr(process_settings, "resource", SimpleNamespace(
        RLIM_INFINITY=UNLIMITED, RLIMIT_NOFILE=7, getrlimit=lambda kind: limits,
        setrlimit=lambda kind, pair: done.append((kind, pair)),
    ))  # fmt: skip
    place = SimpleNamespace(rank=0, size=100, store_is_running=False)
    if isinstance(raised, str):
        with pytest.raises(KieloError, match=raised):
            allow_open_files(place)
        return
    allow_open_files(place)
    assert done == ([] if raised is None else [(7, raised)])


@pytest.mark.parametrize(
    ("size", "mine", "messages"),
    [
        (2, 0, [("send", 1), ("recv", 1)]), (2, 1, [("recv", 0), ("send", 0)]), (1, 0, []),
        (3, 2, [("recv", 1), ("send", 1), ("recv", 0), ("send", 0)]),
        (4, 1, [("recv", 0), ("send", 0), ("send", 2), ("recv", 2)]),
        (4, 0, [("send", 1), ("recv", 1), ("send", 3), ("recv", 3)]),
        (5, 3, [("recv", 2), ("send", 2), ("send", 4), ("recv", 4)]),
        (5, 4, [("recv", 3), ("send", 3), ("recv", 0), ("send", 0)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["2.11.0+rocm7", "2.13.0"])
def test_neighbours_and_both_ends_send_to_each_other(
    size: int, mine: int, messages, version: str, monkeypatch
) -> None:
    """Even pairs, odd pairs, then the ends; the lower rank of a pair sends first.

    Over the group's communicator, and for torch 2.13 also over communicators of two ranks.
    """
    done, store, waited = [], Store(), []
    work = SimpleNamespace(wait=lambda: waited.append(1))
    sends = {
        "send": lambda message, group, group_dst: done.append(("alone", "send", group_dst)),
        "recv": lambda message, group, group_src: done.append(("alone", "recv", group_src)),
        "isend": "send", "irecv": "recv",
        "P2POp": lambda operation, message, group, group_peer: ("batch", operation, group_peer),
        "batch_isend_irecv": lambda operations: done.extend(operations) or [work],
    }  # fmt: skip
    monkeypatch.setattr(communicator, "dist", SimpleNamespace(**sends))
    monkeypatch.setattr(torch, "__version__", version)
    startup = Startup(10 + mine, store, torch.device("cpu"), 30.0)
    warm_messages(startup, "pipeline", range(10, 10 + size), None)
    ways = ["batch"] if version.startswith("2.11") else ["batch", "alone"]
    assert done == [(way, *message) for message in messages for way in ways]
    assert len(waited) == len(messages)
    pairs = [tuple(sorted((mine, other))) for other in dict.fromkeys(other for _, other in messages)]
    assert list(store.values) == [f"arrived/pipeline {low}-{high}/{10 + mine}" for low, high in pairs]

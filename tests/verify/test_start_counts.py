"""The start of one rank of 6,144, counted: nothing grows faster than the ranks that it must reach."""

import math
import os
import threading
from datetime import timedelta

import pytest
import start_counts
import torch
import torch.distributed as dist
from counted_start import (
    CountedStore,
    count_start,
    gloo_peers,
    gloo_store_operations,
    server_operations,
)

from kielo.plan.failures import STORE_OPERATIONS_PER_RANK, communicators
from kielo.ranks.process_settings import open_files_needed
from kielo.ranks.rendezvous import Rendezvous
from kielo.recipe.sections import Layout
from tests.started_ranks import run_ranks


def test_counts_of_a_start_do_not_grow_with_the_job():
    """One rank of 6,144 asks for what one of 512 does; rank 0 for as much as there are ranks."""
    committed = start_counts.read()
    small, large = (count_start(start_counts.job(size), 1) for size in (512, 6144))
    assert (small, large) == (committed[512][1], committed[6144][1])
    assert small.store_operations["counted"] == large.store_operations["counted"] < 20
    assert len(small.communicators) == len(large.communicators) == 4
    assert (small.pairs, small.nccl_sockets, small.parts) == (large.pairs, large.nccl_sockets, large.parts)
    assert large.weights * 11 < small.weights and large.job_parts == 12 * small.job_parts
    assert large.host_sockets < 20 and sum(large.store_operations.values()) < 70


def test_rank_zero_has_sockets_for_all():
    """Rank 0 asks for a limit of open files that has room for all that it connects with."""
    for size, counts in start_counts.read().items():
        first = counts[0]
        stores = 2 * size  # each rank's connection, and another one while a communicator starts
        sockets = first.nccl_sockets + first.host_sockets + stores
        assert size <= first.host_sockets < sockets < open_files_needed(Rendezvous(0, size, 0))


def test_the_planner_counts_a_start_as_its_own_code_does():
    """`kielo plan --failures` has no torch to run it: communicators, and the store's operations."""
    for size, counts in start_counts.read().items():
        layout = start_counts.job(size).placement.layout
        data = size // (layout.tensor * layout.pipeline)
        layout = layout.model_copy(update={"shard": data // layout.replicate})
        counted = max(len(one.communicators) + one.pairs for one in counts)
        assert communicators(layout, size) == counted
        assert start_counts.server_operations(counts) <= (STORE_OPERATIONS_PER_RANK + 1) * size
    both = Layout(replicate=2, shard=4, context=2, tensor=2)
    assert communicators(both, 32) == 6  # the world, four axes, and shard with context, of weights


def test_nothing_grows_faster_than_the_ranks_it_must_reach():
    """At all sizes that were counted: rank 0 reaches all, the others a ring and a tree."""
    for size, counts in start_counts.read().items():
        first, *others = counts
        for of_rank in counts:
            assert len(of_rank.communicators) <= 4 and max(of_rank.communicators) <= size
            assert of_rank.pairs <= 3 and of_rank.nccl_sockets <= 28
            assert of_rank.store_operations["counted"] < 20
        for of_rank in others:
            assert of_rank.host_sockets <= 4 + math.log2(size)
            assert sum(of_rank.store_operations.values()) < 40 + 2 * math.log2(size)
        assert sum(first.store_operations.values()) <= 40 + 2 * size
        assert server_operations(counts) <= 60 * size


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, 1024, 6144, 100_000])
def test_the_host_group_connects_each_rank_with_few(size):
    """Of any size: all ranks but 0 have at most two neighbours, rank 0, a parent and log2(size) children."""
    ranks = range(size) if size <= 6144 else (0, 1, 2, 3, 4095, size // 2, size - 1)
    most = max(len(gloo_peers(rank, size)) for rank in ranks if rank) if size > 1 else 0
    assert most <= 4 + math.log2(size) and len(gloo_peers(0, size)) == size - 1
    if size <= 6144:
        assert sum(gloo_store_operations(rank, size) for rank in range(size)) <= 15 * size


def test_the_page_holds_the_counts():
    """benchmarks/results/start_counts.md has the table of the committed counts."""
    assert start_counts.table(start_counts.read()) in start_counts.PAGE.read_text(encoding="utf-8")


@pytest.mark.full
def test_committed_counts_are_those_of_the_code():
    """Every count of every size, made again."""
    assert {size: start_counts.count(size) for size in start_counts.SIZES} == start_counts.read()


class SharedStore(CountedStore):
    """One rank's view of a store that all ranks share; `asked_for`: the ranks whose addresses it got."""

    def __init__(self, shared: dist.Store, size: int):
        super().__init__(size)
        self._shared = shared
        self.asked_for: set[int] = set()

    def set(self, key, value):
        super().set(key, value)
        self._shared.set(key, value)

    def get(self, key):
        super().get(key)
        self.asked_for.add(int(key.rpartition("/")[2]))
        return self._shared.get(key)

    def wait(self, keys, timeout=None):
        super().wait(keys)
        self._shared.wait(keys)


def peers_of_gloo(size: int) -> list[tuple[set[int], int]]:
    """Returns each rank's peers and store operations in a real gloo group, one thread a rank."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # this process is of its own
    shared, groups = dist.HashStore(), [None] * size
    stores = [SharedStore(shared, size) for _ in range(size)]

    def work(rank: int) -> None:
        store = dist.PrefixStore("group", stores[rank])
        group = groups[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        one, gathered = torch.ones(()), [torch.zeros(()) for _ in range(size)]
        group.allreduce([one]).wait()
        group.allgather([gathered], [one]).wait()
        broadcast, gather, scatter = dist.BroadcastOptions(), dist.GatherOptions(), dist.ScatterOptions()
        broadcast.rootRank = gather.rootRank = scatter.rootRank = 0
        group.broadcast([one], broadcast).wait()
        group.gather([gathered] if rank == 0 else [], [one], gather).wait()
        group.scatter([one], [gathered] if rank == 0 else [], scatter).wait()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(store.asked_for, store.operations.total()) for store in stores]


def test_gloo_connects_as_computed():
    """The computed peers and store operations of a lazily connected group are those of real ones."""
    size = 11
    computed = [(gloo_peers(rank, size), gloo_store_operations(rank, size)) for rank in range(size)]
    assert run_ranks(peers_of_gloo, 1, size) == [computed]

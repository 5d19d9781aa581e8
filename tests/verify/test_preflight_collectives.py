"""What `kielo preflight` sends, expects and counts, and which speeds of groups it refuses, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.recipe.cards import Cluster, cluster
from kielo.verify.preflight import collectives
from kielo.verify.preflight.job import Sizes
from tests.verify import preflight_counts as counts
from tests.verify.made_job import card, job, layout, told

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "ranks", "step", "most"),
    [
        (torch.float32, 3, 1, 4096), (torch.float32, 8192, 1, 2048), (torch.bfloat16, 3, 1, 85),
        (torch.bfloat16, 256, 1, 1), (torch.bfloat16, 257, 2, 1), (torch.bfloat16, 1000, 4, 1),
    ],
)  # fmt: skip
def test_contributed_values_are_as_large_as_exact_sums_allow(dtype, ranks: int, step: int, most: int) -> None:
    """Whole numbers from 0 to the largest whose sum over all ranks is exact, at most 4,096; of many ranks
    only each `step`-th gives some.
    """
    first = collectives.values(0, ranks, dtype, 0, 1021, CPU)
    assert first.dtype == dtype and 0 <= first.min() < 1 + most / 100
    if most > 1000:  # the largest of so many random numbers is near the end
        assert 0.98 * most < first.max() <= most
    else:
        assert first.max() == most
    assert torch.equal(first, first.round()) and collectives.values(step, ranks, dtype, 0, 1021, CPU).any()
    if step > 1:
        assert not collectives.values(1, ranks, dtype, 0, 1021, CPU).any()


def test_values_repeat_after_1021_elements() -> None:
    values = collectives.values(2, 5, torch.float32, 0, 2500, CPU)
    assert values.numel() == 2500 and torch.equal(values[:1021], values[1021:2042])
    assert torch.equal(collectives.values(2, 5, torch.float32, 1030, 600, CPU), values[1030:1630])
    assert collectives.values(0, 2, torch.float32, 5, 1021, CPU).numel() == 1021
    assert not torch.equal(values[:600], collectives.values(3, 5, torch.float32, 0, 600, CPU))


def test_a_difference_is_the_first_with_their_number() -> None:
    right = torch.tensor([5.0, 7.0, 9.0, 11.0])
    assert collectives.difference(right, right) == ""
    wrong = torch.tensor([5.0, 7.25, 9.0, float("nan")])
    assert collectives.difference(wrong, right) == (
        "element 1 is 7.25 and must be 7; 2 of 4 elements are wrong"
    )


@pytest.mark.parametrize(
    ("size", "dtype", "ranks", "elements"),
    [
        (1024, torch.float32, 3, 258), (1024, torch.float32, 4, 256), (1024, torch.bfloat16, 7, 518),
        (10, torch.bfloat16, 4, 8),
    ],
)  # fmt: skip
def test_elements_are_a_multiple_of_the_ranks(size: int, dtype, ranks: int, elements: int) -> None:
    assert collectives.num_elements(size, dtype, ranks) == elements


def test_what_a_rank_sends_of_a_buffer() -> None:
    """As in NCCL's table of bus bandwidths; all to all is for up to 64 ranks."""
    shares = {name: one.sent_share(4) for name, one in collectives.COLLECTIVES.items()}
    assert shares == {
        "all-reduce": 1.5, "reduce-scatter": 0.75, "all-gather": 0.75, "all-to-all": 0.75,
        "message to the next rank": 1.0, "message to the rank before": 1.0,
    }  # fmt: skip
    assert collectives.collectives_of(64) == list(shares)
    assert collectives.collectives_of(65) == [name for name in shares if name != "all-to-all"]


class Ring:
    """Stands for torch.distributed's collectives on rank 1 of 4, whose values are those of the module."""

    size, rank = 4, 1

    def __init__(self, monkeypatch, elements: int, dtype: torch.dtype):
        self.calls: list[tuple] = []
        self.sent = [collectives.values(rank, 4, dtype, 0, elements, CPU) for rank in range(4)]
        monkeypatch.setattr(collectives.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(collectives.dist, "all_to_all_single", self.all_to_all)
        monkeypatch.setattr(collectives.dist, "P2POp", lambda *given, **named: (given, named))
        monkeypatch.setattr(collectives.dist, "batch_isend_irecv", self.batch)

    def all_reduce(self, tensor, group) -> None:
        assert torch.equal(tensor, self.sent[1])
        tensor.copy_(sum(self.sent))

    def all_to_all(self, result, buffer, group) -> None:
        parts = [of_rank.chunk(4)[1] for of_rank in self.sent]
        result.copy_(torch.cat(parts))

    def batch(self, calls) -> list:
        (sending, to), (receiving, source) = calls
        assert sending[0] is collectives.dist.isend and receiving[0] is collectives.dist.irecv
        self.calls.append((to["group_peer"], source["group_peer"]))
        receiving[1].copy_(self.sent[source["group_peer"]])
        return [SimpleNamespace(wait=lambda: None)] * 2


@pytest.mark.parametrize("name", ["all-reduce", "all-to-all", "message to the next rank",
                                  "message to the rank before"])  # fmt: skip
def test_what_a_rank_expects_of_a_collective(monkeypatch, name: str) -> None:
    """Rank 1 of 4 sends to 2 and receives from 0, or the other way; sums and parts are those of all."""
    ring = Ring(monkeypatch, 24, torch.float32)
    group = collectives.Group("shard", None, 1, (3, 5, 7, 9))
    exchange = collectives.COLLECTIVES[name].prepare(group, torch.float32, 24, CPU)
    for _ in range(2):  # it can be made again
        assert torch.equal(exchange.run(), exchange.expected) and exchange.expected.numel() == 24
    expected = {"message to the next rank": (2, 0), "message to the rank before": (0, 2)}
    assert ring.calls == [expected[name]] * 2 if name in expected else not ring.calls


def found_in(groups: dict[tuple[int, ...], float], ranks: int, axis: str = "shard") -> list[dict[str, Any]]:
    """Makes what ranks found of the groups of one axis, by their rate; ranks in none found nothing."""
    found = [{"wrong": [], "groups": {}, "gb_per_second": {}} for _ in range(ranks)]
    for group, rate in groups.items():
        for rank in group:
            found[rank]["groups"][axis] = list(group)
            found[rank]["gb_per_second"][axis] = {"all-reduce": rate}
    return found


def site(gbit: float = 800.0, devices: int = 4) -> Cluster:
    return cluster("laptop").model_copy(
        update={"network_gbit_per_second_per_node": gbit, "devices_per_node": devices}
    )


@pytest.mark.parametrize(
    ("group_size", "nodes", "share"),
    [
        (8, 2, 100.0), (4, 1, None), (2, 2, 25.0), (4, 2, 50.0), (16, 2, 100.0), (12, 3, 100.0),
    ],
)  # fmt: skip
def test_a_group_s_share_of_the_network(group_size: int, nodes: int, share: float | None) -> None:
    """A node of four devices sends 100 GB/s. A ring over all of a node's devices has it alone; rings of one
    device a node are four.
    """
    assert collectives.network_share(site(), group_size, nodes) == share


def test_groups_that_are_slow_for_the_network_or_beside_others() -> None:
    """Less than 0.15 of the share or half of the median; each node's lowest rank is named."""
    on = job("aaaabbbb", cluster=site())

    def slow(groups: dict[tuple[int, ...], float]) -> list[tuple[int | None, str, bool]]:
        return told(collectives.slow_groups(found_in(groups, 8), on))

    everyone = tuple(range(8))
    assert slow({everyone: 15.0}) == []
    said = (
        "all-reduce over shard (ranks 0, 1, 2, 3, 4, 5, 6, 7): 14.9 GB/s, and the network gives 100: is its "
        "plugin missing?"
    )
    assert slow({everyone: 14.9}) == [(0, said, True), (4, said, True)]
    inside = {(0, 1): 10.0, (2, 3): 20.0, (4, 5): 20.0, (6, 7): 30.0}
    assert slow(inside) == []
    said = "all-reduce over shard (ranks 0, 1): 9.9 GB/s, and the median of the 4 groups of this axis is 20"
    assert slow(inside | {(0, 1): 9.9}) == [(0, said, True)]
    assert slow({(2, 3): 20.0}) == []  # other ranks have no such axis
    unequal = found_in({everyone: 15.0}, 8)
    unequal[5]["gb_per_second"]["shard"]["all-reduce"] = 14.0  # the slowest rank's rate counts
    assert len(collectives.slow_groups(unequal, on)) == 2


def test_wrong_values_are_refused_and_speed_on_cpus_is_not_judged() -> None:
    found = found_in({(0, 1): 1.0}, 4)
    found[2]["wrong"] = ["x", "y"]
    assert told(collectives.judge(found, job(kind="cpu"))) == [(2, "x", True), (2, "y", True)]
    on_gpus = told(collectives.judge(found_in({(0, 1, 2, 3): 1.0}, 4), job(cluster=site(800.0, 2))))
    assert [rank for rank, *_ in on_gpus] == [0, 2]


def test_a_long_list_of_ranks_is_cut() -> None:
    ten, eight = tuple(range(10)), tuple(range(10, 18))
    groups = found_in({ten: 1.0, eight: 50.0}, 18)
    ((_, said, _),) = told(collectives.slow_groups(groups, job("a" * 18, cluster=site())))
    assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more)" in said
    ((_, said, _),) = told(collectives.slow_groups(found_in({ten: 50.0, eight: 1.0}, 18), job("a" * 18)))
    assert "(ranks 10, 11, 12, 13, 14, 15, 16, 17)" in said


def test_collectives_in_a_line() -> None:
    found = found_in({(0, 1): 10.0, (2, 3): 30.0}, 4)
    assert collectives.summarise(found, job()) == "every value right; all-reduce shard 10 to 30 GB/s"
    found[1]["wrong"] = found[3]["wrong"] = ["x", "y"]
    assert collectives.summarise(found, job()).startswith("wrong values on 2 of 4 ranks; all-reduce shard")
    assert collectives.summarise(found_in({}, 1), job("a")) == "one rank, which sends nothing"


# --- counts

SMALL = Sizes(matrix=10, products=3, copy_bytes=100, copies=7, rounds=4, message_bytes=(40, 80),
              timed_collectives=2, file_bytes=5000)  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({}, []), ({"shard": 4}, [4]), ({"tensor": 2, "shard": 2}, [2, 2, 4]),
        ({"shard": 3, "context": 2}, [3, 2, 6]),
        ({"shard": 3, "context": 2, "replicate": 2}, [2, 3, 2, 6, 12]),
        ({"context": 4}, [4]), ({"pipeline": 3, "tensor": 5}, [3, 5, 15]),
        ({"context": 2, "tensor": 3}, [2, 3, 6]),
    ],
)  # fmt: skip
def test_groups_of_a_layout(axes: dict[str, int], sizes: list[int]) -> None:
    """An axis of two ranks and more, weights over shard and context, and all ranks if no axis has them."""
    assert counts.group_sizes(layout(**axes)) == sizes


def test_counts_by_hand() -> None:
    """Two ranks, each in the one group of tensor: 6 collectives × (2 dtypes × 2 sizes + 2 timed) calls."""
    found = counts.count(layout(tensor=2), SMALL)
    assert found.flops == 2 * 1000 * (4 * 3 + 3) and found.copied_bytes == 2 * 100 * 4 * 7
    assert found.collectives == 36 and found.file_bytes == 5000
    # Shares of both ranks: 1 of an all-reduce, 1/2 of three others, 1 of two messages: 4.5. Buffers of 40 and
    # 80 bytes are whole numbers of elements for two ranks; the last, in bf16, is timed twice.
    assert found.sent_bytes == {2: pytest.approx(4.5 * (2 * (40 + 80) + 2 * 80))}
    # 6 objects of each of 8 checks, and barriers: 3 of the clock and 3 of the files
    assert found.host_messages == 2 * (6 * 8 + 6)
    # 4 layers and the head: 5 steps × (2 micro-batches × 5 × 30 + 40), and 16 parameters gathered twice
    assert found.training_collectives == 5 * (2 * 5 * 30 + 40) + 2 * 2 * 5 * 16
    # hidden 64: 4 × (4 × 64² + 3 × 64 × 96) + 90 × 64 weights; 8 sequences of 32 tokens, 5 steps
    weights = 4 * (4 * 4096 + 3 * 64 * 96) + 90 * 64
    assert found.training_flops == 6 * weights * 8 * 32 * 5
    two_groups = counts.count(layout(tensor=2, shard=2), SMALL)
    assert two_groups.collectives == 3 * 36 and set(two_groups.sent_bytes) == {2, 4}
    assert two_groups.sent_bytes[2] == pytest.approx(2 * found.sent_bytes[2])
    staged = counts.count(layout(pipeline=2, pipeline_schedule="interleaved_1f1b"), SMALL)
    # 4 layers on 2 ranks and one more; 4 stages ask for 4 micro-batches
    assert staged.training_collectives == 5 * (4 * 3 * 30 + 40) + 2 * 2 * 3 * 16


def test_seconds_at_the_slowest_rates_that_pass() -> None:
    made = counts.Counts(
        flops=6e13, copied_bytes=3e12, collectives=500, sent_bytes={2: 1.5e9, 8: 3e9},
        training_collectives=700, training_flops=1e10, host_messages=1000, file_bytes=10**9,
    )  # fmt: skip
    on = site().model_copy(update={"file_system_gb_per_second": None})
    found = counts.seconds(made, 8, on, card())
    # 0.3 of 100 TFLOP/s and of 2 TB/s
    assert found["device"] == pytest.approx(2 + 5)
    # two nodes: two ranks have 25 GB/s of a network, eight have 100; 0.15 of each; 2 ms a call
    assert found["collectives"] == pytest.approx(1.5 / (0.15 * 25) + 3 / (0.15 * 100) + 1.0)
    assert found["files"] == pytest.approx(2 * 2 * 1e9 / 1e9)  # two nodes of half a GB/s
    assert found["training"] == pytest.approx(2 + 1.4) and found["gathering"] == pytest.approx(0.3)
    assert set(found) == {"device", "collectives", "files", "training", "gathering"}
    slow = on.model_copy(update={"file_system_gb_per_second": 0.4})
    assert counts.seconds(made, 8, slow, card())["files"] == pytest.approx(10)
    alone = counts.seconds(made, 4, on, card(memory_bandwidth_tb_per_second=None))
    assert alone["device"] == pytest.approx(2) and alone["files"] == pytest.approx(4)
    assert alone["collectives"] == pytest.approx(4.5 / (0.15 * 50) + 1.0)  # links inside of the node
    assert counts.seconds(made, 5, on, card())["files"] == pytest.approx(4)  # five ranks are on two nodes

"""What the watch of a rehearsed rank counts, and what stands in for other ranks, with sizes by hand."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_start import (
    CountedGroup,
    CountedStore,
    StartCounts,
    gloo_peers,
    gloo_store_operations,
    nccl_store_operations,
    server_operations,
)
from torch import nn
from torch.nn import functional as F

from kielo.models.blocks.blocked_attention import Terms, attend
from kielo.parallel.lower_right_attention import attend_to_all
from kielo.recipe.errors import KieloError
from kielo.verify.rank_watch import Peak, RankWatch
from kielo.verify.rehearse import heaviest_phase, rehearsed_micro_batches
from kielo.verify.torch_fakes import (
    fake_tensors,
    fake_world,
    group_name,
    is_in_backward,
    plain_parts,
    storages_watched,
)


def test_floating_point_operations() -> None:
    """Two for each product of a matrix product; causal attention counts the half of what torch counts."""
    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
    with RankWatch({}, "") as watch:
        a @ b
        assert watch.flops == {"matrix products": 2 * 3 * 5 * 7}
        c.addmm_(a, b)
        assert watch.flops == {"matrix products": 2 * 2 * 3 * 5 * 7}
        watch.begin()
        assert not watch.flops and not watch.calls and not watch.bytes
    queries = torch.ones(2, 4, 6, 8, requires_grad=True)
    few = torch.ones(2, 2, 6, 8)
    # scores and their products with values: 2 × 2 sequences × 4 heads × 6 × 6 × 8, twice
    whole = 2 * (2 * 2 * 4 * 6 * 6 * 8)
    for is_causal, keys, count in ((False, few.repeat(1, 2, 1, 1), whole), (True, few, whole // 2)):
        with RankWatch({}, "") as watch:
            options = {"is_causal": is_causal, "enable_gqa": keys is few}
            out = F.scaled_dot_product_attention(queries, keys, keys, **options)
            assert watch.flops["attention"] == count
            out.sum().backward()  # gradients of scores, values, queries and keys, and the scores again
            assert watch.flops["attention"] == count + 5 * count // 2


def test_floating_point_operations_of_the_last_queries() -> None:
    """Six of them see four keys before them whole, and half of their own six; grouped keys count for each."""
    queries = torch.rand(2, 4, 6, 8, requires_grad=True)
    keys, values = torch.rand(2, 2, 2, 10, 8, requires_grad=True)
    product = 2 * 2 * 4 * 6 * 8  # of all queries with one key of each head
    with RankWatch({}, "") as watch:
        out = attend_to_all(queries, keys, values, 0.3)
        assert watch.flops == {"attention": 2 * product * 10 - 2 * product * 6 // 2}
        forward = watch.flops["attention"]
        out.sum().backward()  # three products more for each of the two
        assert watch.flops["attention"] == forward + 5 * product * 10 - 5 * product * 6 // 2


def test_attention_in_blocks_is_the_same_in_each_layer() -> None:
    """Only the first of such a form is watched block by block. Bytes and operations of the second are equal,
    forward and backward; what it returns is held as long as it lives. Another form is watched by itself.
    """

    def watched(length: int) -> tuple[Any, ...]:
        q, k, v = (torch.empty(8, 4, length, 16, requires_grad=True) for _ in range(3))
        watch.ledger.name([q, k, v], "parameters")
        watch.begin()
        out = attend(q, k, v, Terms(0.25))
        assert watch.ledger.held_bytes("activations") == 4 * q.numel() and watch.ledger.kind_of(out)
        forward = dict(watch.flops), watch.ledger.peaks()
        gradients = torch.autograd.grad(out.sum(), [q, k, v])
        assert watch.ledger.held_bytes("backward") >= 3 * 4 * q.numel()
        del out, gradients
        assert watch.ledger.held_bytes("activations") == watch.ledger.held_bytes("backward") == 0
        return *forward, dict(watch.flops), watch.ledger.peaks()

    with fake_tensors(), RankWatch({}, "") as watch:
        first, second, longer = watched(2048), watched(2048), watched(4096)
    assert first == second
    products = 2 * 8 * 4 * 2048 * 2048 * 16  # scores; weights by values. Backward: two of each, scores again
    assert first[0] == {"matrix products": 2 * products} and longer[0] == {"matrix products": 8 * products}
    assert first[2] == {"matrix products": 7 * products}
    scores = first[1]["forward"].kinds["activations"] - 4 * 8 * 4 * 2048 * 16
    assert 0 < scores < 4 * 8 * 4 * 2048 * 2048  # of fewer queries at once
    assert longer[1]["forward"].bytes > first[1]["forward"].bytes


def test_memory_by_phase_and_kind() -> None:
    """A product that is kept, and the gradients of both factors in the backward pass."""
    weight, given = nn.Parameter(torch.ones(4, 6)), torch.ones(8, 4)
    with RankWatch({}, "") as watch:
        watch.ledger.name([weight], "parameters")
        watch.begin()
        out = given @ weight
        loss = out.sum()
        assert not is_in_backward() and watch.ledger.kind_of(out) == "activations"
        assert watch.ledger.held_bytes("activations") == 4 * 8 * 6 + 4
        assert watch.ledger.peaks() == {"forward": Peak(292, {"parameters": 96, "activations": 196})}
        loss.backward()
        assert watch.ledger.kind_of(weight.grad) == "backward"
        watch.section = "update"
        moment = torch.zeros(5)
        assert watch.ledger.kind_of(moment) == "update"
    peaks = watch.ledger.peaks()
    assert peaks["backward"].kinds["backward"] >= 96 and peaks["backward"].kinds["parameters"] == 96
    assert peaks["update"].kinds["update"] == 20 and set(peaks) == {"forward", "backward", "update"}


def test_gathered_parameters_and_their_gradients_are_named() -> None:
    """What another operator made and is a parameter is gathered; its gradient is none of the pass."""
    with RankWatch({}, "") as watch:
        made = torch.ones(4, 6) * 2
        assert watch.ledger.kind_of(made) == "activations"
        weight = nn.Parameter(made)
        (torch.ones(8, 4) @ weight).sum().backward()
        assert watch.ledger.kind_of(weight) == "gathered parameters"
        assert watch.ledger.kind_of(weight.grad) == "gradients"
        wide = weight.grad.to(torch.float64)  # summed in another precision
        assert watch.ledger.kind_of(wide) == "gradients"
        own = nn.Parameter(torch.ones(3))
        watch.ledger.name([own], "parameters")
        (own * 2).sum().backward()
        assert watch.ledger.kind_of(own) == "parameters" and watch.ledger.kind_of(own.grad) == "backward"


def test_questions_for_a_value_have_an_answer() -> None:
    """A fake tensor has none; 1 is as good as another number, and True."""
    with fake_tensors(), RankWatch({}, ""):
        number, flag = torch.full((), 7.0), torch.zeros((), dtype=torch.bool)
        assert number.item() == 1 and flag.item() is True and torch.equal(number, number + 1) is True
    with RankWatch({}, ""):
        assert torch.full((), 7.0).item() == 7 and torch.equal(torch.ones(2), torch.zeros(2)) is False


@pytest.fixture
def world():
    with fake_world(3, 8, has_pipeline=False) as found:
        yield found


def test_collectives_of_an_axis(world) -> None:
    """How often, and the bytes of the larger buffer; a group of no axis is the world."""
    assert (world.rank, world.size, dist.get_rank(), dist.get_world_size()) == (3, 8, 3, 8)
    assert world.is_rehearsed and world.local_rank == 0
    name = dist.group.WORLD.group_name
    part, whole = torch.ones(5), torch.ones(40)
    for axes, axis in (({name: "tensor"}, "tensor"), ({}, "world")):
        with RankWatch(axes, "") as watch:
            dist.all_reduce(part)
            dist.all_reduce(part)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.all_to_all_single(torch.ones(40), whole)
            dist.broadcast(part, 0)
        assert watch.calls == {
            (axis, "all-reduce"): 2, (axis, "all-gather"): 1, (axis, "reduce-scatter"): 1,
            (axis, "all-to-all"): 1, (axis, "broadcast"): 1,
        }  # fmt: skip
        assert watch.bytes == {
            (axis, "all-reduce"): 2 * 20, (axis, "all-gather"): 160, (axis, "reduce-scatter"): 160,
            (axis, "all-to-all"): 160, (axis, "broadcast"): 20,
        }  # fmt: skip


def test_buffers_of_weights_and_messages_are_named(world) -> None:
    """Those of the communicator of weights in the passes, but for the parameters themselves."""
    name = dist.group.WORLD.group_name
    part, whole = torch.ones(5), torch.ones(40)
    with RankWatch({name: "pipeline"}, name) as watch:
        watch.ledger.name([part], "parameters")
        dist.all_gather_into_tensor(whole, part)
        assert watch.ledger.kind_of(part) == "parameters"
        assert watch.ledger.kind_of(whole) == "gathered parameters"
        dist.reduce_scatter_tensor(torch.ones(5), given := torch.ones(40))
        assert watch.ledger.kind_of(given) == "gradients"
        dist.recv(received := torch.ones(6), 2)
        assert watch.ledger.kind_of(received) == "receive buffers"
        dist.all_reduce(summed := torch.ones(2))
        assert watch.ledger.kind_of(summed) == "activations"
        watch.section = "update"
        dist.all_gather_into_tensor(late := torch.ones(40), part)
        assert watch.ledger.kind_of(late) == "update"
    with RankWatch({name: "tensor"}, "another") as watch:
        dist.all_gather_into_tensor(other := torch.ones(40), part)
        dist.recv(received := torch.ones(6), 2)
        assert watch.ledger.kind_of(other) == watch.ledger.kind_of(received) == "activations"


def test_a_world_within_a_world_is_refused(world) -> None:
    with (
        pytest.raises(KieloError, match="a rehearsal needs its own process"),
        fake_world(0, 2, has_pipeline=False),
    ):
        pass
    assert group_name("some name") == "some name" and group_name(5) is None
    assert group_name(dist.group.WORLD) == dist.group.WORLD.group_name


def test_torch_warns_of_gathered_tensors_but_in_a_rehearsal() -> None:
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with fake_world(0, 2, has_pipeline=False):
            assert logger.level == logging.ERROR
        assert logger.level == logging.INFO and not dist.is_initialized()
    finally:
        logger.setLevel(before)


def test_changes_of_a_storage_are_told() -> None:
    told, tensor = [], torch.ones(6)
    with storages_watched(lambda storage: told.append(storage.nbytes())):
        tensor.untyped_storage().resize_(8)
    tensor.untyped_storage().resize_(16)
    assert told == [8] and tensor.untyped_storage().nbytes() == 16
    assert plain_parts(tensor) == [tensor]


def job(phases: list[tuple[int, int, tuple[str, ...], int]], **layout: Any) -> SimpleNamespace:
    """phases: (sequences of a micro-batch, their tokens, trained modules, micro-batches of a step)."""
    usual = {"pipeline": 1, "pipeline_schedule": "1f1b", "pipeline_stages_per_rank": None}
    return SimpleNamespace(
        identity=SimpleNamespace(
            phases=[
                SimpleNamespace(sequence_length=length, trainable=given) for _, length, given, _ in phases
            ]
        ),
        placement=SimpleNamespace(
            phases=[
                SimpleNamespace(micro_batch_sequences=rows, micro_batches_per_step=many)
                for rows, _, _, many in phases
            ],
            layout=SimpleNamespace(**(usual | layout)),
        ),
    )


@pytest.mark.parametrize(
    ("phases", "heaviest"),
    [
        ([(4, 100, (), 1), (2, 300, (), 1), (5, 100, (), 9)], 1),
        ([(4, 100, ("embed",), 9), (2, 200, (), 1), (1, 400, ("embed",), 5)], 1),
        ([(4, 100, (), 2), (2, 200, (), 8), (1, 400, (), 5)], 1),
    ],
)
def test_the_heaviest_phase(phases, heaviest: int) -> None:
    """Most tokens in a micro-batch; then one that trains all; then most micro-batches."""
    assert heaviest_phase(job(phases)) == heaviest


@pytest.mark.parametrize(
    ("ranks", "schedule", "many", "run"),
    [
        (1, "1f1b", 1, (1, 1)), (1, "1f1b", 9, (1, 2)), (4, "1f1b", 3, (3, 3)), (4, "1f1b", 16, (4, 5)),
        (4, "1f1b", 5, (4, 5)), (4, "gpipe", 16, (1, 16)), (2, "interleaved_1f1b", 16, (1, 6)),
        (4, "interleaved_1f1b", 16, (1, 8)), (2, "dualpipev", 16, (4, 6)), (2, "dualpipev", 3, (3, 3)),
    ],
)  # fmt: skip
def test_micro_batches_that_are_run(ranks: int, schedule: str, many: int, run: tuple[int, int]) -> None:
    """Without a pipeline two; with one as many as are ever in flight, from the fewest that it runs."""
    resolved = job([(1, 8, (), many)], pipeline=ranks, pipeline_schedule=schedule)
    assert rehearsed_micro_batches(resolved, resolved.placement.phases[0]) == run


@pytest.mark.parametrize(
    ("rank", "size", "peers"),
    [
        (0, 1, set()), (1, 2, {0}), (0, 5, {1, 2, 3, 4}), (5, 11, {0, 1, 4, 6}), (2, 11, {0, 1, 3, 6, 10}),
        (10, 11, {0, 2, 9}), (1, 11, {0, 2, 3, 5, 9}), (3, 20, {0, 1, 2, 4, 7, 11, 19}),
    ],
)  # fmt: skip
def test_peers_of_a_rank(rank: int, size: int, peers: set[int]) -> None:
    """Both neighbours, rank 0, and a parent and children in a binomial tree; two operations for each."""
    assert gloo_peers(rank, size) == peers
    assert gloo_store_operations(rank, size) == 1 + 2 * len(peers)


def test_operations_of_a_store() -> None:
    """NCCL has a second root from 129 ranks on. The server serves all as if each were the busiest."""
    assert [nccl_store_operations(size) for size in (2, 128, 129, 4096)] == [1, 1, 2, 2]

    def counts(counted: int, nccl: int) -> StartCounts:
        operations = {"counted": counted, "NCCL": nccl, "gloo": 99}
        return StartCounts(3, 0, operations, (), 0, 0, 0, 0, 0, 0)

    # gloo: of three ranks each has both others as peers
    assert server_operations([counts(7, 2), counts(5, 6), counts(8, 1)]) == 11 * 3 + 3 * 5


def test_a_counted_store_answers_as_if_all_had_been_there() -> None:
    store = CountedStore(8)
    store.set("a", "text")
    store.set("b", b"bytes")
    assert store.get("a") == b"text" and store.get("b") == b"bytes" and store.get("c") == b""
    assert store.add("n", 1) == 8 and store.add("n", 2) == 10 and store.add("m", 1) == 8
    assert store.compare_set("d", "", "x") == b"x" and store.compare_set("d", "x", "y") == b"x"
    assert store.check(["a", "d"]) is True and store.check(["a", "z"]) is False
    store.wait(["z"])
    assert store.operations == {"set": 2, "get": 3, "add": 3, "compare_set": 2, "check": 2, "wait": 1}
    assert store.has_extended_api() is False and store.clone() is store


def test_a_counted_group_sums_equal_shares() -> None:
    group, tensors = CountedGroup(2, 5, "some"), [torch.tensor([3.0, 4.0])]
    group.allreduce(tensors, None)
    assert tensors[0].tolist() == [15, 20]
    group.send(tensors, 4, 0)
    group.recv(tensors, 1, 0)
    group.recv(tensors, 1, 0)
    assert group.messages == {1, 4} and (group.rank(), group.size()) == (2, 5)
    group.setGroupName("name")
    assert (group.getGroupName(), group.getBackendName()) == ("name", "some")

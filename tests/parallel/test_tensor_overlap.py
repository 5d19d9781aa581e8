"""Collectives of tensor ranks in chunks: the numbers of those at once, each beside the product of another."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kielo.parallel.projection import AccumulatingProjection, TensorAxis, gather_and_multiply, split_rows
from kielo.ranks.world import start_world
from kielo.resolve.stages import CHUNKS
from tests.started_ranks import run_ranks

RANKS, HIDDEN, WIDTH = 2, 12, 20
# Of a rank's part of the sequence: chunks of equal length, of unequal length, and fewer than wanted.
PARTS = (8, 3, 1)
_SENT = ("all_gather_into_tensor", "reduce_scatter_tensor")
_PRODUCTS = ("mm", "addmm")


class Order(TorchDispatchMode):
    """Notes collectives, waits and matrix products in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator._opname in (*_SENT, "wait_tensor", *_PRODUCTS):
            self.names.append(operator._opname)
        return operator(*args, **(kwargs or {}))


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small ones, whose sums of products are exact in fp32: a kernel's order of adding changes nothing."""
    return torch.randint(-3, 4, shape).float()


def a_pair(part: int, chunks: int, bias: bool) -> dict[str, torch.Tensor]:
    """Outputs and gradients of gather → product → product → scatter, of two sequences, on this rank."""
    mesh = init_device_mesh("cpu", (RANKS,))
    rank = mesh.get_local_rank()
    axis = TensorAxis(mesh.get_group().group_name, RANKS, True, chunks)
    torch.manual_seed(3)
    first, second = nn.Linear(HIDDEN, WIDTH, bias=bias), nn.Linear(WIDTH, HIDDEN, bias=bias)
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.data = whole_numbers(*parameter.shape)
    x = whole_numbers(2, RANKS * part, HIDDEN)
    own = slice(rank * WIDTH // RANKS, (rank + 1) * WIDTH // RANKS)
    rows = nn.Linear(HIDDEN, WIDTH // RANKS, bias=bias)
    rows.weight.data = first.weight.data[own].clone()
    if bias:
        rows.bias.data = first.bias.data[own].clone()
    split_rows(second, mesh, axis)
    project = AccumulatingProjection()
    project.axis = axis
    mine = x[:, rank * part : (rank + 1) * part].clone().requires_grad_()
    with Order() as order:
        (hidden,) = project(mine, [rows])
        output = second(hidden)
        forward = len(order.names)
        output.backward(whole_numbers(*output.shape))
    found = {"output": output.detach(), "input": mine.grad, "rows": rows.weight.grad}
    found |= {
        name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for name, p in [*second.named_parameters()] + ([("rows' bias", rows.bias)] if bias else [])
    }
    return {"tensors": found, "forward": order.names[:forward], "backward": order.names[forward:]}


def pairs() -> list[dict]:
    start_world(30, "cpu")
    return [
        {chunks: a_pair(part, chunks, bias) for chunks in (1, CHUNKS)}
        for part in PARTS
        for bias in (False, True)
    ]


@pytest.fixture(scope="module")
def found() -> list[list[dict]]:
    return run_ranks(pairs, RANKS)


def test_a_pair_of_products_in_chunks_is_that_at_once_to_the_bit(found):
    """Of even, uneven and too few positions, with and without biases; each rank's own numbers, all whole."""
    for rank in found:
        for case in rank:
            at_once, chunked = case[1]["tensors"], case[CHUNKS]["tensors"]
            assert at_once.keys() == chunked.keys() and len(at_once) >= 4
            for name, tensor in at_once.items():
                assert torch.equal(tensor, chunked[name]), name


def test_each_chunk_is_sent_beside_the_product_of_another(found):
    """The sum of a product starts before the next product, and is waited for after the last. On gloo a gather
    starts when it is needed. In the backward the gradient is gathered so too, once for both products.
    """
    gather, scatter, wait = "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"
    in_chunks = [gather, wait, "mm"] * CHUNKS
    for rank in found:
        chunked = rank[0][CHUNKS]
        assert chunked["forward"] == in_chunks + ["mm", scatter] * CHUNKS + [wait] * CHUNKS
        # Then the weight's, and the first matrix's: its gather beside the input's gradient, as at once.
        assert chunked["backward"] == [*in_chunks, "mm", gather, "mm", wait, scatter, "mm", wait]
        assert rank[0][1]["forward"] == [gather, wait, "mm", "mm", scatter, wait]


def test_on_a_gpu_all_gathers_start_before_the_first_product():
    """Tensors without values say that they are on a GPU; nothing is sent."""
    with FakeTensorMode(), Order() as order:
        part, matrix = torch.empty(1, 8, HIDDEN, device="cuda"), torch.empty(WIDTH, HIDDEN, device="cuda")
        gather_and_multiply(part, [matrix], [None], TensorAxis("no group", RANKS, True, CHUNKS), False)
    assert order.names == ["all_gather_into_tensor"] * CHUNKS + ["wait_tensor", "mm"] * CHUNKS

"""Products that tensor ranks share, on one of three whose collectives are in memory.

The ranks' parts of a sequence are x, x + 1 and x + 2, a sum over them is three times this rank's numbers, and
this rank gets the second part of what is scattered. All numbers are whole, so that sums are exact.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kielo.parallel.projection import (
    AccumulatingProjection,
    RowSplitLinear,
    TensorAxis,
    gather,
    gather_and_multiply,
    in_sequence_order,
    multiply_and_sum,
    start_gather,
    start_sum,
    wait,
)

RANKS, MINE, WIDTH = 3, 1, 4
# of sequences, of a rank's part of one, into how many chunks it is cut
SIZES = [(1, 2, 1), (2, 2, 1), (3, 5, 1), (2, 5, 2), (1, 4, 2), (2, 1, 2), (2, 7, 3)]


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was sent: collectives by name, of which one is waited for each time."""
    done: list[str] = []

    def all_gather(part: Tensor, ranks: int, group: str) -> Tensor:
        assert (ranks, group) == (RANKS, "tensor") and part.is_contiguous()
        done.append("gather")
        return torch.cat([part + rank for rank in range(RANKS)])

    def all_reduce(x: Tensor, kind: str, group: str) -> Tensor:
        assert (kind, group) == ("sum", "tensor")
        done.append("sum")
        return RANKS * x

    def reduce_scatter(x: Tensor, kind: str, ranks: int, group: str) -> Tensor:
        assert (kind, ranks, group) == ("sum", RANKS, "tensor")
        done.append("scatter")
        return RANKS * x.chunk(RANKS)[MINE]

    collectives = torch.ops._c10d_functional
    for name, function in {
        "all_gather_into_tensor": all_gather, "all_reduce": all_reduce, "wait_tensor": lambda coming: coming,
        "reduce_scatter_tensor": reduce_scatter,
    }.items():  # fmt: skip
        monkeypatch.setattr(collectives, name, function)
    return done


def axis(chunks: int = 1, along_sequence: bool = True) -> TensorAxis:
    return TensorAxis("tensor", RANKS, along_sequence, chunks)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(seed)).float()


def whole_of(part: Tensor) -> Tensor:
    return torch.cat([part, part + 1, part + 2], dim=1)


def mine(whole: Tensor) -> Tensor:
    """What this rank gets of a sum that is scattered along the sequence."""
    return RANKS * whole.chunk(RANKS, dim=1)[MINE]


@pytest.mark.parametrize(("sequences", "length", "chunks"), SIZES)
@pytest.mark.parametrize("keeps_whole", [False, True])
def test_a_gathered_input_is_multiplied_with_each_matrix(
    sequences, length, chunks, keeps_whole, sent
) -> None:
    """In order of the sequence, whatever it is cut into; without an axis nothing is sent."""
    part = numbers(sequences, length, WIDTH)
    matrices, biases = [numbers(5, WIDTH, seed=2), numbers(3, WIDTH, seed=3)], [numbers(5, seed=4), None]
    results, whole = gather_and_multiply(part, matrices, biases, axis(chunks), keeps_whole)
    for found, matrix, bias in zip(results, matrices, biases, strict=True):
        assert torch.equal(found, F.linear(whole_of(part), matrix, bias))
    assert torch.equal(whole, whole_of(part)) if keeps_whole else whole is None
    assert sent == ["gather"] * min(chunks, length)
    sent.clear()
    for other in (None, axis(chunks, along_sequence=False)):
        (result,), kept = gather_and_multiply(part, matrices[:1], biases[:1], other, keeps_whole)
        assert torch.equal(result, F.linear(part, matrices[0], biases[0])) and (kept is part) == keeps_whole
    assert sent == []


@pytest.mark.parametrize(("sequences", "length", "chunks"), SIZES)
def test_products_are_summed_and_scattered(sequences, length, chunks, sent) -> None:
    """A chunk at a time; where ranks hold whole sequences, the sum is whole too."""
    x, matrix = numbers(sequences, RANKS * length, WIDTH), numbers(5, WIDTH, seed=2)
    assert torch.equal(multiply_and_sum(x, matrix, axis(chunks)), mine(x @ matrix.t()))
    assert sent == ["scatter"] * min(chunks, length)
    sent.clear()
    whole = multiply_and_sum(x, matrix, axis(chunks, along_sequence=False))
    assert torch.equal(whole, RANKS * (x @ matrix.t())) and sent == ["sum"]


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_parts_of_ranks_are_joined_in_the_order_of_the_sequence(sequences: int) -> None:
    part = numbers(sequences, 2, WIDTH)
    coming = wait(start_gather(part.mT.contiguous().mT, axis()))
    assert torch.equal(in_sequence_order(coming, RANKS), whole_of(part))
    assert torch.equal(gather(part, axis()), whole_of(part))
    assert gather(part, None) is part and gather(part, axis(along_sequence=False)) is part
    summed = wait(start_sum(whole_of(part), axis()))
    assert torch.equal(summed, mine(whole_of(part)))


@pytest.mark.parametrize("keeps_whole", [False, True])
@pytest.mark.parametrize("along_sequence", [False, True])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_projection_sends_its_input_and_its_gradient(sequences, along_sequence, keeps_whole, sent) -> None:
    """The input's gradient is summed over the ranks; the weights' are of the whole sequence."""
    project = AccumulatingProjection()
    project.axis, project.keeps_whole = axis(along_sequence=along_sequence), keeps_whole
    linears, plain = ([nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 3, bias=False)] for _ in range(2))
    for number, pair in enumerate(zip(linears, plain, strict=True)):
        for one in pair:
            for parameter in one.parameters():
                parameter.data = numbers(*parameter.shape, seed=7 + number)
    part = numbers(sequences, 2, WIDTH)
    x = part.clone().requires_grad_()
    whole = (whole_of(part) if along_sequence else part.clone()).requires_grad_()
    gradient = numbers(sequences, whole.shape[1], 8, seed=5)
    found = torch.cat(project(x, linears), dim=-1)
    expected = torch.cat([linear(whole) for linear in plain], dim=-1)
    assert torch.equal(found, expected)
    found.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(x.grad, mine(whole.grad) if along_sequence else RANKS * whole.grad)
    for one, other in zip(linears, plain, strict=True):
        for parameter, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, theirs.grad)
    again = ["gather"] * (not keeps_whole)
    assert sent == (["gather", *again, "scatter"] if along_sequence else ["sum"])


@pytest.mark.parametrize("is_one_operator", [False, True])
@pytest.mark.parametrize(("along_sequence", "chunks"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_split_row_product_gathers_its_gradient_once(
    bias, along_sequence, chunks, is_one_operator, sent
) -> None:
    """For the input's gradient and the weight's; the bias is added after the sum."""
    linear = nn.Linear(WIDTH, 5, bias=bias)
    for parameter in linear.parameters():
        parameter.data = numbers(*parameter.shape, seed=7)
    linear.__class__ = RowSplitLinear
    linear.axis, linear.is_one_operator = axis(chunks, along_sequence), is_one_operator
    x = numbers(2, 6, WIDTH).requires_grad_()
    output = linear(x)
    product = x.detach() @ linear.weight.detach().t()
    summed = mine(product) if along_sequence else RANKS * product
    assert torch.equal(output, summed + (linear.bias if bias else 0))
    sent.clear()
    gradient = numbers(*output.shape, seed=5)
    output.backward(gradient)
    whole = whole_of(gradient) if along_sequence else gradient
    assert torch.equal(x.grad, whole @ linear.weight)
    assert torch.equal(linear.weight.grad, whole.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    if bias:
        assert torch.equal(linear.bias.grad, whole.sum((0, 1)))
    assert sent == ["gather"] * (chunks if along_sequence else 0)


def test_the_weight_of_a_row_product_may_be_frozen(sent) -> None:
    """Then nothing of the input is kept, and only that has a gradient."""
    linear = nn.Linear(WIDTH, 5, bias=False)
    linear.weight.data = numbers(5, WIDTH, seed=7)
    linear.weight.requires_grad_(False)
    linear.__class__ = RowSplitLinear
    linear.axis, linear.is_one_operator = axis(), False
    x = numbers(1, 6, WIDTH).requires_grad_()
    linear(x).backward(gradient := numbers(1, 2, 5, seed=5))
    assert torch.equal(x.grad, whole_of(gradient) @ linear.weight) and linear.weight.grad is None


def test_a_compiler_is_told_the_shape_of_a_summed_product() -> None:
    """A part of the sequence where ranks hold parts."""
    x, weight = torch.empty(2, 6, WIDTH, device="meta"), torch.empty(5, WIDTH, device="meta")
    operator = torch.ops.kielo.summed_product
    assert operator(x, weight, "tensor", RANKS, True, 1).shape == (2, 2, 5)
    assert operator(x, weight, "tensor", RANKS, False, 1).shape == (2, 6, 5)
    part = torch.empty(2, 2, WIDTH, device="meta")
    assert torch.ops.kielo.gather_in_backward(part, part, RANKS, "tensor").shape == (6, 2, WIDTH)

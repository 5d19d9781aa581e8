"""Norms and gated activations that keep little for the backward: gradients of the formulas, and bytes."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from kielo.models.blocks.mlp import ACTIVATIONS, Activation, GatedActivation
from kielo.models.blocks.norm import RMSNorm

# Sums over 48 numbers in another order, one division more or less: some units of fp32's last place (6e-8).
TOLERANCE = 2e-6
ROWS, WIDTH = 6, 48


def plain_norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.is_zero_centred:
        return (normed * (1.0 + norm.weight.float())).to(x.dtype)
    return norm.weight * normed.to(x.dtype)


def kept_bytes(make: Callable[[], object]) -> int:
    """Bytes that autograd keeps of what `make` computes, each storage once."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        make()
    return sum(kept.values())


@pytest.mark.parametrize("is_zero_centred", [False, True])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, TOLERANCE), (torch.bfloat16, 2e-2)], ids=str)
def test_a_norms_gradients_are_those_of_its_formula(is_zero_centred, dtype, bar):
    """Outputs to the bit. In bf16 both round their results to 8 bits, and the formula its parts too."""
    torch.manual_seed(1)
    norm = RMSNorm(WIDTH, 1e-5, is_zero_centred)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    norm.to(dtype)
    x, gradient = (torch.randn(2, ROWS, WIDTH).to(dtype) for _ in range(2))
    found = []
    for function in (norm, lambda x: plain_norm(norm, x)):
        x_in = x.clone().requires_grad_()
        out = function(x_in)
        found.append((out, *torch.autograd.grad(out, [x_in, norm.weight], gradient)))
    assert torch.equal(found[0][0], found[1][0])
    for mine, theirs in zip(found[0][1:], found[1][1:]):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() <= bar * theirs.abs().max()
    with torch.no_grad():
        assert torch.equal(norm(x), found[1][0])


def test_a_norm_keeps_its_input_as_it_is_and_a_number_a_row():
    norm = RMSNorm(WIDTH, 1e-5).bfloat16()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    assert kept_bytes(lambda: norm(x)) == 2 * ROWS * WIDTH + 2 * WIDTH + 4 * ROWS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_activations_gradients_are_those_of_its_formula(name):
    """To the bit: the same operators in the same order."""
    torch.manual_seed(1)
    module, function = GatedActivation(name), ACTIVATIONS[name]
    gate, up, gradient = (torch.randn(ROWS, WIDTH) for _ in range(3))
    found = []
    for make in (module, lambda gate, up: function(gate) * up):
        inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        out = make(*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, gradient)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found))
    with torch.no_grad():
        assert torch.equal(module(gate, up), found[1][0])


def test_a_gated_activation_keeps_its_inputs_only():
    gate, up = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
    assert kept_bytes(lambda: GatedActivation("silu")(gate, up)) == 2 * 4 * ROWS * WIDTH


@pytest.mark.parametrize("block", [RMSNorm(WIDTH, 1e-5), GatedActivation("silu")], ids=["norm", "activation"])
def test_compiled_blocks_have_the_same_gradients(block):
    """The compiled form is the plain formula, whose gradients autograd adds up in another order."""
    compiled, found = torch.compile(deepcopy(block), backend="aot_eager", fullgraph=True), []
    torch.manual_seed(1)
    *values, gradient = (torch.randn(ROWS, WIDTH) for _ in range(2 if isinstance(block, RMSNorm) else 3))
    for function in (block, compiled):
        inputs = [value.clone().requires_grad_() for value in values]
        found.append(torch.autograd.grad(function(*inputs), inputs, gradient))
    for mine, theirs in zip(*found):
        assert (mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("is_zero_centred", [False, True])
def test_a_frozen_part_of_a_norm_has_no_gradient(is_zero_centred: bool) -> None:
    """The other part has the one that it has with it."""
    torch.manual_seed(1)
    norm, x = RMSNorm(WIDTH, 1e-5, is_zero_centred), torch.randn(ROWS, WIDTH)
    gradient = torch.randn(ROWS, WIDTH)
    found = {}
    for frozen in ("nothing", "weight", "x"):
        norm.weight.grad, given = None, x.clone().requires_grad_(frozen != "x")
        norm.weight.requires_grad_(frozen != "weight")
        norm(given).backward(gradient)
        found[frozen] = given.grad, norm.weight.grad
    assert found["weight"][1] is None and found["x"][0] is None
    assert torch.equal(found["weight"][0], found["nothing"][0])
    assert torch.equal(found["x"][1], found["nothing"][1])


def test_relu_alone_keeps_its_result() -> None:
    assert [name for name in ACTIVATIONS if Activation(name).keeps_result] == ["relu"]

"""Projections of one input as one node of autograd: gradients of separate ones, and no more kept bytes."""

import pytest
import torch
from torch import nn

from kielo.models.blocks.mlp import JointProjection, PlainMLP
from kielo.models.llama.model import Llama
from kielo.parallel.projection import AccumulatingProjection, apply_projection
from kielo.parallel.recompute import apply_recompute
from kielo.recipe.sections import Layout
from tests.parallel.test_layouts import config
from tests.parallel.test_recompute import OperatorCounter

SEQUENCES, LENGTH, HIDDEN = 2, 5, 16
# Sums over 16 to 40 numbers in another order: a few units of fp32's last place (6e-8).
TOLERANCE = 1e-6


def outcome(project: nn.Module, linears: list[nn.Linear], x: torch.Tensor) -> dict:
    """Outputs and gradients of a sum whose every entry has another gradient, and elements kept."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = project(x, linears)
    # Not contiguous, as the heads of attention are.
    sum((y.mT * torch.linspace(-1, 1, y.numel()).view(y.mT.shape)).sum() for y in outputs).backward()
    found = {f"output {n}": y.detach() for n, y in enumerate(outputs)} | {"input": x.grad}
    for n, linear in enumerate(linears):
        found |= {f"{name} {n}": p.grad for name, p in linear.named_parameters() if p.requires_grad}
        linear.zero_grad()
    return {"tensors": found, "kept": sum(kept.values())}


@pytest.mark.parametrize("widths", [(24,), (40, 40), (16, 8, 8)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_separate_linears(widths, bias, frozen):
    """Outputs to the bit, gradients up to the order of sums; a frozen matrix gets none."""
    torch.manual_seed(1)
    linears = [nn.Linear(HIDDEN, width, bias=bias) for width in widths]
    linears[0].weight.requires_grad_(not frozen)
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN)
    expected, found = (
        outcome(project, linears, x) for project in (JointProjection(), AccumulatingProjection())
    )
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in found["tensors"].items():
        theirs = expected["tensors"][name]
        bar = 0 if "output" in name else TOLERANCE * theirs.abs().max()
        assert (tensor - theirs).abs().max() <= bar, name
    if not frozen:
        assert found["kept"] == expected["kept"]  # the input and the weights


def test_without_gradients_the_modules_run_themselves():
    """So that hooks on them see their outputs, as parity's do."""
    block, seen = PlainMLP(HIDDEN, 24, bias=True, activation="relu"), []
    block.project = AccumulatingProjection()
    block.up.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with torch.no_grad():
        block(torch.randn(SEQUENCES, LENGTH, HIDDEN))
    assert seen == [(SEQUENCES, LENGTH, 24)]


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is AccumulatingProjection]


@pytest.mark.parametrize("bias", [False, True])
def test_a_pass_computes_what_it_is_asked_for(bias):
    """A split backward asks for the input's gradient, then for the weights': each product is made once."""
    torch.manual_seed(1)
    linears = [nn.Linear(HIDDEN, width, bias=bias) for width in (16, 8)]
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, requires_grad=True)
    weights = [parameter for linear in linears for parameter in linear.parameters()]
    with OperatorCounter() as whole:
        expected = torch.autograd.grad(_sum(linears, x), [x, *weights])
    total = _sum(linears, x)
    with OperatorCounter() as split:
        found = torch.autograd.grad(total, [x], retain_graph=True)
        found += torch.autograd.grad(total, weights)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))
    assert split.calls["mm"] + split.calls["addmm_"] == 4  # two a matrix
    assert whole.calls["mm"] + whole.calls["addmm_"] + whole.calls["addmm"] == 4 + 2


def _sum(linears: list[nn.Linear], x: torch.Tensor) -> torch.Tensor:
    return sum((y * y).sum() for y in AccumulatingProjection()(x * 2, linears))


def test_a_block_with_a_matrix_of_another_class_stays_as_it_is():
    class Float8Linear(nn.Linear):
        pass

    model = Llama(config(tied=False))
    model.layers["0"].mlp.gate.__class__ = Float8Linear
    apply_projection(model)
    assert replaced(model) == [
        "layers.0.attention.project",
        "layers.1.attention.project",
        "layers.1.mlp.project",
    ]


def test_a_layer_that_is_made_again_keeps_its_gathered_inputs():
    """Every second one here; and not where it keeps the products themselves."""
    for layout, kept in (
        ({"recompute": "full", "recompute_every_layers": 2}, ["0"]),
        ({"recompute": "norms"}, []),
    ):
        model = Llama(config(tied=False))
        apply_projection(model)
        apply_recompute(model, Layout(**layout))
        keeping = [name for name in replaced(model) if model.get_submodule(name).keeps_whole]
        assert keeping == [
            f"layers.{layer}.{block}.project" for layer in kept for block in ("attention", "mlp")
        ]

"""Recomputation: the same gradients to the bit, and what each policy makes again and what it keeps,
by counting operators.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kielo.models.blocks.decoder import init_weights
from kielo.models.llama.model import Llama
from kielo.parallel.recompute import apply_recompute
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from tests.parallel.test_layouts import batch, config, loss_of

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls[operator._opname] += 1
        return operator(*args, **(kwargs or {}))


def gradients_and_calls(**layout) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    torch.set_num_threads(1)
    model = Llama(config(tied=False))
    init_weights(model, seed=1)
    apply_recompute(model, Layout(**layout))
    inputs, labels = batch()
    with OperatorCounter() as counter:
        loss_of(model, inputs, labels, 100).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, counter.calls


@pytest.mark.parametrize(
    ("layout", "attentions", "products", "activations"),
    # Of each operator, how often in all compared with no recomputation: 2 layers run again, or 1, or none. A
    # backward computes the activation function once more in any case.
    [
        ({"recompute": "attention"}, 2, 1, 1),
        ({"recompute": "norms"}, 1, 1, 1),
        ({"recompute": "activations"}, 1, 1, 1.5),
        ({"recompute": "attention+norms+activations"}, 2, 1, 1.5),
        ({"recompute": "norms+activations", "recompute_every_layers": 2}, 1, 1, 1.25),
        ({"recompute": "operators"}, 1, 1, 1.5),
        ({"recompute": "full"}, 2, None, 1.5),
        ({"recompute": "full", "recompute_every_layers": 2}, 1.5, None, 1.25),
        ({"recompute": "operators", "recompute_saved_operators": ("mm",)}, 2, 1, 1.5),
    ],
)
def test_a_policy_makes_again_what_it_says(layout, attentions, products, activations):
    """Attention, matrix products and activation functions of one step;
    names of parameters and gradients unchanged.
    """
    expected, plain = gradients_and_calls()
    found, calls = gradients_and_calls(**layout)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert calls[ATTENTION] == attentions * plain[ATTENTION]
    assert calls["silu"] == activations * plain["silu"]
    assert calls["mm"] == plain["mm"] if products == 1 else calls["mm"] > plain["mm"]


def test_evaluation_of_a_model_that_makes_norms_again_is_that_of_the_plain_model():
    models = [Llama(config(tied=False)) for _ in range(2)]
    for model in models:
        init_weights(model, seed=1)
    apply_recompute(models[1], Layout(recompute="norms+activations"))
    inputs, _ = batch()
    with torch.no_grad():
        assert torch.equal(models[0](inputs), models[1](inputs))
    assert list(models[0].state_dict()) == list(models[1].state_dict())


def test_a_misspelt_combination_is_refused_with_those_that_work():
    with pytest.raises(ValueError, match="'norms[+]activations'"):
        Layout(recompute="activations+norm")


def test_an_operator_that_torch_does_not_have_is_named():
    with pytest.raises(KieloError, match="no 'matmull'.*Fix: mm"):
        gradients_and_calls(recompute="operators", recompute_saved_operators=("matmull",))


class Fp8Product(torch.autograd.Function):
    """A product in FP8 as torchao writes it: `_scaled_mm` inside of a function of autograd."""

    @staticmethod
    def forward(ctx, x, weight):
        one = torch.ones(())
        eight = [part.to(torch.float8_e4m3fn) for part in (x, weight)]
        return torch._scaled_mm(eight[0], eight[1].t(), one, one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Fp8Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))

    def forward(self, x):
        return torch.nn.functional.silu(Fp8Product.apply(x, self.weight))


@pytest.mark.parametrize(("saved", "products"), [(("mm",), 1), (("addmm",), 2)])
def test_products_in_fp8_are_kept_with_those_in_bf16(saved, products):
    """Products of FP8 count as mm: a layer computes them once, and again where mm is not kept."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": Fp8Layer()})
    apply_recompute(model, Layout(recompute="operators", recompute_saved_operators=saved))
    x = torch.ones(32, 32, dtype=torch.bfloat16, requires_grad=True)
    with OperatorCounter() as counter:
        model.layers["0"](x).float().sum().backward()
    assert counter.calls["_scaled_mm"] == products

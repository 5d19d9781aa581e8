"""Recomputation: the same gradients to the bit, and what each policy makes again and what it keeps,
by counting operators.
"""

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kielo.models.blocks.attention import MaskMaker
from kielo.models.blocks.decoder import init_weights
from kielo.models.families import build_model, complete
from kielo.models.llama.model import Llama
from kielo.parallel.recompute import apply_recompute
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout, Model
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


@pytest.mark.full
@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("operators", 0), ("full", 1)])
def test_flexattention_is_computed_again_only_if_a_policy_says_so(monkeypatch, policy, again):
    """In the graphs of a compiled layer, as a GPU has them. A processor refuses only to run the backward."""
    monkeypatch.setattr(MaskMaker, "makes_blocks", lambda *_: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    graphs = []

    def note(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition
    )
    shape = {"model_type": "bloom", "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    model = build_model(complete(Model(hidden_size=32, intermediate_size=128, **shape), 128))
    apply_recompute(model, Layout(recompute=policy, compile=True))
    layer = model.layers["0"]
    layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        model(torch.zeros(1, 128, dtype=torch.int64))
    calls = [targets.count(torch.ops.higher_order.flex_attention) for targets in graphs]
    assert calls == [1, again]
    assert graphs[1].count(torch.ops.higher_order.flex_attention_backward) == 1


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

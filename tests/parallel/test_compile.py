"""Compiled layers: the numbers of uncompiled ones, one code for all layers of a kind, in every layout."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.models.llama.model import Llama, initial_value
from kielo.models.piece import Box
from kielo.parallel.compile import apply_compile, uncompiled
from kielo.parallel.fsdp import set_last_micro_batch
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import build_mesh
from kielo.parallel.parallelise import parallelise
from kielo.parallel.recompute import apply_recompute
from kielo.parallel.tensor_parallel import gather_sequence
from kielo.ranks.world import World, start_world
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout, Model
from kielo.resolve import software
from kielo.resolve.software import BACKEND_VARIABLE
from kielo.resolve.stages import SCHEDULES
from kielo.verify.torch_fakes import fake_world
from tests.models.equality import batch as tiny_batch
from tests.models.equality import mean_loss, our_logits, pair
from tests.models.tiny_configs import LENGTH, TINY
from tests.parallel.test_layouts import config, difference, layout
from tests.started_ranks import run_ranks

# Compiled code adds up in another order: fp32's 24 bits.
LOSS, GRADIENT = 1e-5, 1e-5


def test_an_axis_is_the_same_object_each_time():
    """Else a second model of a process does not compile: DTensor remembers the first one's."""
    with fake_world(0, 4, has_pipeline=False) as world:
        mesh = build_mesh(world, layout(tensor=2, context=2))
        assert mesh["tensor"] is mesh["tensor"]
        assert mesh.of_parameters("tensor") is mesh.of_parameters("tensor")


@pytest.fixture
def traced(monkeypatch):
    """All of torch.compile but for writing machine code, which takes most of the time;
    and its counters from 0.
    """
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setenv(BACKEND_VARIABLE, "aot_eager")
    with torch._dynamo.config.patch(recompile_limit=4):
        yield


def deep(**changes) -> Model:
    return config(tied=False).model_copy(update={"num_hidden_layers": 4} | changes)


def both(model_config: Model, **layout) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(uncompiled, compiled) of the same weights."""
    torch._dynamo.reset()
    models = [families.build_model(model_config) for _ in range(2)]
    for model in models:
        init_weights(model, seed=1)
    apply_recompute(models[1], Layout(compile=True, **layout))
    apply_compile(models[1])
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    return tuple(models)


def assert_alike(plain: torch.nn.Module, compiled: torch.nn.Module, inputs, labels) -> None:
    """Loss and gradients of training, and logits of scoring."""
    assert_trained_alike(plain, compiled, inputs, labels)
    with torch.no_grad():
        expected, found = (our_logits(model, inputs) for model in (plain, compiled))
    assert (found - expected).norm() <= GRADIENT * expected.norm()


def assert_trained_alike(
    plain: torch.nn.Module, compiled: torch.nn.Module, inputs, labels, documents=None
) -> None:
    losses = []
    for model in (plain, compiled):
        model.zero_grad()
        loss = mean_loss(our_logits(model, inputs, documents), labels)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=LOSS)
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters()):
        assert (other.grad - one.grad).norm() <= GRADIENT * one.grad.norm() + 1e-7, name


@pytest.mark.full  # .ci/run has one
@pytest.mark.skipif(
    " " in torch.__file__,
    reason="torch's compiler for CPUs cannot link below a path with a space; .ci/run has a link without one",
)
@pytest.mark.parametrize("variant", [variant for variant in TINY if variant in families.FAMILIES])
def test_machine_code_gives_the_numbers_of_the_uncompiled_layers(variant: str, tmp_path) -> None:
    """Every family: loss and gradients within 1e-5 of themselves, with walls between documents."""
    torch._dynamo.reset()
    plain, _ = pair(TINY[variant], tmp_path)
    compiled = families.build_model(plain.config)
    compiled.load_state_dict(plain.state_dict())
    apply_compile(compiled)
    inputs, labels = tiny_batch()
    assert_trained_alike(plain, compiled, inputs, labels, (torch.arange(LENGTH) >= 10).int().expand(3, -1))


def test_layers_share_their_code_and_no_shape_is_left_uncompiled(traced) -> None:
    """Three shapes, each trained and scored: six versions for all layers, beyond torch's limit, here 4."""
    plain, compiled = both(deep())
    shapes = [(4, 16), (2, 16), (3, 12)]
    for sequences, length in [*shapes, shapes[0]]:
        tokens = torch.randint(0, 67, (sequences, length + 1), generator=torch.Generator().manual_seed(2))
        assert_alike(plain, compiled, tokens[:, :-1], tokens[:, 1:])
    assert counters["stats"]["unique_graphs"] == 2 * len(shapes)
    assert not counters["graph_break"]


@pytest.mark.parametrize("policy", ["attention", "norms+activations", "operators", "full"])
def test_recomputation_is_compiled_with_its_layer(traced, policy: str) -> None:
    plain, compiled = both(deep(), recompute=policy, recompute_saved_operators=("mm",))
    tokens = torch.randint(0, 67, (2, 17), generator=torch.Generator().manual_seed(2))
    assert_alike(plain, compiled, tokens[:, :-1], tokens[:, 1:])
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_a_layer_that_is_not_compiled_still_has_its_compiled_kernel(traced) -> None:
    """As attention has on a GPU, where the layer's code contains the kernel and the layer alone calls it."""
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        return lambda *given: calls.append("kernel") or graph(*given)

    kernel = torch.compile(torch.sin, backend=backend)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) if torch.compiler.is_compiling() else kernel(x)

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": Layer()})
    apply_compile(model)
    layer, x = model.layers["0"], torch.ones(3)
    assert torch.equal(layer(x), x.sin()) and not calls
    with uncompiled(model):
        assert torch.equal(layer(x), x.sin()) and calls == ["kernel"]
    assert torch.equal(layer(x), x.sin()) and calls == ["kernel"]


def test_a_machine_without_a_compiler_says_so(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KieloError, match=r"layout.compile: .*no compiler \(g\+\+\).*layout.compile = false"):
        apply_compile(Llama(config(tied=False)))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(software.shutil, "which", lambda name: name)
    monkeypatch.setattr(software.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(KieloError, match=r"no Python.h.*python3-dev"):
        apply_compile(Llama(config(tied=False)))


RANKS = deep(vocab_size=68)  # divides by the tensor ranks


def filled(name: str, shape: torch.Size, box: Box | None = None) -> torch.Tensor:
    return initial_value(name, shape, RANKS, 3, box) * (1 if "norm" in name else 5)


def score(hidden_bsd: torch.Tensor) -> torch.Tensor:
    """Any scalar of which every entry has another gradient."""
    return (hidden_bsd.float() * torch.linspace(-1, 1, hidden_bsd.numel()).view(hidden_bsd.shape)).sum()


def tokens_bs() -> torch.Tensor:
    return torch.randint(0, 68, (4, 16), generator=torch.Generator().manual_seed(4))


def one_process() -> dict:
    model = Llama(RANKS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(filled(name, parameter.shape))
    model.head = None  # not asked
    value = score(model(tokens_bs()))
    value.backward()
    return {"value": value.item(), "gradients": {name: p.grad for name, p in model.named_parameters()}}


def on_ranks(several: list[dict]) -> list[dict]:
    """Each layout in turn. One start for all: imports of the compiler take seconds."""
    os.environ[BACKEND_VARIABLE] = "aot_eager"  # of this rank's process only
    world, results = start_world(30, "cpu"), []
    for sizes in several:
        torch._dynamo.reset()
        counters.clear()
        on_rank = on_pipeline_rank if "pipeline" in sizes else on_tensor_rank
        results.append(on_rank(world, sizes))
    return results


def laid_out(world: World, sizes: dict) -> tuple:
    placement = layout(**sizes, compile=True)
    mesh = build_mesh(world, placement)
    with torch.device("meta"):
        model = Llama(RANKS)
    return materialise(parallelise(model, mesh, placement, "fp32"), world.device, filled), mesh


def gradients(model: torch.nn.Module) -> dict:
    return {
        name: p.grad.full_tensor() for name, p in model.named_parameters() if not name.startswith("head.")
    }


def on_tensor_rank(world: World, sizes: dict) -> dict:
    model, mesh = laid_out(world, sizes)
    set_last_micro_batch(model, True)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):  # the last norm's, which is not in a layer
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model(tokens_bs())
    is_split = sizes.get("sequence_parallel", True)
    value = score(gather_sequence(hidden, mesh.of_parameters("tensor"), is_split))
    # Each rank's gradient of the hidden states is a part of their sum.
    (value / mesh.of_parameters("tensor").size() / mesh.of_parameters("shard").size()).backward()
    return {
        "value": value.item(),
        "gradients": gradients(model),
        "graphs": dict(counters["stats"]),
        "largest kept": max(kept),
    }


def on_pipeline_rank(world: World, sizes: dict) -> dict:
    """Forward and backward by hand over two stages."""
    stages, mesh = laid_out(world, sizes)
    rank = mesh["pipeline"].get_local_rank()
    (part,) = stages.parts
    set_last_micro_batch(part, True)
    if rank == 0:
        hidden = part(tokens_bs())
        dist.send(hidden.detach().contiguous(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        return {"value": None, "gradients": gradients(stages), "graphs": dict(counters["stats"])}
    received = torch.empty(4, 16, 16)
    dist.recv(received, 0)
    received.requires_grad_()
    value = score(part(received))
    value.backward()
    dist.send(received.grad, 0)
    return {"value": value.item(), "gradients": gradients(stages), "graphs": dict(counters["stats"])}


PIPELINE = {"pipeline": 2, "pipeline_layers": (2, 2), "pipeline_schedule": next(iter(SCHEDULES))}
TWO_RANKS = [{"tensor": 2}, PIPELINE]
OTHERS_ON_TWO = [
    {"tensor": 2, "sequence_parallel": False, "recompute": "full"},
    {"tensor": 2, "sequence_parallel": False},
    {"tensor": 2, "recompute": "full", "tensor_overlap": "chunked"},
    {"tensor": 2, "recompute": "attention"},
    {"tensor": 2, "recompute": "operators"},
    {"tensor": 2, "recompute": "norms+activations"},
]


@pytest.mark.parametrize(
    ("several", "ranks"),
    [
        pytest.param(TWO_RANKS, 2, marks=pytest.mark.full),
        pytest.param(OTHERS_ON_TWO, 2, marks=pytest.mark.full),
        pytest.param([{"tensor": 2, "shard": 2, "zero": 3}], 4, marks=pytest.mark.full),
    ],
    ids=["tensor, pipeline", "other tensor", "tensor x shard"],
)
def test_ranks_compile_and_give_the_gradients_of_one_process(several: list[dict], ranks: int) -> None:
    """One graph for all layers of a rank; over tensor ranks the embedding's gradient comes through the
    layers' border, and with sequence parallelism no layer keeps its gathered input.
    """
    reference = one_process()
    whole_input = tokens_bs().numel() * RANKS.hidden_size
    results = run_ranks(on_ranks, ranks, several, timeout_seconds=600)
    for number, sizes in enumerate(several):
        of_ranks = [result[number] for result in results]
        together = {name: g for result in of_ranks for name, g in result["gradients"].items()}
        for result in of_ranks:
            found = together if "pipeline" in sizes else result["gradients"]
            assert difference(found, reference["gradients"]) < GRADIENT, sizes
            assert result["graphs"]["unique_graphs"] == 1, sizes
            if "tensor" in sizes:
                assert result["value"] == pytest.approx(reference["value"], rel=1e-5), sizes
                is_split = sizes.get("sequence_parallel", True)
                assert (result["largest kept"] < whole_input) == is_split, sizes
        assert of_ranks[-1]["value"] == pytest.approx(reference["value"], rel=1e-5), sizes

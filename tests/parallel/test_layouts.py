"""Every layout of replicate and shard gives the loss, gradients and norm of one plain process."""

import math

import pytest
import torch

from kielo.models.families import complete
from kielo.models.llama.model import Llama, initial_value
from kielo.parallel.fsdp import forward_only, set_last_micro_batch
from kielo.parallel.gradient_clipping import clip_gradients
from kielo.parallel.materialise import local, local_slices, materialise
from kielo.parallel.mesh import AXES, build_mesh, data_rank, data_ranks, sum_over_data
from kielo.parallel.parallelise import parallelise
from kielo.ranks.world import start_world
from kielo.recipe.sections import Layout, Model
from tests.started_ranks import run_ranks

# 67 rows do not divide by the ranks: shards are uneven, with padding.
SEQUENCES, LENGTH, VOCABULARY = 8, 16, 67


def config(tied: bool) -> Model:
    return complete(
        Model(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            vocab_size=VOCABULARY,
            vocab_multiple=1,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=tied,
        ),
        LENGTH,
    )


def layout(**sizes: object) -> Layout:
    return Layout(**(dict.fromkeys(AXES, 1) | {"zero": 1, "compile": False} | sizes))


def fill(model_config: Model):
    return lambda name, shape, box=None: (
        initial_value(name, shape, model_config, 3, box) * (1 if "norm" in name else 5)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    labels = tokens[:, 1:].clone()
    labels[::3, : LENGTH // 2] = -100  # ranks and micro-batches count different numbers of tokens
    return tokens[:, :-1], labels


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor, divisor: int) -> torch.Tensor:
    """Logits outside the model's forward, as train.loss makes them."""
    logits = model.head(model(inputs)).float()
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / divisor


def one_process(tied: bool) -> dict:
    """The reference: no FSDP, no mesh, the whole batch at once, torch's own clipping."""
    model = Llama(config(tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(config(tied))(name, parameter.shape))
    inputs, labels = batch()
    loss = loss_of(model, inputs, labels, int((labels >= 0).sum()))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    clipped = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "clipped": clipped}


def on_ranks(sizes: dict, tied: bool, micro_batches: int, precision: str) -> dict:
    """Two steps' gradients on this rank's samples; the second shows that nothing stale survives the first."""
    world = start_world(30, "cpu")
    placement = layout(**sizes)
    mesh = build_mesh(world, placement)
    with torch.device("meta"):
        model = Llama(config(tied))
    model = materialise(parallelise(model, mesh, placement, precision), world.device, fill(config(tied)))
    inputs, labels = batch()
    divisor = int(sum_over_data((labels[data_rank(mesh) :: data_ranks(mesh)] >= 0).sum(), mesh))
    assert divisor == int((labels >= 0).sum())
    mine = slice(data_rank(mesh), None, data_ranks(mesh))
    parts = list(zip(inputs[mine].chunk(micro_batches), labels[mine].chunk(micro_batches)))

    with forward_only(model):
        held_out = sum_over_data(sum(loss_of(model, x, y, divisor) for x, y in parts), mesh)
    for _ in range(2):
        model.zero_grad()
        loss = torch.zeros(())
        for number, (x, y) in enumerate(parts):
            set_last_micro_batch(model, number == len(parts) - 1)
            part = loss_of(model, x, y, divisor)
            part.backward()
            loss += part.detach()
        gradients = {
            name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()
        }
        norm = clip_gradients(model, mesh, max_norm=0.1)
    clipped = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    held_by_optimiser = list(model.parameters())
    with forward_only(model):
        model(inputs)
    with torch.no_grad():
        for parameter in held_by_optimiser:
            parameter.zero_()
    return {
        "loss": sum_over_data(loss, mesh).item(),
        "loss_without_weights": sum_over_data(
            sum(loss_of(model, x, y, divisor) for x, y in parts), mesh
        ).item(),
        "held_out": held_out.item(),
        "norm": norm.item(),
        "gradients": gradients,
        "clipped": clipped,
        "data_rank": data_rank(mesh),
        "axes": mesh.ranks.mesh_dim_names,
    }


def difference(ours: dict, theirs: dict) -> float:
    """The largest absolute difference of any entry, against the largest entry of its own tensor."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours)


@pytest.mark.parametrize(
    ("sizes", "tied", "micro_batches"),
    [
        ({}, False, 4),
        ({"shard": 4}, False, 2),
        ({"shard": 2, "zero": 3}, True, 2),
        ({"replicate": 2}, False, 2),
        ({"replicate": 2, "shard": 2}, True, 2),
    ],
    ids=str,
)
def test_fp32_equals_one_plain_process(sizes, tied, micro_batches):
    """Loss, every gradient (head, tied and untied, among them),
    norm and clipping do not depend on the layout.
    """
    num_ranks = sizes.get("replicate", 1) * sizes.get("shard", 1)
    reference = one_process(tied)
    results = run_ranks(on_ranks, num_ranks, sizes, tied, micro_batches, "fp32")
    assert [result["data_rank"] for result in results] == list(range(num_ranks))
    for result in results:
        assert result["axes"] == AXES
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert result["held_out"] == pytest.approx(reference["loss"], rel=1e-6)
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-6)
        assert result["norm"] == results[0]["norm"], "the norm is bitwise the same on every rank"
        assert difference(result["gradients"], reference["gradients"]) < 1e-6
        assert difference(result["clipped"], reference["clipped"]) < 2e-6
        assert result["loss_without_weights"] == pytest.approx(math.log(VOCABULARY)), (
            "an evaluation's weights stayed"
        )


def test_bf16_compute_stays_near_fp32():
    """bf16 compute over fp32 parameters gives fp32 gradients within bf16's rounding of the reference."""
    reference = one_process(tied=True)
    for result in run_ranks(on_ranks, 2, {"shard": 2}, True, 2, "bf16"):
        assert {gradient.dtype for gradient in result["gradients"].values()} == {torch.float32}
        assert result["loss"] == pytest.approx(reference["loss"], rel=5e-3)
        assert result["norm"] == pytest.approx(reference["norm"], rel=3e-2)
        assert difference(result["gradients"], reference["gradients"]) < 8e-2


def padded() -> Model:
    """67 tokens in 70 rows, which two tensor ranks share; 35 rows do not divide by two shards."""
    return config(tied=True).model_copy(update={"vocab_multiple": 10})


def filled_parts(sizes: dict) -> dict:
    world = start_world(30, "cpu")
    placement = layout(**sizes)
    with torch.device("meta"):
        model = Llama(padded())
    made = {}

    def counting(name, shape, box):
        assert name not in made
        values = fill(padded())(name, shape, box)
        made[name] = values.numel()
        return values

    mesh = build_mesh(world, placement)
    model = materialise(parallelise(model, mesh, placement, "fp32"), world.device, counting)
    assert made == {name: local(p).numel() for name, p in model.named_parameters()}
    assert "head.weight" not in made and model.head.weight is model.embed.weight
    return {name: (local_slices(p), local(p).detach().clone()) for name, p in model.named_parameters()}


def test_each_rank_makes_only_its_part():
    """Parts cut by rows and by columns are bitwise those of the whole parameter, and together cover it."""
    parts = run_ranks(filled_parts, 4, {"shard": 2, "tensor": 2})
    for name, parameter in Llama(padded()).named_parameters():
        expected = fill(padded())(name, parameter.shape)
        together = torch.full_like(expected, math.nan)
        for part in parts:
            box, values = part[name]
            together[box] = values
        assert torch.equal(together, expected), name
        assert parameter.dim() == 1 or sum(part[name][1].numel() for part in parts) == expected.numel()

"""LAMB is the paper's, in float64 element by element, and a step is the same however parameters are cut."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.parallel.materialise import local
from kielo.ranks.world import start_world
from kielo.recipe.sections import TrainIdentity
from kielo.train.optimiser import Optimiser
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

LAMB = {"optimiser": "lamb", "adam_beta2": 0.98, "adam_epsilon": 1e-6}
RATES = [0.01, 0.02, 0.03, 0.02]
SKIPPED = 2  # this step's gradients are not finite


def network() -> nn.Module:
    """The last matrix is of zeros, so that its first step has no length to go by."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))
    nn.init.zeros_(made[2].weight)
    return made


def gradient(shape: torch.Size, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    values = torch.randn(shape, generator=generator) * (1 + number)
    return values if step != SKIPPED else values.fill_(math.nan)


def by_the_paper(values: list[float], gradients: list[list[float]], is_matrix: bool, decay: float) -> list:
    """Algorithm 2 of arXiv:1904.00962 on one parameter, λ = `decay`; gradients: of each step taken.

    Biases and norms take Adam's step: no λ, no ratio.
    """
    (beta1, beta2, epsilon), decay = (0.9, 0.98, 1e-6), decay if is_matrix else 0.0
    mean, square = [0.0] * len(values), [0.0] * len(values)
    rates = [rate for step, rate in enumerate(RATES) if step != SKIPPED]
    for count, (rate, gradient_) in enumerate(zip(rates, gradients), start=1):
        update = []
        for i, g in enumerate(gradient_):
            mean[i] = beta1 * mean[i] + (1 - beta1) * g
            square[i] = beta2 * square[i] + (1 - beta2) * g * g
            m, v = mean[i] / (1 - beta1**count), square[i] / (1 - beta2**count)
            update.append(m / (math.sqrt(v) + epsilon) + decay * values[i])
        lengths = math.sqrt(sum(x * x for x in values)), math.sqrt(sum(u * u for u in update))
        ratio = lengths[0] / lengths[1] if is_matrix and all(lengths) else 1.0
        values = [x - rate * ratio * u for x, u in zip(values, update)]
    return values


def trained(model: nn.Module, **settings: Any) -> nn.Module:
    """Takes the steps; on a sharded model each rank has its part of the gradients."""
    optimiser = Optimiser(model.named_parameters(), TrainIdentity(**LAMB | settings))
    for step, rate in enumerate(RATES):
        for number, parameter in enumerate(model.parameters()):
            whole = gradient(parameter.shape, step, number)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = whole
        optimiser.step(rate, torch.tensor(float(step == SKIPPED)))
    assert optimiser.updates == len(RATES) - 1
    return model


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_steps_are_those_of_the_paper(decay: float) -> None:
    """Within fp32's rounding of three steps; a step whose flag is set leaves no trace."""
    before = [p.detach().double().flatten().tolist() for p in network().parameters()]
    for number, parameter in enumerate(trained(network(), weight_decay=decay).parameters()):
        gradients = [
            gradient(parameter.shape, step, number).double().flatten().tolist()
            for step in range(len(RATES)) if step != SKIPPED
        ]  # fmt: skip
        expected = by_the_paper(before[number], gradients, parameter.ndim > 1, decay)
        found = parameter.detach().double().flatten()
        torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-6, atol=1e-7)


def test_moments_in_bf16_change_a_step_by_their_rounding() -> None:
    """At most 2^-8 of a moment a step, and three steps, relative to what was gone."""
    start, wide = network(), trained(network())
    narrow = trained(network(), optimiser_state="bf16")
    for begun, one, other in zip(start.parameters(), narrow.parameters(), wide.parameters()):
        assert 0 < (one - other).norm() < 3 * 2**-8 * (other - begun).norm()


def test_every_layout_takes_the_steps_of_one_process() -> None:
    """Two copies of two shards: the whole tensors' norms, to the rounding of sums in another order, and the
    same bits on both copies. Norms of parts would change ratios by far more.
    """
    expected = [parameter.tolist() for parameter in trained(network()).parameters()]
    ranks = run_ranks(_on_four_ranks, 4)
    for number, (whole, parts) in enumerate(ranks):
        for mine, other in zip(whole, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=2e-6, atol=1e-7)
        assert parts == ranks[number % 2][1]


def _on_four_ranks() -> tuple[list, list]:
    start_world(60, "cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(network(), mesh=mesh)
    trained(model)
    assert all(parameter.placements[0] == Replicate() for parameter in model.parameters())
    return (
        [parameter.full_tensor().tolist() for parameter in model.parameters()],
        [local(parameter).tolist() for parameter in model.parameters()],
    )


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "micro_batch": 4},
        pytest.param({"tensor": 2, "shard": 2, "micro_batch": 2}, marks=pytest.mark.full),
    ],
    ids=["tensor", "tensor x shard"],
)
def test_a_run_goes_on_bitwise_and_on_a_tensor_axis(tmp_path: Path, layout: dict[str, int]) -> None:
    """Stopped after step 3 of 6: on one rank weights and moments keep every bit. On ranks that split each
    matrix, once or in both of its dimensions, they differ by the order of sums in fp32.
    """
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    common: dict[str, Any] = {"total_steps": 6, "every_steps": 3, **LAMB}
    whole, stopped, spread = (_in_folder(tmp_path, name, **common) for name in ("whole", "stopped", "spread"))
    train(whole)
    train(stopped, 3)
    train(stopped)
    train(spread, 3)
    ranks = layout["tensor"] * layout.get("shard", 1)
    run_ranks(train, ranks, _in_folder(tmp_path, "spread", **layout, **common))
    one, again, other = (
        read_tensors(Path(run.placement.train_folder) / "checkpoints" / "step_00000006")
        for run in (whole, stopped, spread)
    )
    assert one.keys() == again.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name]), name
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def _in_folder(folder: Path, name: str, **changes: Any) -> Any:
    (folder / name).mkdir(exist_ok=True)
    if not (folder / name / "tokens").exists():
        (folder / name / "tokens").symlink_to(folder / "tokens")
    return resolve(folder / name, **changes)


def test_a_matrix_without_a_gradient_stays() -> None:
    """Its update has no length either, and a ratio of nothing is none."""
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    optimiser = Optimiser(model.named_parameters(), TrainIdentity(**LAMB, weight_decay=0.0))
    model.weight.grad = torch.zeros(2, 3)
    optimiser.step(0.5)
    assert torch.equal(model.weight.detach(), before) and optimiser.updates == 1

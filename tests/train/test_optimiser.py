"""AdamW is torch's, a flag undoes a step completely (of LAMB too, see test_lamb.py for the rest of it),
and moments in bf16 take steps that differ by their rounding alone.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kielo.ranks.world import start_world
from kielo.recipe.optimisers import WIDENED_BYTES
from kielo.recipe.sections import TrainIdentity
from kielo.train import optimiser as module
from kielo.train.optimiser import MOMENTS, Optimiser
from tests.started_ranks import run_ranks

FP32, BF16 = TrainIdentity(), TrainIdentity(optimiser_state="bf16")
LAMB = TrainIdentity(optimiser="lamb")
BF16_ROUNDING = 2.0**-8  # the most that rounding to nearest changes a number by, relative


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def wider_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(37, 53), nn.LayerNorm(53), nn.Linear(53, 2, bias=False))


def set_gradients(network: nn.Module, seed: int) -> None:
    """Sets gradients of a size of its own for each element; on a sharded model, each rank's part of it."""
    sizes, generator = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        size = torch.randn(parameter.shape, generator=sizes).exp()
        gradient = size * (0.5 + torch.randn(parameter.shape, generator=generator))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = DTensor.from_local(
                _part(gradient, mesh.get_local_rank(), mesh.size()), mesh, placements, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
        parameter.grad = gradient


def _part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    parts = tensor.chunk(ranks)
    return parts[rank] if rank < len(parts) else tensor[:0]


def state_of(network: nn.Module, optimiser: Optimiser) -> list[Tensor]:
    """Copies, whole."""
    tensors = [*(p.detach() for p in network.parameters()), *optimiser.moments().values()]
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in tensors]


def assert_same_bits(mine: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("settings", [FP32, BF16, LAMB])
def test_a_skipped_step_leaves_no_trace(settings: Any) -> None:
    """NaN gradients with the flag set touch neither weights nor moments nor the count of updates, and the
    steps after it are those of a run that never saw it.
    """
    ours, undisturbed = model(), model()
    optimiser = Optimiser(ours.named_parameters(), settings)
    other = Optimiser(undisturbed.named_parameters(), settings)
    hooked: list[int] = []
    optimiser.algorithm.register_step_post_hook(lambda *_: hooked.append(1))
    for step, bad in enumerate([False, True, False, True, False]):
        set_gradients(ours, step)
        if bad:
            ours[0].weight.grad[0, 0] = float("nan")
        before = state_of(ours, optimiser)
        optimiser.step(0.01 * (step + 1), torch.tensor(float(bad)))
        optimiser.zero_grad()
        if bad:
            assert_same_bits(state_of(ours, optimiser), before)
        else:
            set_gradients(undisturbed, step)
            other.step(0.01 * (step + 1))
    assert optimiser.updates == other.updates == 3 and len(hooked) == 5
    assert_same_bits(state_of(ours, optimiser), state_of(undisturbed, other))


def test_steps_are_those_of_plain_adamw() -> None:
    """torch's, one operation after another; matrices are decayed, vectors are not."""
    ours, theirs = model(), model()
    optimiser = Optimiser(ours.named_parameters(), FP32)
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": [theirs[0].weight], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimiser.step(0.01 * (step + 1))
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            optimiser.algorithm.state[mine]["exp_avg_sq"],
            reference.state[other]["exp_avg_sq"],
            rtol=1e-6,
            atol=1e-9,
        )


def test_moments_are_there_before_the_first_step_and_have_names() -> None:
    """A checkpoint can be restored into an optimiser that has not stepped; a frozen parameter has none."""
    network = model()
    network[0].bias.requires_grad_(False)
    optimiser = Optimiser(network.named_parameters(), FP32)
    names = {f"{name}/{moment}" for name in ("0.weight", "1.weight", "1.bias") for moment in MOMENTS}
    assert optimiser.moments().keys() == names
    optimiser.resume(7, {})
    set_gradients(network, 0)
    optimiser.step(0.1)
    assert optimiser.updates == 8


@pytest.mark.parametrize("widened_elements", [64, 2**25])
def test_moments_in_bf16_are_widened_and_rounded_and_nothing_else(
    widened_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the weights and moments of a twin: each parameter alone, its moments as fp32 through
    torch's fused step and back. With few elements at a time matrices are cut within rows, whose sums of the
    same operations may end in another bit where vector instructions end, so there to within fp32's rounding
    and one bf16 step.
    """
    monkeypatch.setattr(module, "WIDENED_ELEMENTS", widened_elements)
    ours, twin = wider_model(), wider_model()
    optimiser = Optimiser(ours.named_parameters(), BF16)
    moments = {
        name: [torch.zeros_like(p, dtype=torch.bfloat16) for _ in MOMENTS]
        for name, p in twin.named_parameters()
    }
    for step in range(6):
        lr = 0.01 * (step + 1)
        set_gradients(ours, step)
        set_gradients(twin, step)
        optimiser.step(lr)
        for name, parameter in twin.named_parameters():
            alone = torch.optim.AdamW(
                [parameter], lr, (0.9, 0.95), 1e-8, 0.1 * (parameter.ndim > 1), fused=True
            )
            wide = [moment.float() for moment in moments[name]]
            alone.state[parameter] = {"step": torch.tensor(float(step)), **dict(zip(MOMENTS, wide))}
            alone.step()
            moments[name] = [moment.to(torch.bfloat16) for moment in wide]
    mine = state_of(ours, optimiser)
    theirs = [
        *(p.detach() for p in twin.parameters()),
        *(moment for both in moments.values() for moment in both),
    ]
    if widened_elements == 64:
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(
                one, other, rtol=2 * BF16_ROUNDING if one.dtype == torch.bfloat16 else 1e-6, atol=1e-7
            )
    else:
        assert_same_bits(mine, theirs)
    assert optimiser.updates == 6


def test_updates_with_moments_in_bf16_point_where_those_in_fp32_do() -> None:
    """Updates over 50 steps of equal gradients stay near. A moment is rounded once a step, by at most 2^-8 of
    itself, and forgets at the rate 1 - β: what has gathered is at most 2^-8 / (1 - β) of it, of exp_avg_sq
    half of that under its root. At β 0.9 and 0.95 that is 7.8 % if all roundings went one way; as they fall,
    an eighth of it in the mean at most.
    """
    bound = BF16_ROUNDING / (1 - 0.9) + BF16_ROUNDING / (1 - 0.95) / 2
    narrow, wide = wider_model(), wider_model()
    optimisers = Optimiser(narrow.named_parameters(), BF16), Optimiser(wide.named_parameters(), FP32)
    differences = []
    for step in range(50):
        moved = []
        for network, optimiser in zip((narrow, wide), optimisers):
            for group in optimiser.algorithm.param_groups:
                group["weight_decay"] = 0.0
            before = copy.deepcopy(list(network.parameters()))
            set_gradients(network, step)
            optimiser.step(0.01)
            moved.append(torch.cat([(p - b).flatten() for p, b in zip(network.parameters(), before)]))
        differences.append(((moved[0] - moved[1]).norm() / moved[1].norm()).item())
    assert max(differences) < bound
    assert sum(differences) / 50 < bound / 8
    assert max(differences) > bound / 100  # else the moments were not rounded at all


def test_moments_in_bf16_of_any_layout() -> None:
    """Three ranks, of which one has nothing of the last matrix: equal to one process, but for bits that
    rounding turns over.
    """
    whole = wider_model()
    optimiser = Optimiser(whole.named_parameters(), BF16)
    for step in range(5):
        set_gradients(whole, step)
        optimiser.step(0.01, torch.tensor(float(step == 2)))
    expected = state_of(whole, optimiser)
    for found, updates in run_ranks(_sharded_steps, 3):
        assert updates == 4
        for mine, other in zip(found, expected, strict=True):
            mine = torch.tensor(mine)
            difference = (mine - other.float()).norm() / other.float().norm()
            assert difference < 1e-4


def _sharded_steps() -> tuple[list[list], int]:
    start_world(60, "cpu")
    network = wider_model()
    mesh = init_device_mesh("cpu", (3,))
    for part in network:
        fully_shard(part, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimiser = Optimiser(network.named_parameters(), BF16)
    module.WIDENED_ELEMENTS = 500
    for step in range(5):
        set_gradients(network, step)
        optimiser.step(0.01, torch.tensor(float(step == 2)))
    assert all(
        isinstance(moment, DTensor) and moment.dtype == torch.bfloat16
        for moment in optimiser.moments().values()
    )
    return [tensor.float().tolist() for tensor in state_of(network, optimiser)], optimiser.updates


def test_updates_are_those_of_the_run_whenever_a_parameter_began() -> None:
    """A parameter that was unfrozen after four updates has seen three of seven; gradients go after a step."""
    network = model()
    optimiser = Optimiser(network.named_parameters(), FP32)
    optimiser.resume(7, {"0.weight": 4})
    assert optimiser.updates == 7
    seen = {name: optimiser.algorithm.state[p]["step"].item() for name, p in optimiser.parameters.items()}
    assert seen == {"0.weight": 3.0, "0.bias": 7.0, "1.weight": 7.0, "1.bias": 7.0}
    set_gradients(network, 0)
    optimiser.step(0.1)
    optimiser.zero_grad()
    assert optimiser.updates == 8 and all(parameter.grad is None for parameter in network.parameters())
    network[1].requires_grad_(False)
    network[0].bias.requires_grad_(False)
    alone = Optimiser(network.named_parameters(), FP32)
    alone.resume(5, {"0.weight": 2})
    assert alone.updates == 5
    nothing = Optimiser(nn.Linear(2, 2).requires_grad_(False).named_parameters(), FP32)
    nothing.step(0.1, torch.tensor(1.0))
    assert nothing.updates == 0 and nothing.moments() == {}


def test_so_many_elements_are_widened_at_a_time() -> None:
    """Two moments of four bytes each fill what the planner reserves."""
    assert module.WIDENED_ELEMENTS * 2 * 4 == WIDENED_BYTES

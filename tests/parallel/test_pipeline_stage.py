"""Receive buffers of a pipeline: those of messages under way, in any schedule; gradients of one process."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kielo.parallel.mesh import build_mesh
from kielo.parallel.pipeline_schedule import ScheduleOptions, make_schedule
from kielo.parallel.world import start_world
from kielo.resolve.stages import SCHEDULES, stages_of_rank
from kielo.resolve.torch_versions import schedule_complaint
from tests.parallel.test_layouts import layout
from tests.ranks import run_ranks

RANKS, MICRO_BATCHES, ROWS, WIDTH = 2, 8, 3, 5
NAMES = [name for name in SCHEDULES if schedule_complaint(name, torch.__version__) is None]


def stage(number: int) -> nn.Module:
    generator = torch.Generator().manual_seed(number)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    module.zero = 1
    return module


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    shape = MICRO_BATCHES * ROWS, WIDTH
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def on_a_rank(names: list[str]) -> list[dict]:
    world = start_world(30, "cpu")
    axis = build_mesh(world, layout(pipeline=RANKS))["pipeline"]
    rank, example = axis.get_local_rank(), torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    buffers: list[weakref.ref] = []
    alive: list[int] = []
    send_or_receive = dist.P2POp.__init__

    def watched(op, kind, tensor, *more, **options):
        send_or_receive(op, kind, tensor, *more, **options)
        if kind is dist.irecv:
            buffers.append(weakref.ref(tensor))
            alive.append(sum(buffer() is not None for buffer in buffers))

    dist.P2POp.__init__ = watched
    found = []
    for name in names:
        each = SCHEDULES[name].stages_per_rank
        numbers = stages_of_rank(name, RANKS, rank, each)
        parts = [stage(number) for number in numbers]
        schedule = make_schedule(
            ScheduleOptions(name, MICRO_BATCHES, loss, world.device),
            parts,
            numbers,
            RANKS * each,
            [(example, example)] * each,
            axis.get_group(),
        )
        inputs, target = data()
        has_last = numbers[-1] == RANKS * each - 1
        for _ in range(2):  # the second step uses what the first one left
            buffers.clear()
            alive.clear()
            for part in parts:
                part.zero_grad()
            losses: list[torch.Tensor] = []
            schedule.step(*[inputs] * (0 in numbers), target=target if has_last else None, losses=losses)
        gradients = {
            f"{number}.{name}": parameter.grad
            for number, part in zip(numbers, parts)
            for name, parameter in part.named_parameters()
        }
        found.append({"gradients": gradients, "receives": len(alive), "most": max(alive)})
    return found


@pytest.fixture(scope="module")
def ranks() -> list[list[dict]]:
    return run_ranks(on_a_rank, RANKS, NAMES, timeout_seconds=60)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_buffers_of_messages_under_way_and_trains_as_one_process(ranks, name):
    """fp32, 1e-5 of the largest entry: micro-batches are summed in another order."""
    inputs, target = data()
    each = SCHEDULES[name].stages_per_rank
    parts = [stage(number) for number in range(RANKS * each)]
    loss(nn.Sequential(*parts)(inputs), target).backward()
    whole = {
        f"{number}.{name}": parameter.grad
        for number, part in enumerate(parts)
        for name, parameter in part.named_parameters()
    }
    for rank in ranks:
        found = rank[NAMES.index(name)]
        for key, gradient in found["gradients"].items():
            assert (gradient - whole[key]).abs().max() <= 1e-5 * whole[key].abs().max()
        assert found["receives"] >= MICRO_BATCHES
        if name != "gpipe":  # which has all its forward passes under way
            most = RANKS + 1 if each == 1 else 2 * RANKS * each
            assert found["most"] <= most < found["receives"]

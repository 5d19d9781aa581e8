"""Receive buffers of a pipeline: those of messages under way, in any schedule; gradients of one process."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kielo.parallel import pipeline_schedule
from kielo.parallel.mesh import build_mesh
from kielo.parallel.pipeline_schedule import LeanStage, ScatteringStage, ScheduleOptions, make_schedule
from kielo.ranks.world import start_world
from kielo.resolve.software import schedule_complaint
from kielo.resolve.stages import SCHEDULES, stages_of_rank
from tests.parallel.test_layouts import layout
from tests.started_ranks import run_ranks

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


def test_a_scattering_stage_reduces_after_each_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 is told before each pass if it is the last; a pass that torch splits is refused."""
    done: list[Any] = []
    monkeypatch.setattr(pipeline_schedule, "set_last_micro_batch", lambda *given: done.append(given))
    monkeypatch.setattr(
        pipeline_schedule, "stage_backward", lambda *given: done.append(given) or ("gradient",)
    )
    stage = ScatteringStage.__new__(ScatteringStage)
    stage.submod = "module"
    given = {"stage_output": "out", "output_grads": "of out", "input_values": "in"}
    for last in (False, True):
        assert stage.backward_maybe_with_nosync("full", given, last_backward=last) == (("gradient",), None)
        assert done == [("module", last), ("out", "of out", "in")]
        done.clear()
    stage.backward_maybe_with_nosync("full", given)
    assert done[0] == ("module", False)
    for kind in ("input", "weight"):
        with pytest.raises(ValueError, match=f"of type '{kind}' cannot be reduced by itself"):
            stage.backward_maybe_with_nosync(kind, given)


def test_a_buffer_has_memory_from_the_start_of_its_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the micro-batch in question, on the stage's device; those of the first stage's inputs have none."""
    torch_stage = LeanStage.__mro__[1]
    seen: list[Any] = []

    def where(stage: LeanStage) -> tuple[list[str], list[str]]:
        both = (stage.args_recv_info, stage.grad_recv_info)
        buffers = [[receive.buffer for receives in of.values() for receive in receives] for of in both]
        first, second = [[one.device.type for one in of if one is not None] for of in buffers]
        return first, second

    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
        monkeypatch.setattr(
            torch_stage, name, lambda self, chunk, name=name: seen.append(where(self)) or name
        )
    stage = LeanStage.__new__(LeanStage)
    stage.device = torch.device("cpu")

    def receives() -> dict[int, tuple[SimpleNamespace, ...]]:
        buffers = (torch.empty(3, 2, device="meta", requires_grad=True), None)
        return {number: tuple(SimpleNamespace(buffer=buffer) for buffer in buffers) for number in range(2)}

    stage.args_recv_info, stage.grad_recv_info = receives(), receives()
    there, nowhere = (["meta", "cpu"], ["meta", "meta"])
    assert stage.get_fwd_recv_ops(1) == "get_fwd_recv_ops" and seen.pop() == (there, nowhere)
    buffer = stage.args_recv_info[1][0].buffer
    assert buffer.requires_grad and buffer.shape == (3, 2)
    stage.get_fwd_recv_ops(1)
    assert stage.args_recv_info[1][0].buffer is buffer  # it is there already
    seen.clear()
    assert stage.get_bwd_recv_ops(1) == "get_bwd_recv_ops" and seen.pop() == (there, there)
    assert stage.get_bwd_recv_ops(7) == "get_bwd_recv_ops"  # the last stage has no gradients to receive


def test_a_loss_keeps_its_graph_no_longer_than_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the weights' half of it is still to come, and where it is a view, which stays."""
    torch_stage, given = LeanStage.__mro__[1], []
    monkeypatch.setattr(
        torch_stage, "backward_one_chunk", lambda self, chunk, **options: given.append((chunk, options))
    )
    monkeypatch.setattr(
        torch_stage,
        "get_fwd_send_ops",
        lambda self, chunk: [SimpleNamespace(tensor=torch.ones(2, requires_grad=True) * chunk)],
    )
    stage = LeanStage.__new__(LeanStage)

    def loss() -> torch.Tensor:
        return torch.ones(2, requires_grad=True) * 2

    for made, is_full, keeps in ((loss(), True, False), (loss(), False, True), (loss()[0], True, True)):
        stage.backward_one_chunk(3, loss=made, full_backward=is_full, last_backward=True)
        assert (made.grad_fn is not None) == keeps
        assert given.pop() == (3, {"loss": made, "full_backward": is_full, "last_backward": True})
    stage.backward_one_chunk(4)
    assert given.pop() == (4, {"loss": None, "full_backward": True, "last_backward": False})
    (send,) = stage.get_fwd_send_ops(5)
    assert send.tensor.tolist() == [5.0, 5.0] and not send.tensor.requires_grad

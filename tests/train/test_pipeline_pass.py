"""What a pipeline rank passes through its stages, with stand-ins for stages, schedule and ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kielo.train import forward_backward as module
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.forward_backward import PipelineForwardBackward

HIDDEN = 3
seen: list[Any] = []


class Stage(nn.Module):
    """Adds ten to what comes in, and notes it with the positions that it is given."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, given: Tensor, documents_bs: Tensor | None, positions_s: Tensor) -> Tensor:
        seen.append(("stage", self.number, given.flatten()[0].item(), positions_s.tolist()))
        made = given if given.dim() == 3 else given.unsqueeze(-1).expand(-1, -1, HIDDEN)
        return made.float() + 10


@dataclass(frozen=True)
class Objective:
    z_loss: float = 0.5

    def gathered(self, hidden: Tensor) -> Tensor:
        return hidden * 2

    def of_hidden(
        self, model: nn.Module, hidden: Tensor, labels: Tensor, divisor: Tensor, counted: Any
    ) -> Tensor:
        seen.append(("loss", model.number, self.z_loss, counted, labels.shape[1]))
        return hidden.sum() / divisor


class Piped:
    """Rank 1 of two, which has the stages `numbers` of four; ranks: of each stage."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ranks: tuple, numbers: Iterable[int], splits: bool = False
    ):
        seen.clear()
        self.parts = [Stage(number) for number in numbers]
        of_last = next((part for part in self.parts if part.number == 3), None)
        self.model = SimpleNamespace(
            parts=self.parts, numbers=list(numbers), num_stages=4, last=of_last,
            first=next((part for part in self.parts if part.number == 0), None),
            copy_tied=lambda: seen.append("copy tied"), add_tied_gradient=lambda: seen.append("add tied"),
            config=SimpleNamespace(hidden_size=HIDDEN),
        )  # fmt: skip
        group = SimpleNamespace(rank=lambda: 1)
        axes = {"pipeline": SimpleNamespace(size=lambda: 2, get_group=lambda: group),
                "tensor": SimpleNamespace(size=lambda: 4)}  # fmt: skip
        self.asked: list[Any] = []
        monkeypatch.setattr(module, "rank_of_each_stage", lambda *given: self.asked.append(given) or ranks)
        monkeypatch.setattr(
            module, "sum_over", lambda tensor, over: tensor * 100 if over == [axes["pipeline"]] else 0
        )
        monkeypatch.setattr(module, "schedule_of", self.schedule_of)
        monkeypatch.setattr(module, "dist", SimpleNamespace(irecv=self.recv, isend=self.send))
        monkeypatch.setattr(module, "pass_message", lambda do, hidden, over, other: do(hidden, other))
        self.made: list[Any] = []
        self.step = PipelineForwardBackward(
            self.model, Objective(), lambda tensor: tensor * 2, axes, "zbv", splits, torch.float32
        )

    def recv(self, hidden: Tensor, other: int) -> None:
        seen.append(("recv", other, tuple(hidden.shape)))
        hidden.fill_(7)

    def send(self, hidden: Tensor, other: int) -> None:
        seen.append(("send", other, hidden.flatten()[0].item()))

    def schedule_of(self, model: Any, options: Any, examples: Any) -> Any:
        self.made.append((options, examples))

        def step(*inputs: Tensor, target: Any, losses: list, return_outputs: bool, **named: Tensor) -> None:
            shapes = tuple(tuple(one.shape) for one in inputs)
            targets = None if target is None else tuple(target.shape)
            seen.append(
                ("step", shapes, targets, return_outputs, {name: len(one) for name, one in named.items()})
            )
            if self.model.last is not None:
                losses += [torch.tensor(1.5), torch.tensor(2.0)]

        return SimpleNamespace(step=step)


def micro_batch(columns: int = 8, counted: int | None = 5, **given: Any) -> MicroBatch:
    inputs = torch.arange(2 * columns).view(2, columns)
    return MicroBatch(inputs, inputs + 1, torch.zeros_like(inputs), counted=counted, **given)


@pytest.mark.parametrize(
    ("ranks", "numbers", "done", "loss"),
    [
        (
            (0, 1, 0, 1), (1, 3),
            [("recv", 0, (2, 8, 3)), ("stage", 1, 7.0), ("send", 0, 17.0), ("recv", 0, (2, 8, 3)),
             ("stage", 3, 7.0), ("loss", 3, 0.25, 5, 8)],
            2 * 17.0 * 2 * 8 * 3 / 4,
        ),
        (
            (0, 1, 1, 0), (1, 2),
            [("recv", 0, (2, 8, 3)), ("stage", 1, 7.0), ("stage", 2, 17.0), ("send", 0, 27.0)],
            0,
        ),
        (
            (1, 0, 0, 1), (0, 3),
            [("stage", 0, 0.0), ("send", 0, 10.0), ("recv", 0, (2, 8, 3)), ("stage", 3, 7.0),
             ("loss", 3, 0.25, 5, 8)],
            2 * 17.0 * 2 * 8 * 3 / 4,
        ),
    ],
)  # fmt: skip
def test_held_out_text_goes_stage_after_stage(monkeypatch, ranks, numbers, done, loss: float) -> None:
    """From the rank of the stage before, to that of the next, and within a rank without a message."""
    piped = Piped(monkeypatch, ranks, numbers)
    assert piped.asked == [("zbv", 2, 2)]
    found = piped.step.score(micro_batch(), torch.tensor(4.0), 0.25)
    assert found.item() == pytest.approx(100 * loss)
    positions = list(range(8))
    assert seen == ["copy tied", *((*one, positions) if one[0] == "stage" else one for one in done)]


def test_a_rank_of_a_context_axis_tells_its_stages_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor axis of four that splits hidden states along the sequence has a quarter of their columns."""
    piped = Piped(monkeypatch, (0, 1, 0, 1), (1, 3), splits=True)
    piped.step.score(micro_batch(positions_s=torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])), torch.tensor(4.0), 0.0)
    assert seen[1:3] == [("recv", 0, (2, 2, 3)), ("stage", 1, 7.0, [4, 5, 6, 7, 0, 1, 2, 3])]


@pytest.mark.parametrize(("numbers", "is_first", "is_last"), [((0, 2), True, False), ((1, 3), False, True)])
def test_a_step_is_handed_to_the_schedule_as_a_whole(monkeypatch, numbers, is_first, is_last) -> None:
    """Inputs to the rank with the first stage, labels to that with the last; the loss is summed over both."""
    piped = Piped(monkeypatch, (0, 1, 0, 1), numbers)
    keys = torch.zeros(2, 2)
    batch = StepBatch(1, (), [micro_batch(dropout_keys_b2=keys, counted=3),
                              micro_batch(dropout_keys_b2=keys, counted=9)], torch.tensor(12))  # fmt: skip
    loss = piped.step(batch)
    assert loss.item() == (100 * 2 * 3.5 if is_last else 0) and piped.step.own_loss.item() == 3.5 * is_last
    whole = (4, 8)
    step = ("step", (whole,) * is_first, whole if is_last else None, False,
            {"documents_bs": 4, "dropout_keys_b2": 4})  # fmt: skip
    assert seen == ["copy tied", step, "add tied"]
    ((options, examples),) = piped.made
    assert (options.name, options.micro_batches, options.device.type) == ("zbv", 2, "cpu")
    assert (examples.tokens_bs.shape, examples.hidden_bsd.shape) == ((2, 8), (2, 8, 3))
    assert examples.output_bsd.shape == (2, 8, 3) and examples.hidden_bsd.requires_grad
    assert {one.device.type for one in (examples.tokens_bs, examples.hidden_bsd, examples.output_bsd)} == {
        "meta"
    }


def test_a_schedule_is_made_anew_when_shapes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the number of micro-batches; documents are left out where there are none."""
    piped = Piped(monkeypatch, (0, 1, 0, 1), (1, 3))

    def take(columns: int, number: int) -> int:
        pieces = [MicroBatch(*[micro_batch(columns).inputs_bs] * 2, None) for _ in range(number)]
        piped.step(StepBatch(1, (), pieces, torch.tensor(0)))
        return len(piped.made)

    assert [take(8, 2), take(8, 2), take(8, 3), take(4, 3), take(4, 3), take(8, 2)] == [1, 1, 2, 3, 3, 4]
    assert seen[1][4] == {}


@pytest.mark.parametrize(("counts", "most"), [((3, 9), 9), ((3, None), None)])
def test_the_schedules_loss_counts_as_many_labels_as_any_micro_batch(monkeypatch, counts, most) -> None:
    """Its last stage's output is gathered, and its divisor is that of all ranks, 1 at least."""
    piped = Piped(monkeypatch, (0, 1, 0, 1), (1, 3))
    for counted, divisor in ((6, 12.0), (0, 1.0)):
        piped.step(StepBatch(1, (), [micro_batch(counted=one) for one in counts], torch.tensor(counted)))
        seen.clear()
        ((options, _),) = piped.made
        assert options.loss(torch.ones(2, 8, 3), torch.ones(2, 8)).item() == 48 / divisor
        assert seen == [("loss", 3, 0.5, most, 8)]
    last = piped.model.last
    assert (last(torch.ones(2, 8, 3), documents_bs=None) == 22).all()

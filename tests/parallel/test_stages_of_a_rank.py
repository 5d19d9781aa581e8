"""Stages of one pipeline rank, with its messages in memory: what each keeps, and how copies stay equal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kielo.parallel import pipeline_parallel
from kielo.parallel.pipeline_parallel import ExampleTensors, Stages, cut, into_stages, schedule_of
from kielo.recipe.sections import Layout

ROWS, WIDTH = 3, 2


class Part(nn.Module):
    """A stage of four of a model whose head is its embedding, with a table that all stages need."""

    def __init__(self, number: int, is_tied: bool = True, last: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=is_tied)
        self.of_all_stages = ("relative",)
        self.embed = nn.Embedding(ROWS, WIDTH) if number == 0 else None
        self.head = nn.Linear(WIDTH, ROWS, bias=False) if number == last else None
        self.layer = nn.Linear(1, 1, bias=False)
        self.relative = nn.Parameter(torch.full((2,), float(number + 1)))
        self.resets: list[str] = []
        for value, module in ((10.0, self.embed), (20.0, self.head)):
            if module is not None:
                nn.init.constant_(module.weight, value)

    def reset_buffers(self, device: str) -> None:
        self.resets.append(device)


class Wire:
    """Messages of a rank. done: what was sent, and to or from whom. given: what arrives in its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, given: float) -> None:
        self.done: list[Any] = []
        self.given = given
        for name in ("broadcast", "all_reduce"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(pipeline_parallel, "pass_message", self.pass_message)

    def pass_message(self, operation: Any, tensor: torch.Tensor, group: str, other: int) -> None:
        if operation is dist.isend:
            self.done.append(("send", tensor.flatten()[0].item(), other))
        else:
            self.done.append(("recv", other))
            tensor.fill_(self.given)

    def broadcast(self, tensor: torch.Tensor, group: str, group_src: int) -> None:
        self.done.append(("broadcast", tensor[0].item(), group_src))
        if self.given:
            tensor.fill_(self.given)

    def all_reduce(self, tensor: torch.Tensor, group: str) -> None:
        self.done.append(("sum", tensor[0].item()))
        tensor.mul_(10)


def stages(
    numbers: tuple[int, ...], rank: int = 0, ranks: int = 2, is_tied: bool = True, last: int = 3
) -> Stages:
    axis = SimpleNamespace(
        size=lambda: ranks, get_local_rank=lambda: rank, get_group=lambda: "group", device_type="cpu"
    )
    return Stages([Part(number, is_tied, last) for number in numbers], numbers, last + 1, axis)


def with_gradients(made: Stages) -> Stages:
    """Each parameter's gradient is a hundredth of its own value, and of layers nothing."""
    for part in made.parts:
        for module in (part.embed, part.head):
            if module is not None:
                module.weight.grad = module.weight.detach() / 100
        part.relative.grad = part.relative.detach() / 100
    return made


def firsts(*tensors: torch.Tensor | None) -> list[float | None]:
    return [None if tensor is None else round(tensor.flatten()[0].item(), 6) for tensor in tensors]


def test_copies_are_not_among_the_parameters() -> None:
    """Neither a tied head, nor on later stages what the first has too."""
    v = stages((0, 3))
    assert [name for name, _ in v.named_parameters()] == [
        "relative", "embed.weight", "layer.weight", "layer.weight",
    ]  # fmt: skip
    assert v.first is v.parts[0] and v.last is v.parts[1]
    untied = stages((0, 3), is_tied=False)
    assert [name for name, _ in untied.named_parameters()][-2:] == ["head.weight", "layer.weight"]
    middle = stages((1, 2))
    assert [name for name, _ in middle.named_parameters()] == 2 * ["layer.weight"]
    assert middle.first is None and middle.last is None
    middle.reset_buffers("cpu")
    assert [part.resets for part in middle.parts] == [["cpu"], ["cpu"]]


def test_a_rank_with_both_ends_sends_nothing_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own values and gradients pass from one stage to the other; the table's go to all."""
    wire, v = Wire(monkeypatch, given=0.0), with_gradients(stages((0, 3)))
    v.copy_tied()
    assert firsts(v.parts[1].head.weight, v.parts[1].relative, v.parts[0].relative) == [10.0, 1.0, 1.0]
    assert wire.done == [("broadcast", 1.0, 0)]
    wire.done.clear()
    v.add_tied_gradient()
    assert wire.done == [("sum", pytest.approx(0.01 + 0.04))]
    assert firsts(v.parts[0].relative.grad, v.parts[1].relative.grad) == [0.5, None]
    assert firsts(v.parts[0].embed.weight.grad, v.parts[1].head.weight.grad) == [pytest.approx(0.3), None]


def test_a_rank_in_the_middle_takes_the_tables_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its stages do; its gradients are in the sum, and are not kept."""
    wire, middle = Wire(monkeypatch, given=7.0), with_gradients(stages((1, 2), rank=1))
    middle.parts[0].relative.grad = None  # of a stage without layers
    middle.copy_tied()
    assert firsts(*(part.relative for part in middle.parts)) == [7.0, 7.0]
    middle.add_tied_gradient()
    assert wire.done == [("broadcast", 2.0, 0), ("sum", pytest.approx(0.03))]
    assert firsts(*(part.relative.grad for part in middle.parts)) == [None, None]
    for part in middle.parts:
        part.relative.requires_grad_(False)
    middle.add_tied_gradient()
    assert len(wire.done) == 2


def test_the_first_and_the_last_rank_send_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks 0 and 2: the embedding's values one way, the head's gradient back."""
    wire = Wire(monkeypatch, given=5.0)
    first, last = with_gradients(stages((0,), 0, 3, last=2)), with_gradients(stages((2,), 2, 3, last=2))
    first.copy_tied()
    last.copy_tied()
    tied = [one for one in wire.done if one[0] in ("send", "recv")]
    assert tied == [("send", 10.0, 2), ("recv", 0)] and firsts(last.last.head.weight) == [5.0]
    wire.done.clear()
    first.add_tied_gradient()
    last.add_tied_gradient()
    tied = [one for one in wire.done if one[0] in ("send", "recv")]
    assert tied == [("recv", 2), ("send", pytest.approx(0.2), 0)]
    assert firsts(first.first.embed.weight.grad, last.last.head.weight.grad) == [5.1, None]
    wire.done.clear()
    frozen = stages((0,), 0, 3, last=2)
    frozen.parts[0].relative.requires_grad_(False)
    frozen.add_tied_gradient()
    assert wire.done == []


def test_without_a_tied_head_nothing_of_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, v = Wire(monkeypatch, given=0.0), with_gradients(stages((0, 3), is_tied=False))
    v.copy_tied()
    v.add_tied_gradient()
    assert [one[0] for one in wire.done] == ["broadcast", "sum"]
    assert firsts(v.parts[1].head.weight, v.parts[1].head.weight.grad) == [20.0, 0.2]


class Whole(nn.Module):
    """A model of four layers, with everything that a stage may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.of_all_stages = ()
        for name in ("embed", "position_table", "embed_norm", "norm", "transform", "head"):
            setattr(self, name, nn.Identity())
        self.layers = nn.ModuleDict({str(number): nn.Identity() for number in range(4)})


def has(model: nn.Module) -> list[str]:
    names = ("embed", "position_table", "embed_norm", "norm", "transform", "head")
    return [name for name in names if getattr(model, name) is not None] + list(model.layers)


def test_a_stage_keeps_what_it_runs() -> None:
    """The first has the embedding, the last the head; layers keep their numbers."""
    begin, end = ["embed", "position_table", "embed_norm"], ["norm", "transform", "head"]
    assert has(cut(Whole(), 0, 3, range(0, 1))) == [*begin, "0"]
    assert has(cut(Whole(), 1, 3, range(1, 3))) == ["1", "2"]
    assert has(cut(Whole(), 2, 3, range(3, 4))) == [*end, "3"]


@pytest.mark.parametrize(
    ("rank", "schedule", "numbers", "layers"),
    [
        (0, "zbv", (0, 3), [["0", "1"], []]), (1, "zbv", (1, 2), [["2"], ["3"]]),
        (1, "interleaved_1f1b", (1, 3), [["2"], []]),
    ],
)  # fmt: skip
def test_a_rank_has_the_stages_of_its_schedule(rank: int, schedule: str, numbers, layers) -> None:
    """Each is a model of its own, and is parallelised by itself."""
    axis, seen = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: rank), []
    layout = Layout(pipeline=2, pipeline_schedule=schedule, pipeline_layers=(2, 1, 1, 0))
    whole = Whole()
    made = into_stages(whole, {"pipeline": axis}, layout, lambda part: seen.append(part) or part)
    assert made.numbers == numbers and made.num_stages == 4 and list(made.parts) == seen
    assert [list(part.layers) for part in made.parts] == layers and len(whole.layers) == 4


def test_stages_are_told_what_they_take_and_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens into the first, outputs out of the last, and hidden states between."""
    monkeypatch.setattr(pipeline_parallel, "make_schedule", lambda *arguments: arguments)
    examples = ExampleTensors("tokens", "hidden", "output")
    made = stages((0, 3))
    options, parts, numbers, count, shapes, group = schedule_of(made, "options", examples)
    assert (options, numbers, count, group) == ("options", (0, 3), 4, "group") and parts == (*made.parts,)
    assert shapes == [("tokens", "hidden"), ("hidden", "output")]
    assert schedule_of(stages((1, 2)), "options", examples)[4] == 2 * [("hidden", "hidden")]
    assert schedule_of(stages((0,), last=0), "options", examples)[4] == [("tokens", "output")]

"""Layers are marks of progress on the way forward and back: at once on a CPU, as events on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kielo.train.watch.slow_ranks import marked_layers


class Layers(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Noted:
    """What a progress is told. room: how many events it takes."""

    def __init__(self, room: int = 100) -> None:
        self.marks, self.events, self.room = 0, [], room

    def mark(self) -> None:
        self.marks += 1

    @property
    def takes_events(self) -> bool:
        return len(self.events) < self.room

    def mark_after(self, has_passed: Any) -> None:
        self.events.append(has_passed())


def test_each_layer_is_a_mark_forward_and_back() -> None:
    """Back where its input has a gradient: not that of the first, which is given, and not without one."""
    model, progress = Layers("0", "1", "2"), Noted()
    with marked_layers(model, torch.device("cpu"), progress):
        output = model(torch.ones(2, 3))
        assert progress.marks == 3
        output.sum().backward()
        assert progress.marks == 3 + 2
        with torch.no_grad():
            model(torch.ones(2, 3))
        assert progress.marks == 5 + 3
    model(torch.ones(2, 3)).sum().backward()
    assert progress.marks == 8


def test_layers_of_all_stages_of_a_rank_are_marks() -> None:
    model, progress = SimpleNamespace(parts=[Layers("0"), Layers("2", "3")]), Noted()
    with marked_layers(model, torch.device("cpu"), progress):
        for part in model.parts:
            part(torch.ones(2, 3))
    assert progress.marks == 3


def test_a_gpu_is_asked_by_events_as_long_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded in its stream, and nothing counts at once."""

    class Event:
        is_recorded = False

        def record(self) -> None:
            self.is_recorded = True

        def query(self) -> bool:
            return self.is_recorded

    monkeypatch.setattr(torch.cuda, "Event", Event)
    model, progress = Layers("0", "1", "2"), Noted(room=4)
    with marked_layers(model, SimpleNamespace(type="cuda"), progress):
        model(torch.ones(2, 3))
        assert progress.events == 3 * [True]
        model(torch.ones(2, 3))
    assert progress.events == 4 * [True] and progress.marks == 0

"""A step that is not finite names the ranks that saw it before any sum over ranks."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kielo.train.run import train
from kielo.train.watch import checks
from kielo.train.watch.checks import LocalFinite, described
from tests.alerts import alerts
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.mark.parametrize("is_bad", (False, True))
def test_what_a_rank_sees(is_bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is not finite in one of two micro-batches; the step after it is sound again."""
    monkeypatch.setattr(checks.socket, "gethostname", lambda: "here")
    model = TwoLayers()
    watch = LocalFinite(model, torch.device("cpu"))
    for step, factor in ((7, math.inf if is_bad else 1.0), (8, 1.0)):
        for of_micro_batch in (factor, 1.0):
            (model(torch.ones(2, 4, requires_grad=True)).sum() * of_micro_batch).backward()
        watch.note(step, torch.tensor(math.nan if is_bad and step == 7 else 1.0))
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert watch.seen(0)[0] == 8 and watch.seen(0)[1].startswith("no rank")
    assert watch.seen(1) == (7, "rank 0 (here): its loss and gradients" if is_bad else watch.seen(0)[1])


def test_how_ranks_are_named() -> None:
    sound = [("a", False, False)] * 3
    assert described(sound).startswith("no rank")
    assert described([*sound, ("b", False, True)]) == "rank 3 (b): its gradients"
    assert described([("a", True, True)] * 4).startswith("all 4 ranks")
    many = described([*sound, *[("b", True, False)] * 10])
    assert "rank 10 (b): its loss" in many and many.endswith("and 2 more")


def train_with_a_bad_gradient(resolved: Any, faulty_ranks: tuple[int, ...], times: FaultTimes) -> str:
    """Trains; on some ranks the gradient of what the last norm returns is NaN in one backward pass."""
    times.watch_training()
    passes = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        if passes != 9:
            return gradient
        times.note("planted")
        return gradient * math.nan

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(spoil)

    original = LocalFinite.__init__

    def with_hook(self: LocalFinite, model: nn.Module, device: torch.device) -> None:
        original(self, model, device)
        for part in getattr(model, "parts", [model]):
            if int(os.environ["RANK"]) in faulty_ranks and part.norm is not None:
                part.norm.register_forward_hook(hook)

    LocalFinite.__init__ = with_hook
    try:
        return train(resolved).outcome
    finally:
        LocalFinite.__init__ = original


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "faulty_ranks", "named"),
    [
        ({"shard": 2}, (1,), {1}),
        ({"replicate": 3}, (0,), {0}),
        ({"pipeline": 2, "pipeline_layers": (1, 1), "replicate": 2}, (3,), {1, 3}),
    ],
    ids=("shard", "replicate", "pipeline"),
)
def test_a_gradient_of_one_rank(
    tmp_path: Path,
    layout: dict[str, int],
    faulty_ranks: tuple[int, ...],
    named: set[int],
    fault_times: FaultTimes,
) -> None:
    """In a pipeline the stages below get it too, of the same column. No checkpoint holds what it spoilt."""
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, micro_batch=2, **layout)
    ranks = resolved.placement.world_size
    ends = run_ranks(
        train_with_a_bad_gradient, ranks, resolved, faulty_ranks, fault_times, timeout_seconds=300
    )
    assert set(ends) == {"finished"}
    (alert,) = alerts(tmp_path / "train")
    message = alert["message"]
    found = {rank for rank in range(resolved.placement.world_size) if f"rank {rank} (" in message}
    assert found == named and "gradients" in message

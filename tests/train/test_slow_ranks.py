"""A rank whose own work takes longer than the others' is named, with its cost; noise is nobody's."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kielo.train.run import train
from kielo.train.slow_ranks import SAMPLES, LayerTimes, SlowRank, described, slow_ranks
from tests.alerts import alerts
from tests.fault_times import FaultTimes
from tests.ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


def samples(seed: int, ranks: int, noise: float) -> np.ndarray:
    """Seconds of each rank at several steps; heavy-tailed, as on a busy machine."""
    return 0.01 * (1 + noise * np.random.default_rng(seed).pareto(3, (SAMPLES, ranks)))


def test_who_is_slow() -> None:
    """By 60 %, beside noise of half of it. In noise alone nobody is: 0 of 4,000 ranks."""
    times = samples(0, 4, 0.1)
    times[:, 2] *= 1.6
    (slow,) = slow_ranks(times.tolist())
    assert slow.rank == 2 and slow.seconds == pytest.approx(times[:, 2].mean())
    of_two = samples(1, 2, 0.1)
    of_two[:, 0] *= 1.6
    assert [one.rank for one in slow_ranks(of_two.tolist())] == [0]
    for seed in range(500):
        assert slow_ranks(samples(seed, 8, 0.5).tolist()) == []


def test_what_is_told() -> None:
    told = described(SlowRank(3, 0.016, 0.01), "nid7")
    assert "rank 3 (nid7) is slow: 16 ms a layer, where the median rank takes 10 ms" in told
    assert "may lose 38% of its speed" in told  # 1 - 10 / 16


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
        self.layers["1"].register_forward_pre_hook(lambda *_: time.sleep(0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["1"](self.layers["0"](x))


def test_layers_are_measured_without_what_waits_before_them() -> None:
    """A hook that was there before, as FSDP2's, is left out; outside of start and stop nothing counts."""
    model = Sleeper()
    times = LayerTimes(model, torch.device("cpu"))
    model(torch.ones(2))
    assert times.seconds() == 0.0
    times.start()
    model(torch.ones(2))
    times.stop()
    measured = times.seconds()
    model(torch.ones(2))
    assert times.seconds() == measured and measured > 0
    model.layers["0"].forward = lambda x: (time.sleep(0.02), x)[1]
    times.start()
    model(torch.ones(2))
    assert times.seconds() >= 0.01  # the mean of two layers, of which one sleeps 0.02 s


def train_with_a_slow_rank(resolved: Any, slow_rank: int, times: FaultTimes) -> str:
    times.watch_training()
    original = LayerTimes.__init__

    def slowed(self: LayerTimes, model: nn.Module, device: torch.device) -> None:
        original(self, model, device)
        if int(os.environ["RANK"]) == slow_rank:
            times.note("planted")
            for layer in model.layers.values():
                forward = layer.forward
                layer.forward = lambda *inputs, forward=forward: (time.sleep(0.1), forward(*inputs))[1]

    LayerTimes.__init__ = slowed
    try:
        return train(resolved).outcome
    finally:
        LayerTimes.__init__ = original


@pytest.mark.full
def test_a_slow_rank_is_named_within_fifty_steps(tmp_path: Path, fault_times: FaultTimes) -> None:
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, shard=4, total_steps=52)
    ends = run_ranks(train_with_a_slow_rank, 4, resolved, 2, fault_times, timeout_seconds=400)
    assert set(ends) == {"finished"}
    (alert,) = alerts(tmp_path / "train")
    assert alert["step"] <= 50 and alert["message"].startswith("rank 2 (")

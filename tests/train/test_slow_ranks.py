"""A rank whose own work takes longer than the others' is named, with its cost; noise is nobody's."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kielo.train.run import train
from kielo.train.watch import slow_ranks as slow_ranks_module
from kielo.train.watch.slow_ranks import SAMPLES, LayerTimes, SlowRank, SpeedWatch, described, slow_ranks
from tests.alerts import alerts
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks
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
    assert "rank 3 (nid7) is slow: 16 ms a layer. The median rank takes 10 ms" in told
    assert "may lose 38% of its speed" in told  # 1 - 10 / 16


def test_a_rank_is_slow_if_its_fastest_sample_is_slower_than_the_slowest_usual_one() -> None:
    """By a tenth, not more; usual is the lower one of two, and the second of three and four."""
    of_four = [[8.0, 1.0, 2.0, 4.0], [1.0, 8.0, 2.2, 2.0]]
    assert slow_ranks(of_four) == []
    of_four = [[2.2, 1.0, 2.0, 4.0], [9.0, 1.0, 2.0, 2.21]]
    assert slow_ranks(of_four) == [SlowRank(3, (4.0 + 2.21) / 2, 2.0)]
    assert slow_ranks([[2.0, 2.0, 2.0, 2.9], [3.0, 3.0, 3.0, 2.9]]) == []
    assert slow_ranks([[1.0, 5.0, 9.0]]) == [SlowRank(2, 9.0, 5.0)]
    assert slow_ranks([[1.0, 5.0]]) == [SlowRank(1, 5.0, 1.0)]
    assert slow_ranks([[3.0], [3.0]]) == []


class Ranks:
    """Four ranks of which this is rank 1; `seconds`: what an all-reduce finds for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 4):
        self.others = torch.tensor([1.0, 0.0, 1.0, 1.0][:size])
        self.reduced = 0
        monkeypatch.setattr(slow_ranks_module, "dist", SimpleNamespace(
            get_world_size=lambda: size, get_rank=lambda: 1, all_reduce=self.all_reduce,
        ))  # fmt: skip
        hosts = SimpleNamespace(gather=lambda host: [f"nid{rank}" for rank in range(size)])
        monkeypatch.setattr(slow_ranks_module, "Agreement", lambda: hosts)

    def all_reduce(self, numbers: torch.Tensor) -> None:
        self.reduced += 1
        numbers += self.others


class Layers:
    """Layers of which a sample takes `own` seconds."""

    def __init__(self) -> None:
        self.were_started, self.own, self.done = False, 1.0, []

    def start(self) -> None:
        self.were_started = True
        self.done.append("start")

    def stop(self) -> None:
        self.done.append("stop")

    def seconds(self) -> float:
        return self.own


def test_samples_are_shared_every_five_steps_and_a_slow_rank_is_told_once(monkeypatch) -> None:
    """The sample of step 5 is shared in step 10; eight of them name a rank; it is told again after it was
    as fast as the others.
    """
    ranks, layers, alerts = Ranks(monkeypatch), Layers(), []
    watch = SpeedWatch(torch.device("cpu"), lambda *alert: alerts.append(alert))
    begun: list[int] = []
    layers.own = 2.0
    for step in range(1, 51):
        watch.begin(step, layers)
        if layers.done == ["start"]:
            begun.append(step)
        assert layers.done in ([], ["start"])
        watch.end(layers)
        assert layers.done[-1] == "stop"
        layers.done.clear()
        assert (len(alerts) == 1) == (step >= 45)
    assert begun == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50] and ranks.reduced == 9
    ((step, message),) = alerts
    assert step == 45 and message == described(SlowRank(1, 2.0, 1.0), "nid1")
    layers.own = 1.0
    watch.begin(55, layers)
    layers.own = 2.0
    for step in range(60, 100, 5):
        assert len(alerts) == 1
        watch.begin(step, layers)
    assert [step for step, _ in alerts] == [45, 95]
    ranks.others = torch.tensor([1.0, 0.0, 1.0, 3.0])
    for step in range(100, 140, 5):
        watch.begin(step, layers)
    assert [step for step, _ in alerts] == [45, 95, 135]
    both = (SlowRank(1, 2.0, 1.0), SlowRank(3, 3.0, 1.0))
    assert alerts[-1][1] == ". ".join(described(one, f"nid{one.rank}") for one in both)


def test_one_rank_is_not_measured(monkeypatch) -> None:
    Ranks(monkeypatch, 1)
    layers = Layers()
    SpeedWatch(torch.device("cpu"), pytest.fail).begin(5, layers)
    assert not layers.were_started


def test_the_seconds_are_the_mean_over_the_measured_layers(monkeypatch) -> None:
    """Of the newest sample, with gradients, and of so many calls; a layer of a pipeline's part counts too."""
    now = [0.0]

    class Layer(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += self.seconds
            return x

    monkeypatch.setattr(slow_ranks_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    parts = [SimpleNamespace(layers={"0": Layer(1.0)}), SimpleNamespace(layers={"1": Layer(4.0)})]
    layers = [next(iter(part.layers.values())) for part in parts]
    times = LayerTimes(SimpleNamespace(parts=parts), torch.device("cpu"))
    assert not times.were_started and times.seconds() == 0.0
    for _ in range(2):
        times.start()
        assert times.were_started and times.seconds() == 0.0
        with torch.no_grad():
            layers[1](torch.ones(1))
        for layer in (layers[0], layers[0], layers[1]):
            layer(torch.ones(1))
        assert times.seconds() == 2.0
        for _ in range(300):
            layers[1](torch.ones(1))
        assert times.seconds() == (1 + 1 + 254 * 4) / 256
        times.stop()


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

"""What the host does about a GPU, with a stand-in for its events and copies: it waits for no newer work."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.train import meter as meter_module
from kielo.train.meter import Meter
from kielo.train.watch import checks, slow_ranks
from kielo.train.watch.checks import DelayedReader
from kielo.train.watch.slow_ranks import LayerTimes

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Device:
    """A GPU whose queue the host has to wait for; `done` says what is queued and waited for."""

    def __init__(self) -> None:
        self.done: list[tuple] = []
        self.milliseconds = 0.0
        self.events = 0
        self.cuda = SimpleNamespace(
            Event=self.event, synchronize=lambda device: self.done.append(("wait", device.type))
        )  # fmt: skip

    def event(self, enable_timing: bool = False) -> Any:
        self.events += 1
        made = SimpleNamespace(number=self.events, at=None)

        def record() -> None:
            made.at = self.milliseconds
            self.done.append(("record", made.number, enable_timing))

        made.record = record
        made.synchronize = lambda: self.done.append(("wait for", made.number))
        made.elapsed_time = lambda later: later.at - made.at
        return made

    def empty(self, shape: torch.Size, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        self.done.append(("empty", pin_memory))
        made = torch.empty(shape, dtype=dtype)
        copy = made.copy_

        class Copy(torch.Tensor):
            pass

        pinned = made.as_subclass(Copy)
        pinned.copy_ = lambda other, non_blocking: self.done.append(("copy", non_blocking)) or copy(other)
        return pinned


@pytest.fixture
def device() -> Device:
    return Device()


def test_numbers_of_a_gpu_are_read_a_step_late(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied to pinned memory without a wait; the host waits for the copy of the step before alone."""
    monkeypatch.setattr(checks, "torch", device)
    reader = DelayedReader(GPU)
    assert reader.steps_behind == 1 and reader.unread() == []
    assert reader.read(torch.tensor([3.0, 4.0])) is None
    assert device.done == [("empty", True), ("copy", True), ("record", 1, False)]
    device.done.clear()
    assert reader.unread() == [[3.0, 4.0]] and device.done == [("wait for", 1)]
    device.done.clear()
    assert reader.read(torch.tensor([5.0, 6.0])) == [3.0, 4.0]
    assert device.done == [("empty", True), ("copy", True), ("record", 2, False), ("wait for", 1)]
    assert reader.read(torch.tensor([7.0, 8.0])) == [5.0, 6.0] and reader.unread() == [[7.0, 8.0]]


def test_numbers_of_a_cpu_are_read_at_once() -> None:
    reader = DelayedReader(CPU)
    assert (reader.steps_behind, reader.read(torch.tensor([3.0, 4.0])), reader.unread()) == (
        0,
        [3.0, 4.0],
        [],
    )


def test_layers_are_timed_by_the_events_of_a_gpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds; the host waits for the last one before it asks."""
    monkeypatch.setattr(slow_ranks, "torch", SimpleNamespace(cuda=device.cuda, is_grad_enabled=lambda: True))

    class Layer(torch.nn.Module):
        def forward(self, milliseconds: float) -> None:
            device.milliseconds += milliseconds

    layers = {"0": Layer(), "1": Layer()}
    times = LayerTimes(SimpleNamespace(layers=layers), GPU)
    times.start()
    for layer, milliseconds in (("0", 30.0), ("1", 50.0)):
        layers[layer](milliseconds)
        device.milliseconds += 7.0
    times.stop()
    layers["0"](900.0)
    assert device.done == [("record", number, True) for number in (1, 2, 3, 4)]
    device.done.clear()
    assert times.seconds() == pytest.approx(0.04) and device.done == [("wait for", 4)]


def test_the_meter_waits_for_the_steps_that_are_running(device: Device, monkeypatch) -> None:
    """Before a pause, so that their time counts, and after it, so that the pause's does not."""
    clock = [100.0]
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(meter_module, "torch", device)
    waits = iter((3.0, 5.0))
    device.cuda.synchronize = lambda of: (
        device.done.append(("wait", of)),
        clock.append(clock.pop() + next(waits)),
    )
    meter = Meter(1, 1000, GPU)
    meter.use(1e12, 0, None)
    with meter.paused():
        assert device.done == [("wait", GPU)]
        clock[0] += 60.0
    assert device.done == [("wait", GPU)] * 2
    clock[0] += 1.0
    assert meter.lap(8)["seconds"] == pytest.approx(4.0)


def test_a_lap_from_the_start_and_two_laps_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that nobody started counts from 0, and no FLOPs before a phase is set."""
    clock = [100.0]
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    meter = Meter(4, 1000, CPU)
    clock[0] = 102.0
    assert meter.lap(10) == {
        "tokens_per_second": 5.0, "planned_tokens_per_second": None, "tflops_per_second": 0.0, "mfu": None,
        "seconds": 2.0, "seconds_left": 198.0,
    }  # fmt: skip
    meter.use(8e11, 10, 0.5)
    meter.start(20)
    clock[0] = 103.0
    lap = meter.lap(25)
    assert (lap["tokens_per_second"], lap["seconds"]) == (5.0, 1.0)
    assert lap["tflops_per_second"] == pytest.approx(1.0) and lap["mfu"] == pytest.approx(2.0)

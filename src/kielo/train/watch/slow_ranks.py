"""Watch the layers of a rank: marks of progress for the hang watch, and times that show slow ranks.

A mark is a layer that begins, forward or back. Times are of layers' forward passes in a sample of steps,
after FSDP2 has gathered the weights: work that waits for nobody, because a whole step takes the same time on
all ranks. Ranks that share a layer's tensors wait for each other inside the layer, and are named together.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kielo.checkpoint.agreement import Agreement
from kielo.ranks.hang_watch import Progress
from kielo.train.watch.checks import DelayedReader

SAMPLE_EVERY_STEPS = 5
SAMPLES = 8  # so that a rank is named within 50 steps
LEAST_EXCESS = 0.1
_MOST_CALLS = 256  # of layers in a sample: an event costs the host some microseconds


@contextmanager
def marked_layers(model: nn.Module, device: torch.device, progress: Progress) -> Iterator[None]:
    """Mark `progress` at each layer that begins, and at each layer whose input has its gradient.

    The host of a GPU is far ahead of the device, so there a mark counts when the device has passed its event.
    """

    def mark(*_: Any) -> None:
        if device.type != "cuda":
            progress.mark()
        elif progress.takes_events:
            event = torch.cuda.Event()
            event.record()
            progress.mark_after(event.query)

    def begin(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mark()
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            inputs[0].register_hook(mark)

    parts = getattr(model, "parts", [model])
    hooks = [layer.register_forward_pre_hook(begin) for part in parts for layer in part.layers.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class LayerTimes:
    def __init__(self, model: nn.Module, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._calls: list[tuple[Any, Any]] = []
        self._is_on, self._begun = False, None
        self.were_started = False
        for part in getattr(model, "parts", [model]):
            for layer in part.layers.values():
                layer.register_forward_pre_hook(self._begin)  # after FSDP2's hook, which waits for weights
                layer.register_forward_hook(self._end)

    def start(self) -> None:
        self._is_on, self._calls, self.were_started = True, [], True

    def stop(self) -> None:
        self._is_on = False

    def seconds(self) -> float:
        """Return the mean of the layers measured last, 0 without any. Waits until they are done."""
        if not self._calls:
            return 0.0
        if not self._on_gpu:
            return fmean(end - begin for begin, end in self._calls)
        self._calls[-1][1].synchronize()
        return fmean(begin.elapsed_time(end) for begin, end in self._calls) / 1000

    def _begin(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        is_measured = self._is_on and len(self._calls) < _MOST_CALLS and torch.is_grad_enabled()
        self._begun = self._now() if is_measured else None

    def _end(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._begun is not None:
            self._calls.append((self._begun, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class SlowRank:
    rank: int
    seconds: float
    usual_seconds: float


def slow_ranks(samples: Sequence[Sequence[float]]) -> list[SlowRank]:
    """Return the ranks whose fastest sample exceeds the slowest usual sample by more than `LEAST_EXCESS`.

    samples: seconds of each rank, at several steps. Usual is the lower median over the ranks. By noise alone
    a given rank is found in fewer than one of 12,870 groups of 8 samples.
    """
    usual = [sorted(of_step)[(len(of_step) - 1) // 2] for of_step in samples]
    found = []
    for rank, of_rank in enumerate(zip(*samples, strict=True)):
        if min(of_rank) > (1 + LEAST_EXCESS) * max(usual):
            found.append(SlowRank(rank, fmean(of_rank), fmean(usual)))
    return found


class SpeedWatch:
    """The samples of all ranks, one number each, and alerts about slow ranks. All ranks call it."""

    def __init__(self, device: torch.device, alert: Callable[[int, str], None]):
        self._device, self._alert = device, alert
        self._late = DelayedReader(device)
        self._samples: deque[list[float]] = deque(maxlen=SAMPLES)
        self._told: set[int] = set()

    def begin(self, step: int, layers: LayerTimes) -> None:
        if dist.get_world_size() == 1 or step % SAMPLE_EVERY_STEPS:
            return
        if layers.were_started:
            self._share(step, layers.seconds())
        layers.start()

    def end(self, layers: LayerTimes) -> None:
        layers.stop()

    def _share(self, step: int, seconds: float) -> None:
        everyone = torch.zeros(dist.get_world_size(), device=self._device)
        everyone[dist.get_rank()].fill_(seconds)
        dist.all_reduce(everyone)
        read = self._late.read(everyone)
        if read is None:
            return
        self._samples.append(read)
        if len(self._samples) < SAMPLES:
            return
        slow = slow_ranks(self._samples)
        if {one.rank for one in slow} - self._told:
            hosts = Agreement().gather(socket.gethostname())
            self._alert(step, ". ".join(described(one, hosts[one.rank]) for one in slow))
        self._told = {one.rank for one in slow}


def described(slow: SlowRank, host: str) -> str:
    return (
        f"rank {slow.rank} ({host}) is slow: {1000 * slow.seconds:.3g} ms a layer. The median rank takes "
        f"{1000 * slow.usual_seconds:.3g} ms. All ranks wait for it, so the job may lose "
        f"{1 - slow.usual_seconds / slow.seconds:.0%} of its speed. Fix: leave that node out"
    )

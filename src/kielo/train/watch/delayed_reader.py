"""Small numbers from the device, read by the host without making it wait.

In: a few numbers in a tensor, each step. Out: the same numbers as a list: of this step on the CPU, of the
step before on a GPU, where the copy of the newest is still in progress. Every rank reads the same step's
numbers at the same step, so what follows from them (stopping, failing) happens on all ranks alike.
"""

from collections import deque

import torch
from torch import Tensor


class DelayedReader:
    """Read numbers one step late on a GPU, where it waits only for a copy that was queued a step ago."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self.steps_behind = int(self._on_gpu)
        self._queue: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read(self, numbers: Tensor) -> list[float] | None:
        """Queue `numbers` (one dim) and return those of the last finished step; None at the very start."""
        if not self._on_gpu:
            return numbers.tolist()
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._queue.append((copy, arrived))
        if len(self._queue) < 2:
            return None
        copy, arrived = self._queue.popleft()
        arrived.synchronize()
        return copy.tolist()

    def unread(self) -> list[list[float]]:
        """Return what was queued and not read yet, and leave it in the queue. Waits for the device."""
        for _, arrived in self._queue:
            arrived.synchronize()
        return [copy.tolist() for copy, _ in self._queue]

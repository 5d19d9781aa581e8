"""Small numbers from the device, read without waiting: on a GPU one step late, on every rank alike."""

from collections import deque

import torch
from torch import Tensor


class DelayedReader:
    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self.steps_behind = int(self._on_gpu)
        self._queue: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read(self, numbers: Tensor) -> list[float] | None:
        """Queue `numbers` (one dim). Return the last finished step's numbers, or None at the very start."""
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
        """Return the queued numbers, and leave them in the queue. Waits for the device."""
        for _, arrived in self._queue:
            arrived.synchronize()
        return [copy.tolist() for copy, _ in self._queue]

"""Small numbers from the device, read by the host without waiting.

On a GPU the host reads the numbers of the step before, while the newest copy is under way. Every rank reads
the same step's numbers at the same step, so decisions from them (stopping, failing) are the same on all
ranks.
"""

from collections import deque

import torch
from torch import Tensor


class DelayedReader:
    """A reader that on a GPU waits only for the copy that was queued one step ago."""

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

"""Marks of progress inside a step: each layer that the device reaches, forward and back.

The host of a GPU is far ahead of the device, so a mark is an event that counts when the device has passed it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kielo.ranks.hang_watch import Progress


@contextmanager
def marked_layers(model: nn.Module, device: torch.device, progress: Progress) -> Iterator[None]:
    """Mark `progress` at each layer that begins, and at each layer whose input has its gradient."""

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

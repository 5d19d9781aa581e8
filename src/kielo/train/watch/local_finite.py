"""Names the ranks on which a step was not finite, by what each of them saw before any sum over ranks.

One number that is not finite makes a sum over ranks not finite on all of them. So each rank notes on its
device if its own part of the loss was finite, and if the gradient that arrived at its first layer was: in the
backward pass everything that is not finite goes on to there. Two numbers a step, which the host reads only
after a step that was not finite.
"""

import socket
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.materialise import local

_STEPS = 2  # the host learns of a step that was not finite one step late on a GPU
_MOST_RANKS = 8


class LocalFinite:
    """Watches the first layer of a model, or of each of a rank's pipeline stages."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._is_gradient_bad = torch.zeros((), dtype=torch.bool, device=device)
        self._seen = torch.zeros(_STEPS, 2, dtype=torch.bool, device=device)
        self._steps: list[int] = []  # those of the rows of `_seen`, the newest last
        for part in getattr(model, "parts", [model]):
            for layer in list(part.layers.values())[:1]:  # a stage may have none
                layer.register_forward_pre_hook(self._before_layer)

    def note(self, step: int, loss: Tensor) -> None:
        """Notes what this rank saw in a step. loss: its own part. Called after each backward pass."""
        self._seen = torch.stack((self._seen[1], torch.stack((~torch.isfinite(loss), self._is_gradient_bad))))
        self._is_gradient_bad.zero_()
        self._steps = [*self._steps, step][-_STEPS:]

    def seen(self, steps_behind: int) -> tuple[int, str]:
        """Returns the last noted step, or the one before it, and e.g. "rank 1 (nid2): its loss".

        All ranks call it together.
        """
        own = self._seen[-1 - steps_behind].tolist()
        return self._steps[-1 - steps_behind], described(Agreement().gather((socket.gethostname(), *own)))

    def _before_layer(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            inputs[0].register_hook(self._look)

    def _look(self, gradient: Tensor) -> None:
        self._is_gradient_bad |= ~torch.isfinite(local(gradient)).all()


def described(seen: Sequence[tuple[str, bool, bool]]) -> str:
    """Returns which ranks saw what. seen: (host, loss, gradient were not finite) of each rank."""
    bad = [(rank, *of_rank) for rank, of_rank in enumerate(seen) if any(of_rank[1:])]
    if not bad:
        return "no rank's own loss or hidden states: in the gradient of a weight, or in a sum between ranks"
    if len(bad) == len(seen) > 1:
        return (
            f"all {len(seen)} ranks: the weights may be spoilt, or ranks that share a sequence passed it on"
        )
    named = [
        f"rank {rank} ({host}): its {' and '.join(['loss'] * loss + ['gradients'] * gradient)}"
        for rank, host, loss, gradient in bad[:_MOST_RANKS]
    ]
    more = f" and {len(bad) - _MOST_RANKS} ranks more" if len(bad) > _MOST_RANKS else ""
    return ", ".join(named) + more

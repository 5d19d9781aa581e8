"""What the loop asks after each step: may the run go on, or must it go back to an earlier checkpoint."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.materialise import local
from kielo.parallel.replicas import Replicas
from kielo.train.watch.guard import Guard

Answer = Literal["go on", "go back"]
_STEPS = 2  # the host learns of a step that was not finite one step late on a GPU
_MOST_RANKS = 8


class LocalFinite:
    """Names the ranks on which a step was not finite, by what each of them saw before any sum over ranks.

    One number that is not finite makes a sum over ranks not finite on all of them. So each rank notes on its
    device if its own part of the loss was finite, and the gradient that arrived at its first layer (of each
    pipeline stage): in the backward pass everything that is not finite goes on to there. Two numbers a
    step, which the host reads only after a step that was not finite.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self._is_gradient_bad = torch.zeros((), dtype=torch.bool, device=device)
        self._seen = torch.zeros(_STEPS, 2, dtype=torch.bool, device=device)
        self._steps: list[int] = []  # those of the rows of `_seen`, the newest last
        for part in getattr(model, "parts", [model]):
            for layer in list(part.layers.values())[:1]:  # a stage may have none
                layer.register_forward_pre_hook(self._before_layer)

    def note(self, step: int, loss: Tensor) -> None:
        """Note what this rank saw in a step. loss: its own part. Called after each backward pass."""
        self._seen = torch.stack((self._seen[1], torch.stack((~torch.isfinite(loss), self._is_gradient_bad))))
        self._is_gradient_bad.zero_()
        self._steps = [*self._steps, step][-_STEPS:]

    def seen(self, steps_behind: int) -> tuple[int, str]:
        """Return the last noted step, or the one before it, and e.g. "rank 1 (nid2): its loss".

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
    """Return which ranks saw what. seen: (host, loss, gradient were not finite) of each rank."""
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


@dataclass(frozen=True)
class TakenStep:
    """A step that was taken, and the present model's watches. own_loss: this rank's part of the loss."""

    step: int
    loss: Tensor
    gradient_norm: Tensor
    own_loss: Tensor
    local_finite: LocalFinite
    replicas: Replicas


class Check(Protocol):
    """A check of each step. All ranks ask it together and get the same answer."""

    def after_step(self, taken: TakenStep) -> Answer:
        """Make an earlier checkpoint the newest to go back. Raises KieloError to stop the run."""


class NotFinite:
    """Alerts of a step that was not finite, with the ranks that saw it first."""

    def __init__(self, guard: Guard, alert: Callable[[int, str], None]):
        self._guard, self._alert = guard, alert

    def after_step(self, taken: TakenStep) -> Answer:
        taken.local_finite.note(taken.step, taken.own_loss)
        if self._guard.was_bad():
            step, found = taken.local_finite.seen(self._guard.steps_behind)
            self._alert(step, f"the step was not finite, and is left out; first seen by {found}")
        return "go on"


class Divergence:
    """Stop the run after too many steps in a row that were not finite. way_on: see `Guard`."""

    def __init__(self, guard: Guard, way_on: Callable[[int], str]):
        self._guard, self._way_on = guard, way_on

    def after_step(self, taken: TakenStep) -> Answer:
        self._guard.stop_if_diverged(taken.step, self._way_on)
        return "go on"

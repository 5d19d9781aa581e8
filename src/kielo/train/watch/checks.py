"""Checks of a run: after each step whether it may continue or must go back, and of its end.

A check goes back by making an earlier checkpoint the newest. `run.go_back` then restores it.
"""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.materialise import local
from kielo.parallel.replicas import Difference, Replicas
from kielo.ranks.hang_watch import some
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train.watch.guard import Guard

Answer = Literal["continue", "go back"]
_STEPS = 2  # on a GPU the host learns of a bad step one step late
_MOST_RANKS = 8
_NAMED_TENSORS = 4
_FIX = "Fix: move the newest checkpoints out of train/checkpoints. The run resumes from an older checkpoint"


class LocalFinite:
    """Find the ranks that caused a bad step, by what each rank saw before any sum over ranks.

    Each rank notes on its device if its own part of the loss was finite, and the gradient at its first layer
    (of each pipeline stage), which every bad gradient reaches. The host reads the flags after a bad step.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self._is_gradient_bad = torch.zeros((), dtype=torch.bool, device=device)
        self._seen = torch.zeros(_STEPS, 2, dtype=torch.bool, device=device)
        self._steps: list[int] = []  # of the rows of `_seen`, the newest last
        for part in getattr(model, "parts", [model]):
            for layer in list(part.layers.values())[:1]:  # a stage can have no layer
                layer.register_forward_pre_hook(self._before_layer)

    def note(self, step: int, loss: Tensor) -> None:
        self._seen = torch.stack((self._seen[1], torch.stack((~torch.isfinite(loss), self._is_gradient_bad))))
        self._is_gradient_bad.zero_()
        self._steps = [*self._steps, step][-_STEPS:]

    def seen(self, steps_behind: int) -> tuple[int, str]:
        """Return the last noted step or the step before, and e.g. "rank 1 (nid2): its loss"."""
        own = self._seen[-1 - steps_behind].tolist()
        return self._steps[-1 - steps_behind], described(Agreement().gather((socket.gethostname(), *own)))

    def _before_layer(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            inputs[0].register_hook(self._look)

    def _look(self, gradient: Tensor) -> None:
        self._is_gradient_bad |= ~torch.isfinite(local(gradient)).all()


def described(seen: Sequence[tuple[str, bool, bool]]) -> str:
    bad = [(rank, *of_rank) for rank, of_rank in enumerate(seen) if any(of_rank[1:])]
    if not bad:
        return "no rank's own loss or hidden states: in the gradient of a weight, or in a sum between ranks"
    if len(bad) == len(seen) > 1:
        return (
            f"all {len(seen)} ranks: the weights may be spoilt, or ranks that share a sequence passed it on"
        )
    named = [
        f"rank {rank} ({host}): its {' and '.join(['loss'] * loss + ['gradients'] * gradient)}"
        for rank, host, loss, gradient in bad
    ]
    return some(named, _MOST_RANKS)


@dataclass(frozen=True)
class TakenStep:
    """A completed step, and the watches of the present model. own_loss: this rank's part of the loss."""

    step: int
    loss: Tensor
    gradient_norm: Tensor
    own_loss: Tensor
    local_finite: LocalFinite
    replicas: Replicas


class Check(Protocol):
    def after_step(self, taken: TakenStep) -> Answer: ...


class NotFinite:
    def __init__(self, guard: Guard, alert: Callable[[int, str], None]):
        self._guard, self._alert = guard, alert

    def after_step(self, taken: TakenStep) -> Answer:
        taken.local_finite.note(taken.step, taken.own_loss)
        if self._guard.was_bad():
            step, found = taken.local_finite.seen(self._guard.steps_behind)
            self._alert(step, f"the step was not finite and is skipped. First seen by {found}")
        return "continue"


class Divergence:
    def __init__(self, guard: Guard, way_on: Callable[[int], str]):
        self._guard, self._way_on = guard, way_on

    def after_step(self, taken: TakenStep) -> Answer:
        self._guard.stop_if_diverged(taken.step, self._way_on)
        return "continue"


class ReplicaCheck:
    """A comparison of replicas every K steps and before each save, for bits that flip without a visible loss.

    Every checkpoint is older than a difference that is found, so the run goes back. Raises KieloError without
    a checkpoint, and for ranks that may have differed before. `found` is the difference until the run went
    back. `go_back_before` makes the newest checkpoint from before a step the newest.
    """

    def __init__(self, train: TrainPlacement, go_back_before: Callable[[int], bool]):
        self.found = ""
        self._every_steps, self._go_back_before = train.compare_replicas_every_steps, go_back_before
        self._blamed_before: set[int] = set()

    def after_step(self, taken: TakenStep) -> Answer:
        return self._compared(taken.step, taken.replicas) if self._is_due(taken.step) else "continue"

    def before_keeping(self, taken: TakenStep) -> Answer:
        """Compare, unless `after_step` has compared in this step. All ranks call it together."""
        if not self._every_steps or self._is_due(taken.step):
            return "continue"
        return self._compared(taken.step, taken.replicas)

    def _is_due(self, step: int) -> bool:
        return bool(self._every_steps) and step % self._every_steps == 0

    def _compared(self, step: int, replicas: Replicas) -> Answer:
        differences = replicas.differences() if replicas.exist else []
        if not differences:
            return "continue"
        ranks = {rank for difference in differences for rank in difference.ranks}
        found = f"replicas differ: {_differing(differences)}"
        if ranks & self._blamed_before:
            raise KieloError(
                f"step {step}: {found}. It is not the first time in this job, so it stops. Fix: leave that "
                "node out. The same command resumes from the newest checkpoint"
            )
        self._blamed_before |= ranks
        if not self._go_back_before(step):
            raise KieloError(
                f"step {step}: {found}, and no checkpoint was saved before. The same command begins at step 0"
            )
        self.found = found
        return "go back"


def _differing(differences: list[Difference]) -> str:
    """Return e.g. "model/norm.weight on rank 2 (nid1)". All ranks call it."""
    hosts = Agreement().gather(socket.gethostname())
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for difference in differences:
        by_ranks.setdefault(difference.ranks, []).append(difference.name)
    parts = []
    for ranks, names in sorted(by_ranks.items()):
        where = " or ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
        parts.append(f"{some(sorted(names), _NAMED_TENSORS)} on {where}")
    return "; ".join(parts)


@torch.no_grad()
def refuse_unsound_weights(model: nn.Module, device: torch.device) -> None:
    """Raise KieloError on every rank, naming weights with NaN or infinities, in constant memory."""
    shards = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    shards = {name: shard for name, shard in shards.items() if shard.numel()}
    # aminmax returns NaN for both ends of a tensor with a NaN
    ends = [torch.stack(shard.aminmax()).float().to(device) for shard in shards.values()]
    bad = (
        ~torch.stack(ends).isfinite().all(dim=1) if ends else torch.zeros(0, dtype=torch.bool, device=device)
    )
    num_bad = bad.sum().float()
    if dist.is_initialized():
        dist.all_reduce(num_bad)
    if not num_bad:
        return
    ours = [name for name, is_bad in zip(shards, bad.tolist(), strict=True) if is_bad]
    names = list(dict.fromkeys(name for of_rank in Agreement().gather(ours) for name in of_rank))
    found = f"the weights contain NaN or infinities: {some(names, 1)}"
    raise KieloError(f"{found}. The run is not finished. {_FIX}")


def refuse_unsound_loss(step: int, heldout_loss: float | None) -> None:
    if heldout_loss is not None and not math.isfinite(heldout_loss):
        raise KieloError(
            f"step {step}, the last: the held-out loss is {heldout_loss}. The run is not finished. {_FIX}"
        )

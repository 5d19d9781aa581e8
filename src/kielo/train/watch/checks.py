"""Checks of a run: after each step whether it may continue or must go back, and of its end.

A step whose loss or gradient norm is not finite is skipped by a flag that stays on the device. Both numbers
are the same on every rank. A check goes back by making an earlier checkpoint the newest. `run.go_back` then
restores it.
"""

import math
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kielo.checkpoint.agreement import Agreement
from kielo.parallel.materialise import local
from kielo.parallel.replicas import Difference, Replicas
from kielo.ranks.hang_watch import some
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainIdentity, TrainPlacement

Answer = Literal["continue", "go back"]
_STEPS = 2  # on a GPU the host learns of a bad step one step late
_MOST_RANKS = 8
_NAMED_TENSORS = 4
_FIX = "Fix: move the newest checkpoints out of train/checkpoints. The run resumes from an older checkpoint"


class DelayedReader:
    """Small numbers from the device, read without waiting: on a GPU one step late, on every rank alike."""

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


def has_no_label(loss: Any, gradient_norm: Any) -> Any:
    """Return True for a step in which no label counted: loss and gradient are exactly 0."""
    return (loss == 0) & (gradient_norm == 0)


@dataclass(frozen=True)
class GuardState:
    """The counts of bad steps, and (loss, norm) of the last steps, None for a number that is not finite."""

    in_a_row: int
    skipped: int
    without_labels: int = 0
    last: Sequence[Sequence[float | None]] = ()

    @staticmethod
    def read(plain: Mapping[str, Any]) -> "GuardState":
        return GuardState(**{name: plain[name] for name in GuardState.__annotations__ if name in plain})


class Guard:
    """The counts of bad steps on the device, so that a sound step costs no wait. The host reads them late."""

    def __init__(self, device: torch.device, train: TrainIdentity):
        self.device = device
        self._max_in_a_row = train.max_skipped_steps_in_a_row
        # a ring of (loss, norm)
        self._remembered = torch.full((train.fp8.watch_steps, 2), math.nan, device=device)
        self._steps = 0  # checked so far; the ring has the last steps
        # bad in a row, bad so far, without a label so far
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._late = DelayedReader(device)
        self._read: list[float] | None = None

    def check(self, loss: Tensor, gradient_norm: Tensor) -> Tensor:
        """Return a float32 scalar on the device, the same on all ranks: 1 if this step must be skipped."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(gradient_norm))
        self._counts[0] = (self._counts[0] + 1) * bad
        self._counts[1] += bad
        self._counts[2] += has_no_label(loss, gradient_norm)
        row = torch.stack((loss.float(), gradient_norm.float()))
        self._remembered[self._steps % len(self._remembered)] = row
        self._steps += 1
        return bad.to(torch.float32)

    @property
    def steps_behind(self) -> int:
        """By how many steps `was_bad` and `stop_if_diverged` are late."""
        return self._late.steps_behind

    def was_bad(self) -> bool:
        """Return True if the last finished step was bad. All ranks call it once after each step."""
        self._read = self._late.read(self._counts)
        return bool(self._read and self._read[0])

    def stop_if_diverged(self, step: int, way_on: Callable[[int], str] = lambda first_bad_step: "") -> None:
        """Raise KieloError after too many bad steps in a row. way_on: first bad step → how to resume."""
        counts = self._read
        if counts is None or counts[0] < self._max_in_a_row:
            return
        first_bad_step = max(1, step - self._late.steps_behind - int(counts[0]) + 1)
        raise KieloError(
            f"step {step}: the loss or the gradient norm was not finite {int(counts[0])} steps in a row "
            f"(train.max_skipped_steps_in_a_row = {self._max_in_a_row}), so the run stops. "
            f"{way_on(first_bad_step)}Fix: train.skip_steps = [[{first_bad_step}, {step}]] if the text is at "
            f"fault (see `kielo data RECIPE --step {first_bad_step}`). Or, in a new run, a lower "
            "train.learning_rate or a longer train.warmup_share"
        )

    @property
    def bad_in_a_row(self) -> int:
        """The bad steps since the last sound step. Waits for the device."""
        return int(self._counts[0].item())

    @property
    def skipped(self) -> int:
        """The skipped steps since step 1. Waits for the device."""
        return int(self._counts[1].item())

    @property
    def without_labels(self) -> int:
        """The steps without a counted label since step 1. Waits for the device."""
        return int(self._counts[2].item())

    def last(self, steps: int) -> list[tuple[float, float]]:
        """Return loss and norm of the last steps with a label, oldest first. Waits for the device."""
        size = len(self._remembered)
        rows = self._remembered.tolist()
        last = [rows[step % size] for step in range(max(0, self._steps - min(steps, size)), self._steps)]
        return [(loss, norm) for loss, norm in last if not has_no_label(loss, norm)]

    def state(self) -> GuardState:
        in_a_row, skipped, without_labels = self._counts.tolist()
        rows = self.last(len(self._remembered))
        last = [[value if math.isfinite(value) else None for value in row] for row in rows]
        return GuardState(in_a_row, skipped, without_labels, last)

    def restore(self, state: GuardState) -> None:
        self._counts.copy_(torch.tensor([state.in_a_row, state.skipped, state.without_labels]))
        self._late = DelayedReader(self._counts.device)  # counts of later steps may be under way
        last = state.last[-len(self._remembered) :]
        for number, row in enumerate(last):
            self._remembered[number] = torch.tensor([math.nan if value is None else value for value in row])
        self._steps = len(last)


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

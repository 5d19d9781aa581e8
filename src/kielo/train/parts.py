"""The parts of a training run, by how long they exist: for an attempt, a precision, a phase or a step.

`build.py` makes them, `loop.py` calls them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from kielo.artifact.metrics import Row
from kielo.checkpoint.remote_copies import RemoteCopies
from kielo.parallel.mesh import Mesh
from kielo.parallel.replicas import Replicas
from kielo.ranks.communicator import TimeLimits
from kielo.recipe.sections import Precision
from kielo.train.feed import Feed, StepBatch
from kielo.train.forward_backward import ForwardBackward
from kielo.train.heldout import HeldOut
from kielo.train.log import Log
from kielo.train.meter import Meter, StepRow
from kielo.train.optimiser import Optimiser
from kielo.train.profile import Profile
from kielo.train.state import RunCheckpoints, State
from kielo.train.stop import Stop
from kielo.train.watch.checks import Check, Guard, LocalFinite, ReplicaCheck
from kielo.train.watch.resources import Garbage, Resources
from kielo.train.watch.slow_ranks import LayerTimes, SpeedWatch
from kielo.train.watch.spikes import SpikeWatch


class Periodic(Protocol):
    """Work between steps that makes a row of the log. All ranks call it together."""

    @property
    def name(self) -> str: ...

    def due(self, step: int) -> bool: ...

    def is_owed(self, step: int) -> bool:
        """Return True if a stop has kept an earlier attempt from making the row of this step."""
        ...

    def row(self, state: State) -> Row: ...


@dataclass(frozen=True)
class StepParts:
    """The parts of one optimiser step. `on_gradients` is called after the backward pass, before clipping."""

    forward_backward: ForwardBackward
    clip: Callable[[], Tensor]
    guard: Guard
    optimiser: Optimiser
    on_gradients: tuple[Callable[[StepBatch], None], ...] = ()


@dataclass(frozen=True)
class PrecisionParts:
    """The model and all that refers to it, replaced by a change of precision or of trained modules."""

    precision: Precision
    trainable: tuple[str, ...]
    model: nn.Module
    step: StepParts
    replicas: Replicas
    local_finite: LocalFinite
    layer_times: LayerTimes
    heldout: HeldOut
    periodic: tuple[Periodic, ...] = ()


# Called with the model's parts, the mesh, and the run's stop, which long work looks at.
MakePeriodic = Callable[[PrecisionParts, Mesh, Stop], Periodic]


@dataclass(frozen=True)
class Asked:
    """The requests of a training's caller.

    `ready` refuses what is asked, before anything is built. All ranks call it. `periodic` makes each
    `Periodic` of a precision's model over the mesh. `copies` go to an address, on rank 0.
    """

    profile_steps: int = 0
    is_saving: bool = True
    ready: Callable[[], None] = lambda: None
    periodic: tuple[MakePeriodic, ...] = ()
    copies: RemoteCopies | None = None


@dataclass(frozen=True)
class PhaseParts:
    feed: Feed
    last_step: int
    tokens_per_step: int
    sequences_per_step: int


@dataclass
class Run:
    """The parts of one attempt at a run. The loop calls `checks` after each step, in this order."""

    asked: Asked
    device: torch.device
    mesh: Mesh
    time_limits: TimeLimits
    state: State
    guard: Guard
    checks: tuple[Check, ...]
    spike_watch: SpikeWatch
    replica_check: ReplicaCheck
    speed_watch: SpeedWatch
    learning_rate: Callable[[int], float]
    meter: Meter
    step_row: StepRow
    log: Log
    stop: Stop
    resources: Resources
    checkpoints: RunCheckpoints
    alert: Callable[[int, str], None]
    profile: Profile
    garbage: Garbage
    current: PrecisionParts = field(init=False)

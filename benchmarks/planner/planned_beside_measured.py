"""Steps of a run beside what the card of its machine predicts for them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kielo.plan.calibrate import Machine, device_of, workload_of
from kielo.plan.measured_run import read_measured_run
from kielo.plan.step_seconds import step_seconds
from kielo.recipe.cards import Cluster
from kielo.recipe.errors import KieloError


@dataclass(frozen=True)
class Comparison:
    """Steps of one size: the median of their measured seconds, and the planner's seconds by part."""

    sequence_length: int
    micro_batch: int
    micro_batches: int
    measured_seconds: float
    parts: dict[str, float]

    @property
    def planned_seconds(self) -> float:
        return sum(self.parts.values())


def compare(machine: Machine, path: Path | str, site: Cluster | None = None) -> list[Comparison]:
    """Compares a run's metrics.jsonl with the machine's card, for each size of its steps.

    Raises KieloError like `measure`, and for a run on another kind of device than the card's.
    """
    run = read_measured_run(Path(path))
    placement, precision = run.resolved.placement, run.precision
    is_same = placement.device == machine.accelerator.device and precision == machine.precision
    if not is_same or (placement.device == "cpu" and placement.world_size != machine.ranks):
        raise KieloError(
            f"{path} is of {device_of(run)}, the card of {machine.ranks} ranks on "
            f"{machine.accelerator.name!r} in {machine.precision}. Fix: name a run like those that the "
            "card was made from"
        )
    parts = step_seconds(workload_of([run], machine.accelerator, site), machine.efficiency)
    return [
        Comparison(
            *size, float(np.median(times)), {name: float(part[index]) for name, part in vars(parts).items()}
        )
        for index, (size, times) in enumerate(run.seconds.items())
    ]

"""Effective time of a job whose devices fail: best save interval, cost of a failure, spare nodes; no torch.

Failures are random and independent, at one rate a device. A failure stops the whole job, which resumes from
the newest safe save. A save stops training shortly and is written while training continues.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kielo.ranks.hang_watch import beat_seconds, silent_seconds, stuck_seconds
from kielo.ranks.local_ranks import STACKS_SECONDS
from kielo.recipe.cards import Cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout

_CARD = Path(__file__).resolve().parent.parent / "cards" / "failures" / "published_rates.toml"
_USUAL_RATE = "llama3"
LEAST_RATE, MOST_RATE = 1e-6, 1e6  # failures of a device in 1,000 days: one in 3 million years, one in 86 s
_DAY_SECONDS = 86400
_SILENT_SHARE = 0.1  # as in Llama 3's training, if a source does not say it
# Until the other ranks have ended after a rank died: `srun --kill-on-bad-exit` took 4 s (Slurm 22.05).
_ENDED_SECONDS = 10.0
# A rank, from a found hang to its end: it reads the hang, counts itself as written, waits for the others, and
# counts itself as leaving. One rank reads the count.
_STORE_OPERATIONS_TO_THE_END = 5
# Assumed: a process with torch from a container's file, ten times an idle machine's 3 s; a communicator of
# many ranks; and a node without the others' compiled code.
_PROCESS_SECONDS, _COMMUNICATOR_SECONDS, _COMPILE_SECONDS = 30.0, 2.0, 30.0
# Of one store: counted for 8 to 6,144 ranks (benchmarks/results/start_counts.json), and assumed.
STORE_OPERATIONS_PER_RANK, _STORE_OPERATIONS_PER_SECOND = 32, 5000.0
_SURE_OF_SPARES = 0.95
# Share of failures that take several nodes at once, and with them copies in memory: Llama 3's of switches and
# cables, 35 of 419 (arXiv:2407.21783, table 5).
_SEVERAL_NODES_SHARE = 35 / 419


@dataclass(frozen=True)
class Rate:
    """Failures of a device in 1,000 days, their source, and the share of them that ends no process."""

    per_1000_device_days: float
    source: str
    silent_share: float = _SILENT_SHARE

    def mean_seconds(self, devices: int) -> float:
        """Return the mean time between failures of a job of this many devices."""
        return 1000 * _DAY_SECONDS / (self.per_1000_device_days * devices)


@dataclass(frozen=True)
class Save:
    """Seconds that a save stops training, and seconds until the run can resume from it (safe)."""

    stop: float
    safe: float


@dataclass(frozen=True)
class Steps:
    """Seconds of a step and longest without a layer, steps between saves, `train.hang_seconds`."""

    seconds: float
    pause_seconds: float
    between_saves: int
    hang_seconds: float


@dataclass(frozen=True)
class Copies:
    """Copies in the nodes' memory, every `between` steps. A neighbour has one after `cost.safe`."""

    between: int
    cost: Save


@dataclass(frozen=True)
class Failures:
    """The cost of failures of a job."""

    rate: Rate
    mean_seconds: float  # between two failures
    down: dict[str, float]  # part → mean seconds from a failure to the next step
    frozen_seconds: float  # the same if a rank or its node sends no heartbeat
    stuck_seconds: float  # the same if all still send heartbeats
    own_seconds: float  # between two saves of the recipe
    young_seconds: float  # the best time between saves, to first order
    daly_seconds: float  # to higher order
    best_steps: int  # between saves
    effective_share: float  # of the time that is spent on kept steps, as the recipe saves
    best_share: float  # with the best interval
    job_seconds: float
    spare_nodes: int  # enough to replace every failed node in 95 of 100 jobs of `job_seconds`

    @property
    def down_seconds(self) -> float:
        return sum(self.down.values())


def rate_of(text: str, site: Cluster) -> Rate:
    """Return the rate by name, by number, or for "" the cluster card's, else Llama 3's. Raises KieloError."""
    if not text and site.failures_per_1000_device_days is not None:
        return Rate(site.failures_per_1000_device_days, f"the card of {site.name}")
    known = published_rates()
    name = text or _USUAL_RATE
    if name in known:
        return known[name]
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    if not LEAST_RATE <= number <= MOST_RATE:
        raise KieloError(
            f"--failures {name}: neither a published rate nor a number from {LEAST_RATE:g} to {MOST_RATE:g}. "
            f"Fix: {', '.join(known)}, 0.5 (failures of a device in 1,000 days), or --failures alone, after "
            "the recipe"
        )
    return Rate(number, "--failures")


@cache
def published_rates() -> Mapping[str, Rate]:
    found = tomllib.loads(_CARD.read_text(encoding="utf-8"))
    return {
        name: Rate(
            1000 * one["failures"] / (one["devices"] * one["days"]),
            f"{one['description']}; {one['source']}",
            one.get("silent_share", _SILENT_SHARE),
        )
        for name, one in found.items()
    }


def expect(
    rate: Rate,
    layout: Layout,
    save: Save,
    steps: Steps,
    read_seconds: float,
    job_seconds: float,
    copies: Copies | None = None,
) -> Failures:
    """Return the cost of failures at this rate for a job.

    A checkpoint is read in `read_seconds`. `copies` are in memory, between the recipe's saves. A restart
    writes a copy to the disk before it reads it. If several nodes are lost, it reads a saved checkpoint.
    """
    devices = layout.replicate * layout.shard * layout.context * layout.tensor * layout.pipeline
    mean, restart = rate.mean_seconds(devices), restart_seconds(layout, devices, read_seconds)
    if copies is not None:
        restart["copy written to the disk"] = save.safe
    # All learn of it within a beat. They wait only for a frozen rank, until it has written its stacks.
    ending = beat_seconds(devices) + _STORE_OPERATIONS_TO_THE_END * devices / _STORE_OPERATIONS_PER_SECOND
    frozen = silent_seconds(steps.hang_seconds, devices) + ending + STACKS_SECONDS
    stuck = stuck_seconds(steps.pause_seconds, steps.hang_seconds) + ending
    found = (1 - rate.silent_share) * _ENDED_SECONDS + rate.silent_share * stuck
    down = {"noticed, and all ranks ended": found, **restart}
    down_seconds = sum(down.values())
    young, daly = young_seconds(save.stop, mean), daly_seconds(save.stop, mean)
    own = steps.between_saves * steps.seconds
    # a save begins when the save before it is safe
    best_steps = max(1, round(max(daly, save.safe) / steps.seconds))
    again, share = sum(restart.values()), _own_share(steps, save, copies, mean, down_seconds)
    times = mean, down, frozen + again, stuck + again, own, young, daly, best_steps
    best_share = effective_share(best_steps * steps.seconds, save, mean, down_seconds)
    return Failures(rate, *times, share, best_share, job_seconds, spares(job_seconds / mean))


def _own_share(
    steps: Steps, save: Save, copies: Copies | None, mean_seconds: float, down_seconds: float
) -> float:
    """Return the effective share as the recipe saves and copies. One failed node costs `down_seconds`."""
    interval = steps.between_saves * steps.seconds
    if copies is None:
        return effective_share(interval, save, mean_seconds, down_seconds)
    saved = effective_share(interval, save, mean_seconds, down_seconds - save.safe)
    interval = copies.between * steps.seconds
    copied = effective_share(interval, copies.cost, mean_seconds, down_seconds)
    if not (saved and copied):
        return 0.0
    return 1 / ((1 - _SEVERAL_NODES_SHARE) / copied + _SEVERAL_NODES_SHARE / saved)


def young_seconds(stop_seconds: float, mean_seconds: float) -> float:
    """Return the best time between saves to first order, √(2 C M) (Young 1974, doi:10.1145/361147.361115)."""
    return math.sqrt(2 * stop_seconds * mean_seconds)


def daly_seconds(stop_seconds: float, mean_seconds: float) -> float:
    """Return the best time to higher order (Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37)."""
    if stop_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = stop_seconds / (2 * mean_seconds)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_seconds(stop_seconds, mean_seconds) * series - stop_seconds


def effective_share(interval_seconds: float, save: Save, mean_seconds: float, down_seconds: float) -> float:
    """Return the share of a job's time that is spent on kept steps, by Daly's model.

    It includes the time until the next step, in which a job may fail again, and steps taken during the save.
    """
    # By exponentials of negative numbers, which do not overflow.
    segment = (interval_seconds + save.stop) / mean_seconds
    lost = (down_seconds + save.safe) / mean_seconds
    return interval_seconds / mean_seconds * math.exp(-lost - segment) / -math.expm1(-segment)


def restart_seconds(layout: Layout, devices: int, read_seconds: float) -> dict[str, float]:
    """Return part → seconds from the end of all ranks to their next step, in the same job."""
    return {
        "processes": _PROCESS_SECONDS,
        "store": STORE_OPERATIONS_PER_RANK * devices / _STORE_OPERATIONS_PER_SECOND,
        "communicators": _COMMUNICATOR_SECONDS * communicators(layout, devices),
        "checkpoint read": read_seconds,
        "code compiled": _COMPILE_SECONDS * (layout.compile is not False),
    }


def communicators(layout: Layout, devices: int) -> int:
    """Return the communicators that a rank starts, as benchmarks/start/counted_start.py counts them."""
    axes = (layout.replicate, layout.pipeline, layout.shard, layout.context, layout.tensor)
    groups = 1 + sum(1 < size < devices for size in axes)
    merged = layout.shard * layout.context
    groups += layout.context > 1 and layout.shard > 1 and merged < devices
    return groups + (min(2, layout.pipeline) if layout.pipeline > 1 else 0)


def spares(mean_failures: float) -> int:
    """Return the fewest nodes that are enough with 95 %, if each failure takes one (Poisson)."""
    logarithm, number = -mean_failures, 0  # of a probability that may be too small for a float
    total = math.exp(logarithm)
    while total < _SURE_OF_SPARES:
        number += 1
        logarithm += math.log(mean_failures / number)
        total += math.exp(logarithm)
    return number

"""Effective time of a job whose devices fail: best save interval, cost of a failure, spare nodes; no torch.

Failures come at random and independently of each other, at one rate a device. A failure stops the whole job;
it goes on from the newest save that was safe. Saves stop training shortly and are written while it goes on.
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
_SILENT_SHARE = 0.1  # as in Llama 3's training, where a source does not tell
# Until the other ranks have ended after one died: `srun --kill-on-bad-exit` took 4 s (Slurm 22.05).
_ENDED_SECONDS = 10.0
# Of each rank, from a hang that is found to its end: it asks for the hang, adds itself to those that have
# written, waits for the others, and adds itself to those that leave; and one rank looks how many there are.
_STORE_OPERATIONS_TO_THE_END = 5
# Assumptions: a process with torch from a container's file, ten times an idle machine's 3 s; a communicator
# of many ranks; and a node without the others' compiled code.
_PROCESS_SECONDS, _COMMUNICATOR_SECONDS, _COMPILE_SECONDS = 30.0, 2.0, 30.0
# Of one store: counted for 8 to 6,144 ranks (benchmarks/results/start_counts.json), and assumed.
STORE_OPERATIONS_PER_RANK, _STORE_OPERATIONS_PER_SECOND = 32, 5000.0
_SURE_OF_SPARES = 0.95
# Of failures, those that take several nodes at once, and with them copies in memory: Llama 3's of switches
# and cables, 35 of 419 (arXiv:2407.21783, table 5).
_SEVERAL_NODES_SHARE = 35 / 419


@dataclass(frozen=True)
class Rate:
    """Failures of a device in 1,000 days, and where that is from.

    silent_share: of them, those that end no process.
    """

    per_1000_device_days: float
    source: str
    silent_share: float = _SILENT_SHARE

    def mean_seconds(self, devices: int) -> float:
        """Return the mean time between failures of a job of so many devices."""
        return 1000 * _DAY_SECONDS / (self.per_1000_device_days * devices)


@dataclass(frozen=True)
class Save:
    """Seconds of a save. stop: that training stops. safe: until the run can go back to what was saved."""

    stop: float
    safe: float


@dataclass(frozen=True)
class Steps:
    """Seconds of a step, steps between two saves of the recipe, and its `train.hang_seconds`.

    pause_seconds: the longest time in which a device comes to no layer.
    """

    seconds: float
    pause_seconds: float
    between_saves: int
    hang_seconds: float


@dataclass(frozen=True)
class Copies:
    """Copie in the nodes' memory (`checkpoint.memory_every_steps`). between: steps between two of them.

    cost: as of a save; `safe` is when the neighbour has the files.
    """

    between: int
    cost: Save


@dataclass(frozen=True)
class Failures:
    """The cost of failures of a job.

    mean_seconds: between two failures. down: part → seconds from a failure to the next step, in the mean over
    failures that end a process and silent ones, all of which count as stuck; frozen_seconds: the same where a
    rank or its node sends no heartbeat any more; stuck_seconds: where all still do. own_seconds: between two
    saves of the recipe. young_seconds, daly_seconds: the best time between them; best_steps: in steps.
    effective_share: of the time, what is spent on steps that are kept, as the recipe saves; best_share: with
    the best interval. spare_nodes: with so many, 95 of 100 jobs of `job_seconds` can replace every node that
    failed.
    """

    rate: Rate
    mean_seconds: float
    down: dict[str, float]
    frozen_seconds: float
    stuck_seconds: float
    own_seconds: float
    young_seconds: float
    daly_seconds: float
    best_steps: int
    effective_share: float
    best_share: float
    job_seconds: float
    spare_nodes: int

    @property
    def down_seconds(self) -> float:
        return sum(self.down.values())


def rate_of(text: str, site: Cluster) -> Rate:
    """Return the rate that a person asked for: a name of published ones, a number, or "" for the usual one.

    The usual one is the cluster card's own, and Llama 3's where it has none. Raises KieloError.
    """
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
            f"Fix: {', '.join(known)}, 0.5 (failures of a device in 1,000 days), or --failures "
            "alone, after the recipe"
        )
    return Rate(number, "--failures")


@cache
def published_rates() -> Mapping[str, Rate]:
    """Return the rates that others counted, by name."""
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
    """Return what failures at this rate cost a job.

    read_seconds: to read a checkpoint. copies: those in memory, if the recipe has any between its saves. A
    restart writes one to the disk before it reads it; where several nodes were lost, it reads a save.
    """
    devices = layout.replicate * layout.shard * layout.context * layout.tensor * layout.pipeline
    mean, restart = rate.mean_seconds(devices), restart_seconds(layout, devices, read_seconds)
    if copies is not None:
        restart["copy written to the disk"] = save.safe
    # all hear of it within a beat; only a frozen rank is waited for, until it has written its stacks
    ending = beat_seconds(devices) + _STORE_OPERATIONS_TO_THE_END * devices / _STORE_OPERATIONS_PER_SECOND
    frozen = silent_seconds(steps.hang_seconds, devices) + ending + STACKS_SECONDS
    stuck = stuck_seconds(steps.pause_seconds, steps.hang_seconds) + ending
    found = (1 - rate.silent_share) * _ENDED_SECONDS + rate.silent_share * stuck
    down = {"noticed, and all ranks ended": found, **restart}
    down_seconds = sum(down.values())
    young, daly = young_seconds(save.stop, mean), daly_seconds(save.stop, mean)
    own = steps.between_saves * steps.seconds
    # a save begins when the one before it is safe
    best_steps = max(1, round(max(daly, save.safe) / steps.seconds))
    return Failures(
        rate=rate,
        mean_seconds=mean,
        down=down,
        frozen_seconds=frozen + sum(restart.values()),
        stuck_seconds=stuck + sum(restart.values()),
        own_seconds=own,
        young_seconds=young,
        daly_seconds=daly,
        best_steps=best_steps,
        effective_share=_own_share(steps, save, copies, mean, down_seconds),
        best_share=effective_share(best_steps * steps.seconds, save, mean, down_seconds),
        job_seconds=job_seconds,
        spare_nodes=spares(job_seconds / mean),
    )


def _own_share(
    steps: Steps, save: Save, copies: Copies | None, mean_seconds: float, down_seconds: float
) -> float:
    """Return the effective share as the recipe saves and copies.

    A failure of one node goes back to the copy, one of several to the save; the time that a step takes with
    all losses is the mean of both. down_seconds: of a failure of one node.
    """
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
    """Return the best time between two saves to first order, √(2 C M).

    Young 1974, doi:10.1145/361147.361115. stop_seconds: C, that a save stops training. mean_seconds: M,
    between failures.
    """
    return math.sqrt(2 * stop_seconds * mean_seconds)


def daly_seconds(stop_seconds: float, mean_seconds: float) -> float:
    """Return the best time between two saves to higher order.

    Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37.
    """
    if stop_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = stop_seconds / (2 * mean_seconds)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_seconds(stop_seconds, mean_seconds) * series - stop_seconds


def effective_share(interval_seconds: float, save: Save, mean_seconds: float, down_seconds: float) -> float:
    """Return the share of a job's time that is spent on steps that are kept.

    Daly's model with the time lost until the next step, in which a job may fail again; and a failure also
    costs the steps that were taken while the newest save was being written.
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
    """Return how many communicators a rank starts, one after another: of the world, axes, and messages.

    As benchmarks/start/counted_start.py counts them by running the start's own code.
    """
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

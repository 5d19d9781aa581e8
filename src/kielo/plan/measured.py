"""A machine as a person's own runs show it: metrics.jsonl and resolved.toml → a card that plans use;
arithmetic, no torch.

A run is cut into stretches of steps of one shape (sequence length, micro-batch, micro-batches); the median
step of each is a measurement. Constants of `efficiency.py` are fitted to them as `fit.py` does, but few: only
those that a run of Kielo can tell, each drawn to what is usual for such a device, so that what the runs do
not tell keeps that.

A GPU keeps the peaks of its card. A processor's card has none: its peak, memory bandwidth and the bandwidth
between ranks are fitted too. There a rank is a process with its share of the cores, so a card of two ranks
with a thread each says nothing of one rank with two threads, and runs of different numbers of ranks are
refused.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.metrics import PassedOver, TrainingStep, read_metrics
from kielo.artifact.own_text import HASH_COMMENT, write_own_text
from kielo.plan.candidates import candidate_columns
from kielo.plan.efficiency import CONSTANTS, Efficiency, card_text, fitted, members, read_card
from kielo.plan.fit import drawn_to_prior
from kielo.plan.step_time import step_seconds
from kielo.plan.workload import Workload
from kielo.recipe.cards import Accelerator, Cluster, accelerators, clusters
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.cards import cluster as cluster_card
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from kielo.resolve.resolved import Placement, Resolved
from kielo.resolve.resolved import read as read_resolved

Column = np.ndarray
_StepRow = TrainingStep | PassedOver
MIN_ROWS = 3  # of a stretch, after its warm-up
_WARM_UP_STEPS = 2  # of a stretch: memory is taken, kernels are chosen, schedules are made
_NOISE = 0.02  # of a median step: what the spreads below are weighed against
_ROUNDS, _LEAST_GAIN = 60, 1e-6  # few figures, quickly fitted
# of the interval, either way: residuals of the runs themselves know nothing of other shapes
_NARROWEST = 0.08
_NORMAL_TAIL = 1.28  # standard deviations, either way, that hold 80 % of a normal distribution


@dataclass(frozen=True)
class Machine:
    """`accelerator` is a whole card, of one rank; on a processor its only peak is that of `precision`.

    `ranks`: of the runs; on a processor they shared its cores. `runs`: files that it was made from.
    """

    accelerator: Accelerator
    efficiency: Efficiency
    spread: dict[str, float]
    precision: str
    ranks: int
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Of steps of one shape: the median of their measured seconds, and the planner's by part."""

    sequence_length: int
    micro_batch: int
    micro_batches: int
    measured_seconds: float
    parts: dict[str, float]

    @property
    def planned_seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Run:
    path: Path
    resolved: Resolved
    # of a step, by (sequence length, micro-batch, micro-batches)
    seconds: dict[tuple[int, int, int], list[float]]


@dataclass(frozen=True)
class _Prior:
    """A figure that is fitted: its start, and how far (standard deviation of the logarithm) it may move from
    it.
    """

    start: float
    spread: float


# A processor's: found by trial on two cores of an EPYC 7003 (2026-11, torch 2.13, fp32, gloo over loopback),
# with models other than those of benchmarks/planner_measured.py. Nothing is hidden there: whoever sends holds
# the core that computes.
_CPU = {
    "flash": _Prior(0.25, 0.5), "elementwise": _Prior(2.5, 0.4), "accumulate": _Prior(1.0, 0.4),
    "layer_seconds": _Prior(2.5e-3, 0.35), "step_seconds": _Prior(2.5e-2, 0.6), "tensor_exposed": _Prior(1.0, 0.3),
    "pipeline_exposed": _Prior(0.2, 0.5), "data_hidden": _Prior(0.01, 0.1), "gather": _Prior(1.2, 0.3),
    "latency_seconds": _Prior(8e-3, 0.5), "tensor_launch": _Prior(2.0, 0.3), "tile": _Prior(8.0, 0.5),
    "wave_elements": _Prior(4e3, 0.5), "misaligned": _Prior(1.0, 0.05), "small_heads": _Prior(0.1, 0.5),
    "jitter": _Prior(0.01, 0.3),
}  # fmt: skip
_CPU_MACHINE = {
    "flops": _Prior(8e10, 2.0),  # peak of a rank, a second: anything from half a core to a socket
    "bytes_a_flop": _Prior(0.12, 0.4),  # memory bandwidth by that peak
    # bandwidth between ranks by memory bandwidth: each byte is copied several times
    "link_share": _Prior(0.15, 0.5),
}
# A GPU's start is the shipped card; these may move, by the spreads of `CONSTANTS`.
_GPU = (
    "matrix_engine", "flash", "elementwise", "accumulate", "layer_seconds", "tensor_exposed", "data_hidden", "gather",
    "pipeline_exposed", "step_seconds", "latency_seconds", "tensor_launch", "network", "node",
)  # fmt: skip


def measure(paths: Sequence[Path | str], site: Cluster | None = None) -> Machine:
    """The machine that the runs with these metrics.jsonl were on; `resolved.toml` lies beside each or one
    folder up.

    site: what nodes are made of; default: for GPUs the first cluster card that has them, and one node for
    processors. Raises KieloError for files that are not there or hold too little, and for runs that were not
    on one kind of device.
    """
    runs = [_read_run(Path(path)) for path in paths]
    if not runs:
        raise KieloError(
            "no metrics.jsonl was given; what would work: runs/NAME/train/metrics.jsonl of a run of your own"
        )
    _refuse_mixed(runs)
    placement, precision = runs[0].resolved.placement, runs[0].resolved.identity.precision
    ranks = max(run.resolved.placement.world_size for run in runs)
    card = accelerator_card("cpu") if placement.device == "cpu" else _gpu_card(runs[0])
    priors = _CPU | _CPU_MACHINE if placement.device == "cpu" else _gpu_priors(card)
    start = _with_figures(card, precision, {name: prior.start for name, prior in priors.items()})
    work = _work(runs, start, site)
    seconds = np.array([np.median(times) for run in runs for times in run.seconds.values()])
    values = _solve(priors, lambda values: _predict(work, card, values), np.log(seconds))
    errors = np.log(seconds) - np.log(_predict(work, card, values))
    return Machine(
        _with_source(_with_figures(card, precision, values)), _efficiency(card, values), _spread(errors), precision, ranks,
        tuple(str(run.path) for run in runs),
    )  # fmt: skip


def compare(machine: Machine, path: Path | str, site: Cluster | None = None) -> list[Comparison]:
    """What a run's metrics.jsonl says beside what the machine's card does, for each shape of its steps.

    Raises KieloError as `measure` does, and for a run on another kind of device than the card's.
    """
    run = _read_run(Path(path))
    placement, precision = run.resolved.placement, run.resolved.identity.precision
    is_same = placement.device == machine.accelerator.device and precision == machine.precision
    if not is_same or (placement.device == "cpu" and placement.world_size != machine.ranks):
        raise KieloError(
            f"{path} is of {_device(run)}, the card of {machine.ranks} ranks on "
            f"{machine.accelerator.name!r} in {machine.precision}; what would work: a run like those that "
            "the card was made from"
        )
    parts = step_seconds(_work([run], machine.accelerator, site), machine.efficiency)
    return [
        Comparison(
            *shape, float(np.median(times)), {name: float(part[index]) for name, part in vars(parts).items()}
        )
        for index, (shape, times) in enumerate(run.seconds.items())
    ]


def write_machine(machine: Machine, path: Path | str) -> None:
    """As TOML: the constants as in the shipped card of them, then what the machine is. Replaces only a card
    that nobody has changed; raises KieloError for another file.
    """
    runs = "\n".join(f"  {run}" for run in machine.runs)
    header = (
        "A machine as its own runs showed it, by `kielo plan calibrate`; `kielo plan RECIPE --machine` "
        f"takes it.\nMeasured in {machine.precision} on {machine.ranks} ranks, from\n{runs}\nWhat those "
        "runs could not tell has the value that is usual. [interval] is how far a prediction may be off."
    )
    measured = {"precision": machine.precision, "ranks": machine.ranks, "runs": list(machine.runs)}
    card = machine.accelerator.model_dump(mode="json", exclude_none=True)
    peaks = card.pop("peak_tflops")
    text = card_text(machine.efficiency, machine.spread, header)
    text += _table("measured", measured, "what the runs were: on a processor the ranks shared its cores")
    text += _table(
        "accelerator", card, "of one rank; a processor's bandwidths count fp32 as two bytes, like the planner"
    )
    text += _table(
        "accelerator.peak_tflops", peaks, "dense; a processor's from the rate of its large products"
    )
    write_own_text(path, text, HASH_COMMENT)


def read_machine(path: Path | str) -> Machine:
    """What `write_machine` wrote. Raises KieloError for another file."""
    path = Path(path)
    hint = "`kielo plan calibrate RUN/train/metrics.jsonl --to my_machine.toml` writes such a file"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror}); {hint}") from None
    except ValueError as error:
        raise KieloError(f"{path}: not valid TOML ({error}); {hint}") from None
    try:
        card, measured = Accelerator.model_validate(content["accelerator"]), content["measured"]
        efficiency, spread = read_card(path)
        interval = {"lower": float(spread["lower"]), "upper": float(spread["upper"])}
        return Machine(
            card,
            efficiency,
            interval,
            measured["precision"],
            int(measured["ranks"]),
            tuple(map(str, measured["runs"])),
        )
    except (KeyError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        raise KieloError(f"{path}: not the card of a machine ({error!r}); {hint}") from None


def _read_run(path: Path) -> _Run:
    if not path.is_file():
        raise KieloError(
            f"{path}: no such file; what would work: runs/NAME/train/metrics.jsonl of a run of your own"
        )
    plans = [folder / "resolved.toml" for folder in (path.parent, path.parent.parent)]
    plan = next((plan for plan in plans if plan.is_file()), None)
    if plan is None:
        raise KieloError(
            f"{path}: neither {plans[0]} nor {plans[1]} is there, so the shape of this run is not known; "
            "what would work: the file where the run left it, or its resolved.toml copied beside it"
        )
    resolved, rows = read_resolved(plan), _last_attempt(_rows(path))
    if resolved.identity.precision == "fp8" and resolved.identity.fp8.emulate:
        raise KieloError(
            f"{path}: FP8 was emulated, which tells nothing of a machine; what would work: a run in fp32 or "
            "bf16"
        )
    if not rows:
        raise KieloError(
            f"{path}: no row of a training step; what would work: the metrics.jsonl of a run that has trained"
        )
    _refuse_other_ranks(path, rows, resolved)
    seconds = {
        shape: times for shape, times in _seconds_by_shape(rows, resolved).items() if len(times) >= MIN_ROWS
    }
    if not seconds:
        raise KieloError(
            f"{path}: no stretch of steps of one size has {MIN_ROWS} rows after its first {_WARM_UP_STEPS} "
            "steps; what would work: a longer run, or train.log_every_steps=1"
        )
    return _Run(path, resolved, seconds)


def _rows(path: Path) -> list[_StepRow]:
    """Reads the rows of training steps and of steps that were passed over."""
    return [
        row
        for row in read_metrics(path)
        if isinstance(row, PassedOver) or (isinstance(row, TrainingStep) and row.tokens_per_second)
    ]


def _last_attempt(rows: Iterable[_StepRow]) -> list[_StepRow]:
    """resolved.toml tells the layout of the newest attempt alone; each counts its seconds anew."""
    last: list[_StepRow] = []
    seconds = 0.0
    for row in rows:
        if isinstance(row, TrainingStep):
            last = [] if row.seconds < seconds else last
            seconds = row.seconds
        last.append(row)
    return last if any(isinstance(row, TrainingStep) for row in last) else []


def _refuse_other_ranks(path: Path, rows: Sequence[_StepRow], resolved: Resolved) -> None:
    """A finished run that is started again on other ranks trains nothing and leaves a
    resolved.toml of those.
    """
    row, placement = next(row for row in reversed(rows) if isinstance(row, TrainingStep)), resolved.placement
    per_token = placement.phases[resolved.identity.phase_index(row.step)].flops_per_token
    ranks = row.tokens_per_second * per_token / (row.tflops_per_second or np.nan) / 1e12
    # A row across two phases has tokens of both; between numbers of ranks lies more than that.
    if ranks / placement.world_size > 1.4 or placement.world_size / ranks > 1.4:
        raise KieloError(
            f"{path}: its rows are of {ranks:.0f} ranks, its resolved.toml of {placement.world_size}; what "
            "would work: a run that was not started again on other ranks after its end"
        )


def _seconds_by_shape(
    rows: Sequence[_StepRow], resolved: Resolved
) -> dict[tuple[int, int, int], list[float]]:
    """Seconds of a step, one figure a row, by (sequence length, micro-batch, micro-batches). A row counts the
    steps since the one before it; rows with the first steps of a phase or of the attempt do not count, nor
    those across two phases, nor those from the first change of precision on.
    """
    identity, found, before = resolved.identity, {}, None
    for row in rows:
        first, before = None if before is None else before + 1, row.step
        if first is None or isinstance(row, PassedOver):
            continue
        index = identity.phase_index(first)
        phase, placed = identity.phases[index], resolved.placement.phases[index]
        if first < phase.first_step + _WARM_UP_STEPS or row.step > phase.last_step:
            continue
        if identity.precision_changes and row.step >= identity.precision_changes[0][0]:
            continue
        shape = (phase.sequence_length, placed.micro_batch_sequences, placed.micro_batches_per_step)
        found.setdefault(shape, []).append(phase.tokens_per_step / row.tokens_per_second)
    return found


def _refuse_mixed(runs: Sequence[_Run]) -> None:
    """Only runs on one kind of device, in one precision, tell of one machine."""
    first = _device(runs[0])
    for run in runs[1:]:
        if _device(run) != first:
            raise KieloError(
                f"{run.path} is of {_device(run)}, {runs[0].path} of {first}; what would work: runs of one "
                "kind of device in one precision, and on a processor with as many ranks"
            )


def _device(run: _Run) -> str:
    placement, precision = run.resolved.placement, run.resolved.identity.precision
    if placement.device == "cpu":
        return f"{placement.world_size} ranks on a processor in {precision}"
    return f"{placement.accelerator} in {precision}"


def _gpu_card(run: _Run) -> Accelerator:
    name, precision = run.resolved.placement.accelerator, run.resolved.identity.precision
    card = accelerator_card(name) if name in accelerators() else None
    if card is None or precision not in card.peak_tflops or card.memory_bandwidth_tb_per_second is None:
        raise KieloError(
            f"{run.path}: was trained in {precision} on {name!r}, for which no card has a peak and a memory "
            "bandwidth; what would work: a card of it in kielo/cards/accelerators, beside "
            f"{', '.join(accelerators())}"
        )
    return card


def _work(runs: Sequence[_Run], card: Accelerator, site: Cluster | None) -> Workload:
    """A row for each shape of each run. The peak is of the precision of the products that there are."""
    ranks = max(run.resolved.placement.world_size for run in runs)
    site = site or _site_of(card, ranks)
    precision = runs[0].resolved.identity.precision
    if precision != "fp8":
        # Bytes count as in bf16: a processor's bandwidths are fitted to that.
        card = card.model_copy(
            update={"peak_tflops": card.peak_tflops | {"bf16": card.peak_tflops[precision]}}
        )
        precision = "bf16"
    return Workload.of([
        candidate_columns(
            run.resolved.identity.model, _layout(run.resolved.placement), card, site,
            sequence_length=length, micro_batch=micro_batch, micro_batches=micro_batches, precision=precision,
            fp8=run.resolved.identity.fp8, optimiser_state=run.resolved.identity.optimiser_state,
        )
        for run in runs
        for length, micro_batch, micro_batches in run.seconds
    ])  # fmt: skip


def _site_of(card: Accelerator, ranks: int) -> Cluster:
    """A cluster of such devices; where no card has them, one node with all ranks, whose network is as fast as
    its links.
    """
    found = [site for site in map(cluster_card, clusters()) if site.accelerator == card.name]
    if found and card.device == "cuda":
        return found[0]
    gbit = card.link_gb_per_second * 8 * ranks
    return cluster_card("laptop").model_copy(
        update={"devices_per_node": ranks, "network_gbit_per_second_per_node": gbit}
    )


def _layout(placement: Placement) -> Layout:
    """As a recipe would say it, with `shard` in ranks."""
    names = ("pipeline", "pipeline_schedule", "replicate", "shard", "context", "tensor", "sequence_parallel", "zero",
             "cpu_offload", "context_attention", "recompute", "recompute_every_layers")  # fmt: skip
    stages = len(placement.pipeline_layers) // placement.pipeline or None
    return Layout(**{name: getattr(placement, name) for name in names}, pipeline_stages_per_rank=stages)


def _gpu_priors(card: Accelerator) -> dict[str, _Prior]:
    start, _ = fitted()
    return {
        name: _Prior(float(start.values[name][_member(name, card)]), CONSTANTS[name].spread) for name in _GPU
    }


def _member(name: str, card: Accelerator) -> int:
    """Which entry of a constant is this device's, trained by Kielo."""
    return members(name).index(
        {"architecture": card.architecture, "engine": "fsdp", "all": "all"}[CONSTANTS[name].by]
    )


def _efficiency(card: Accelerator, values: Mapping[str, float]) -> Efficiency:
    """The shipped constants with `values` for this device."""
    constants = {name: column.copy() for name, column in fitted()[0].values.items()}
    for name, value in values.items():
        if name in constants:
            constants[name][_member(name, card)] = value
    return Efficiency(constants)


def _with_figures(card: Accelerator, precision: str, values: Mapping[str, float]) -> Accelerator:
    """A processor's card with what was fitted; a GPU's as it is."""
    if "flops" not in values:
        return card
    memory = values["flops"] * values["bytes_a_flop"]
    return card.model_copy(update={
        "peak_tflops": {precision: values["flops"] / 1e12},
        "memory_bandwidth_tb_per_second": memory / 1e12,
        "link_gb_per_second": memory * values["link_share"] / 1e9,
    })  # fmt: skip


def _with_source(card: Accelerator) -> Accelerator:
    source = f"{card.source}; constants measured by kielo" if card.device == "cuda" else "measured by kielo"
    return card.model_copy(update={"source": source, "date": date.today().isoformat()[:7]})


def _predict(work: Workload, card: Accelerator, values: Mapping[str, float]) -> Column:
    """Seconds of a step on the machine with these figures."""
    if "flops" in values:
        ones = np.ones(len(work))
        memory = values["flops"] * values["bytes_a_flop"] * ones
        link = memory * values["link_share"]
        work = replace(
            work, peak=values["flops"] * ones, peak_recipe=values["flops"] * ones, memory_bandwidth=memory,
            node_bandwidth=link, network_bandwidth=link,
        )  # fmt: skip
    return step_seconds(work, _efficiency(card, values)).total


def _solve(
    priors: Mapping[str, _Prior], predict: Callable[[Mapping[str, float]], Column], target: Column
) -> dict[str, float]:
    """Figures by which `predict` gives what `target` is the logarithm of, each drawn to its prior."""
    origin = np.log([prior.start for prior in priors.values()])
    spreads = np.array([prior.spread for prior in priors.values()])

    def named(parameters: Column) -> dict[str, float]:
        return dict(zip(priors, np.exp(parameters).tolist()))

    def errors(parameters: Column) -> Column:
        return np.log(predict(named(parameters))) - target

    return named(drawn_to_prior(errors, 1 / _NOISE, origin, spreads, origin, _ROUNDS, _LEAST_GAIN))


def _spread(errors: Column) -> dict[str, float]:
    """The interval's figures: 80 % of a normal distribution as wide as the residuals, or `_NARROWEST`."""
    half = max(_NORMAL_TAIL * float(np.sqrt(np.mean(errors**2))), _NARROWEST)
    return {"lower": -half, "upper": half}


def _table(name: str, content: Mapping[str, Any], meaning: str) -> str:
    """A TOML table; JSON's strings, numbers and lists of them are TOML's too."""
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    return "\n".join(["", f"# {meaning}", f"[{name}]", *lines]) + "\n"

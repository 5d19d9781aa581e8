"""A run in one layout: seconds of a step by part, bytes by part, and speed and memory from them; no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kielo.plan.collective_seconds import context_layer_seconds, stage_seconds
from kielo.plan.efficiency import Efficiency
from kielo.plan.layer_seconds import exposed_tensor_seconds, head_seconds, layer_seconds
from kielo.plan.layout_name import layout_name
from kielo.plan.pipeline_simulation import StageSeconds, simulated_seconds
from kielo.plan.published_engine import PublishedEngine, published_beside
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import hidden_data_seconds, step_seconds
from kielo.plan.workload import Workload
from kielo.recipe.phases import FullPhase
from kielo.recipe.sections import CompleteModel, Layout
from kielo.resolve.memory import is_last_fullest, memory_bytes
from kielo.resolve.memory_row import StepSize
from kielo.resolve.shares import Shares, micro_batches_needed, rank_of_stage
from kielo.resolve.stages import layers_of_stages, num_stages, stages_of_rank

Column = np.ndarray
SHARE = 0.8  # of new measurements that should be inside
OF_HOST = "of host memory a node"
_OF_LAYERS = ("matrix", "attention", "elementwise", "launch", "tensor_traffic", "context_traffic")


def interval(seconds: Column, figures: Mapping[str, float]) -> tuple[Column, Column]:
    """Return (low, high), which should contain `SHARE` of measured seconds, by a card's [interval]."""
    return seconds * np.exp(figures["lower"]), seconds * np.exp(figures["upper"])


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with the seconds of its stages."""

    schedule: str
    ranks: int
    micro_batches: int
    stages: StageSeconds  # of a micro-batch, in the model's order
    layers: tuple[int, ...]  # of each stage
    head: float  # of the last stage
    exposed: float  # of each stage: it waits for a neighbour

    def simulated_seconds(self) -> float:
        return simulated_seconds(self.schedule, self.stages, self.ranks, self.micro_batches)

    def busiest_rank(self) -> tuple[int, ...]:
        """Return the stages of the rank with most work."""
        whole, chunks = self.stages.whole(), len(self.layers) // self.ranks
        owned = (stages_of_rank(self.schedule, self.ranks, rank, chunks) for rank in range(self.ranks))
        return max(owned, key=lambda some: sum(whole[stage] for stage in some))


class Passes(NamedTuple):
    """Seconds of a micro-batch. again: repeated forward work. hop: to the next stage; it waits `exposed`."""

    layer: float
    head: float
    hop: float
    again: float
    exposed: float


def passes(work: Workload, efficiency: Efficiency) -> list[Passes]:
    """Compute the passes of each entry of `work`."""
    rates = efficiency.of(work)
    traffic = exposed_tensor_seconds(work, rates) + context_layer_seconds(work, rates)
    layer, hop = layer_seconds(work, rates).total(traffic), stage_seconds(work, rates)
    again = np.maximum(work.layers_again, work.operators_again * 0.5)
    columns = (layer, head_seconds(work, rates), hop, again, hop * rates.pipeline_exposed)
    return [Passes(*(float(value) for value in values)) for values in zip(*columns, strict=True)]


def layout_pipeline(
    model: CompleteModel, layout: Layout, one: Passes, micro_batches: int, sequence_length: int
) -> Pipeline:
    """Return a layout's pipeline, in which forward and both gradients take a third of a layer each."""
    layer, head, hop, again, exposed = one
    layers = layers_of_stages(model, sequence_length, layout)
    third = [number * layer / (3 + again) for number in layers]
    heads = [0.0] * (len(layers) - 1) + [head / 3]
    stages = StageSeconds(
        tuple(seconds + exposed + more for seconds, more in zip(third, heads, strict=True)),
        tuple(seconds * (1 + again) + exposed + more for seconds, more in zip(third, heads, strict=True)),
        tuple(seconds + more for seconds, more in zip(third, heads, strict=True)),
        hop,
    )
    schedule, ranks = layout.pipeline_schedule, layout.pipeline
    return Pipeline(schedule, ranks, micro_batches, stages, layers, head, 2 * exposed)


def with_simulation(parts: dict[str, float], pipeline: Pipeline, layers_assumed: float) -> dict[str, float]:
    """Return `parts` for the busiest rank, with "bubble" simulated. layers_assumed: the layers in `parts`."""
    own = pipeline.busiest_rank()
    share = sum(pipeline.layers[stage] for stage in own) / layers_assumed
    found = parts | {name: parts[name] * share for name in _OF_LAYERS}
    found["head"] = pipeline.micro_batches * pipeline.head if own[-1] == len(pipeline.layers) - 1 else 0.0
    found["pipeline_traffic"] = pipeline.micro_batches * pipeline.exposed * len(own)
    work = sum(found[name] for name in (*_OF_LAYERS, "head", "pipeline_traffic"))
    seconds = pipeline.simulated_seconds()
    found["bubble"] = max(0.0, seconds - work)
    found["slowest"] *= seconds / sum(parts[name] for name in (*_OF_LAYERS, "head", "bubble"))
    return found


class Need(NamedTuple):
    """Needed and usable bytes of one kind of memory."""

    bytes: float
    usable: float
    where: str = "a device"

    @property
    def fits(self) -> bool:
        return self.bytes <= self.usable

    @property
    def of_host(self) -> str:
        """The kind of memory in words, or "" for a device's."""
        return "" if self.where == "a device" else f" {self.where}"


@dataclass(frozen=True)
class PlannedLayout:
    """One layout of a run on `nodes` nodes, in steps of `phase`. `layout.shard` is a number, not 0."""

    run: RunToPlan
    layout: Layout
    nodes: int
    devices: int
    phase: FullPhase
    micro_batch: int
    micro_batches: int
    seconds: dict[str, float]  # part (field of `StepSeconds`) → seconds of an optimiser step
    low_seconds: float
    high_seconds: float
    bytes: dict[str, float]  # part → bytes of the fullest device, as torch's max_memory_reserved counts
    hidden_data_seconds: float = 0.0  # data-parallel traffic that backward passes hide, in no part
    stages: StageSeconds | None = None  # of a micro-batch, if the pipeline was simulated
    is_last_fullest: bool = False  # the last pipeline rank is the fullest, not the first
    published: PublishedEngine | None = None  # beside a plan for a machine on which Kielo was not measured

    @property
    def sequence_length(self) -> int:
        return self.phase.sequence_length

    @property
    def tokens_per_step(self) -> int:
        return self.phase.tokens_per_step

    @property
    def name(self) -> str:
        return layout_name(self.layout, self.micro_batch)

    @property
    def fullest(self) -> str:
        """The first rank that needs most memory, with its pipeline stages, in words."""
        layout = self.layout
        if layout.pipeline == 1:
            return "rank 0 (as every rank)"
        number = layout.pipeline - 1 if self.is_last_fullest else 0
        each = num_stages(layout) // layout.pipeline
        stages = stages_of_rank(layout.pipeline_schedule, layout.pipeline, number, each)
        are = f"stages {', '.join(map(str, stages))}" if len(stages) > 1 else f"stage {stages[0]}"
        return f"rank {rank_of_stage(layout, number)} ({are})"

    @property
    def shares(self) -> Shares:
        """How data-parallel ranks divide the step, with empty sequences."""
        ranks = self.layout.replicate * self.layout.shard
        sequences = self.tokens_per_step // self.sequence_length
        return Shares(sequences, ranks, self.micro_batch, self.micro_batches)

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def safe_share(self) -> float:
        """Seconds of the slower of plan and published engine, by the planned seconds."""
        return max(1.0, self.published.factor) if self.published else 1.0

    @property
    def peak_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def host_bytes_per_node(self) -> float:
        """Bytes in a node's own memory: copies of a save, and what layout.cpu_offload keeps there."""
        return self.run.host_bytes_per_node(self.bytes, self.layout.cpu_offload)

    @property
    def device_need(self) -> Need:
        return Need(self.peak_bytes, self.run.usable_bytes)

    @property
    def host_need(self) -> Need:
        return Need(self.host_bytes_per_node, self.run.usable_host_bytes, OF_HOST)

    @property
    def need(self) -> Need:
        """The memory that decides: a node's own if only that is too small, else a device's."""
        return self.host_need if self.device_need.fits and not self.host_need.fits else self.device_need

    @property
    def fits(self) -> bool:
        return self.need.fits

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def tflops_per_device(self) -> float:
        """TFLOP/s by the model's FLOPs, with causal attention and without recomputation."""
        return self.tokens_per_second * self.run.flops_per_token(self.phase) / self.devices / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops_per_device / self.run.peak_tflops


def plan_layouts(
    run: RunToPlan,
    layouts: Sequence[tuple[Layout, int, int]],
    phase: FullPhase | None = None,
    simulate: bool = True,
) -> list[PlannedLayout]:
    """Plan each (layout, nodes, micro-batch). `simulate` plans pipelines by stages, not a formula.

    If Kielo was not measured on the machine, the range also holds a published engine's steps.
    """
    if not layouts:
        return []
    phase = phase or run.phase
    work = workload(run, [(layout, micro_batch, phase) for layout, _, micro_batch in layouts])
    seconds, memory = vars(step_seconds(work, run.efficiency)), memory_bytes(work).parts()
    last = is_last_fullest(work)
    hidden = hidden_data_seconds(work, run.efficiency, seconds["data_traffic"])
    published: list[PublishedEngine | None] = [None for _ in layouts]
    if not run.is_measured:
        published = published_beside(work, run.efficiency)
    each_pass, layers = passes(work, run.efficiency), work.layers_of_heaviest_rank
    found = []
    for index, (layout, nodes, size) in enumerate(layouts):
        parts, stages = {name: float(column[index]) for name, column in seconds.items()}, None
        devices, many = int(work.devices[index]), int(work.micro_batches[index])
        if simulate and layout.pipeline > 1:
            simulated = layout_pipeline(run.model, layout, each_pass[index], many, phase.sequence_length)
            parts, stages = with_simulation(parts, simulated, float(layers[index])), simulated.stages
        low, high = map(float, interval(np.array(sum(parts.values())), run.spread))
        if (beside := published[index]) is not None:
            low, high = low * min(1.0, beside.factor), high * max(1.0, beside.factor)
        sizes = {name: float(column[index]) for name, column in memory.items()}
        shape = run, layout, nodes, devices, phase, size, many
        others = float(hidden[index]), stages, bool(last[index]), beside
        found.append(PlannedLayout(*shape, parts, low, high, sizes, *others))
    return found


def workload(run: RunToPlan, shapes: Sequence[tuple[Layout, int, FullPhase]]) -> Workload:
    """Return the workload of each (layout, sequences of a micro-batch, phase)."""
    rows = []
    for layout, size, phase in shapes:
        number = shares_of(layout, size, phase).micro_batches
        step = StepSize(phase.sequence_length, size, number)
        rows.append(run.columns(layout, step, phase.trainable))
    return Workload.of(rows)


def shares_of(layout: Layout, micro_batch: int, phase: FullPhase) -> Shares:
    """Return how a layout's ranks divide the steps of `phase`."""
    sequences, ranks = phase.tokens_per_step // phase.sequence_length, layout.replicate * layout.shard
    number = micro_batches_needed(layout, math.ceil(sequences / ranks), micro_batch)
    return Shares(sequences, ranks, micro_batch, int(number))

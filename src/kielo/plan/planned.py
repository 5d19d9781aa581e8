"""A recipe on a machine, laid out in one way: seconds of a step by part, bytes by part, and what follows; no
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kielo.models.families import module
from kielo.plan.candidates import candidate_columns
from kielo.plan.clock import StageSeconds
from kielo.plan.efficiency import Efficiency, fitted
from kielo.plan.interval import interval
from kielo.plan.layout_name import layout_name
from kielo.plan.measured import read_machine
from kielo.plan.memory import memory_bytes, usable_bytes
from kielo.plan.pipeline_clock import pipeline, with_clock
from kielo.plan.precision import main_precision
from kielo.plan.step_time import step_seconds
from kielo.plan.traffic import data_seconds
from kielo.plan.workload import Workload
from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.cards import cluster as cluster_card
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase, full_phases
from kielo.recipe.sections import Layout, Model, Precision, Recipe
from kielo.resolve.fp8_check import without_fp8
from kielo.resolve.phases import ramp_steps
from kielo.resolve.resolve import complete_model, imagined_text


@dataclass(frozen=True)
class Job:
    """What is planned: a recipe with a complete model on a machine, and what that machine and Kielo reach.

    `precision` is what is planned for; `card`'s bf16 peak is that of it, or, for fp8, of what is not in fp8.
    `spread` is the interval's figures.
    """

    recipe: Recipe
    model: Model
    site: Cluster
    card: Accelerator
    efficiency: Efficiency
    spread: dict[str, float]
    precision: Precision

    @staticmethod
    def of(recipe: Recipe, model: Model, precision: Precision | None = None) -> "Job":
        """On the recipe's cluster, by its `machine` where it names one. precision: default, what most steps
        have. Raises KieloError where nothing tells how fast the devices are, and for FP8 on those that have
        none.
        """
        precision = precision or main_precision(recipe)
        site = cluster_card(recipe.cluster)
        if recipe.machine:
            machine = read_machine(Path(recipe.machine))
            card, efficiency, spread = machine.accelerator, machine.efficiency, machine.spread
            if card.device == "cpu" and machine.ranks != site.devices_per_node:
                raise KieloError(
                    f"{recipe.machine}: its runs shared the processor among {machine.ranks} ranks, and "
                    f"{site.name} has {site.devices_per_node} devices a node; what would work: a card of "
                    f"runs with --ranks {site.devices_per_node}"
                )
        else:
            card, (efficiency, spread) = accelerator_card(site.accelerator), fitted()
        complaint = without_fp8(card) if precision == "fp8" else None
        if complaint:
            raise KieloError(complaint)
        between = "bf16" if precision == "fp8" else precision
        peak = card.peak_tflops.get(between)
        if peak is None or card.memory_bandwidth_tb_per_second is None:
            raise KieloError(
                f"the card {card.name!r} has no {between} peak or no memory bandwidth, so no speed can be "
                "planned for it; what would work: a card of your own machine, by `kielo plan calibrate "
                "RUN/train/metrics.jsonl --to my_machine.toml`, and then --machine my_machine.toml"
            )
        card = card.model_copy(update={"peak_tflops": {**card.peak_tflops, "bf16": peak}})
        return Job(recipe, model, site, card, efficiency, spread, precision)

    @staticmethod
    def of_recipe(recipe: Recipe) -> "Job":
        """Before there is text or a tokenizer: the vocabulary is as large as the recipe asks."""
        complaints: list[str] = []
        model = complete_model(recipe, full_phases(recipe), imagined_text(recipe).vocabulary_size, complaints)
        if complaints:
            raise KieloError("; ".join(complaints))
        return Job.of(recipe, model)

    @cached_property
    def phases(self) -> tuple[FullPhase, ...]:
        return full_phases(self.recipe)

    @cached_property
    def phase(self) -> FullPhase:
        """The one with most tokens: layouts are ranked by it."""
        return max(self.phases, key=lambda phase: phase.tokens)

    @cached_property
    def sequences_of_steps(self) -> tuple[int, ...]:
        """How many each kind of step has: of every phase, and of a batch ramp."""
        found = {phase.tokens_per_step // phase.sequence_length for phase in self.phases}
        ramp, first = self.recipe.train.batch_ramp, self.phases[0]
        if ramp is not None:
            found |= {size // first.sequence_length for size, _ in ramp_steps(ramp, first.tokens_per_step)}
        return tuple(sorted(found))

    @cached_property
    def usable_bytes(self) -> float:
        """Of a device; where its card does not say, a node's memory is shared out."""
        if self.card.memory_bytes is None:
            return self.site.memory_gib_per_node * 2**30 / self.site.devices_per_node
        return float(usable_bytes(self.card.memory_bytes))

    @property
    def peak_tflops(self) -> float:
        """Of a device, in the precision that is planned for."""
        return self.card.peak_tflops["fp8" if self.precision == "fp8" else "bf16"]

    def columns(
        self, layout: Layout, sequence_length: int, micro_batch: int, micro_batches: int
    ) -> dict[str, Any]:
        """A row of `Workload.of` for the job laid out so."""
        train = self.recipe.train
        return candidate_columns(
            self.model, layout, self.card, self.site, sequence_length=sequence_length, micro_batch=micro_batch,
            micro_batches=micro_batches, precision=self.precision, fp8=train.fp8, optimiser_state=train.optimiser_state,
            loss_chunk_tokens=train.loss_chunk_tokens,
        )  # fmt: skip

    def flops_per_token(self, sequence_length: int) -> int:
        return module(self.model.model_type, "count").flops_per_token(self.model, sequence_length)


@dataclass(frozen=True)
class Planned:
    """One layout of a job on `nodes` nodes. `layout.shard` is a number, not 0.

    `seconds`: part → seconds of an optimiser step, as the fields of `StepSeconds`; they add up to
    `step_seconds`. `bytes`: part → bytes of the fullest device; they add up to `peak_bytes` (as torch's
    max_memory_reserved counts). `hidden_data_seconds`: of data-parallel traffic, what backward passes hide:
    it is in no part. `stages`: what each stage takes with a micro-batch, where the pipeline was simulated;
    else None.
    """

    job: Job
    layout: Layout
    nodes: int
    devices: int
    sequence_length: int
    micro_batch: int
    micro_batches: int
    tokens_per_step: int
    seconds: dict[str, float]
    low_seconds: float
    high_seconds: float
    bytes: dict[str, float]
    hidden_data_seconds: float = 0.0
    stages: StageSeconds | None = None

    @property
    def name(self) -> str:
        return layout_name(self.layout, self.micro_batch)

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.job.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs, causal attention, nothing for recomputation."""
        return self.tokens_per_second * self.job.flops_per_token(self.sequence_length) / self.devices / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops_per_device / self.job.peak_tflops


def plan_layouts(
    job: Job,
    layouts: Sequence[tuple[Layout, int, int]],
    phase: FullPhase | None = None,
    simulate: bool = True,
) -> list[Planned]:
    """Of (layout, nodes, sequences of a micro-batch) each, in the same order; what cannot run is the caller's
    to know.

    simulate: pipelines by their clock, stage by stage, in place of the closed form.
    """
    if not layouts:
        return []
    phase = phase or job.phase
    work = workload(job, [(layout, micro_batch, phase) for layout, _, micro_batch in layouts])
    seconds, memory = vars(step_seconds(work, job.efficiency)), memory_bytes(work).parts()
    once, each = data_seconds(work, job.efficiency.of(work))
    hidden = np.maximum(0.0, once + each * work.micro_batches - seconds["data_traffic"])
    found = []
    for index, (layout, nodes, size) in enumerate(layouts):
        parts, stages = {name: float(column[index]) for name, column in seconds.items()}, None
        if simulate and layout.pipeline > 1:
            one = work.take(np.array([index]))
            line = pipeline(job.model, layout, one, job.efficiency, phase.sequence_length)
            parts, stages = with_clock(parts, line, float(one.layers_of_heaviest_rank[0])), line.stages
        low, high = interval(np.array(sum(parts.values())), job.spread)
        found.append(
            Planned(
                job, layout, nodes, int(work.devices[index]), phase.sequence_length, size,
                int(work.micro_batches[index]), phase.tokens_per_step,
                parts, float(low), float(high), {name: float(column[index]) for name, column in memory.items()},
                float(hidden[index]), stages,
            )
        )  # fmt: skip
    return found


def workload(job: Job, shapes: Sequence[tuple[Layout, int, FullPhase]]) -> Workload:
    """Of (layout, sequences of a micro-batch, phase) each."""
    rows = []
    for layout, size, phase in shapes:
        sequences = phase.tokens_per_step // phase.sequence_length
        micro_batches = sequences // (layout.replicate * layout.shard * size)
        rows.append(job.columns(layout, phase.sequence_length, size, micro_batches))
    return Workload.of(rows)

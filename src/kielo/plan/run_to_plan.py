"""A run to plan: a recipe with a complete model on a machine; no torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kielo.models.families import module
from kielo.plan.calibrate import read_machine
from kielo.plan.efficiency import Efficiency, fitted
from kielo.plan.memory import usable_bytes
from kielo.plan.precision import main_precision
from kielo.plan.workload_row import workload_row
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
class RunToPlan:
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
    def of(recipe: Recipe, model: Model, precision: Precision | None = None) -> "RunToPlan":
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
        return RunToPlan(recipe, model, site, card, efficiency, spread, precision)

    @staticmethod
    def of_recipe(recipe: Recipe) -> "RunToPlan":
        """Before there is text or a tokenizer: the vocabulary is as large as the recipe asks."""
        complaints: list[str] = []
        model = complete_model(recipe, full_phases(recipe), imagined_text(recipe).vocabulary_size, complaints)
        if complaints:
            raise KieloError("; ".join(complaints))
        return RunToPlan.of(recipe, model)

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
        """A row of `Workload.of` for the run laid out so."""
        train = self.recipe.train
        return workload_row(
            self.model, layout, self.card, self.site, sequence_length=sequence_length, micro_batch=micro_batch,
            micro_batches=micro_batches, precision=self.precision, fp8=train.fp8, optimiser_state=train.optimiser_state,
            loss_chunk_tokens=train.loss_chunk_tokens,
        )  # fmt: skip

    def flops_per_token(self, sequence_length: int) -> int:
        return module(self.model.model_type, "count").flops_per_token(self.model, sequence_length)

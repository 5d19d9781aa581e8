"""A run to plan: a recipe with a complete model on a machine; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import TypeVar

import numpy as np

from kielo.plan.calibrate import read_machine
from kielo.plan.efficiency import Efficiency, fitted
from kielo.plan.workload import main_precision, workload_row
from kielo.recipe.cards import Accelerator, Cluster
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.cards import cluster as cluster_card
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase, full_phases
from kielo.recipe.sections import CompleteModel, Layout, Precision, Recipe
from kielo.resolve.memory import usable_bytes
from kielo.resolve.memory_row import StepSize, TrainOptions
from kielo.resolve.planned_phases import flops_per_token
from kielo.resolve.resolve import case_before_text
from kielo.resolve.rules import Case, Machine, device_has_fp8, refuse
from kielo.resolve.software import planned, usual_precision, with_precision
from kielo.resolve.state_bytes import host_bytes
from kielo.resolve.text import check_budget, with_budget_of_ready_tokens

Bytes = TypeVar("Bytes", float, np.ndarray)  # a number, or a column of them


@dataclass(frozen=True)
class RunToPlan:
    """A recipe with a complete model on a machine, and what that machine and Kielo reach."""

    recipe: Recipe
    model: CompleteModel
    site: Cluster
    card: Accelerator  # its bf16 peak is for `precision`, or for fp8 for products that are not in fp8
    efficiency: Efficiency
    spread: dict[str, float]  # figures of the prediction interval
    precision: Precision
    is_measured: bool = False  # the machine's card has constants from runs of Kielo

    @staticmethod
    def of(recipe: Recipe, model: CompleteModel, precision: Precision | None = None) -> "RunToPlan":
        """Return the run on the recipe's cluster, or by the card of its `machine`.

        `precision` defaults to the precision of most steps. Raise KieloError if no card has the devices'
        speed, or for FP8 on devices without FP8.
        """
        site = cluster_card(recipe.cluster)
        if recipe.machine:
            machine = read_machine(Path(recipe.machine))
            card, efficiency, spread = machine.accelerator, machine.efficiency, machine.spread
            if card.device == "cpu" and machine.ranks != site.devices_per_node:
                devices = site.devices_per_node
                raise KieloError(
                    f"{recipe.machine}: its runs shared the processor among {machine.ranks} ranks, and "
                    f"{site.name} has {devices} devices a node. Fix: a card of runs with --ranks {devices}"
                )
        else:
            card, (efficiency, spread) = accelerator_card(site.accelerator), fitted()
        # A processor's card has only the precision of its measured runs.
        has_amx = card.device == "cpu" and "fp32" not in card.peak_tflops
        recipe = with_precision(recipe, usual_precision(card.device, has_amx)[0])
        precision = precision or main_precision(recipe)
        if precision == "fp8":
            refuse(recipe, list(device_has_fp8(card)))
        between = "bf16" if precision == "fp8" else precision
        peak = card.peak_tflops.get(between)
        if peak is None or card.memory_bandwidth_tb_per_second is None:
            raise KieloError(
                f"the card {card.name!r} has no {between} peak or no memory bandwidth, so no speed can be "
                "planned for it. Fix: a card of your own machine, by `kielo plan calibrate "
                "RUN/train/metrics.jsonl --to my_machine.toml`, and then --machine my_machine.toml; or "
                "another --cluster, such as lumi_g"
            )
        card = card.model_copy(update={"peak_tflops": {**card.peak_tflops, "bf16": peak}})
        return RunToPlan(recipe, model, site, card, efficiency, spread, precision, bool(recipe.machine))

    @staticmethod
    def of_recipe(recipe: Recipe) -> "RunToPlan":
        """Return the run before there is text or a tokenizer, with the recipe's vocabulary size."""
        recipe = with_budget_of_ready_tokens(recipe)
        check_budget(recipe)
        return RunToPlan.of(recipe, case_before_text(recipe).model)

    @cached_property
    def phases(self) -> tuple[FullPhase, ...]:
        return full_phases(self.recipe)

    @cached_property
    def phase(self) -> FullPhase:
        """The phase with most tokens, by which layouts are ranked."""
        return max(self.phases, key=lambda phase: phase.tokens)

    @cached_property
    def sequences_of_steps(self) -> tuple[int, ...]:
        """Sequences of each phase's steps. A batch ramp's small steps run on any ranks."""
        return tuple(sorted({phase.tokens_per_step // phase.sequence_length for phase in self.phases}))

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes that a device can give; if its card has none, its share of the node's memory."""
        usable = usable_bytes(self.card)
        return self.usable_host_bytes / self.site.devices_per_node if usable is None else usable

    @property
    def usable_host_bytes(self) -> float:
        """Bytes of a node's own memory that a job may use."""
        return self.site.memory_gib_per_node * 2**30

    def host_bytes_per_node(self, parts: Mapping[str, Bytes], is_offloaded: bool) -> Bytes:
        """Compute the bytes in a node's own memory if all its ranks hold `parts` (of `MemoryBytes.parts`)."""
        whole: Bytes = reduce(add, parts.values())
        kinds = ("weights", "gradients", "optimiser")
        weights, gradients, optimiser = (parts.get(name, 0 * whole) for name in kinds)
        is_copied, on_cpu = self.recipe.checkpoint.memory_every_steps > 0, self.card.device == "cpu"
        copies = host_bytes(weights, gradients, optimiser, is_offloaded and not on_cpu, is_copied)
        return self.site.devices_per_node * (copies + whole if on_cpu else copies)

    @cached_property
    def case(self) -> Case:
        """The case by which rules judge layouts."""
        return Case.of(self.recipe, self.model, Machine(software=planned(self.site)))

    @property
    def peak_tflops(self) -> float:
        """The device's peak in the precision of the plan."""
        return self.card.peak_tflops["fp8" if self.precision == "fp8" else "bf16"]

    def columns(self, layout: Layout, step: StepSize, trainable: tuple[str, ...] = ()) -> dict[str, float]:
        """Return a row for `Workload.of`: the run in this layout, in a phase that trains these modules."""
        options = TrainOptions.of(
            self.precision, self.recipe.train, trainable, self.recipe.evaluate.every_steps > 0
        )
        return workload_row(self.model, layout, self.card, self.site, step, options)

    def flops_per_token(self, phase: FullPhase) -> int:
        return flops_per_token(self.model, phase.sequence_length, phase.trainable)

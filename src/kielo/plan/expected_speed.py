"""Expected speed of a resolved run: planned tokens a second, printed beside measured ones; no torch."""

from dataclasses import replace

import numpy as np

from kielo.plan.planned_layout import workload
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import step_seconds
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Resolved


def tokens_per_second(run: RunToPlan, resolved: Resolved) -> list[float]:
    """Computes tokens a second of each resolved phase, over all ranks, by the closed form.

    `resolved` must come from `run`'s recipe; the precision is the run's.
    """
    asked = {phase.number: phase for phase in run.phases}
    placement = resolved.placement
    shard = {"replicate": placement.layout.replicate, "shard": placement.layout.shard}
    layout = run.recipe.layout.model_copy(update=shard)
    work = workload(run, [
        (layout, placed.micro_batch_sequences,
         replace(asked[phase.number], sequence_length=phase.sequence_length,
                 tokens_per_step=phase.tokens_per_step))
        for phase, placed in zip(resolved.identity.phases, placement.phases)
    ])  # fmt: skip
    tokens = np.array([phase.tokens_per_step for phase in resolved.identity.phases], dtype=float)
    return [float(speed) for speed in tokens / step_seconds(work, run.efficiency).total]


def with_expectation(resolved: Resolved, recipe: Recipe) -> Resolved:
    """Returns `resolved` with the planned speed of each phase in the run's first precision.

    Returns it unchanged if no card says how fast its devices are, or if FP8 is only emulated.
    """
    precision = resolved.identity.train.precision
    if precision == "fp8" and resolved.identity.train.fp8.emulate:
        return resolved
    try:
        run = RunToPlan.of(recipe, resolved.identity.model, precision)
    except KieloError:
        if recipe.machine:
            raise
        return resolved
    placement = resolved.placement
    if placement.device != run.card.device or (placement.accelerator != run.card.name and not recipe.machine):
        return resolved
    phases = tuple(
        placed.model_copy(update={"planned_tokens_per_second": round(speed, 1)})
        for placed, speed in zip(placement.phases, tokens_per_second(run, resolved))
    )
    return resolved.model_copy(update={"placement": placement.model_copy(update={"phases": phases})})

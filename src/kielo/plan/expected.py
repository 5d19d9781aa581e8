"""What the planner expects of a resolved run: tokens a second in each phase, to be printed beside what is
measured; no torch.
"""

from dataclasses import replace

import numpy as np

from kielo.plan.planned import Job, workload
from kielo.plan.step_time import step_seconds
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Resolved


def tokens_per_second(job: Job, resolved: Resolved) -> list[float]:
    """Of each of the resolved phases, over all ranks, by the closed form, in the job's precision. `resolved`
    is of `job`'s recipe.
    """
    asked = {phase.number: phase for phase in job.phases}
    placement = resolved.placement
    work = workload(job, [
        (placement.layout, placed.micro_batch_sequences,
         replace(asked[phase.number], sequence_length=phase.sequence_length, tokens_per_step=phase.tokens_per_step))
        for phase, placed in zip(resolved.identity.phases, placement.phases)
    ])  # fmt: skip
    tokens = np.array([phase.tokens_per_step for phase in resolved.identity.phases], dtype=float)
    return [float(speed) for speed in tokens / step_seconds(work, job.efficiency).total]


def with_expectation(resolved: Resolved, recipe: Recipe) -> Resolved:
    """`resolved` with what is planned for each phase in the run's first precision; as it is, where no card
    tells how fast its devices are, and for FP8 that is only emulated.
    """
    precision = resolved.identity.train.precision
    if precision == "fp8" and resolved.identity.train.fp8.emulate:
        return resolved
    try:
        job = Job.of(recipe, resolved.identity.model, precision)
    except KieloError:
        if recipe.machine:
            raise
        return resolved
    placement = resolved.placement
    if placement.device != job.card.device or (placement.accelerator != job.card.name and not recipe.machine):
        return resolved
    phases = tuple(
        placed.model_copy(update={"planned_tokens_per_second": round(speed, 1)})
        for placed, speed in zip(placement.phases, tokens_per_second(job, resolved))
    )
    return resolved.model_copy(update={"placement": placement.model_copy(update={"phases": phases})})

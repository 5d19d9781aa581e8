"""The gain that `layout.tensor_overlap = "chunked"` would bring a planned layout, in words; no torch."""

from kielo.plan.overlap_seconds import BESIDE_COLLECTIVE
from kielo.plan.planned_layout import PlannedLayout, plan_layouts

_LEAST = 0.005  # of a step; less is not worth a sentence
ASSUMED = (
    f"by assumption: a product beside a collective keeps {BESIDE_COLLECTIVE:.0%} of its rate. It was not "
    "measured on a GPU"
)


def overlap_offer(planned: PlannedLayout) -> str | None:
    """Returns a sentence where collectives in chunks would make the steps of `planned` shorter, by plan."""
    layout = planned.layout
    if layout.tensor == 1 or layout.tensor_overlap != "none" or not layout.sequence_parallel:
        return None
    if planned.run.precision == "fp8":  # whose matrices gather at once
        return None
    chunked = layout.model_copy(update={"tensor_overlap": "chunked"})
    phase = next(
        one
        for one in planned.run.phases
        if (one.sequence_length, one.tokens_per_step) == (planned.sequence_length, planned.tokens_per_step)
    )
    (changed,) = plan_layouts(planned.run, [(chunked, planned.nodes, planned.micro_batch)], phase)
    saved = 1 - changed.step_seconds / planned.step_seconds
    if saved < _LEAST:
        return None
    return (
        f'{planned.name}: layout.tensor_overlap = "chunked" would take {saved:.1%} off a step, since its '
        f"collectives then run beside products ({ASSUMED})."
    )

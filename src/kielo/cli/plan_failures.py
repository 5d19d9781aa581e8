"""The output of `kielo plan --failures`: what failures cost, as a table and sentences."""

from collections.abc import Sequence

from kielo.cli.plan_tables import Table
from kielo.plan.cost import Cost
from kielo.plan.failures import Failures
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.amounts import format_seconds

_WORTH_A_WORD = 0.005  # of the time, that another interval of saves would win


def failure_rows(listed: Sequence[PlannedLayout], costs: Sequence[Cost]) -> Table:
    """Returns rows that fit a line of 80 columns, of the fastest layout on each number of nodes."""
    titles = ("nodes", "failure in", "down", "save every", "effective", "as it saves", "spares")
    rows = [
        (
            planned.nodes, format_seconds(found.mean_seconds), f"{found.down_seconds:.0f} s",
            f"{found.best_steps:,} steps", f"{found.best_share:.1%}", f"{found.effective_share:.1%}",
            found.spare_nodes,
        )
        for planned, found in _first_of_each(listed, costs)
    ]  # fmt: skip
    return titles, rows


def failure_notes(run: RunToPlan, listed: Sequence[PlannedLayout], costs: Sequence[Cost]) -> list[str]:
    """Returns sentences: the rate, the parts of a failure's cost, and what the recipe's saves should be."""
    planned, found = _first_of_each(listed, costs)[-1]
    its_cost = next(cost for cost in costs if cost.failures is found)
    devices, every = f"{planned.devices:,} devices", run.recipe.checkpoint.every_steps
    parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in found.down.items() if seconds >= 0.5)
    newest = its_cost.checkpoint_seconds
    lines = [
        f"Failures: {found.rate.per_1000_device_days:.3g} of a device in 1,000 days ({found.rate.source}). "
        "effective: time spent on steps that are kept, with a save so often; as it saves: as the recipe "
        f"does. spares: nodes with which 95 % of jobs of {format_seconds(found.job_seconds)} can replace all "
        "that failed.",
        f"On {devices} training goes on {found.down_seconds:.0f} s after a failure, "
        f"{found.frozen_seconds:.0f} s where a node or process only falls silent, "
        f"{found.stuck_seconds:.0f} s where a rank is stuck and alive, in the same job. In seconds: {parts}. "
        f"Steps of {found.own_seconds / 2 + newest:,.0f} s are lost, half of the time between two saves and "
        f"the {newest:.0f} s that writing takes.",
        f"A save stops training for {its_cost.stop_seconds:.1f} s, so the best time between two is "
        f"{found.young_seconds:,.0f} s by Young and {found.daly_seconds:,.0f} s by Daly.",
    ]
    copied = run.recipe.checkpoint.memory_every_steps
    if copied:
        lines.append(
            f"checkpoint.memory_every_steps = {copied}: a failure of one node costs the steps since the last "
            f"copy in memory, {copied * planned.step_seconds / 2:,.0f} s in the mean besides writing; one of "
            "several nodes costs those since the last save."
        )
    if found.best_share - found.effective_share > _WORTH_A_WORD:
        lines.append(
            f"checkpoint.every_steps = {every} is a save every {format_seconds(found.own_seconds)}, with "
            f"{found.effective_share:.1%} of the time effective; what would work: checkpoint.every_steps = "
            f"{found.best_steps}, with {found.best_share:.1%}."
        )
    return lines


def _first_of_each(
    listed: Sequence[PlannedLayout], costs: Sequence[Cost]
) -> list[tuple[PlannedLayout, Failures]]:
    """Returns the fastest layout on each number of nodes, and what failures cost it."""
    first: dict[int, tuple[PlannedLayout, Failures]] = {}
    for planned, cost in zip(listed, costs):
        if cost.failures is not None:
            first.setdefault(planned.nodes, (planned, cost.failures))
    return list(first.values())

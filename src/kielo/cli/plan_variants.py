"""`kielo plan` of a recipe of several variants: each variant's own layout and cost, and the sum."""

import argparse
from collections.abc import Sequence
from typing import Any

from kielo.cli import plan_tables as tables
from kielo.cli.run_languages import chosen_in
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.plan.choose_layout import own
from kielo.plan.cost import cost
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.errors import KieloError


def plan_variants(options: argparse.Namespace, runs: dict[str, tuple[RunToPlan, Sequence[int]]]) -> int:
    """Print the cost of each run (choice → run, numbers of nodes) on the first of its nodes, and of all."""
    for flag in ("plot", "failures", "top"):
        if getattr(options, flag) is not None:
            raise KieloError(f"--{flag}: is for one of {len(runs)} variants. Fix: --set {next(iter(runs))}")
    planned: dict[str, tables.Costed] = {}
    refused: dict[str, str] = {}
    for choice, (run, nodes) in runs.items():
        found = own(run, nodes[0])
        if isinstance(found, PlannedLayout):
            planned[choice] = found, cost(found, options.wall_hours)
        else:
            refused[choice] = found
    hours = sum(its_cost.device_hours for _, its_cost in planned.values())
    if options.json:
        content: dict[str, Any] = {chosen_in(one): tables.planned_json(*planned[one]) for one in planned}
        print_json(
            {"variants": content, "refused": refused, "device_hours": hours, "billed_hours": _billed(planned)}
        )
        return 0
    if planned:
        rows = [
            (chosen_in(choice), *row)
            for choice, costed in planned.items()
            for row in tables.best_rows(costed[0].run, [], [costed])[1]
        ]
        first = next(iter(planned.values()))
        print_table(("variant", *tables.best_rows(first[0].run, [], [first])[0]), rows)
        billed, site = _billed(planned), first[0].run.site
        unit = f" ({billed:,.0f} {site.billing_unit})" if billed else ""
        print_text(f"all {len(planned)} together: {hours:,.0f} device-hours{unit}")
    for choice, reason in refused.items():
        print_text(f"{chosen_in(choice)}: {reason}")
    print_text(f"More: kielo plan {options.recipe} --set {next(iter(runs))}")
    return 0


def _billed(planned: dict[str, tables.Costed]) -> float | None:
    billed = [tables.billed_hours(of.run, its_cost.device_hours) for of, its_cost in planned.values()]
    return None if None in billed else sum(one or 0 for one in billed)

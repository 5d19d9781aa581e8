"""`kielo plan` of a recipe of several variants: each variant's own layout and cost, and the sum."""

import argparse
from collections.abc import Sequence
from typing import Any

from kielo.cli import plan_tables as tables
from kielo.cli.run_languages import chosen_in
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.plan.choose_layout import own
from kielo.plan.cost import cost
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.errors import KieloError


def refuse_flags(options: argparse.Namespace, flags: Sequence[str], why: str, fix: str) -> None:
    """Refuse each of the flags that a person gives."""
    for flag in flags:
        if getattr(options, flag) not in (None, False):
            raise KieloError(f"--{flag}: {why}. Fix: {fix}")


def plan_variants(options: argparse.Namespace, runs: dict[str, tuple[RunToPlan, Sequence[int]]]) -> int:
    """Print the cost of each run (choice → run, numbers of nodes) on the first of its nodes, and of all.

    A run that cannot run or does not fit is in no sum.
    """
    first_choice = next(iter(runs))
    of_one = f"one of {len(runs)} variants"
    refuse_flags(
        options, ("plot", "failures", "top", "wide", "all"), f"is for {of_one}", f"--set {first_choice}"
    )
    if options.nodes is not None and any(len(nodes) > 1 for _, nodes in runs.values()):
        raise KieloError(
            f"--nodes {options.nodes}: several numbers are for {of_one}. Fix: --set {first_choice}"
        )
    planned: dict[str, tables.Costed] = {}
    refused: dict[str, str] = {}
    for choice, (run, nodes) in runs.items():
        found = own(run, nodes[0])
        if isinstance(found, str):
            refused[chosen_in(choice)] = found
        elif not found.fits:
            (refused[chosen_in(choice)],) = tables.unfitting({nodes[0]: found})
        else:
            planned[chosen_in(choice)] = found, cost(found, options.wall_hours)
    hours = sum(its_cost.device_hours for _, its_cost in planned.values())
    safe = sum(of.safe_share * its_cost.device_hours for of, its_cost in planned.values())
    billed = _billed(planned)
    if options.json:
        content: dict[str, Any] = {
            "variants": {name: tables.planned_json(*costed) for name, costed in planned.items()},
            "refused": refused,
        }
        sums = {"safe_device_hours": safe, "device_hours": hours, "billed_hours": billed}
        print_json(content | sums)
        return 0
    if planned:
        first = next(iter(planned.values()))[0].run
        rows = [
            (name, *row)
            for name, costed in planned.items()
            for row in tables.best_rows(costed[0].run, [costed], [], is_safe=True)[1]
        ]
        print_table(("variant", *tables.best_rows(first, [], [], is_safe=True)[0]), rows)
        told = tables.safe_and_planned(safe, hours, billed, first.site.billing_unit)
        print_text(f"all {len(planned)} together{' that fit' * bool(refused)}: {told}")
    if refused:
        print_text(f"left out of the sum: {', '.join(refused)}")
    for name, reason in refused.items():
        print_text(f"{name}: {reason}")
    print_text(f"More: kielo plan {options.recipe} --set {first_choice}")
    return 0


def _billed(planned: dict[str, tables.Costed]) -> float | None:
    billed = [tables.billed_hours(of.run, its_cost.device_hours) for of, its_cost in planned.values()]
    return None if None in billed else sum(one or 0 for one in billed)

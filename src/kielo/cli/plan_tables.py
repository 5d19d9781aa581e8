"""The output of `kielo plan`: found layouts → rows for people and values for machines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from kielo.cli.terminal import flat
from kielo.plan.compare import overlap_offer, verdict
from kielo.plan.cost import START_SECONDS, Cost, with_layout
from kielo.plan.part_names import SECONDS, count_text
from kielo.plan.planned_layout import SHARE, PlannedLayout
from kielo.plan.remedies import in_words
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Choice, Found
from kielo.recipe.without_effect import layout_in_force
from kielo.resolve.overview import overview_of_phases
from kielo.resolve.resolved import Resolved

Table = tuple[Sequence[str], list[tuple[Any, ...]]]
_GIGA = 1e9
_NAME_COLUMNS = 24  # of a layout, beside six columns of figures in a line of 80
_UNEVEN_NAMED = 3  # layouts whose ranks have uneven numbers of sequences
_NAMES_IN_JSON = 3  # of refused layouts for a reason, unless all are asked for


def facts(run: RunToPlan, nodes: Sequence[int], found: Found) -> list[tuple[str, str]]:
    """Returns (name, value) of the run and the machine that layouts are ranked for."""
    rows = overview_of_phases(run.model, run.phases).rows()
    of_phase = f", ranked by phase {run.phase.number}" if len(run.phases) > 1 else ""
    numbers = ", ".join(f"{number:,}" for number in nodes)
    return [
        ("recipe", run.recipe.name),
        *([("about", run.recipe.description)] if run.recipe.description else []),
        *rows,
        (
            "machine",
            f"{run.site.name}, {numbers} nodes of {count_text(run.site.devices_per_node, 'device')} "
            f"({run.card.name}), {run.usable_bytes / _GIGA:.1f} GB of each usable",
        ),
        ("layouts", f"{found.looked_at:,} looked at, in {run.precision}{of_phase}"),
    ]


def best_rows(
    run: RunToPlan, listed: Sequence[tuple[PlannedLayout, Cost]], own: tuple[PlannedLayout, Cost] | None
) -> Table:
    """Returns rows that fit a line of 80 columns: the fastest layouts, and the recipe's own, marked by *."""
    unit = run.site.billing_unit
    titles = ("nodes", "tokens/s", "GB", "days", "device-hours", *([unit] if unit else []), "layout")
    rows = []
    for planned, its_cost in [*listed, *([own] if own else [])]:
        is_own = own is not None and planned.name == own[0].name
        hours = [its_cost.device_hours, billed_hours(run, its_cost.device_hours)]
        rows.append(
            (
                planned.nodes, f"{planned.tokens_per_second:,.0f}", f"{planned.peak_bytes / _GIGA:.1f}",
                f"{its_cost.days:,.1f}", *(f"{number:,.0f}" for number in hours if number is not None),
                _broken(planned.name + (" *" if is_own else "")),
            )
        )  # fmt: skip
    return titles, list(dict.fromkeys(rows))  # the recipe's own layout may be among the fastest


def _broken(name: str) -> str:
    """Breaks the name of a layout before a term, so that it fits its column."""
    return "\n".join(wrap(name.replace("-", "- "), _NAME_COLUMNS)).replace("- ", "-")


def billed_hours(run: RunToPlan, device_hours: float) -> float | None:
    """Returns what the site bills for `device_hours`, in its billing unit; None where no card says it."""
    per_node_hour = run.site.billed_per_node_hour
    return None if per_node_hour is None else device_hours / run.site.devices_per_node * per_node_hour


def ranking_rows(listed: Sequence[PlannedLayout], costs: Sequence[Cost]) -> Table:
    titles = (
        "nodes", "layout", "tokens/s", "s a step", f"{SHARE:.0%} interval", "TFLOP/s a device", "MFU",
        "GB a device", "bubble", "device hours", "days", "jobs", "checkpoint",
    )  # fmt: skip
    rows = [
        (
            planned.nodes, planned.name, f"{planned.tokens_per_second:,.0f}", f"{planned.step_seconds:.3g}",
            f"{planned.low_seconds:.3g}–{planned.high_seconds:.3g}", f"{planned.tflops_per_device:.1f}",
            f"{planned.mfu:.1%}", f"{planned.peak_bytes / _GIGA:.1f}",
            f"{planned.seconds['bubble'] / planned.step_seconds:.1%}",
            f"{cost.device_hours:,.0f}", f"{cost.days:,.1f}", cost.jobs,
            f"{cost.checkpoint_bytes / _GIGA:,.0f} GB in {cost.checkpoint_seconds:.0f} s",
        )
        for planned, cost in zip(listed, costs)
    ]  # fmt: skip
    return titles, rows


def part_rows(listed: Sequence[PlannedLayout]) -> Table:
    """Seconds of a step by part; parts that no layout has are left out."""
    parts = [part for part in listed[0].seconds if any(planned.seconds[part] >= 5e-7 for planned in listed)]
    rows = [
        (
            planned.nodes,
            planned.name,
            *(f"{planned.seconds[part]:.3g}" for part in parts),
            f"{planned.hidden_data_seconds:.3g}",
        )
        for planned in listed
    ]
    return ("nodes", "layout", *(SECONDS.get(part, part) for part in parts), "data traffic hidden"), rows


def refusal_rows(found: Found, is_all: bool) -> Table:
    """Returns why layouts are not listed: reasons with a count and an example, or every layout by name."""
    rows: list[tuple[Any, ...]] = []
    for nodes, reasons in {**{"any": found.impossible}, **found.refused}.items():
        for why, layouts in sorted(reasons.items(), key=lambda item: -len(item[1])):
            rows += (
                [(nodes, 1, name(one), why) for one in layouts]
                if is_all
                else [(nodes, len(layouts), name(layouts[0]), why)]
            )
    return ("nodes", "layouts", "not listed" if is_all else "not listed, for example", "why not"), rows


def name(choice: Choice) -> str:
    """Returns the layout's name; the axes alone where no number of nodes makes it possible."""
    layout = choice.layout
    if layout.shard * layout.replicate > 1:
        return choice.name
    axes = {"tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    return "-".join(f"{axis}{ranks}" for axis, ranks in axes.items() if ranks > 1) or choice.name


def notes(
    run: RunToPlan,
    listed: Sequence[PlannedLayout],
    costs: Sequence[Cost],
    own: Mapping[int, PlannedLayout | str],
    found: Found,
) -> list[str]:
    """Returns sentences: the rank of the recipe's own layout, and the assumptions behind the figures."""
    lines = []
    for nodes, planned in own.items():
        if isinstance(planned, str):
            lines.append(f"{nodes} nodes, the recipe's own layout: {planned}")
            continue
        best = found.ranked[nodes][0] if found.ranked[nodes] else None
        behind = (
            f", {1 - planned.tokens_per_second / best.tokens_per_second:.0%} slower than the best"
            if best and planned.tokens_per_second < best.tokens_per_second
            else ""
        )
        need = planned.need
        gb = f"{need.bytes / _GIGA:.1f} of {need.usable / _GIGA:.1f} GB{need.of_host}"
        fits = f"{gb}{behind}" if planned.fits else f"does not fit, {gb}"
        lines.append(
            f"{nodes} nodes, the recipe's own layout: {planned.name}, {planned.tokens_per_second:,.0f} "
            f"tokens/s, {fits}"
        )
    first = listed[0]
    source = f" ({run.card.memory_source})" if run.card.memory_source else ""
    wall = f"jobs of at most {run.site.max_wall_hours:g} hours, " if run.site.max_wall_hours else ""
    lines.append(
        f"{run.usable_bytes / _GIGA:.1f} GB a device are usable{source}. '{first.name}' takes "
        f"{first.host_bytes_per_node / _GIGA:.1f} of {run.usable_host_bytes / _GIGA:.1f} GB of host memory a "
        "node. Hours are of "
        f"{wall}{START_SECONDS / 60:.0f} minutes to start each, a save every "
        f"{run.recipe.checkpoint.every_steps} steps and held-out text; no queue"
        f"{'' if costs[0].failures else ', no failures'}. MFU is of "
        f"model FLOPs at {run.peak_tflops:g} TFLOP/s. `kielo plan explain` says why '{first.name}' is so "
        "fast; `kielo rehearse` measures the bytes."
    )
    lines += _unfitting(own) + _empty(listed, own) + _overlap(listed) + _agreement(run, own)
    return lines


def short_notes(
    run: RunToPlan, listed: Sequence[PlannedLayout], own: Mapping[int, PlannedLayout | str], explain: str
) -> list[str]:
    """Returns sentences: how the recipe's own layout differs from the fastest one, and what to ask next.

    explain: what a person types to explain a layout, with {layout} for its name.
    """
    lines, slower = [], []
    for nodes, planned in own.items():
        best = next((each for each in listed if each.nodes == nodes), None)
        on = f" on {count_text(nodes, 'node')}" if len(own) > 1 else ""
        if best is None:
            lines.append(f"No layout fits{on}.")
        elif isinstance(planned, str):
            lines.append(f"The recipe's own layout cannot run{on}: {planned}")
        elif planned.name == best.name:
            mark = " (*)" if len(own) == 1 else ""
            lines.append(f"The recipe's own layout{mark} is the fastest{on}.")
        elif len(own) == 1:
            lines.append(f"* the recipe's own layout. {verdict([best, planned])}")
        elif not planned.fits:
            lines.append(f"The recipe's own layout does not fit{on}.")
        elif planned.tokens_per_second > best.tokens_per_second:
            lines.append(f"The recipe's own layout is faster than those that were looked at{on}.")
        else:
            slower.append(f"{1 - planned.tokens_per_second / best.tokens_per_second:.0%}{on}")
    if slower:
        lines.append(f"The recipe's own layout is slower than the fastest by {', '.join(slower)}.")
    lines += _unfitting(own) + _empty(listed, own) + _overlap(listed) + _agreement(run, own)
    name = listed[0].name
    lines.append(
        f"More: --wide; `{explain.format(layout=name)} --nodes {listed[0].nodes}` explains a layout and "
        "prints it for the recipe."
    )
    return lines


def of_all_languages(codes: Sequence[str], planned: Sequence[tuple[PlannedLayout, Cost]]) -> dict[str, Any]:
    """Returns the cost of a run for each language, on each of the layouts that were planned for the first."""
    layouts = [
        {
            "name": one.name, "nodes": one.nodes, "hours_each": 24 * its_cost.days,
            "days_in_a_row": len(codes) * its_cost.days,
            "device_hours": len(codes) * its_cost.device_hours,
            "billed_hours": billed_hours(one.run, len(codes) * its_cost.device_hours),
        }
        for one, its_cost in planned
    ]  # fmt: skip
    distinct = {(one["nodes"], one["name"]): one for one in layouts}  # the recipe's own may be the fastest
    return {"codes": list(codes), "planned": codes[0], "layouts": list(distinct.values())}


def languages_rows(run: RunToPlan, of_all: Mapping[str, Any]) -> Table:
    """Returns what `of_all_languages` found as rows, one for each layout."""
    unit = run.site.billing_unit
    titles = (
        "nodes", "hours each", "days in a row", "device-hours", *([unit] if unit else []), "layout",
    )  # fmt: skip
    rows = []
    for one in of_all["layouts"]:
        hours = [number for number in (one["device_hours"], one["billed_hours"]) if number is not None]
        rows.append(
            (
                one["nodes"], f"{one['hours_each']:,.1f}", f"{one['days_in_a_row']:,.1f}",
                *(f"{number:,.0f}" for number in hours), _broken(one["name"]),
            )
        )  # fmt: skip
    return titles, rows


def _overlap(listed: Sequence[PlannedLayout]) -> list[str]:
    """Returns what overlapping the tensor axis would bring the first layout that has one."""
    first = next((planned for planned in listed if planned.layout.tensor > 1), None)
    offer = overlap_offer(first) if first else None
    return [offer] if offer else []


def _empty(listed: Sequence[PlannedLayout], own: Mapping[int, PlannedLayout | str]) -> list[str]:
    """Returns a sentence for each uneven way to share out a step, with a layout that has it."""
    said: dict[str, PlannedLayout] = {}
    for planned in [*own.values(), *listed]:
        if isinstance(planned, PlannedLayout) and planned.shares.empty_share:
            said.setdefault(str(planned.shares), planned)
    return [
        f"{planned.name} on {count_text(planned.nodes, 'node')}: {sentence}; its speed counts them."
        for sentence, planned in list(said.items())[:_UNEVEN_NAMED]
    ]


def _unfitting(own: Mapping[int, PlannedLayout | str]) -> list[str]:
    """Returns where the recipe's own layout does not fit, by the rank that needs most, and what would."""
    return [
        f"On {count_text(nodes, 'node')} the recipe's own layout needs {planned.need.bytes / _GIGA:.1f} GB"
        f"{planned.need.of_host or ' on ' + planned.fullest}, of {planned.need.usable / _GIGA:.1f} usable; "
        f"{in_words(planned)}."
        for nodes, planned in own.items()
        if isinstance(planned, PlannedLayout) and not planned.fits
    ]


def _agreement(run: RunToPlan, own: Mapping[int, PlannedLayout | str]) -> list[str]:
    most = run.site.max_nodes_per_job
    if most is None or max(own) <= most:
        return []
    return [
        f"{run.site.name} lets a job have {most} nodes in its usual queue; more need an agreement with the "
        "site."
    ]


def planned_json(planned: PlannedLayout, cost: Cost) -> dict[str, Any]:
    billed = billed_hours(planned.run, cost.device_hours)
    failures = None if cost.failures is None else asdict(cost.failures)
    return {
        "name": planned.name, "nodes": planned.nodes, "devices": planned.devices,
        "layout": planned.layout.model_dump(mode="json"), "micro_batch_sequences": planned.micro_batch,
        "micro_batches_per_step": planned.micro_batches, "sequence_length": planned.sequence_length,
        "tokens_per_step": planned.tokens_per_step, "fits": planned.fits, "bytes": planned.bytes,
        "peak_bytes": planned.peak_bytes, "usable_bytes": planned.run.usable_bytes,
        "host_bytes_per_node": planned.host_bytes_per_node,
        "usable_host_bytes_per_node": planned.run.usable_host_bytes,
        "seconds": planned.seconds, "hidden_data_seconds": planned.hidden_data_seconds,
        "step_seconds": planned.step_seconds,
        "interval_seconds": [planned.low_seconds, planned.high_seconds],
        "tokens_per_second": planned.tokens_per_second, "tflops_per_device": planned.tflops_per_device,
        "mfu": planned.mfu, 
        "cost": vars(cost) | {"days": cost.days, "billed_hours": billed, "failures": failures},
    }  # fmt: skip


def plan_json(
    run: RunToPlan,
    found: Found,
    listed: Sequence[PlannedLayout],
    costs: Sequence[Cost],
    own: Mapping[int, PlannedLayout | str],
    is_all: bool,
) -> dict[str, Any]:
    def reasons(of: Mapping[str, Sequence[Choice]]) -> list[dict[str, Any]]:
        most = None if is_all else _NAMES_IN_JSON
        return [
            {"why": why, "layouts": len(some), "names": [name(one) for one in some[:most]]}
            for why, some in of.items()
        ]

    return {
        "recipe": run.recipe.name, "cluster": run.site.name, "looked_at": found.looked_at,
        "run": overview_of_phases(run.model, run.phases).figures(),
        "billing_unit": run.site.billing_unit or None,
        "layouts": [planned_json(planned, cost) for planned, cost in zip(listed, costs)],
        "own": {nodes: each if isinstance(each, str) else _own_json(each) for nodes, each in own.items()},
        "not_listed": {"any": reasons(found.impossible)}
        | {nodes: reasons(of) for nodes, of in found.refused.items()},
    }  # fmt: skip


def _own_json(planned: PlannedLayout) -> dict[str, Any]:
    return {
        key: getattr(planned, key)
        for key in ("name", "tokens_per_second", "step_seconds", "peak_bytes", "fits")
    }


def layout_toml(planned: PlannedLayout) -> str:
    """Returns the lines of a recipe that choose this layout."""
    chosen = layout_in_force(with_layout(planned.run.recipe, planned))
    lines = [f"{key} = {_toml(value)}" for key, value in chosen.items() if key != "shard"]
    return "\n".join(["[layout]", *lines, "", "[train]", f"micro_batch_sequences = {planned.micro_batch}"])


def _toml(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def identity_and_placement(resolved: Resolved) -> list[Table]:
    """Returns tables of every number of a resolved run: identity, placement, phases and learning rates."""
    tables: list[Table] = []
    for title, part in (("identity", resolved.identity), ("placement", resolved.placement)):
        values = part.model_dump(mode="json", exclude={"phases", "learning_rates"})
        tables.append(
            ((title, "value"), [(key, json.dumps(value, ensure_ascii=False)) for key, value in flat(values)])
        )
    phases = [
        (phase.number, f"{phase.first_step}–{phase.last_step}", phase.tokens_per_step, phase.sequence_length,
         f"{placed.micro_batches_per_step} × {placed.micro_batch_sequences}",
         ", ".join(f"{name} {weight:g}" for name, weight in phase.mixture.items()))
        for phase, placed in zip(resolved.identity.phases, resolved.placement.phases)
    ]  # fmt: skip
    tables.append(
        (("phase", "steps", "tokens a step", "sequence", "micro-batches × sequences", "mixture"), phases)
    )
    rates = [
        (f"{rate.first_token:,}", f"{rate.tokens:,}", rate.schedule, f"{rate.peak:g}", f"{rate.final:g}",
         f"{rate.warmup_tokens:,}", f"{rate.decay_tokens:,}")
        for rate in resolved.identity.learning_rates
    ]  # fmt: skip
    tables.append(
        (("learning rate after token", "tokens", "schedule", "peak", "final", "warm-up", "decay"), rates)
    )
    return tables

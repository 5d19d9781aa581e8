"""The output of `kielo plan`: found layouts → rows for people and values for machines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from kielo.cli.terminal import flat
from kielo.plan.batch_sizes import BatchSize, Law
from kielo.plan.compare import SECONDS, count_text, gb_text, overlap_offer, verdict
from kielo.plan.cost import START_SECONDS, Cost, with_layout
from kielo.plan.cost import cost as cost_of
from kielo.plan.failures import Failures
from kielo.plan.planned_layout import SHARE, PlannedLayout
from kielo.plan.remedies import in_words
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Choice, Found
from kielo.recipe.amounts import format_seconds
from kielo.recipe.without_effect import layout_in_force
from kielo.resolve.overview import overview_of_phases
from kielo.resolve.resolved import Resolved

Table = tuple[Sequence[str], list[tuple[Any, ...]]]
Costed = tuple[PlannedLayout, Cost]
_NAME_COLUMNS = 24  # of a layout's name, beside six columns of figures
_UNEVEN_NAMED = 3  # layouts with uneven numbers of sequences a rank
_NAMES_IN_JSON = 3  # of refused layouts for a reason, without --all
_LEAST_SECONDS = 5e-7  # of a part in the table
_SAFE = "safe hours"  # of devices
_WORTH_A_WORD = 0.005  # share of the time that another interval of saves gains


def facts(run: RunToPlan, nodes: Sequence[int], found: Found) -> list[tuple[str, str]]:
    """Return (name, value) of the run and the machine that layouts are ranked for."""
    of_phase = f", ranked by phase {run.phase.number}" if len(run.phases) > 1 else ""
    numbers = ", ".join(f"{number:,}" for number in nodes)
    return [
        ("recipe", run.recipe.name),
        *([("about", run.recipe.description)] if run.recipe.description else []),
        *overview_of_phases(run.model, run.phases).rows(),
        (
            "machine",
            f"{run.site.name}, {numbers} nodes of {count_text(run.site.devices_per_node, 'device')} "
            f"({run.card.name}), {gb_text(run.usable_bytes)} GB of each usable",
        ),
        ("layouts", f"{found.looked_at:,} looked at, in {run.precision}{of_phase}"),
    ]


def hours_rows(run: RunToPlan, listed: Sequence[Costed]) -> Table:
    """Return the hours of the fastest layout on each number of nodes, the safe ones first."""
    rows: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    for planned, cost in listed:
        if planned.nodes in seen:
            continue
        seen.add(planned.nodes)
        hours = {"device-hours": cost.device_hours}
        if (billed := billed_hours(run, cost.device_hours)) is not None:
            hours[run.site.billing_unit] = billed
        low, high = planned.low_seconds / planned.step_seconds, planned.high_seconds / planned.step_seconds
        rows += [
            (planned.nodes, unit, f"{each * planned.safe_share:,.0f}", f"{each:,.0f}",
             f"{each * low:,.0f} to {each * high:,.0f}")
            for unit, each in hours.items()
        ]  # fmt: skip
    return ("nodes", "unit", "safe", "planned", f"{SHARE:.0%} of runs"), rows


def engine_note(run: RunToPlan, first: PlannedLayout) -> str:
    """Return the engine that the safe hours are of, or the machine's measurement."""
    if run.is_measured:
        return f"Hours by {run.recipe.machine}, measured with Kielo on {run.card.name}."
    said = f"Kielo was not measured on {run.card.name}."
    if first.published is not None:
        way = f" ({first.published.way})" if first.published.way else ""
        said += (
            f" Safe hours are of the same layout by {first.published.name}, as in its published runs on such "
            f"devices{way}. The range holds both."
        )
    return f"{said} Fix: `kielo plan calibrate` with your own runs, which narrows it."


def best_rows(
    run: RunToPlan, listed: Sequence[Costed], own: Sequence[Costed], is_safe: bool = False
) -> Table:
    """Return rows of 80 columns: the fastest layouts, and the recipe's own layout, marked by *.

    is_safe: with a column of the safe device-hours, which `hours_rows` has too.
    """
    titles = ("nodes", "tokens/s", "GB", "days", *[_SAFE] * is_safe, *_hour_titles(run), "layout")
    rows = [
        (
            planned.nodes,
            f"{planned.tokens_per_second:,.0f}",
            gb_text(planned.peak_bytes),
            f"{cost.days:,.1f}",
            *[f"{cost.device_hours * planned.safe_share:,.0f}"] * is_safe,
            *_hours(run, cost.device_hours),
            _broken(_marked(planned, own)),
        )
        for planned, cost in [*listed, *own]
    ]
    return titles, list(dict.fromkeys(rows))  # the recipe's own layout may be among the fastest


def batch_rows(run: RunToPlan, nodes: int, found: Sequence[BatchSize], both: Sequence[Law]) -> Table:
    """Return a row for each number of tokens a step. Days: to the same loss, by each law."""
    authors = [law.name.split()[0] for law in both]
    more = *(f"tokens, {name}" for name in authors), *(f"days, {name}" for name in authors)
    titles = ("tokens a step", "layout", "tokens/s", "speed", *more)
    rows: list[tuple[Any, ...]] = []
    for one in found:
        shares = [f"{share - 1:+.0%}" for share in one.tokens]
        mark = " *" if one.tokens_per_step == run.phase.tokens_per_step else ""
        head = f"{one.tokens_per_step:,}{mark}"
        if one.planned is None:
            rows.append((head, f"none on {nodes} nodes", "", "", *shares, "", ""))
            continue
        days = cost_of(one.planned).days
        speed = f"{one.planned.tokens_per_second:,.0f}", f"{one.speed - 1:+.0%}"
        to_same_loss = [f"{days * share:,.1f}" for share in one.tokens]
        rows.append((head, one.planned.name, *speed, *shares, *to_same_loss))
    return titles, rows


def layout_rows(listed: Sequence[Costed], own: Sequence[Costed], found: Found, is_all: bool) -> Table:
    """Return every figure of the layouts, seconds by part, and the other layouts with the reason.

    is_all: all of the other layouts, else one layout for each reason, with their number.
    """
    several = list({(each[0].nodes, each[0].name): each for each in [*listed, *own]}.values())
    parts = [
        part for part in SECONDS if any(one.seconds.get(part, 0) >= _LEAST_SECONDS for one, _ in several)
    ]
    titles = (
        *("nodes", "layout", "tokens/s", "s a step", f"{SHARE:.0%} interval", "TFLOP/s a device", "MFU"),
        *("GB a device", "device hours", "days", "jobs", "checkpoint"),
        *(f"{SECONDS[part]}, s" for part in parts),
        *("data traffic hidden, s", "why not"),
    )
    rows: list[tuple[Any, ...]] = [
        (
            planned.nodes,
            _marked(planned, own),
            f"{planned.tokens_per_second:,.0f}",
            f"{planned.step_seconds:.3g}",
            f"{planned.low_seconds:.3g}–{planned.high_seconds:.3g}",
            f"{planned.tflops_per_device:.1f}",
            f"{planned.mfu:.1%}",
            gb_text(planned.peak_bytes),
            f"{cost.device_hours:,.0f}",
            f"{cost.days:,.1f}",
            cost.jobs,
            f"{cost.checkpoint_bytes / 1e9:,.0f} GB in {cost.checkpoint_seconds:.0f} s",
            *(f"{planned.seconds.get(part, 0):.3g}" for part in parts),
            f"{planned.hidden_data_seconds:.3g}",
            "" if planned.fits else "does not fit",
        )
        for planned, cost in several
    ]
    blank = ("",) * (len(titles) - 3)
    for nodes, reasons in [("any", found.impossible), *found.refused.items()]:
        for why, layouts in sorted(reasons.items(), key=lambda item: -len(item[1])):
            more = f" and {len(layouts) - 1:,} more" if len(layouts) > 1 else ""
            names = [name(one) for one in layouts] if is_all else [name(layouts[0]) + more]
            rows += [(nodes, each, *blank, why) for each in names]
    return titles, rows


def _marked(planned: PlannedLayout, own: Sequence[Costed]) -> str:
    is_own = (planned.nodes, planned.name) in {(one.nodes, one.name) for one, _ in own}
    return planned.name + " *" * is_own


def _broken(name: str) -> str:
    return "\n".join(wrap(name.replace("-", "- "), _NAME_COLUMNS)).replace("- ", "-")


def _hour_titles(run: RunToPlan) -> list[str]:
    return ["device-hours", *([run.site.billing_unit] if run.site.billing_unit else [])]


def _hours(run: RunToPlan, device_hours: float) -> list[str]:
    billed = billed_hours(run, device_hours)
    return [f"{hours:,.0f}" for hours in (device_hours, billed) if hours is not None]


def safe_and_planned(safe: float, planned: float, billed: float | None, unit: str) -> str:
    """Return safe and planned device-hours in words. billed: the bill of the planned hours, in `unit`."""
    parts = []
    for title, hours in (("safe", safe), ("planned", planned)):
        bill = "" if billed is None else f" ({billed * hours / planned:,.0f} {unit})"
        parts.append(f"{title} {hours:,.0f} device-hours{bill}")
    return ", ".join(parts)


def billed_hours(run: RunToPlan, device_hours: float) -> float | None:
    """Return what the site bills for `device_hours`, in its billing unit, or None if no card says it."""
    per_node_hour = run.site.billed_per_node_hour
    return None if per_node_hour is None else device_hours / run.site.devices_per_node * per_node_hour


def name(choice: Choice) -> str:
    """Return the layout's name; of a layout that no number of nodes allows, its axes alone."""
    layout = choice.layout
    if layout.shard * layout.replicate > 1:
        return choice.name
    axes = {"tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    return "-".join(f"{axis}{ranks}" for axis, ranks in axes.items() if ranks > 1) or choice.name


def notes(
    run: RunToPlan, listed: Sequence[PlannedLayout], own: Mapping[int, PlannedLayout | str]
) -> list[str]:
    """Return sentences on the recipe's own layout beside the fastest, and on open questions."""
    first = next((planned for planned in listed if planned.layout.tensor > 1), None)
    offer, most = overlap_offer(first) if first else None, run.site.max_nodes_per_job
    lines = [*_own_notes(listed, own), *unfitting(own), *_empty(listed, own), *([offer] if offer else [])]
    if most is not None and max(own) > most:
        limit = f"{run.site.name} allows a job {most} nodes in its usual queue."
        lines.append(f"{limit} More need an agreement with the site.")
    return lines


def assumptions(run: RunToPlan, first: PlannedLayout, has_failures: bool) -> str:
    """Return the assumptions of the figures. first: the fastest layout."""
    source = f" ({run.card.memory_source})" if run.card.memory_source else ""
    wall = f"jobs of at most {run.site.max_wall_hours:g} hours, " if run.site.max_wall_hours else ""
    return (
        f"{gb_text(run.usable_bytes)} GB a device are usable{source}. '{first.name}' takes "
        f"{gb_text(first.host_bytes_per_node)} of {gb_text(run.usable_host_bytes)} GB of host memory a node. "
        f"Hours are of {wall}{START_SECONDS / 60:.0f} minutes to start each, a save every "
        f"{run.recipe.checkpoint.every_steps} steps and held-out text; no queue"
        f"{'' if has_failures else ', no failures'}. MFU is of model FLOPs at {run.peak_tflops:g} TFLOP/s."
    )


def _own_notes(listed: Sequence[PlannedLayout], own: Mapping[int, PlannedLayout | str]) -> Iterator[str]:
    slower = []
    for nodes, planned in own.items():
        best = next((each for each in listed if each.nodes == nodes), None)
        on = f" on {count_text(nodes, 'node')}" if len(own) > 1 else ""
        if best is None:
            yield f"No layout fits{on}."
        elif isinstance(planned, str):
            yield f"The recipe's own layout cannot run{on}: {planned}"
        elif planned.name == best.name:
            yield f"The recipe's own layout{' (*)' * (len(own) == 1)} is the fastest{on}."
        elif len(own) == 1:
            yield f"* the recipe's own layout. {verdict([best, planned])}"
        elif not planned.fits:
            yield f"The recipe's own layout does not fit{on}."
        elif planned.tokens_per_second > best.tokens_per_second:
            yield f"The recipe's own layout is faster than the layouts that were searched{on}."
        else:
            slower.append(f"{1 - planned.tokens_per_second / best.tokens_per_second:.0%}{on}")
    if slower:
        yield f"The recipe's own layout is slower than the fastest by {', '.join(slower)}."


def _empty(listed: Sequence[PlannedLayout], own: Mapping[int, PlannedLayout | str]) -> list[str]:
    """Return a sentence for each uneven division of a step, with a layout that has it."""
    said: dict[str, PlannedLayout] = {}
    for planned in [*own.values(), *listed]:
        if isinstance(planned, PlannedLayout) and planned.shares.empty_share:
            said.setdefault(str(planned.shares), planned)
    return [
        f"{planned.name} on {count_text(planned.nodes, 'node')}: {sentence}; its speed counts them."
        for sentence, planned in list(said.items())[:_UNEVEN_NAMED]
    ]


def unfitting(own: Mapping[int, PlannedLayout | str]) -> list[str]:
    """Return the memory that the recipe's own layout lacks on its fullest rank, and the remedies."""
    return [
        f"On {count_text(nodes, 'node')} the recipe's own layout needs {gb_text(planned.need.bytes)} GB"
        f"{planned.need.of_host or ' on ' + planned.fullest}, of {gb_text(planned.need.usable)} usable; "
        f"{in_words(planned)}."
        for nodes, planned in own.items()
        if isinstance(planned, PlannedLayout) and not planned.fits
    ]


def of_all_languages(codes: Sequence[str], planned: Sequence[Costed]) -> dict[str, Any]:
    """Return the cost of a run for each language, on each of the layouts that were planned for the first."""
    many, layouts = len(codes), {}  # a dict, since the recipe's own layout may be the fastest
    for one, cost in planned:
        layouts[one.nodes, one.name] = {
            "name": one.name,
            "nodes": one.nodes,
            "hours_each": 24 * cost.days,
            "days_in_a_row": many * cost.days,
            "safe_device_hours": many * cost.device_hours * one.safe_share,
            "device_hours": many * cost.device_hours,
            "billed_hours": billed_hours(one.run, many * cost.device_hours),
        }
    return {"codes": list(codes), "planned": codes[0], "layouts": list(layouts.values())}


def languages_rows(run: RunToPlan, of_all: Mapping[str, Any]) -> Table:
    """Return the result of `of_all_languages` as a row for each layout."""
    rows = [
        (
            one["nodes"],
            f"{one['hours_each']:,.1f}",
            f"{one['days_in_a_row']:,.1f}",
            f"{one['safe_device_hours']:,.0f}",
            *_hours(run, one["device_hours"]),
            _broken(one["name"]),
        )
        for one in of_all["layouts"]
    ]
    return ("nodes", "hours each", "days in a row", _SAFE, *_hour_titles(run), "layout"), rows


def failure_table(run: RunToPlan, listed: Sequence[Costed]) -> tuple[Table, list[str]]:
    """Return the cost of failures for the fastest layout on each number of nodes, and sentences."""
    first: dict[int, tuple[PlannedLayout, Cost, Failures]] = {}
    for planned, cost in listed:
        if cost.failures is not None:
            first.setdefault(planned.nodes, (planned, cost, cost.failures))
    titles = ("nodes", "failure in", "down", "save every", "effective", "as it saves", "spares")
    rows = [
        (
            planned.nodes,
            format_seconds(found.mean_seconds),
            f"{found.down_seconds:.0f} s",
            f"{found.best_steps:,} steps",
            f"{found.best_share:.1%}",
            f"{found.effective_share:.1%}",
            found.spare_nodes,
        )
        for planned, _, found in first.values()
    ]
    planned, cost, found = list(first.values())[-1]
    parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in found.down.items() if seconds >= 0.5)
    lines = [
        f"Failures: {found.rate.per_1000_device_days:.3g} of a device in 1,000 days ({found.rate.source}). "
        "effective: share of time for steps that are kept, with the saves of the table; as it saves: with "
        f"the recipe's saves. spares: nodes for 95 % of jobs of {format_seconds(found.job_seconds)} to "
        "replace all failed nodes.",
        f"On {planned.devices:,} devices a save stops training for {cost.stop_seconds:.1f} s. The best time "
        f"between two saves is {found.young_seconds:,.0f} s (Young 1974) or {found.daly_seconds:,.0f} s "
        f"(Daly 2006). After a failure training resumes in {found.down_seconds:.0f} s ({parts}); if a node "
        f"is silent in {found.frozen_seconds:.0f} s, if a rank is stuck in {found.stuck_seconds:.0f} s. It "
        f"repeats {found.own_seconds / 2 + cost.checkpoint_seconds:,.0f} s of steps.",
    ]
    checkpoint = run.recipe.checkpoint
    if checkpoint.memory_every_steps:
        lost = checkpoint.memory_every_steps * planned.step_seconds / 2
        lines.append(
            f"checkpoint.memory_every_steps = {checkpoint.memory_every_steps}: the failure of one node costs "
            f"{lost:,.0f} s of steps besides writing, of several nodes all steps since the last save."
        )
    if found.best_share - found.effective_share > _WORTH_A_WORD:
        lines.append(
            f"checkpoint.every_steps = {checkpoint.every_steps} is a save every "
            f"{format_seconds(found.own_seconds)}, with {found.effective_share:.1%} of the time effective. "
            f"Fix: checkpoint.every_steps = {found.best_steps}, with {found.best_share:.1%}."
        )
    return (titles, rows), lines


def planned_json(planned: PlannedLayout, cost: Cost) -> dict[str, Any]:
    billed = billed_hours(planned.run, cost.device_hours)
    failures = None if cost.failures is None else asdict(cost.failures)
    same = (
        *("name", "nodes", "devices", "sequence_length", "tokens_per_step", "fits", "bytes", "peak_bytes"),
        *("host_bytes_per_node", "seconds", "hidden_data_seconds", "step_seconds", "tokens_per_second"),
        *("tflops_per_device", "mfu"),
    )
    published = None if planned.published is None else planned.published._asdict()
    return {key: getattr(planned, key) for key in same} | {
        "is_measured": planned.run.is_measured,
        "published_engine": published,
        "layout": planned.layout.model_dump(mode="json"),
        "micro_batch_sequences": planned.micro_batch,
        "micro_batches_per_step": planned.micro_batches,
        "usable_bytes": planned.run.usable_bytes,
        "usable_host_bytes_per_node": planned.run.usable_host_bytes,
        "interval_seconds": [planned.low_seconds, planned.high_seconds],
        "cost": vars(cost)
        | {"days": cost.days, "billed_hours": billed, "failures": failures}
        | {"safe_device_hours": cost.device_hours * planned.safe_share},
    }


def plan_json(
    run: RunToPlan,
    found: Found,
    listed: Sequence[Costed],
    own: Mapping[int, PlannedLayout | str],
    is_all: bool,
) -> dict[str, Any]:
    def reasons(of: Mapping[str, Sequence[Choice]]) -> list[dict[str, Any]]:
        most = None if is_all else _NAMES_IN_JSON
        return [
            {"why": why, "layouts": len(some), "names": [name(one) for one in some[:most]]}
            for why, some in of.items()
        ]

    of_own = ("name", "tokens_per_second", "step_seconds", "peak_bytes", "fits")
    return {
        "recipe": run.recipe.name,
        "cluster": run.site.name,
        "looked_at": found.looked_at,
        "run": overview_of_phases(run.model, run.phases).figures(),
        "billing_unit": run.site.billing_unit or None,
        "layouts": [planned_json(planned, cost) for planned, cost in listed],
        "own": {
            nodes: each if isinstance(each, str) else {key: getattr(each, key) for key in of_own}
            for nodes, each in own.items()
        },
        "not_listed": {"any": reasons(found.impossible)}
        | {str(nodes): reasons(of) for nodes, of in found.refused.items()},
    }


def layout_toml(planned: PlannedLayout) -> str:
    """Return the lines of a recipe that choose this layout: an entry if it has one for these nodes."""
    recipe = planned.run.recipe
    chosen = layout_in_force(with_layout(recipe, planned))
    lines = [f"{key} = {json.dumps(value)}" for key, value in chosen.items() if key != "shard"]
    entries = (entry for entry in recipe.layouts if entry.cluster == recipe.cluster)
    if any(planned.nodes in entry.nodes for entry in entries):
        head = [
            f"# in place of {planned.nodes} in the nodes of another entry",
            "[[layouts]]",
            f"cluster = {json.dumps(recipe.cluster)}",
            f"nodes = [{planned.nodes}]",
            f"micro_batch_sequences = {planned.micro_batch}",
        ]
        return "\n".join([*head, "[layouts.layout]", *lines])
    return "\n".join(["[layout]", *lines, "", "[train]", f"micro_batch_sequences = {planned.micro_batch}"])


def identity_and_placement(resolved: Resolved) -> Iterator[Table]:
    """Yield tables of every number of a resolved run: identity, placement, phases and learning rates."""
    for title, part in (("identity", resolved.identity), ("placement", resolved.placement)):
        values = flat(part.model_dump(mode="json", exclude={"phases", "learning_rates"}))
        yield (title, "value"), [(key, json.dumps(value, ensure_ascii=False)) for key, value in values]
    yield (
        ("phase", "steps", "tokens a step", "sequence", "micro-batches × sequences", "mixture"),
        [
            (
                phase.number,
                f"{phase.first_step}–{phase.last_step}",
                phase.tokens_per_step,
                phase.sequence_length,
                f"{placed.micro_batches_per_step} × {placed.micro_batch_sequences}",
                ", ".join(f"{name} {weight:g}" for name, weight in phase.mixture.items()),
            )
            for phase, placed in zip(resolved.identity.phases, resolved.placement.phases, strict=True)
        ],
    )
    yield (
        ("learning rate after token", "tokens", "schedule", "peak", "final", "warm-up", "decay"),
        [
            (
                f"{rate.first_token:,}",
                f"{rate.tokens:,}",
                rate.schedule,
                f"{rate.peak:g}",
                f"{rate.final:g}",
                f"{rate.warmup_tokens:,}",
                f"{rate.decay_tokens:,}",
            )
            for rate in resolved.identity.learning_rates
        ],
    )

"""Choice of layouts from a search, by name or by rank; says why there are none; no torch."""

import math
from collections.abc import Sequence

from kielo.plan.layout_name import matches
from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found, search
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text


def named(run: RunToPlan, nodes: int, name: str, or_nearest: bool = False) -> PlannedLayout:
    """Return the fastest layout on so many nodes whose name has the terms of `name`.

    or_nearest: if none fits in memory, returns the one that needs least. Raises KieloError if no such layout
    runs.
    """
    found = search(run, [nodes], matches(name))
    ranked = found.ranked.get(nodes, [])
    if ranked:
        return ranked[0]
    if or_nearest and nodes in found.nearest:
        return found.nearest[nodes]
    raise _not_among(name, run, nodes, found)


def different_axes(ranked: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Return the fastest layout of each tensor × pipeline × context, in the same order."""
    best: dict[tuple[int, int, int], PlannedLayout] = {}
    for planned in ranked:
        layout = planned.layout
        best.setdefault((layout.tensor, layout.pipeline, layout.context), planned)
    return list(best.values())


def own(run: RunToPlan, nodes: int) -> PlannedLayout | str:
    """Plans the recipe's own layout on so many nodes; returns the reason as text if it cannot run there."""
    devices = nodes * run.site.devices_per_node
    try:
        resolved = resolve(
            run.recipe, "", devices, run.card.device, run.card.name, text=imagined_text(run.recipe)
        )
    except KieloError as error:
        return str(error)
    index = resolved.identity.phases.index(
        max(resolved.identity.phases, key=lambda of: of.tokens_per_step * of.steps)
    )
    size = resolved.placement.phases[index].micro_batch_sequences
    shard = {"replicate": resolved.placement.layout.replicate, "shard": resolved.placement.layout.shard}
    return plan_layouts(run, [(run.recipe.layout.model_copy(update=shard), nodes, size)])[0]


def nothing_runs(run: RunToPlan, nodes: Sequence[int], found: Found) -> KieloError:
    """Make the error that names the layout nearest to running, and on how many nodes it would run."""
    where = f"on {' or '.join(map(str, nodes))} nodes of {run.site.name}"
    if not found.nearest:
        reasons = sorted(
            ((len(layouts), why) for some in found.refused.values() for why, layouts in some.items()),
            reverse=True,
        )
        return KieloError(
            f"no layout of {run.recipe.name} runs {where}: "
            + "; ".join(f"{why} ({many} layouts)" for many, why in reasons[:3])
            + _batch_advice(run, nodes)
        )
    number, nearest = min(found.nearest.items(), key=lambda item: item[1].peak_bytes)
    more = 2 * max(nodes)
    while more <= run.site.nodes and not search(run, [more]).ranked[more]:
        more *= 2
    need = nearest.need
    advice = (
        f"{more} nodes"
        if more <= run.site.nodes
        else f"a smaller model, or a machine with more {need.where.removeprefix('of ')}"
        if need.of_host
        else "a smaller model, or a machine with more memory a device"
    )
    return KieloError(
        f"no layout of {run.recipe.name} fits {where}: the least is {need.bytes / 1e9:.1f} GB "
        f"{need.where} ({nearest.name} on {number}), and {need.usable / 1e9:.1f} GB are usable. "
        f"Fix: {advice}"
    )


def _batch_advice(run: RunToPlan, nodes: Sequence[int]) -> str:
    """Say how many tokens a step must have, or on how many nodes it can run.

    A pipeline of p ranks needs p micro-batches, so a step needs at least a sequence for each group of tensor
    ranks.
    """
    heads, node = (
        math.gcd(run.model.num_attention_heads, run.model.num_key_value_heads or 1),
        run.site.devices_per_node,
    )
    groups = node // math.gcd(node, heads)  # of a node
    sequences = run.phase.tokens_per_step // run.phase.sequence_length
    fewer = f", or at most {sequences // groups} nodes" if sequences >= groups else ""
    return (
        f". Fix: {run.phase.key('tokens_per_step')} = "
        f"{min(nodes) * groups * run.phase.sequence_length} or a multiple "
        f"(it is {run.phase.tokens_per_step}){fewer}"
    )


def _not_among(name: str, run: RunToPlan, nodes: int, found: Found) -> KieloError:
    fits = matches(name)
    if nodes in found.nearest:
        nearest, need = found.nearest[nodes], found.nearest[nodes].need
        return KieloError(
            f"{name} on {nodes} nodes does not fit: {nearest.name} needs {need.bytes / 1e9:.1f} GB "
            f"{need.where}, the least of all with that name, and {need.usable / 1e9:.1f} GB are usable"
        )
    reasons = [why for why, layouts in found.refused.get(nodes, {}).items() if layouts]
    reasons += [
        why
        for why, layouts in found.impossible.items()
        if any(fits(one.layout, one.micro_batch) for one in layouts)
    ]
    devices = nodes * run.site.devices_per_node
    return KieloError(
        f"{name}: {'; '.join(reasons) or f'none of the layouts of {devices} devices has that name'}"
    )

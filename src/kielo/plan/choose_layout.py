"""Choice of layouts from a search, by name or by rank, and the reasons if there are none; no torch."""

import math
from collections.abc import Sequence

from kielo.plan.layout_name import matches
from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found, search
from kielo.recipe.errors import KieloError
from kielo.recipe.layout_on_nodes import on_nodes
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text

_MOST_STAGES, _MOST_TRIED = 16, 4  # of numbers of nodes near those that a person asked for


def named(run: RunToPlan, nodes: int, name: str, or_nearest: bool = False) -> PlannedLayout:
    """Return the fastest layout with the terms of `name`, or the nearest. Raises KieloError without any."""
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
    """Plan the recipe's own layout on `nodes` nodes, or return the reason as text if it cannot run there."""
    devices, card, text = nodes * run.site.devices_per_node, run.card, imagined_text(run.recipe)
    try:
        resolved = resolve(run.recipe, "", devices, card.device, card.name, text=text)
    except KieloError as error:
        return str(error)
    phases = zip(resolved.identity.phases, resolved.placement.phases, strict=True)
    _, placed = max(phases, key=lambda both: both[0].tokens_per_step * both[0].steps)
    size = placed.micro_batch_sequences
    shard = {"replicate": resolved.placement.layout.replicate, "shard": resolved.placement.layout.shard}
    return plan_layouts(run, [(on_nodes(run.recipe, nodes).layout.model_copy(update=shard), nodes, size)])[0]


def nothing_runs(run: RunToPlan, nodes: Sequence[int], found: Found) -> KieloError:
    """Return the error that names the layout nearest to running, and on how many nodes it would run."""
    where = f"on {' or '.join(map(str, nodes))} nodes of {run.site.name}"
    if not found.nearest:
        refused = (each for some in found.refused.values() for each in some.items())
        reasons = sorted(((len(layouts), why) for why, layouts in refused), reverse=True)
        why = "; ".join(f"{why} ({many} layouts)" for many, why in reasons[:3])
        return KieloError(f"no layout of {run.recipe.name} runs {where}: {why}{_batch_advice(run, nodes)}")
    number, nearest = min(found.nearest.items(), key=lambda item: item[1].peak_bytes)
    more = 2 * max(nodes)
    while more <= run.site.nodes and not search(run, [more]).ranked[more]:
        more *= 2
    need = nearest.need
    kind = need.where.removeprefix("of ") if need.of_host else "memory a device"
    advice = f"{more} nodes" if more <= run.site.nodes else f"a smaller model, or a machine with more {kind}"
    return KieloError(
        f"no layout of {run.recipe.name} fits {where}: the least is {need.bytes / 1e9:.1f} GB "
        f"{need.where} ({nearest.name} on {number}), and {need.usable / 1e9:.1f} GB are usable. "
        f"Fix: {advice}"
    )


def _batch_advice(run: RunToPlan, nodes: Sequence[int]) -> str:
    """Return a fix. A step needs at least a sequence for each group of tensor ranks."""
    phase, node = run.phase, run.site.devices_per_node
    heads = math.gcd(run.model.num_attention_heads, run.model.num_key_value_heads or 1)
    groups = node // math.gcd(node, heads)  # of a node
    sequences = phase.tokens_per_step // phase.sequence_length
    near = _nodes_near(run, min(nodes), groups, sequences)
    most = f"at most {sequences // groups} nodes" if sequences >= groups else ""
    fewer = f", or {near or most}" if near or most else ""
    least = f"{phase.key('tokens_per_step')} = {min(nodes) * groups * phase.sequence_length}"
    return f". Fix: {least} or a multiple (it is {phase.tokens_per_step}){fewer}"


def _nodes_near(run: RunToPlan, nodes: int, groups: int, sequences: int) -> str:
    """Return the most nodes, at least nine tenths of `nodes`, on which a pipeline shares `sequences`, or "".

    groups: of tensor ranks, on a node. A number such as 2,978 = 2 × 1,489 leaves too many replicas, and 2,976
    does not.
    """
    stages = range(2, min(run.model.num_hidden_layers, _MOST_STAGES) + 1)
    tried = 0
    for fewer in range(nodes - 1, math.ceil(0.9 * nodes) - 1, -1):
        if any(fewer * groups % ranks == 0 and fewer * groups // ranks <= sequences for ranks in stages):
            if search(run, [fewer]).ranked.get(fewer):
                return f"{fewer} nodes"
            tried += 1
            if tried == _MOST_TRIED:
                break
    return ""


def _not_among(name: str, run: RunToPlan, nodes: int, found: Found) -> KieloError:
    fits, devices = matches(name), nodes * run.site.devices_per_node
    if nodes in found.nearest:
        nearest, need = found.nearest[nodes], found.nearest[nodes].need
        return KieloError(
            f"{name} on {nodes} nodes does not fit: {nearest.name} needs {need.bytes / 1e9:.1f} GB "
            f"{need.where}, the least of all with that name, and {need.usable / 1e9:.1f} GB are usable"
        )
    reasons = [why for why, layouts in found.refused.get(nodes, {}).items() if layouts]
    for why, layouts in found.impossible.items():
        reasons += [why] * any(fits(one.layout, one.micro_batch) for one in layouts)
    return KieloError(f"{name}: {'; '.join(reasons) or f'no layout of {devices} devices has that name'}")

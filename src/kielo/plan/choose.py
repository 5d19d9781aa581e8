"""The layouts of a search that somebody asked for, or why there are none and what would work; no torch."""

import math
from collections.abc import Sequence

from kielo.plan.layout_name import matches
from kielo.plan.planned import Job, Planned, plan_layouts
from kielo.plan.search import Found, search
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import imagined_text, resolve


def named(job: Job, nodes: int, name: str, or_nearest: bool = False) -> Planned:
    """The fastest layout on so many nodes that `name` is (a part of) the name of.

    or_nearest: where none fits in memory, the one that needs least of it. KieloError where no such layout
    runs.
    """
    found = search(job, [nodes], matches(name))
    ranked = found.ranked.get(nodes, [])
    if ranked:
        return ranked[0]
    if or_nearest and nodes in found.nearest:
        return found.nearest[nodes]
    raise _not_among(name, job, nodes, found)


def different_axes(ranked: Sequence[Planned]) -> list[Planned]:
    """The fastest of each tensor × pipeline × context; in the same order."""
    best: dict[tuple[int, int, int], Planned] = {}
    for planned in ranked:
        layout = planned.layout
        best.setdefault((layout.tensor, layout.pipeline, layout.context), planned)
    return list(best.values())


def own(job: Job, nodes: int) -> Planned | str:
    """The recipe's own layout on so many nodes, or why it cannot run there."""
    devices = nodes * job.site.devices_per_node
    try:
        resolved = resolve(
            job.recipe, "", devices, job.card.device, job.card.name, text=imagined_text(job.recipe)
        )
    except KieloError as error:
        return str(error)
    index = resolved.identity.phases.index(
        max(resolved.identity.phases, key=lambda of: of.tokens_per_step * of.steps)
    )
    size = resolved.placement.phases[index].micro_batch_sequences
    shard = {"replicate": resolved.placement.layout.replicate, "shard": resolved.placement.layout.shard}
    return plan_layouts(job, [(job.recipe.layout.model_copy(update=shard), nodes, size)])[0]


def nothing_runs(job: Job, nodes: Sequence[int], found: Found) -> KieloError:
    """What is nearest to running, and on how many nodes it would."""
    where = f"on {' or '.join(map(str, nodes))} nodes of {job.site.name}"
    if not found.nearest:
        reasons = sorted(
            ((len(layouts), why) for some in found.refused.values() for why, layouts in some.items()),
            reverse=True,
        )
        return KieloError(
            f"no layout of {job.recipe.name} runs {where}: "
            + "; ".join(f"{why} ({many} layouts)" for many, why in reasons[:3])
            + _batch_advice(job, nodes)
        )
    number, nearest = min(found.nearest.items(), key=lambda item: item[1].peak_bytes)
    more = 2 * max(nodes)
    while more <= job.site.nodes and not search(job, [more]).ranked[more]:
        more *= 2
    advice = (
        f"{more} nodes"
        if more <= job.site.nodes
        else "a smaller model, or a machine with more memory a device"
    )
    return KieloError(
        f"no layout of {job.recipe.name} fits {where}: the least is {nearest.peak_bytes / 1e9:.1f} GB a "
        f"device ({nearest.name} on {number}), and {job.usable_bytes / 1e9:.1f} GB are usable; what would "
        f"work: {advice}"
    )


def _batch_advice(job: Job, nodes: Sequence[int]) -> str:
    """A pipeline of p ranks wants p micro-batches, so a step needs a sequence for each group of tensor ranks,
    at the least.
    """
    heads, node = (
        math.gcd(job.model.num_attention_heads, job.model.num_key_value_heads or 1),
        job.site.devices_per_node,
    )
    groups = node // math.gcd(node, heads)  # of a node
    sequences = job.phase.tokens_per_step // job.phase.sequence_length
    fewer = f", or at most {sequences // groups} nodes" if sequences >= groups else ""
    return (
        f"; what would work: {job.phase.key('tokens_per_step')} = "
        f"{min(nodes) * groups * job.phase.sequence_length} or a multiple "
        f"(it is {job.phase.tokens_per_step}){fewer}"
    )


def _not_among(name: str, job: Job, nodes: int, found: Found) -> KieloError:
    """Why no layout of that name is in the ranking."""
    fits = matches(name)
    if nodes in found.nearest:
        nearest = found.nearest[nodes]
        return KieloError(
            f"{name} on {nodes} nodes does not fit: {nearest.name} needs {nearest.peak_bytes / 1e9:.1f} GB "
            f"a device, the least of those that it names, and {job.usable_bytes / 1e9:.1f} GB are usable"
        )
    reasons = [why for why, layouts in found.refused.get(nodes, {}).items() if layouts]
    reasons += [
        why
        for why, layouts in found.impossible.items()
        if any(fits(one.layout, one.micro_batch) for one in layouts)
    ]
    devices = nodes * job.site.devices_per_node
    return KieloError(
        f"{name}: "
        f"{'; '.join(reasons) or f'none of the layouts of {devices} devices that are looked at is called that'}"
    )

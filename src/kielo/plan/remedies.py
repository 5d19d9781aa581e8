"""Remedies for layouts that do not fit, each of them planned, and advice on slow layouts; no torch.

A remedy is one change of the recipe's keys, or two if no single change is enough: more recomputation, a
higher ZeRO degree, more tensor or pipeline ranks, smaller micro-batches, or more nodes.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.errors import KieloError
from kielo.recipe.layout_on_nodes import on_devices
from kielo.recipe.sections import RECOMPUTED_PARTS, CompleteModel, Layout, Recipe
from kielo.resolve.resolved import Resolved
from kielo.resolve.rules import LAYOUT_RULES, complaints
from kielo.resolve.software import compile_advice
from kielo.resolve.stages import SCHEDULES


def speed_advice(model: CompleteModel, layout: Layout, accelerator: str, has_fp8: bool = False) -> list[str]:
    """Return advice on sizes that are slow on a machine, and on slow combinations of keys.

    has_fp8: steps of the run are computed in FP8. MI250X is fast at hidden sizes in multiples of 1,024 and at
    least 1,280 columns a tensor rank (LUMI's blog post "Scaling the pre-training of large language models of
    >100B parameters to thousands of AMD MI250X GPUs", section on tensor parallelism).
    """
    advice = []
    if layout.compile and (slow := compile_advice(layout)):
        advice.append(slow)
    if has_fp8 and layout.tensor > 1 and layout.tensor_overlap != "none":
        advice.append(
            f"layout.tensor_overlap = {layout.tensor_overlap!r} is for matrices in bf16 and fp32: torchao's "
            "FP8 matrices gather and scatter at once"
        )
    if layout.tensor > 1 and model.hidden_size % (64 * layout.tensor):
        advice.append(
            f"model.hidden_size = {model.hidden_size} over layout.tensor = {layout.tensor} is no multiple "
            "of 64 a rank: matrix units work on tiles of 64 or more"
        )
    if "mi250x" in accelerator:
        if model.hidden_size % 1024:
            advice.append(f"model.hidden_size = {model.hidden_size}: MI250X is fastest at multiples of 1,024")
        if layout.tensor > 1 and model.hidden_size / layout.tensor < 1280:
            advice.append(
                f"model.hidden_size / layout.tensor = {model.hidden_size / layout.tensor:g} is less than "
                "1,280, which makes too small matrices on MI250X. Fewer tensor ranks and more shard ranks "
                "are usually faster"
            )
    return advice


_MOST = 3
_CHEAP = frozenset({"norms", "activations"})  # recomputed without a matrix product
# Recomputation of whole layers, from the least to the most.
_OF_LAYERS = (("operators", 1), ("full", 2), ("full", 1))
_Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Remedy:
    """Changed keys of the recipe, and the layout with them. slower: seconds a token and device, by before."""

    changes: _Changes
    planned: PlannedLayout
    slower: float

    def __str__(self) -> str:
        """Return `--set` flags with their gain and cost."""
        values = {key: shlex.quote(json.dumps(one)) for key, one in self.changes.items()}
        sets = " ".join(
            f"--{'nodes ' if key == 'nodes' else f'set {key}='}{one}" for key, one in values.items()
        )
        cost = f"{self.slower:.0%} slower" if self.slower >= 0 else f"{-self.slower:.0%} faster"
        return f"{sets} ({self.planned.need.bytes / 1e9:.1f} GB, {cost} a device)"


def remedies(planned: PlannedLayout) -> list[Remedy]:
    """Return up to three ways to make `planned` fit, the least slow first, or [] if there is none."""
    singles = list(_single_changes(planned))
    found = _that_fit(planned, singles)
    if not found:
        pairs = [{**one, **other} for one, other in combinations(singles, 2) if not one.keys() & other.keys()]
        found = _that_fit(planned, pairs)
    return found[:_MOST]


def in_words(planned: PlannedLayout) -> str:
    """Return one sentence on what would make `planned` fit."""
    found = remedies(planned)
    if not found:
        return "no one or two changes of the layout make it fit; `kielo plan RECIPE --nodes N` lists others"
    return "changes that make it fit, the fastest first: " + "; ".join(map(str, found))


def memory_warning(resolved: Resolved, recipe: Recipe) -> str | None:
    """Return why a run will not fit its GPUs' memory, with remedies, or None if it fits or no card knows."""
    placement = resolved.placement
    try:
        run = RunToPlan.of(recipe, resolved.identity.model, resolved.identity.train.precision)
    except KieloError:
        return None
    if placement.device != "cuda" or placement.accelerator != run.card.name:
        return None
    axes = {"replicate": placement.layout.replicate, "shard": placement.layout.shard}
    sizes = zip(resolved.identity.phases, placement.phases, strict=True)
    size = max(placed.micro_batch_sequences for phase, placed in sizes if phase.number == run.phase.number)
    nodes = max(1, placement.world_size // run.site.devices_per_node)
    layout = on_devices(recipe, placement.world_size).layout.model_copy(update=axes)
    (planned,) = plan_layouts(run, [(layout, nodes, size)], simulate=False)
    if planned.device_need.fits:
        return None
    return (
        f"planned to need {planned.peak_bytes / 1e9:.1f} GB on {planned.fullest}, of "
        f"{run.usable_bytes / 1e9:.1f} usable GB; {in_words(planned)}"
    )


def _single_changes(planned: PlannedLayout) -> Iterator[_Changes]:
    layout, run = planned.layout, planned.run
    splits = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    yield from _more_recomputation(layout)
    for zero in range(layout.zero + 1, 3 if splits else 4):
        yield {"layout.zero": zero}
    size = planned.micro_batch // 2
    while size:
        yield {"train.micro_batch_sequences": size}
        size //= 2
    if 2 * layout.tensor <= run.site.devices_per_node:
        yield {"layout.tensor": 2 * layout.tensor}
    if layout.pipeline_layers is None:
        yield {"layout.pipeline": 2 * layout.pipeline}
    if 2 * planned.nodes <= run.site.nodes:
        yield {"nodes": 2 * planned.nodes}


def _more_recomputation(layout: Layout) -> Iterator[_Changes]:
    """Yield keys that recompute more, the cheapest first. Some of these layouts may be unable to run."""
    now = layout.recomputed
    if now & {"operators", "full"}:
        strength = _strength(layout.recompute, layout.recompute_every_layers)
        choices = [choice for choice in _OF_LAYERS if _strength(*choice) > strength]
    else:
        cheap = "+".join(part for part in RECOMPUTED_PARTS if part in now | _CHEAP)
        is_cheap = now >= _CHEAP and layout.recompute_every_layers == 1
        choices = [*([] if is_cheap else [(cheap, 1)]), *_OF_LAYERS]
    for recompute, every_layers in choices:
        yield {"layout.recompute": recompute, "layout.recompute_every_layers": every_layers}


def _strength(recompute: str, every_layers: int) -> tuple[bool, float]:
    """Return a key that grows with the work that `operators` or `full` recompute."""
    return recompute == "full", 1 / every_layers


def _that_fit(planned: PlannedLayout, several: Sequence[_Changes]) -> list[Remedy]:
    changed = [(changes, made) for changes in several if (made := _changed(planned, changes)) is not None]
    plans = plan_layouts(planned.run, [made for _, made in changed], simulate=False)
    now = (planned.layout, planned.nodes, planned.micro_batch)
    (before,) = plan_layouts(planned.run, [now], simulate=False)
    fitting = [(changes, plan) for (changes, _), plan in zip(changed, plans, strict=True) if plan.fits]
    found = (
        Remedy(_complete(changes, plan), plan, 1 - _speed(plan) / _speed(before)) for changes, plan in fitting
    )
    return sorted(found, key=lambda remedy: remedy.slower)


def _complete(changes: _Changes, planned: PlannedLayout) -> _Changes:
    """Return `changes` with the other keys of the planned layout, if the recipe would not keep them.

    --set layout.X removes [[layouts]], and other nodes have another entry. `planned` has no given shard.
    """
    recipe = planned.run.recipe
    is_kept = changes.keys() <= {"train.micro_batch_sequences"} or not (recipe.layouts or recipe.layout.shard)
    if is_kept:
        return changes
    now = recipe.layout.model_dump(mode="json")
    values = planned.layout.model_copy(update={"shard": 0}).model_dump(mode="json")
    others = {key: value for key, value in values.items() if value != now[key]} or {"tensor": now["tensor"]}
    size = {"train.micro_batch_sequences": planned.micro_batch}
    is_size_kept = planned.micro_batch == recipe.train.micro_batch_sequences
    return {
        **changes,
        **{f"layout.{key}": other for key, other in others.items()},
        **({} if is_size_kept else size),
    }


def _speed(planned: PlannedLayout) -> float:
    return planned.tokens_per_second / planned.devices


def _changed(planned: PlannedLayout, changes: Mapping[str, Any]) -> tuple[Layout, int, int] | None:
    """Return (layout, nodes, sequences of a micro-batch) with the changes, or None if it cannot run."""
    run, size = planned.run, changes.get("train.micro_batch_sequences", planned.micro_batch)
    nodes = changes.get("nodes", planned.nodes)
    update = {key.removeprefix("layout."): value for key, value in changes.items() if "layout." in key}
    layout = planned.layout.model_copy(update=update)
    others = layout.tensor * layout.pipeline * layout.context * layout.replicate
    shard, left = divmod(nodes * run.site.devices_per_node, others)
    if left or not shard:
        return None
    layout = layout.model_copy(update={"shard": shard})
    changed = replace(planned, layout=layout, micro_batch=size)
    sequences = run.phase.tokens_per_step // run.phase.sequence_length
    refused = complaints(run.case.with_layout(layout), LAYOUT_RULES)
    if refused or sequences < changed.shares.data_ranks or layout.pipeline > run.model.num_hidden_layers:
        return None
    return layout, nodes, size

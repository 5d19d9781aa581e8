"""Every layout that a run could have on so many nodes: those that can run, ranked, and why the others cannot;
no torch.

A form is what does not depend on the number of nodes (tensor, pipeline, context, schedule, recomputation,
ZeRO degree, micro-batch); its columns are made once. With a number of nodes it becomes a layout, or falls out
with a reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kielo.plan.layout_name import layout_name
from kielo.plan.memory import memory_bytes
from kielo.plan.planned_layout import PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload
from kielo.recipe.sections import Layout
from kielo.resolve.layout_check import layout_complaints
from kielo.resolve.stages import SCHEDULES

Column = np.ndarray
_MICRO_BATCHES = (1, 2, 4, 8)
_CONTEXTS = (1, 2, 4, 8, 16)
_SHORTEST_PIECE = 4096  # tokens of a sequence on a context rank, below which nobody gains by splitting it
_RECOMPUTATION = (("none", 1), ("operators", 1), ("full", 4), ("full", 2), ("full", 1))
# (degree, is it split within nodes and copied between them); of replicas degree 2 has nothing that 1 and 3
# have not.
_ZERO = ((1, False), (2, False), (3, False), (1, True), (3, True))
_INTERLEAVED = (2, 3, 4, 5)  # stages a rank
_SIMULATED = 50  # of the best, over all numbers of nodes
_FAR_SLOWER = 1.5
_FEWEST = 8  # of each, and of those that somebody names


class Choice(NamedTuple):
    """A layout, made and named only when somebody asks: most are never looked at."""

    form: Layout
    shard: int
    replicate: int
    micro_batch: int

    @property
    def layout(self) -> Layout:
        return self.form.model_copy(update={"shard": self.shard, "replicate": self.replicate})

    @property
    def name(self) -> str:
        return layout_name(self.layout, self.micro_batch)


@dataclass
class Found:
    """`ranked`: number of nodes → the best of the layouts that run and fit, fastest first. `refused`: number
    of nodes → reason → layouts. `impossible`: reason that no number of nodes changes → layouts. `nearest`:
    number of nodes → the layout that needs least memory of those that could run. `looked_at`: layouts in all.
    """

    ranked: dict[int, list[PlannedLayout]] = field(default_factory=dict)
    refused: dict[int, dict[str, list[Choice]]] = field(default_factory=dict)
    impossible: dict[str, list[Choice]] = field(default_factory=dict)
    nearest: dict[int, PlannedLayout] = field(default_factory=dict)
    looked_at: int = 0


@dataclass(frozen=True)
class _Forms:
    """[n] forms: layouts without data-parallel ranks, and their columns as if they had several."""

    layouts: list[Layout]
    is_hybrid: Column  # split within a node, copied between nodes
    work: Workload

    @property
    def ranks(self) -> Column:
        return self.work.tensor * self.work.pipeline * self.work.context


def search(
    run: RunToPlan, nodes: Sequence[int], wanted: Callable[[Layout, int], bool] | None = None
) -> Found:
    """Over every form on each number of nodes; only the layouts that are `wanted`, given with their
    micro-batch.
    """
    found = Found()
    forms = _forms(run, [number * run.site.devices_per_node for number in nodes], found)
    keep = max(_FEWEST, _SIMULATED // len(nodes)) if wanted is None else _FEWEST
    for number in nodes:
        if forms.layouts:
            _on_nodes(run, forms, number, keep, wanted, found)
    return found


def _on_nodes(
    run: RunToPlan,
    forms: _Forms,
    nodes: int,
    keep: int,
    wanted: Callable[[Layout, int], bool] | None,
    found: Found,
) -> None:
    shard, copies = _data_ranks(run, forms, nodes)
    index = np.flatnonzero(shard)
    shard, copies = shard[index].astype(int), copies[index].astype(int)
    work = forms.work.take(index)
    layouts = [
        Choice(forms.layouts[form], int(s), int(r), int(size))
        for form, s, r, size in zip(index, shard, copies, work.micro_batch)
    ]
    if wanted is not None:
        keeps = [number for number, one in enumerate(layouts) if wanted(one.layout, one.micro_batch)]
        layouts, shard, copies = [layouts[number] for number in keeps], shard[keeps], copies[keeps]
        work = work.take(np.array(keeps, dtype=int))
    found.looked_at += len(layouts)
    found.ranked[nodes] = []
    if not layouts:
        return
    micro_batches, reason = _micro_batches(run, work, layouts, shard * copies)
    work = replace(
        work, data=shard * copies, shard=shard * work.context, micro_batches=np.maximum(1, micro_batches)
    )
    refused = found.refused.setdefault(nodes, {})
    for why in sorted(set(reason) - {""}):
        refused[why] = [layouts[number] for number in np.flatnonzero(reason == why)]
    runs = np.flatnonzero(reason == "")
    if not len(runs):
        return
    peak = memory_bytes(work.take(runs)).peak("reserved")
    fits = peak <= run.usable_bytes
    if not fits.all():
        refused[f"needs more than {run.usable_bytes / 1e9:.1f} GB a device"] = [
            layouts[number] for number in runs[~fits]
        ]
    least = layouts[runs[np.argmin(peak)]]
    found.nearest[nodes] = plan_layouts(run, [(least.layout, nodes, least.micro_batch)])[0]
    runs = runs[fits]
    seconds = step_seconds(work.take(runs), run.efficiency).total
    fastest = np.argsort(seconds, kind="stable")
    best = _best_of_each_kind([layouts[number] for number in runs[fastest]], seconds[fastest], keep)
    planned = plan_layouts(run, [(one.layout, nodes, one.micro_batch) for one in best])
    found.ranked[nodes] = sorted(planned, key=lambda plan: plan.step_seconds)


def _best_of_each_kind(order: Sequence[Choice], seconds: Column, keep: int) -> list[Choice]:
    """The first `keep` in `order`, fastest first, of different axes or schedules; then others as there is
    room. `seconds` of each: kinds that are far slower than the best come last.
    """
    first, rest, seen = [], [], set()
    for one, time in zip(order, seconds):
        form = one.form
        kind = (
            form.tensor,
            form.pipeline,
            form.context,
            form.pipeline_schedule,
            form.pipeline_stages_per_rank,
        )
        (rest if kind in seen or time > _FAR_SLOWER * seconds[0] else first).append(one)
        seen.add(kind)
    return (first + rest)[:keep]


def _data_ranks(run: RunToPlan, forms: _Forms, nodes: int) -> tuple[Column, Column]:
    """(ranks that split, copies of those) of each form; 0 where it is no layout of so many nodes, or one like
    another.
    """
    data, left = np.divmod(nodes * run.site.devices_per_node, forms.ranks)
    in_node = run.site.devices_per_node / (forms.work.tensor * forms.work.context)
    is_split_by_node = (in_node > 1) & (in_node % 1 == 0) & (data % in_node == 0) & (data > in_node)
    shard = np.where(forms.is_hybrid, np.where(is_split_by_node, in_node, 0), data)
    shard = np.where((left > 0) | ((data == 1) & (forms.work.zero > 1)), 0, shard)
    return shard, np.where(shard > 0, data / np.maximum(shard, 1), 0)


def _micro_batches(
    run: RunToPlan, work: Workload, layouts: list[Choice], data: Column
) -> tuple[Column, Column]:
    """(micro-batches of a step, "" or why there cannot be so many)."""
    sequences = run.phase.tokens_per_step // run.phase.sequence_length
    number = sequences / (data * work.micro_batch)
    key = run.phase.key("tokens_per_step")
    reasons = [
        (sequences < data, f"fewer sequences a step ({sequences}, by {key}) than data-parallel ranks"),
        (
            sequences % data > 0,
            f"{sequences} sequences a step cannot be shared evenly by its data-parallel ranks",
        ),
        (number % 1 > 0, "its micro-batch does not divide the sequences of a data-parallel rank"),
        *_schedule_reasons(work, layouts, number, ""),
    ]
    for others in run.sequences_of_steps:
        if others != sequences:
            where = f" in steps of {others} sequences, of the batch ramp or another phase"
            each = _largest_divisor(others / data, work.micro_batch)
            reasons.append(
                (others % data > 0, "its data-parallel ranks cannot share evenly what they have" + where)
            )
            reasons += _schedule_reasons(work, layouts, others / (data * each), where)
    why = np.select([is_so for is_so, _ in reasons], [reason for _, reason in reasons], default="")
    return number, why


def _schedule_reasons(
    work: Workload, layouts: list[Choice], number: Column, where: str
) -> list[tuple[Column, str]]:
    """As `stages.micro_batch_complaint`, for many layouts at once."""
    schedule = np.array([one.form.pipeline_schedule for one in layouts])
    is_pipeline = work.pipeline > 1
    needed = np.isin(schedule, ("1f1b", "dualpipev")) * is_pipeline * work.pipeline * work.chunks
    rounds = np.maximum(1, number // work.pipeline)
    is_uneven = np.char.startswith(schedule, "interleaved") & is_pipeline & (number % rounds > 0)
    splits = np.array([SCHEDULES[name].splits_backward for name in schedule]) & is_pipeline
    return [
        (
            splits & (number < work.pipeline),
            "fewer micro-batches than ranks, which leave a split backward pass nothing to fill" + where,
        ),
        (number < needed, "fewer micro-batches than the schedule's stages" + where),
        (is_uneven, "micro-batches do not make equal rounds over the pipeline's ranks" + where),
    ]


def _largest_divisor(numbers: Column, at_most: Column) -> Column:
    """As the resolver lowers a micro-batch to what divides."""
    found = np.ones(len(numbers))
    for size in range(2, max(_MICRO_BATCHES) + 1):
        found = np.where((numbers % size == 0) & (size <= at_most), size, found)
    return found


def _forms(run: RunToPlan, devices: Sequence[int], found: Found) -> _Forms:
    layouts, is_hybrid, rows = [], [], []
    sizes = _MICRO_BATCHES
    for layout in _layouts(run, devices, found):
        row = run.columns(
            layout.model_copy(update={"shard": 2}), run.phase.sequence_length, micro_batch=1, micro_batches=2
        )
        splits = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
        for zero, hybrid in _ZERO:
            if not (splits and zero == 3):
                layouts.append(layout.model_copy(update={"zero": zero}))
                is_hybrid.append(hybrid)
                rows.append(row | {"zero": zero})
    work = Workload.of(rows)
    if rows:
        work = work.take(np.repeat(np.arange(len(rows)), len(sizes)))
        work = replace(work, micro_batch=np.tile(np.array(sizes, float), len(rows)))
    return _Forms(
        [layout for layout in layouts for _ in sizes], np.repeat(np.array(is_hybrid, bool), len(sizes)), work
    )


def _layouts(run: RunToPlan, devices: Sequence[int], found: Found) -> Iterator[Layout]:
    """With one data-parallel rank and ZeRO 1."""
    usual = {key: getattr(run.recipe.layout, key) for key in ("context_attention", "compile")}
    for layout in _axes(run, devices, found):
        splits = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
        for again, every in _RECOMPUTATION[:1] if splits else _RECOMPUTATION:
            yield layout.model_copy(update=usual | {"recompute": again, "recompute_every_layers": every})


def _axes(run: RunToPlan, devices: Sequence[int], found: Found) -> Iterator[Layout]:
    """Tensor, pipeline and context ranks with a schedule, as far as the model and a node allow."""
    length, node = run.phase.sequence_length, run.site.devices_per_node
    for tensor in _powers_of_two(max(2 * node, 16)):
        if tensor > node:
            _refuse(
                found,
                f"tensor ranks beyond the {node} devices of a node: each layer would wait for the network",
                tensor=tensor,
            )
            continue
        for context in _CONTEXTS:
            if context > 1 and length < context * _SHORTEST_PIECE:
                why = f"less than {_SHORTEST_PIECE} of a sequence's {length} tokens on a context rank"
                _refuse(found, why, tensor=tensor, context=context)
                continue
            for pipeline in _pipelines(devices, tensor * context):
                yield from _schedules(
                    run, Layout(tensor=tensor, context=context, pipeline=pipeline, shard=1), found
                )


def _schedules(run: RunToPlan, layout: Layout, found: Found) -> Iterator[Layout]:
    """The same layout under each schedule that has room for it."""
    choices: list[dict] = [{}]
    if layout.pipeline > 1:
        choices = [
            {"pipeline_schedule": name} for name in ("1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
        ]
        choices += [
            {"pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_rank": stages}
            for stages in _INTERLEAVED
            if _is_near_even(run.model.num_hidden_layers, layout.pipeline * stages)
        ]
    for choice in choices:
        one = layout.model_copy(update=choice)
        complaints = layout_complaints(
            run.model, run.phase.sequence_length, one, run.phase.key("sequence_length")
        )
        for complaint in complaints[:1]:
            found.impossible.setdefault(complaint, []).append(Choice(one, 1, 1, 1))
        if not complaints:
            yield one


def _refuse(found: Found, why: str, **axes: int) -> None:
    found.impossible.setdefault(why, []).append(Choice(Layout(**axes), 1, 1, 1))


def _is_near_even(layers: int, stages: int) -> bool:
    """Could each stage have as many layers, with room left for the head or the embedding."""
    return layers >= stages - 1 and -layers % stages <= 2


def _pipelines(devices: Sequence[int], others: int) -> list[int]:
    """Pipeline ranks that leave whole data-parallel ranks on one of the numbers of devices."""
    largest = max(devices) // others
    return [
        ranks
        for ranks in range(1, min(largest, 128) + 1)
        if any(some % (ranks * others) == 0 for some in devices)
    ]


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]

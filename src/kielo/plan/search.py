"""Search of a run's layouts on so many nodes: ranks those that can run, says why others cannot; no torch.

A form is what does not depend on the number of nodes (tensor, pipeline, context, schedule, recomputation,
ZeRO degree, micro-batch); its columns are computed once. With a number of nodes it becomes a layout, or is
dropped with a reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kielo.plan.layout_name import layout_name
from kielo.plan.planned_layout import OF_HOST, PlannedLayout, plan_layouts
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload
from kielo.recipe.sections import Layout
from kielo.resolve.memory import memory_bytes
from kielo.resolve.memory_row import StepSize
from kielo.resolve.rules import LAYOUT_RULES, complaints
from kielo.resolve.shares import IN_ROUNDS, MOST_FILLED, NEED_STAGES, least_accepted, preferred_size
from kielo.resolve.stages import SCHEDULES

Column = np.ndarray
_MICRO_BATCHES = (1, 2, 4, 8)
_CONTEXTS = (1, 2, 4, 8, 16)
_FEWEST_TOKENS = 4096  # of a sequence on a context rank; splitting into shorter parts gains nothing
_RECOMPUTATION = (
    ("none", 1), ("norms+activations", 1), ("operators", 1), ("full", 4), ("full", 2), ("full", 1),
)  # fmt: skip
_WITH_SPLIT_BACKWARD = _RECOMPUTATION[:2]
# (ZeRO degree, True if split within nodes and copied between them). With copies, degree 2 has no advantage
# that 1 or 3 does not have.
_ZERO = ((1, False), (2, False), (3, False), (1, True), (3, True))
_INTERLEAVED = (2, 3, 4, 5)  # stages a rank
_SIMULATED = 50  # best layouts, over all numbers of nodes
_FAR_SLOWER = 1.5  # times the seconds of the fastest
_FEWEST = 8  # layouts simulated for each number of nodes, and of those that match a name


_KIND = attrgetter("tensor", "pipeline", "context", "pipeline_schedule", "pipeline_stages_per_rank")
# keys of [layout] that are not searched
_AS_IN_RECIPE = ("context_attention", "compile", "tensor_overlap")


class Choice(NamedTuple):
    """A layout that is built and named only on demand, because most are never shown."""

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
    """Result of a search.

    `ranked`: number of nodes → the best layouts that run and fit, fastest first. `refused`: number of nodes →
    reason → layouts. `impossible`: reason that holds for every number of nodes → layouts. `nearest`: number
    of nodes → the layout that needs least memory of those that could run. `looked_at`: layouts in all.
    """

    ranked: dict[int, list[PlannedLayout]] = field(default_factory=dict)
    refused: dict[int, dict[str, list[Choice]]] = field(default_factory=dict)
    impossible: dict[str, list[Choice]] = field(default_factory=dict)
    nearest: dict[int, PlannedLayout] = field(default_factory=dict)
    looked_at: int = 0


@dataclass(frozen=True)
class _Forms:
    """[n] forms: layouts without data-parallel ranks, and their columns as if they had several ranks."""

    layouts: list[Layout]
    is_hybrid: Column  # split within a node, copied between nodes
    work: Workload

    @property
    def ranks(self) -> Column:
        return self.work.tensor * self.work.pipeline * self.work.context


def search(
    run: RunToPlan, nodes: Sequence[int], wanted: Callable[[Layout, int], bool] | None = None
) -> Found:
    """Search every form on each number of nodes.

    wanted: keeps only the layouts for which it returns True, given with their micro-batch.
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
    memory = memory_bytes(work.take(runs))
    peak = memory.peak("reserved")
    host, fits = run.host_bytes_per_node(memory.parts(), False), np.ones(len(runs), bool)
    for needed, usable, where in (
        (peak, run.usable_bytes, "a device"),
        (host, run.usable_host_bytes, OF_HOST),
    ):
        lacks = fits & (needed > usable)
        if lacks.any():
            refused[f"needs more than {usable / 1e9:.1f} GB {where}"] = [
                layouts[number] for number in runs[lacks]
            ]
        fits &= ~lacks
    least = layouts[runs[np.argmin(peak)]]
    found.nearest[nodes] = plan_layouts(run, [(least.layout, nodes, least.micro_batch)])[0]
    runs = runs[fits]
    seconds = step_seconds(work.take(runs), run.efficiency).total
    fastest = np.argsort(seconds, kind="stable")
    best = _best_of_each_kind([layouts[number] for number in runs[fastest]], seconds[fastest], keep)
    planned = plan_layouts(run, [(one.layout, nodes, one.micro_batch) for one in best])
    found.ranked[nodes] = sorted(planned, key=lambda plan: plan.step_seconds)


def _best_of_each_kind(order: Sequence[Choice], seconds: Column, keep: int) -> list[Choice]:
    """Return the first `keep` of `order`, fastest first: different axes or schedules, then others.

    `seconds` [n] of each: kinds that are far slower than the best come last.
    """
    first: list[Choice] = []
    rest: list[Choice] = []
    seen = set()
    for one, time in zip(order, seconds):
        kind = _KIND(one.form)
        (rest if kind in seen or time > _FAR_SLOWER * seconds[0] else first).append(one)
        seen.add(kind)
    return (first + rest)[:keep]


def _data_ranks(run: RunToPlan, forms: _Forms, nodes: int) -> tuple[Column, Column]:
    """Return (ranks that split, copies of those) of each form.

    Both are 0 where the form does not fit so many nodes, or equals another.
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
    sequences = run.phase.tokens_per_step // run.phase.sequence_length
    schedule = _Schedules.of(work, layouts)
    number, reasons = schedule.reasons(sequences, data, "")
    size = schedule.preferred_size(sequences, data)
    key = run.phase.key("tokens_per_step")
    reasons = [
        (sequences < data, f"fewer sequences a step ({sequences}, by {key}) than data-parallel ranks"),
        (size < work.micro_batch, "smaller micro-batches have fewer empty sequences"),
        *reasons,
    ]
    for others in run.sequences_of_steps:
        if others != sequences:
            where = f" in steps of {others} sequences, of another phase"
            reasons.append((others < data, "fewer sequences than data-parallel ranks" + where))
            reasons += schedule.reasons(others, data, where)[1]
    why = np.select([is_so for is_so, _ in reasons], [reason for _, reason in reasons], default="")
    return number, why


@dataclass(frozen=True)
class _Schedules:
    """Columns [n] of what layouts' schedules ask of the number of micro-batches, as `least_accepted`."""

    sizes: Column  # of a micro-batch
    ranks: Column
    stages: Column
    in_rounds: Column
    splits: Column

    @staticmethod
    def of(work: Workload, layouts: list[Choice]) -> "_Schedules":
        schedule, is_pipeline = np.array([one.form.pipeline_schedule for one in layouts]), work.pipeline > 1
        return _Schedules(
            work.micro_batch,
            work.pipeline,
            np.isin(schedule, NEED_STAGES) * is_pipeline * work.pipeline * work.chunks,
            np.char.startswith(schedule, IN_ROUNDS) & is_pipeline,
            np.isin(schedule, [name for name, one in SCHEDULES.items() if one.splits_backward]) & is_pipeline,
        )

    def needed(self, sequences: int, data: Column, sizes: Column) -> Column:
        """Return the micro-batches of each rank, with as few empty ones as the schedule accepts."""
        there_are = np.ceil(np.ceil(sequences / data) / sizes)
        return least_accepted(there_are, self.ranks, self.stages, self.in_rounds)

    def preferred_size(self, sequences: int, data: Column) -> Column:
        """Return the size that the resolver takes where the layout's own is asked for."""
        sizes = np.arange(1, max(_MICRO_BATCHES) + 1)
        rows = np.stack([size * self.needed(sequences, data, np.array(size)) for size in sizes])
        may = (sizes[:, None] <= self.sizes) & (sizes[:, None] <= np.ceil(sequences / data))
        return preferred_size(sizes, rows, may)

    def reasons(self, sequences: int, data: Column, where: str) -> tuple[Column, list[tuple[Column, str]]]:
        """Return (micro-batches, (where it holds, reason) pairs), as `resolve` refuses them."""
        sizes = np.minimum(self.sizes, self.preferred_size(sequences, data)) if where else self.sizes
        number = self.needed(sequences, data, np.maximum(1, sizes))
        there_are = np.ceil(np.ceil(sequences / data) / np.maximum(1, sizes))
        return number, [
            (
                self.splits & (there_are < self.ranks),
                "fewer micro-batches than ranks, which leave a split backward pass nothing to fill" + where,
            ),
            (
                number - there_are > MOST_FILLED * number,
                "fewer micro-batches than the schedule's stages" + where,
            ),
        ]


def _forms(run: RunToPlan, devices: Sequence[int], found: Found) -> _Forms:
    layouts, is_hybrid, rows = [], [], []
    sizes = _MICRO_BATCHES
    for layout in _layouts(run, devices, found):
        several = layout.model_copy(update={"shard": 2})
        step = StepSize(run.phase.sequence_length, micro_batch=1, micro_batches=2)
        row = run.columns(several, step, run.phase.trainable)
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
    usual = {key: getattr(run.recipe.layout, key) for key in _AS_IN_RECIPE}
    for layout in _axes(run, devices, found):
        splits = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
        for again, every in _WITH_SPLIT_BACKWARD if splits else _RECOMPUTATION:
            yield layout.model_copy(update=usual | {"recompute": again, "recompute_every_layers": every})


def _axes(run: RunToPlan, devices: Sequence[int], found: Found) -> Iterator[Layout]:
    """Yield tensor, pipeline and context ranks with a schedule, as far as the model and a node allow."""
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
            if context > 1 and length < context * _FEWEST_TOKENS:
                why = f"less than {_FEWEST_TOKENS} of a sequence's {length} tokens on a context rank"
                _refuse(found, why, tensor=tensor, context=context)
                continue
            for pipeline in _pipelines(devices, tensor * context):
                yield from _schedules(
                    run, Layout(tensor=tensor, context=context, pipeline=pipeline, shard=1), found
                )


def _schedules(run: RunToPlan, layout: Layout, found: Found) -> Iterator[Layout]:
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
        refused = complaints(run.case.with_layout(one), LAYOUT_RULES)
        for complaint in refused[:1]:
            found.impossible.setdefault(complaint, []).append(Choice(one, 1, 1, 1))
        if not refused:
            yield one


def _refuse(found: Found, why: str, **axes: int) -> None:
    found.impossible.setdefault(why, []).append(Choice(Layout(**axes), 1, 1, 1))


def _is_near_even(layers: int, stages: int) -> bool:
    """Return True if stages can have equally many layers, with room left for the head or the embedding."""
    return layers >= stages - 1 and -layers % stages <= 2


def _pipelines(devices: Sequence[int], others: int) -> list[int]:
    """Return pipeline ranks that leave whole data-parallel ranks on one of the numbers of devices."""
    largest = max(devices) // others
    return [
        ranks
        for ranks in range(1, min(largest, 128) + 1)
        if any(some % (ranks * others) == 0 for some in devices)
    ]


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]

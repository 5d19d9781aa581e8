"""Search of a run's layouts on given numbers of nodes: rank what runs, and give reasons for the rest.

A form is a layout without its data-parallel ranks. The columns of all forms are computed once.
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
_FEWEST_TOKENS = 4096  # of a sequence on a context rank; shorter parts gain nothing
_WITH_SPLIT_BACKWARD = (("none", 1), ("norms+activations", 1))
_RECOMPUTATION = (*_WITH_SPLIT_BACKWARD, ("operators", 1), ("full", 4), ("full", 2), ("full", 1))
# (ZeRO degree, True if split within nodes and copied between them). With copies, degree 2 gains nothing.
_ZERO = ((1, False), (2, False), (3, False), (1, True), (3, True))
_INTERLEAVED = (2, 3, 4, 5)  # stages a rank
_SIMULATED = 50  # best layouts, over all numbers of nodes
_FAR_SLOWER = 1.5  # times the seconds of the fastest
_FEWEST = 8  # layouts simulated for each number of nodes, and of layouts that match a name
_KIND = attrgetter("tensor", "pipeline", "context", "pipeline_schedule", "pipeline_stages_per_rank")
# keys of [layout] that are not searched
_AS_IN_RECIPE = ("context_attention", "compile", "tensor_overlap")
_Wanted = Callable[[Layout, int], bool] | None


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
    """Result of a search."""

    # nodes → layouts that run and fit, fastest first
    ranked: dict[int, list[PlannedLayout]] = field(default_factory=dict)
    refused: dict[int, dict[str, list[Choice]]] = field(default_factory=dict)  # nodes → reason → layouts
    impossible: dict[str, list[Choice]] = field(default_factory=dict)  # reason on any nodes → layouts
    nearest: dict[int, PlannedLayout] = field(default_factory=dict)  # nodes → least memory
    looked_at: int = 0  # number of layouts


@dataclass(frozen=True)
class _Forms:
    """[n] forms: layouts without data-parallel ranks, and their columns as if they had several ranks."""

    layouts: list[Layout]
    is_hybrid: Column  # split within a node, copied between nodes
    work: Workload

    @property
    def ranks(self) -> Column:
        return self.work.tensor * self.work.pipeline * self.work.context


def search(run: RunToPlan, nodes: Sequence[int], wanted: _Wanted = None) -> Found:
    """Search every form on each number of nodes, or only layouts (with micro-batch) that are `wanted`."""
    found = Found()
    forms = _forms(run, [number * run.site.devices_per_node for number in nodes], found)
    keep = max(_FEWEST, _SIMULATED // len(nodes)) if wanted is None else _FEWEST
    for number in nodes:
        if forms.layouts:
            _on_nodes(run, forms, number, keep, wanted, found)
    return found


def _on_nodes(run: RunToPlan, forms: _Forms, nodes: int, keep: int, wanted: _Wanted, found: Found) -> None:
    shard, copies = _data_ranks(run, forms, nodes)
    index = np.flatnonzero(shard)
    shard, copies = shard[index].astype(int), copies[index].astype(int)
    work = forms.work.take(index)
    layouts = [
        Choice(forms.layouts[form], int(s), int(r), int(size))
        for form, s, r, size in zip(index, shard, copies, work.micro_batch, strict=True)
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
    data, micro_batches = shard * copies, np.maximum(1, micro_batches)
    work = replace(work, data=data, shard=shard * work.context, micro_batches=micro_batches)
    work = _with_longer_rounds(work, layouts)
    refused = found.refused.setdefault(nodes, {})
    for why in sorted(set(reason) - {""}):
        refused[why] = [layouts[number] for number in np.flatnonzero(reason == why)]
    runs = np.flatnonzero(reason == "")
    if not len(runs):
        return
    memory = memory_bytes(work.take(runs))
    peak = memory.peak("reserved")
    host, fits = run.host_bytes_per_node(memory.parts(), False), np.ones(len(runs), bool)
    kinds = (peak, run.usable_bytes, "a device"), (host, run.usable_host_bytes, OF_HOST)
    for needed, usable, where in kinds:
        lacks = fits & (needed > usable)
        if lacks.any():
            why = f"needs more than {usable / 1e9:.1f} GB {where}"
            refused[why] = [layouts[number] for number in runs[lacks]]
        fits &= ~lacks
    least = layouts[runs[np.argmin(peak)]]
    found.nearest[nodes] = plan_layouts(run, [(least.layout, nodes, least.micro_batch)])[0]
    runs = runs[fits]
    seconds = step_seconds(work.take(runs), run.efficiency).total
    fastest = np.argsort(seconds, kind="stable")
    best = _best_of_each_kind([layouts[number] for number in runs[fastest]], seconds[fastest], keep)
    planned = plan_layouts(run, [(one.layout, nodes, one.micro_batch) for one in best])
    # Stages of unequal length may need more than `work` says.
    found.ranked[nodes] = sorted((one for one in planned if one.fits), key=lambda plan: plan.step_seconds)


def _with_longer_rounds(work: Workload, layouts: Sequence[Choice]) -> Workload:
    """Return `work` with the passes that interleaved stages keep in rounds of more passes than ranks."""
    is_in_rounds = np.array([one.form.pipeline_schedule.startswith(IN_ROUNDS) for one in layouts])
    a_round = work.micro_batches // np.maximum(1, work.micro_batches // work.pipeline)
    more = np.where(is_in_rounds & (work.pipeline > 1), (work.chunks - 1) * (a_round - work.pipeline), 0)
    return replace(work, first_passes=work.first_passes + more, last_passes=work.last_passes + more)


def _best_of_each_kind(order: Sequence[Choice], seconds: Column, keep: int) -> list[Choice]:
    """Return the first `keep` of `order`: different axes or schedules, then others and far slower kinds."""
    first: list[Choice] = []
    rest: list[Choice] = []
    seen = set()
    for one, time in zip(order, seconds, strict=True):
        kind = _KIND(one.form)
        (rest if kind in seen or time > _FAR_SLOWER * seconds[0] else first).append(one)
        seen.add(kind)
    return (first + rest)[:keep]


def _data_ranks(run: RunToPlan, forms: _Forms, nodes: int) -> tuple[Column, Column]:
    """Return (ranks that split, copies of them) of each form; both 0 if it does not fit or equals another."""
    data, left = np.divmod(nodes * run.site.devices_per_node, forms.ranks)
    in_node = run.site.devices_per_node / (forms.work.tensor * forms.work.context)
    is_split_by_node = (in_node > 1) & (in_node % 1 == 0) & (data % in_node == 0) & (data > in_node)
    shard = np.where(forms.is_hybrid, np.where(is_split_by_node, in_node, 0), data)
    shard = np.where((left > 0) | ((data == 1) & (forms.work.zero > 1)), 0, shard)
    return shard, np.where(shard > 0, data / np.maximum(shard, 1), 0)


def _micro_batches(run: RunToPlan, work: Workload, layouts: list[Choice], data: Column) -> list[Column]:
    """Return micro-batches, and the reason why each layout cannot run, or ""."""
    sequences = run.phase.tokens_per_step // run.phase.sequence_length
    schedule, key = _Schedules.of(work, layouts), run.phase.key("tokens_per_step")
    number, refused = schedule.reasons(sequences, data, "")
    too_large = schedule.preferred_size(sequences, data) < work.micro_batch
    reasons = [
        (sequences < data, f"fewer sequences a step ({sequences}, by {key}) than data-parallel ranks"),
        (too_large, "smaller micro-batches have fewer empty sequences"),
        *refused,
    ]
    for others in run.sequences_of_steps:
        if others != sequences:
            where = f" in steps of {others} sequences, of another phase"
            reasons.append((others < data, "fewer sequences than data-parallel ranks" + where))
            reasons += schedule.reasons(others, data, where)[1]
    return [number, np.select([is_so for is_so, _ in reasons], [why for _, why in reasons], default="")]


@dataclass(frozen=True)
class _Schedules:
    """Columns [n] of what schedules require of the number of micro-batches, as in `least_accepted`."""

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
        filled = np.ceil(np.ceil(sequences / data) / sizes)
        return least_accepted(filled, self.ranks, self.stages, self.in_rounds)

    def preferred_size(self, sequences: int, data: Column) -> Column:
        """Return the size that the resolver chooses if the layout asks for its own."""
        sizes = np.arange(1, max(_MICRO_BATCHES) + 1)
        rows = np.stack([size * self.needed(sequences, data, np.array(size)) for size in sizes])
        may = (sizes[:, None] <= self.sizes) & (sizes[:, None] <= np.ceil(sequences / data))
        return preferred_size(sizes, rows, may)

    def reasons(self, sequences: int, data: Column, where: str) -> tuple[Column, list[tuple[Column, str]]]:
        """Return (micro-batches, (where true, reason) pairs), as `resolve` refuses them."""
        sizes = np.minimum(self.sizes, self.preferred_size(sequences, data)) if where else self.sizes
        sizes = np.maximum(1, sizes)
        number, filled = self.needed(sequences, data, sizes), np.ceil(np.ceil(sequences / data) / sizes)
        idle = "fewer micro-batches than ranks, which leave a split backward pass nothing to fill"
        return number, [
            (self.splits & (filled < self.ranks), idle + where),
            (
                number - filled > MOST_FILLED * number,
                "fewer micro-batches than the schedule's stages" + where,
            ),
        ]


def _forms(run: RunToPlan, devices: Sequence[int], found: Found) -> _Forms:
    layouts, is_hybrid, rows, sizes = [], [], [], _MICRO_BATCHES
    usual = {key: getattr(run.recipe.layout, key) for key in _AS_IN_RECIPE}
    step = StepSize(run.phase.sequence_length, micro_batch=1, micro_batches=0)  # whole rounds
    for axes in _axes(run, devices, found):
        splits = axes.pipeline > 1 and SCHEDULES[axes.pipeline_schedule].splits_backward
        for again, every in _WITH_SPLIT_BACKWARD if splits else _RECOMPUTATION:
            layout = axes.model_copy(update=usual | {"recompute": again, "recompute_every_layers": every})
            row = run.columns(layout.model_copy(update={"shard": 2}), step, run.phase.trainable)
            for zero, hybrid in _ZERO:
                if not (splits and zero == 3):
                    layouts += [layout.model_copy(update={"zero": zero})] * len(sizes)
                    is_hybrid += [hybrid] * len(sizes)
                    rows.append(row | {"zero": zero})
    work = Workload.of(rows)
    if rows:
        work = work.take(np.repeat(np.arange(len(rows)), len(sizes)))
        work = replace(work, micro_batch=np.tile(np.array(sizes, float), len(rows)))
    return _Forms(layouts, np.array(is_hybrid, bool), work)


def _axes(run: RunToPlan, devices: Sequence[int], found: Found) -> Iterator[Layout]:
    """Yield tensor, pipeline and context ranks with a schedule that the model and a node allow."""
    length, node = run.phase.sequence_length, run.site.devices_per_node
    for tensor in (2**exponent for exponent in range(max(2 * node, 16).bit_length())):
        if tensor > node:
            why = f"tensor ranks beyond the {node} devices of a node: each layer would wait for the network"
            _refuse(found, why, tensor=tensor)
            continue
        for context in _CONTEXTS:
            if context > 1 and length < context * _FEWEST_TOKENS:
                why = f"less than {_FEWEST_TOKENS} of a sequence's {length} tokens on a context rank"
                _refuse(found, why, tensor=tensor, context=context)
                continue
            for pipeline in _pipelines(devices, tensor * context):
                layout = Layout(tensor=tensor, context=context, pipeline=pipeline, shard=1)
                yield from _schedules(run, layout, found)


def _schedules(run: RunToPlan, layout: Layout, found: Found) -> Iterator[Layout]:
    choices: list[dict[str, object]] = [{}]
    layers = run.model.num_hidden_layers
    if layout.pipeline > 1:
        names = ("1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
        choices = [{"pipeline_schedule": name} for name in names]
        choices += [
            {"pipeline_schedule": "interleaved_1f1b", "pipeline_stages_per_rank": stages}
            for stages in _INTERLEAVED
            # equally many layers, with room left for the head or the embedding
            if layers >= layout.pipeline * stages - 1 and -layers % (layout.pipeline * stages) <= 2
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


def _pipelines(devices: Sequence[int], others: int) -> list[int]:
    """Return pipeline ranks that leave whole data-parallel ranks on one of the numbers of devices."""
    numbers = range(1, min(max(devices) // others, 128) + 1)
    return [ranks for ranks in numbers if any(some % (ranks * others) == 0 for some in devices)]

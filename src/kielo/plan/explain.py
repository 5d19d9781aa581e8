"""A planned layout as one table: seconds, share and reason of each part, in `PlannedLayout`'s own numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kielo.plan.collective_seconds import context_layer_seconds
from kielo.plan.compare import (
    ASSUMED,
    BYTES,
    SECONDS,
    changed_parts,
    count_text,
    gb_text,
    is_comparable,
    listed,
    seconds_text,
    unfit,
    with_overlap,
)
from kielo.plan.layer_seconds import engine_factor, exposed_tensor_seconds, layer_seconds, matrix_flops
from kielo.plan.pipeline_simulation import StageSeconds, simulated_seconds
from kielo.plan.planned_layout import SHARE, PlannedLayout, plan_layouts, workload
from kielo.plan.workload import Workload, steps_by_precision
from kielo.resolve.fp8_matrices import fp8_share, is_gathered_in_fp8
from kielo.resolve.rules import LAYOUT_RULES, complaints
from kielo.resolve.stages import SCHEDULES, micro_batch_complaint, num_stages, stages_of_rank

_INTERLEAVED = (2, 3, 4, 5, 6, 8)  # stages a rank


class Row(NamedTuple):
    """A part of the step, a kind of memory, or a change; seconds, and share of the step or usable memory."""

    part: str
    seconds: float | None
    share: float | None
    reason: str

    def cells(self, planned: PlannedLayout) -> tuple[str, str, str, str]:
        """Return the row as text, with seconds to the fourth figure of the step."""
        seconds = "" if self.seconds is None else seconds_text(planned, self.seconds).removesuffix(" s")
        share = "" if self.share is None else f"{self.share:.{1 if self.share >= 0.001 else 3}%}"
        return self.part, seconds, share, self.reason


def explain(planned: PlannedLayout, others: Sequence[PlannedLayout] = ()) -> list[Row]:
    """Return the step, its parts (largest first), memory, considered changes, and comparable `others`."""
    work = workload(planned.run, [(planned.layout, planned.micro_batch, planned.phase)])
    same_step = [one for one in others if one is not planned and is_comparable(planned, one)]
    rivals = [(one, f"{one.name}: {changed_parts(one, planned)}") for one in same_step]
    return [
        _step(planned),
        *_parts(planned, work),
        *_precision(planned),
        *_memory(planned),
        *_changes(planned),
        *(_change(planned, one, "other layout", said) for one, said in rivals),
    ]


def bubble_share(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return idle seconds by a rank's work, for equal stages without hops and backward = 2 × forward.

    (p - 1)/m for GPipe and 1F1B, divided by v for interleaving (Narayanan et al. 2021, arXiv:2104.04473), and
    by 3 for a split backward pass (Qi et al. 2024, arXiv:2401.10241).
    """
    return (ranks - 1) / (micro_batches * _bubble_divisor(schedule, stages_per_rank))


def recomputed_seconds(planned: PlannedLayout) -> dict[str, float]:
    """Return part → its seconds that recomputation causes."""
    work = workload(planned.run, [(planned.layout, planned.micro_batch, planned.phase)])
    none, rates = np.zeros(1), planned.run.efficiency.of(work)
    names = ("layers", "attention", "operators", "norms", "activations")
    now = _layer_parts(work, rates)
    then = _layer_parts(replace(work, **{f"{name}_again": none for name in names}), rates)
    return {part: planned.seconds[part] * (1 - then[part] / now[part]) if now[part] else 0.0 for part in now}


def _step(planned: PlannedLayout) -> Row:
    copies = planned.layout.replicate * planned.layout.shard
    low, high = (seconds_text(planned, seconds) for seconds in (planned.low_seconds, planned.high_seconds))
    reason = (
        f"{planned.name} on {count_text(planned.nodes, 'node')} ({count_text(planned.devices, 'device')}): "
        f"{planned.tokens_per_step:,} tokens at {planned.tokens_per_second:,.0f} tokens/s, "
        f"{planned.tflops_per_device:.1f} TFLOP/s a device (model FLOPs), {planned.mfu:.1%} of its peak; "
        f"{count_text(copies, 'data-parallel rank')} with {count_text(planned.micro_batches, 'micro-batch')} "
        f"of {planned.micro_batch} × {planned.sequence_length:,} tokens"
        f"{f' ({planned.shares})' * bool(planned.shares.empty_share)}; {SHARE:.0%} of measured steps are "
        f"expected in {low} to {high}"
    )
    return Row("step", planned.step_seconds, 1.0, reason)


def _parts(planned: PlannedLayout, work: Workload) -> Iterator[Row]:
    """Yield the parts, largest first. The largest beside matrix products bounds the step."""
    has_copies = planned.layout.replicate * planned.layout.shard * planned.layout.context > 1
    reasons = _work_reasons(planned, work) | _traffic_reasons(planned, work)
    if planned.layout.pipeline > 1:
        reasons["bubble"] = _bubble(planned)
    parts = sorted(planned.seconds.items(), key=lambda each: -each[1])
    bound = next(part for part, _ in parts if part not in ("matrix", "head"))
    products = sum(planned.seconds.get(name, 0.0) for name in ("matrix", "head")) / planned.step_seconds
    for part, seconds in parts:
        if seconds > 0 or (part == "data_traffic" and has_copies):  # which may be all hidden
            reason = reasons.get(part, "")
            if part == bound:
                says = f"bounds the step beside matrix work ({products:.1%} with the head)"
                reason = f"{says}; {reason}" if reason else says
            yield Row(SECONDS.get(part, part), seconds, seconds / planned.step_seconds, reason)
    again = recomputed_seconds(planned)
    if planned.layout.recompute != "none":
        every, seconds = planned.layout.recompute_every_layers, sum(again.values())
        each = [f"{SECONDS[part]} {seconds_text(planned, time)}" for part, time in again.items() if time]
        kind = f"{planned.layout.recompute}{f' in one layer of {every}' * (every > 1)}"
        flops = f"{_recomputed_flops(planned, work):.0%} more FLOPs than the model's"
        reason = f"{kind}: {', '.join(each) or 'nothing'}; {flops}"
        yield Row("of these, recomputation", seconds, seconds / planned.step_seconds, reason)


def _work_reasons(planned: PlannedLayout, work: Workload) -> dict[str, str]:
    layout, run, rates = planned.layout, planned.run, planned.run.efficiency.of(work)
    again = work.layers_again + (1 - work.layers_again) * work.operators_again * 0.5
    is_fp8, sequence, times = run.precision == "fp8", planned.sequence_length, planned.micro_batches
    peak = work.peak_recipe if is_fp8 else work.peak
    rate = float((matrix_flops(work) * (3 + again) / layer_seconds(work, rates).matrix / peak)[0])
    large = _first(rates.matrix_fp8 if is_fp8 else rates.matrix) * _first(engine_factor(work, rates))
    large *= float(work.power_share[0]) ** _first(rates.power)
    more = f" ({2 * float(again[0]):.2g} more for recomputation)" if again > 0 else ""
    moved = "norms, residuals, rotation and activations through memory"
    if layout.zero < 3 and times > 1:
        moved += f"; gradients added up {times} times a step (less often with larger micro-batches)"
    if layout.tensor > 1 and not layout.sequence_parallel:
        moved += f"; sequence parallelism would split norms and residuals over {layout.tensor} tensor ranks"
    last = f"; on the last of {layout.pipeline} pipeline ranks, beside its layers"
    shard, deviations = layout.shard * layout.context, math.sqrt(2 * math.log(planned.devices))
    return {
        "matrix": f"2 FLOPs a weight and token forward{more}, 4 backward, at {rate:.1%} of the device's "
        f"peak{' in FP8' * is_fp8}; products of any size reach at most {large:.1%}, larger micro-batches "
        "make larger products",
        "attention": f"grows with the sequence: twice the seconds a token at {2 * sequence:,} tokens instead "
        f"of {sequence:,}",
        "elementwise": moved,
        "launch": f"the host launches kernels in {1e3 * _first(rates.layer_seconds):.2f} ms a layer and "
        "micro-batch at least; larger micro-batches give the device more to do meanwhile",
        "head": f"output matrix and loss over {run.model.vocab_size:,} tokens"
        f"{last * (layout.pipeline > 1)}{f'; split over {layout.tensor} tensor ranks' * (layout.tensor > 1)}",
        "optimiser": f"{_first(work.update_traffic_bytes):g} bytes a parameter through memory once a step, "
        + (f"of 1/{shard} of the rank's parameters" if shard > 1 else "of all parameters of the rank"),
        "fixed": "a constant of the engine for what no other part counts; larger steps pay it less often",
        "slowest": f"the slowest of {count_text(planned.devices, 'device')} is expected "
        f"√(2 ln {planned.devices:,}) = {deviations:.1f} standard deviations of {_first(rates.jitter):.2%} "
        "behind their mean, and all wait for it",
    }


def _traffic_reasons(planned: PlannedLayout, work: Workload) -> dict[str, str]:
    layout, rates, inside = planned.layout, planned.run.efficiency.of(work), planned.run.site.devices_per_node
    again, chunks = float(work.layers_again[0]), int(work.overlap_chunks[0])
    is_split = float(work.sequence_parallel[0])
    where = f"inside a node of {inside} devices"
    if layout.tensor > inside:
        where = f"over several nodes of {inside} devices, at the network's speed"
    more = f", {2 * again:g} of them for recomputation" if again else ""
    more += ", two halves of one to gather inputs again for the gradients of weights" if is_split else ""
    beside = (
        f"; gathers before products and sums after them run in {chunks} chunks beside products, which wait "
        f"for the first or the last chunk, {ASSUMED}"
    )
    each = num_stages(layout) // layout.pipeline
    hops = "inside a node" if planned.devices <= inside else "over the network"
    return {
        "tensor_traffic": f"{layout.tensor} ranks {where}; {4 + 2 * again + is_split:g} all-reduces a layer "
        f"and micro-batch{more}, each of 2 (t − 1)/t × the hidden states; {_first(rates.tensor_exposed):.0%} "
        f"is not hidden{beside * (chunks > 1)}",
        "context_traffic": f"keys and values to all {layout.context} context ranks, their gradients back",
        "pipeline_traffic": f"hidden states and their gradients from stage to stage {hops}, {2 * each} times "
        f"a micro-batch on each rank{f' ({each} stages)' * (each > 1)}; {_first(rates.pipeline_exposed):.0%} "
        "is not hidden",
        "data_traffic": _data(planned, rates),
    }


def _data(planned: PlannedLayout, rates: Any) -> str:
    layout, behind, hides = planned.layout, "the passes over it", rates.data_hidden
    ranks, times = layout.shard * layout.context, count_text(planned.micro_batches, "micro-batch")
    is_late = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    if layout.zero == 3 and ranks > 1:
        how = f"parameters are gathered and gradients scattered for each of {times}"
        hides = rates.gather_hidden
    elif layout.zero == 2 and not is_late:
        how = f"parameters are gathered once a step, and gradients scattered for each of {times}"
    else:
        how = "gradients and parameters are exchanged once a step, so larger steps make its share smaller"
        behind = "a backward pass"
    return (
        f"between {layout.replicate * ranks} ranks {how}; another "
        f"{seconds_text(planned, planned.hidden_data_seconds)} are hidden, as {_first(hides):.0%} of "
        f"{behind} can hide traffic, which slows it by {_first(rates.overlap_cost):.0%} of the hidden seconds"
    )


def _bubble(planned: PlannedLayout) -> str:
    layout, many = planned.layout, planned.micro_batches
    ranks, schedule = layout.pipeline, layout.pipeline_schedule
    each = num_stages(layout) // ranks
    divisor = _bubble_divisor(schedule, each)
    formula = f"(p − 1)/{f'({divisor} m)' if divisor > 1 else 'm'} = {ranks - 1}/{divisor * many}"
    text = (
        f"{ranks} pipeline ranks wait while {count_text(many, 'micro-batch')} fill and empty the pipeline: "
        f"for {schedule} and equal stages {formula} = {bubble_share(schedule, ranks, each, many):.1%} of a "
        "rank's work"
    )
    if planned.stages is not None:
        simulated = _simulated_bubble(planned, planned.stages, many)
        text += f"; simulated with these stages and hops, {simulated:.1%}"
    return text


def _bubble_divisor(schedule: str, stages_per_rank: int) -> int:
    return stages_per_rank * (3 if SCHEDULES[schedule].splits_backward else 1)


def _simulated_bubble(planned: PlannedLayout, stages: StageSeconds, micro_batches: int) -> float:
    """Return the simulated seconds beyond the heaviest rank's work, divided by that work."""
    layout, whole = planned.layout, stages.whole()
    ranks, schedule = layout.pipeline, layout.pipeline_schedule
    owned = [stages_of_rank(schedule, ranks, rank, len(whole) // ranks) for rank in range(ranks)]
    work = micro_batches * max(sum(whole[stage] for stage in some) for some in owned)
    return simulated_seconds(schedule, stages, ranks, micro_batches) / work - 1


def _precision(planned: PlannedLayout) -> Iterator[Row]:
    run, fp8 = planned.run, planned.run.recipe.train.fp8
    steps = steps_by_precision(run.recipe)
    if len(steps) > 1:
        others = listed([f"{number:,} in {name}" for name, number in steps.items() if name != run.precision])
        mine, whole = steps.get(run.precision, 0), sum(steps.values())
        reason = f"planned for {run.precision}, the precision of {mine:,} of {whole:,} steps ({others})"
        yield Row("precision", None, mine / whole, reason)
    if run.precision == "fp8":
        gathered = ", which are also gathered in 8 bits" * is_gathered_in_fp8(fp8, run.card.device)
        products = "; products for weights' gradients in bf16" * (fp8.scaling == "rowwise_with_gw_hp")
        head = "the head's weight gradient" if fp8.head else "the head"
        wide = f"{head}, attention and kept activations in bf16"
        reason = f"of the layers' matrices{gathered}{products}; {wide}"
        yield Row(f"FP8 ({fp8.scaling})", None, fp8_share(run.model, fp8), reason)


def _memory(planned: PlannedLayout) -> Iterator[Row]:
    """Yield memory of the fullest device, and of a node if all its ranks are as full."""
    need, host = planned.device_need, planned.host_need
    sizes = sorted(planned.bytes.items(), key=lambda each: -each[1])
    parts = ", ".join(f"{BYTES.get(part, part)} {gb_text(size)}" for part, size in sizes if size > 0)
    fits = {True: "fits", False: "does not fit"}
    of = f"{gb_text(need.bytes)} of {gb_text(need.usable)} usable GB on the fullest, {planned.fullest}"
    yield Row("memory", None, need.bytes / need.usable, f"{fits[need.fits]}: {of}: {parts}")
    content = "the copies that a save makes of weights and optimiser state"
    if planned.run.card.device == "cpu":
        content = f"all of the above and {content}"
    elif planned.layout.cpu_offload:
        content = f"weights, gradients and optimiser state, and {content}"
    if planned.run.recipe.checkpoint.memory_every_steps:
        content += ", and the copies that stay in memory (checkpoint.memory_every_steps)"
    of = f"at most {gb_text(host.bytes)} of {gb_text(host.usable)} GB a node"
    yield Row("host memory", None, host.bytes / host.usable, f"{fits[host.fits]}: {of}: {content}")


def _changes(planned: PlannedLayout) -> Iterator[Row]:
    layout = planned.layout
    if layout.recompute != "none":
        other = _planned_with(planned, {"recompute": "none", "recompute_every_layers": 1})
        yield _change(planned, other, "no recomputation", changed_parts(other, planned))
    if layout.pipeline > 1:
        yield _more_micro_batches(planned)
        yield from _other_schedules(planned)
    if chunked := with_overlap(planned):
        reason = f'layout.tensor_overlap = "chunked" runs them beside products, {ASSUMED}'
        yield _change(planned, chunked, "chunked collectives", reason)


def _change(planned: PlannedLayout, other: PlannedLayout, title: str, reason: str) -> Row:
    share = other.step_seconds / planned.step_seconds
    memory = f"{gb_text(other.peak_bytes)} instead of {gb_text(planned.peak_bytes)} GB{unfit(other)}"
    return Row(title, other.step_seconds, share, f"{reason}; {memory}")


def _planned_with(planned: PlannedLayout, changes: Mapping[str, object]) -> PlannedLayout:
    layout = planned.layout.model_copy(update=changes)
    return plan_layouts(planned.run, [(layout, planned.nodes, planned.micro_batch)], planned.phase)[0]


def _more_micro_batches(planned: PlannedLayout) -> Row:
    """Return the bubble that twice the micro-batches would leave, and what can supply them."""
    layout, many = planned.layout, 2 * planned.micro_batches
    ranks, schedule = layout.pipeline, layout.pipeline_schedule
    while micro_batch_complaint(schedule, many, ranks, num_stages(layout)) is not None:
        many += 1
    if planned.stages is None:
        left = bubble_share(schedule, ranks, num_stages(layout) // ranks, many)
    else:
        left = _simulated_bubble(planned, planned.stages, many)
    sources = [f"{many * planned.tokens_per_step // planned.micro_batches:,} tokens a step"]
    size, copies = planned.micro_batch, layout.replicate * layout.shard
    if many == 2 * planned.micro_batches:
        sources += [f"micro-batches of {size // 2} × {planned.sequence_length:,} tokens"] * (size % 2 == 0)
        fewer = f"{count_text(copies // 2, 'data-parallel rank')} instead of {copies} (half of the devices)"
        sources += [fewer] * (copies % 2 == 0)
    reason = f"would leave a bubble of {left:.1%} of the work; needs {listed(sources, 'or')}"
    return Row(f"{many} micro-batches", None, None, reason)


def _other_schedules(planned: PlannedLayout) -> Iterator[Row]:
    """Plan the first interleaving, and the V, that halve the bubble by its formula."""
    layout = planned.layout
    divisor = _bubble_divisor(layout.pipeline_schedule, num_stages(layout) // layout.pipeline)
    tried = [("interleaved_1f1b", each) for each in _INTERLEAVED if each >= 2 * divisor][:1]
    tried += [("zbv", 2)] if _bubble_divisor("zbv", 2) >= 2 * divisor else []
    for schedule, each in tried:
        changes = {"pipeline_schedule": schedule, "pipeline_stages_per_rank": each, "pipeline_layers": None}
        changed = layout.model_copy(update=changes)
        if complaints(planned.run.case.with_layout(changed), LAYOUT_RULES):
            continue
        stages = num_stages(changed)
        if micro_batch_complaint(schedule, planned.micro_batches, layout.pipeline, stages) is not None:
            continue
        other = _planned_with(planned, changes)
        bubble = seconds_text(planned, other.seconds["bubble"])
        yield _change(planned, other, schedule, f"{each} stages a rank: pipeline bubble {bubble}")


def _layer_parts(work: Workload, rates: Any) -> dict[str, float]:
    """Return seconds of one layer and micro-batch, by the parts that recomputation changes."""
    layer, tensor = layer_seconds(work, rates), exposed_tensor_seconds(work, rates)
    traffic = tensor + context_layer_seconds(work, rates)
    columns = {name: getattr(layer, name) for name in ("matrix", "attention", "elementwise")}
    launch = layer.total(traffic) - (sum(columns.values()) + tensor + traffic - tensor)
    columns |= {"launch": launch, "tensor_traffic": tensor}
    return {part: float(column[0]) for part, column in columns.items()}


def _recomputed_flops(planned: PlannedLayout, work: Workload) -> float:
    """Return recomputed FLOPs as a share of the model's: 2 a weight, attention 2 × width × sequence."""
    matrix = work.layers_again + (1 - work.layers_again) * work.operators_again * 0.5
    again = np.maximum(work.layers_again, work.attention_again)
    attention = again * 2 * work.heads * work.head_dim * work.sequence
    repeated = work.layers * (2 * work.layer_parameters * matrix + attention)
    return float(repeated[0]) / planned.run.flops_per_token(planned.phase)


def _first(constant: Any) -> float:
    return float(np.ravel(constant)[0])

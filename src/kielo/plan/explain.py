"""Explanation of a layout's speed and memory, in sentences with numbers; no torch.

Every number is a `PlannedLayout`'s own, or what the same formulas give for the layout with one thing changed.
GB are 1e9 bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from kielo.plan.collective_seconds import context_layer_seconds
from kielo.plan.compare import ASSUMED, against, is_comparable, overlap_offer, unfit
from kielo.plan.layer_seconds import layer_seconds, matrix_flops
from kielo.plan.overlap_seconds import exposed_tensor_seconds
from kielo.plan.part_names import BYTES, SECONDS, capital, count_text, gb_text, listed, seconds_text
from kielo.plan.pipeline_simulation import simulated_seconds
from kielo.plan.planned_layout import SHARE, PlannedLayout, plan_layouts
from kielo.plan.workload import Workload, steps_by_precision
from kielo.resolve.fp8_matrices import fp8_share, is_gathered_in_fp8
from kielo.resolve.memory_row import StepSize
from kielo.resolve.rules import LAYOUT_RULES, complaints
from kielo.resolve.stages import (
    SCHEDULES,
    micro_batch_complaint,
    num_stages,
    stages_of_rank,
)

_MATRIX_WORK = ("matrix", "head")
_INTERLEAVED = (2, 3, 4, 5, 6, 8)  # stages a rank


def why(planned: PlannedLayout, others: Sequence[PlannedLayout] = ()) -> list[str]:
    """Returns sentences that defend the layout: its speed, memory and seconds by part, and comparisons.

    Compares it with those of `others` that have the same step on as many nodes.
    """
    rivals = [other for other in others if other is not planned and is_comparable(planned, other)]
    return [
        _headline(planned),
        *_precision(planned),
        _memory(planned),
        _host_memory(planned),
        *_parts(planned),
        *_recomputation(planned),
        *([offer] if (offer := overlap_offer(planned)) else []),
        _bound(planned),
        _interval(planned),
        *(against(planned, other) for other in rivals),
    ]


def bubble_share(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Returns idle seconds by a rank's work, for equal stages without hops.

    The backward pass takes twice the forward. (p - 1)/m for GPipe and 1F1B, divided by v for interleaving
    (Narayanan et al. 2021, arXiv:2104.04473); a third of it where the backward pass is split (Qi et al. 2024,
    arXiv:2401.10241).
    """
    return (ranks - 1) / (micro_batches * _bubble_divisor(schedule, stages_per_rank))


def _bubble_divisor(schedule: str, stages_per_rank: int) -> int:
    return stages_per_rank * (3 if SCHEDULES[schedule].splits_backward else 1)


def _headline(planned: PlannedLayout) -> str:
    copies = planned.layout.replicate * planned.layout.shard
    size = f"{planned.micro_batch} × {planned.sequence_length:,} tokens"
    return (
        f"{planned.name} on {count_text(planned.nodes, 'node')} ({count_text(planned.devices, 'device')}): "
        f"a step of {planned.tokens_per_step:,} tokens takes {seconds_text(planned, planned.step_seconds)}, "
        f"which is {planned.tokens_per_second:,.0f} tokens/s, {planned.tflops_per_device:.1f} TFLOP/s a "
        f"device (model FLOPs) and {planned.mfu:.1%} of its peak. "
        f"{'Each of ' * (copies > 1)}{count_text(copies, 'data-parallel rank')} takes "
        f"{count_text(planned.micro_batches, 'micro-batch')} of {size} a step"
        f"{f' ({planned.shares})' * bool(planned.shares.empty_share)}."
    )


def _precision(planned: PlannedLayout) -> Iterator[str]:
    """Yields sentences on the plan's precision, unless everything is in one precision."""
    run, fp8 = planned.run, planned.run.recipe.train.fp8
    steps = steps_by_precision(run.recipe)
    if len(steps) > 1:
        others = listed(
            [f"{number:,} in {name}" for name, number in steps.items() if name != run.precision], "and"
        )
        yield (
            f"The plan is for {run.precision}, which {steps.get(run.precision, 0):,} of "
            f"{sum(steps.values()):,} steps are "
            f"computed in ({others})."
        )
    if run.precision == "fp8":
        share, is_gathered = fp8_share(run.model, fp8), is_gathered_in_fp8(fp8, run.card.device)
        gathered = ", which are also gathered in 8 bits" * is_gathered
        products = "; products for weights' gradients are in bf16" * (fp8.scaling == "rowwise_with_gw_hp")
        head = "the head's weight gradient" if fp8.head else "the head"
        yield (
            f"FP8 ({fp8.scaling}) is for {share:.0%} of the layers' matrices{gathered}{products}; {head}, "
            "attention and what is kept for the backward pass are in bf16."
        )


def _memory(planned: PlannedLayout) -> str:
    """Says what the fullest device holds, in GB of 1e9 bytes like `kielo rehearse`."""
    need = planned.device_need
    usable, peak = need.usable, need.bytes
    left, largest_first = usable - peak, sorted(planned.bytes.items(), key=lambda each: -each[1])
    parts = ", ".join(f"{BYTES.get(part, part)} {gb_text(size)}" for part, size in largest_first if size > 0)
    room = (
        f"{gb_text(left)} GB ({left / usable:.0%}) are left" if need.fits else f"{gb_text(-left)} GB too much"
    )
    fits = "fits" if need.fits else "does not fit"
    return (
        f"Memory {fits}: {gb_text(peak)} GB on the fullest, {planned.fullest}, of "
        f"{gb_text(usable)} usable GB; {room}. In GB of 1e9 bytes: {parts}."
    )


def _host_memory(planned: PlannedLayout) -> str:
    """Says what a node's own memory holds if all its ranks are as the fullest one."""
    need = planned.host_need
    content = "the copies that a save makes of weights and optimiser state"
    if planned.run.card.device == "cpu":
        content = f"all of the above and {content}"
    elif planned.layout.cpu_offload:
        content = f"weights, gradients and optimiser state, and {content}"
    if planned.run.recipe.checkpoint.memory_every_steps:
        content += ", and those that stay in memory (checkpoint.memory_every_steps)"
    return (
        f"Host memory {'fits' if need.fits else 'does not fit'}: at most {gb_text(need.bytes)} GB a node, of "
        f"{gb_text(need.usable)} GB, for {content}."
    )


def _parts(planned: PlannedLayout) -> Iterator[str]:
    """Yields a sentence or two for each part of the step, largest first."""
    facts = _Facts(planned)
    has_copies = planned.layout.replicate * planned.layout.shard * planned.layout.context > 1
    for part, seconds in sorted(planned.seconds.items(), key=lambda each: -each[1]):
        if seconds > 0 or (part == "data_traffic" and has_copies):  # which may be all hidden
            share = seconds / planned.step_seconds
            size = f"{seconds_text(planned, seconds)}, {share:.{1 if share >= 0.001 else 3}%}"
            reason = _SENTENCES[part](facts) if part in _SENTENCES else ""
            yield f"{capital(SECONDS.get(part, part))}: {size}. {reason}".strip()


class _Facts:
    """Numbers for the sentences about one layout: its row of columns, and plans of changed layouts."""

    def __init__(self, planned: PlannedLayout) -> None:
        self.planned, self.layout, self.run = planned, planned.layout, planned.run
        self.inside = planned.run.site.devices_per_node

    @cached_property
    def work(self) -> Workload:
        planned = self.planned
        step = StepSize(planned.sequence_length, planned.micro_batch, planned.micro_batches)
        return Workload.of([self.run.columns(self.layout, step, planned.phase.trainable)])

    def constant(self, name: str) -> float:
        """Returns a fitted constant for this machine and engine."""
        return float(np.ravel(getattr(self.run.efficiency.of(self.work), name))[0])

    def with_layout(self, **changes: object) -> PlannedLayout:
        """Plans the same step with the layout changed."""
        planned, layout = self.planned, self.layout.model_copy(update=changes)
        return plan_layouts(self.run, [(layout, planned.nodes, planned.micro_batch)], planned.phase)[0]


def _matrix(facts: _Facts) -> str:
    work, rates = facts.work, facts.run.efficiency.of(facts.work)
    again = work.layers_again + (1 - work.layers_again) * work.operators_again * 0.5
    is_fp8 = facts.run.precision == "fp8"
    peak = work.peak_recipe if is_fp8 else work.peak
    rate = float((matrix_flops(work) * (3 + again) / layer_seconds(work, rates).matrix / peak)[0])
    large = facts.constant("matrix_fp8" if is_fp8 else "matrix") * facts.constant("matrix_engine")
    large *= float(work.power_share[0]) ** facts.constant("power")
    anew = f" ({2 * float(again[0]):.2g} more for recomputation)" if again > 0 else ""
    return (
        f"2 FLOPs a weight and token forward{anew} and 4 backward, at {rate:.1%} of the device's "
        f"peak{' in FP8' * is_fp8}, of "
        f"which products of any size reach at most {large:.1%}; larger micro-batches make larger products."
    )


def _attention(facts: _Facts) -> str:
    sequence = facts.planned.sequence_length
    return (
        f"It grows with the sequence: {2 * sequence:,} tokens instead of {sequence:,} would take twice as "
        "long a token."
    )


def _elementwise(facts: _Facts) -> str:
    text = "The bytes of norms, residuals, rotation and activations through memory"
    if facts.layout.zero < 3 and facts.planned.micro_batches > 1:
        times = facts.planned.micro_batches
        text += f", and of gradients, added up {times} times a step (less often with larger micro-batches)"
    if facts.layout.tensor > 1 and not facts.layout.sequence_parallel:
        text += (
            f"; sequence parallelism would split norms and residuals over {facts.layout.tensor} tensor ranks"
        )
    return text + "."


def _launch(facts: _Facts) -> str:
    least = 1e3 * facts.constant("layer_seconds")
    return (
        f"The device waits for the host to launch kernels, {least:.2f} ms a layer and micro-batch at least; "
        "larger micro-batches give it more to do meanwhile."
    )


def _head(facts: _Facts) -> str:
    where = (
        f" on the last of {facts.layout.pipeline} pipeline ranks, beside its layers"
        if facts.layout.pipeline > 1
        else ""
    )
    split = f", split over {facts.layout.tensor} tensor ranks" if facts.layout.tensor > 1 else ""
    return f"The output matrix and the loss over {facts.run.model.vocab_size:,} tokens{where}{split}."


def _bubble(facts: _Facts) -> str:
    layout, planned = facts.layout, facts.planned
    ranks, many = layout.pipeline, planned.micro_batches
    each, schedule = num_stages(layout) // ranks, layout.pipeline_schedule
    divisor = _bubble_divisor(schedule, each)
    formula = f"(p − 1)/{f'({divisor} m)' if divisor > 1 else 'm'} = {ranks - 1}/{divisor * many}"
    text = (
        f"{ranks} pipeline ranks wait while {count_text(many, 'micro-batch')} fill and empty the pipeline. "
        f"For {schedule} and equal stages the wait is {formula} = "
        f"{bubble_share(schedule, ranks, each, many):.1%} of a rank's work"
    )
    if planned.stages is not None:
        text += f"; simulated with these stages and hops, it is {_simulated_bubble(planned, many):.1%}"
    return " ".join([f"{text}.", _more_micro_batches(facts, each), *_other_schedules(facts, divisor)])


def _simulated_bubble(planned: PlannedLayout, micro_batches: int) -> float:
    """Returns the simulated seconds beyond the heaviest rank's work, by that work."""
    layout, whole = planned.layout, planned.stages.whole()
    ranks, schedule = layout.pipeline, layout.pipeline_schedule
    owned = [stages_of_rank(schedule, ranks, rank, len(whole) // ranks) for rank in range(ranks)]
    work = micro_batches * max(sum(whole[stage] for stage in some) for some in owned)
    return simulated_seconds(schedule, planned.stages, ranks, micro_batches) / work - 1


def _more_micro_batches(facts: _Facts, stages_per_rank: int) -> str:
    """Says what bubble twice as many micro-batches would leave, and where they could come from."""
    planned, layout = facts.planned, facts.layout
    ranks, schedule, many = layout.pipeline, layout.pipeline_schedule, 2 * planned.micro_batches
    while micro_batch_complaint(schedule, many, ranks, num_stages(layout)) is not None:
        many += 1
    left = (
        bubble_share(schedule, ranks, stages_per_rank, many) if planned.stages is None
        else _simulated_bubble(planned, many)
    )  # fmt: skip
    sources = [f"{many * planned.tokens_per_step // planned.micro_batches:,} tokens a step"]
    size, copies = planned.micro_batch, layout.replicate * layout.shard
    if many == 2 * planned.micro_batches:
        sources += [f"micro-batches of {size // 2} × {planned.sequence_length:,} tokens"] * (size % 2 == 0)
        fewer = f"{count_text(copies // 2, 'data-parallel rank')} instead of {copies} (half of the devices)"
        sources += [fewer] * (copies % 2 == 0)
    return f"{many} micro-batches would leave {left:.1%} of the work: that takes {listed(sources, 'or')}."


def _other_schedules(facts: _Facts, divisor: int) -> Iterator[str]:
    """Plans the first interleaving, and the V, that halve the bubble by its formula."""
    layout, planned = facts.layout, facts.planned
    tried = [("interleaved_1f1b", each) for each in _INTERLEAVED if each >= 2 * divisor][:1]
    tried += [("zbv", 2)] if _bubble_divisor("zbv", 2) >= 2 * divisor else []
    for schedule, each in tried:
        changes = {"pipeline_schedule": schedule, "pipeline_stages_per_rank": each, "pipeline_layers": None}
        changed = layout.model_copy(update=changes)
        if complaints(facts.run.case.with_layout(changed), LAYOUT_RULES):
            continue
        if (
            micro_batch_complaint(schedule, planned.micro_batches, layout.pipeline, num_stages(changed))
            is not None
        ):
            continue
        other = facts.with_layout(**changes)
        yield (
            f"{schedule} with {each} stages a rank would have a bubble of "
            f"{seconds_text(planned, other.seconds['bubble'])}, "
            f"a step of {seconds_text(planned, other.step_seconds)} and {gb_text(other.peak_bytes)} "
            f"GB{unfit(other)}."
        )


def _tensor(facts: _Facts) -> str:
    tensor, again = facts.layout.tensor, float(facts.work.layers_again[0])
    is_split = float(facts.work.sequence_parallel[0])
    times = 4 + 2 * again + is_split
    where = (
        f"{tensor} ranks inside a node of {facts.inside} devices" if tensor <= facts.inside
        else f"{tensor} ranks over several nodes of {facts.inside} devices, at the network's speed"
    )  # fmt: skip
    more = f", {2 * again:g} of them for recomputation" if again else ""
    more += ", two halves of one to gather inputs again for the gradients of weights" if is_split else ""
    chunks = int(facts.work.overlap_chunks[0])
    beside = (
        f" Of this, gathers before products and sums after them run in {chunks} chunks beside products, of "
        f"which the first or the last is waited for, {ASSUMED}." if chunks > 1 else ""
    )  # fmt: skip
    return (
        f"{where}. {times:g} all-reduces a layer and micro-batch{more}, each of 2 (t − 1)/t × the hidden "
        f"states; {facts.constant('tensor_exposed'):.0%} of it is not hidden.{beside}"
    )


def _context(facts: _Facts) -> str:
    return f"Keys and values go through all {facts.layout.context} context ranks, and their gradients back."


def _pipeline(facts: _Facts) -> str:
    layout = facts.layout
    where = "inside a node" if facts.planned.devices <= facts.inside else "over the network"
    each = num_stages(layout) // layout.pipeline
    return (
        f"Hidden states and their gradients go from stage to stage {where}, {2 * each} times a micro-batch "
        f"on each rank{f' ({each} stages)' * (each > 1)}; {facts.constant('pipeline_exposed'):.0%} of it is "
        "not hidden."
    )


def _data(facts: _Facts) -> str:
    layout, planned = facts.layout, facts.planned
    ranks = layout.replicate * layout.shard * layout.context
    times, behind = count_text(planned.micro_batches, "micro-batch"), "the passes over it"
    hides = "data_hidden"
    is_late = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    if layout.zero == 3 and layout.shard * layout.context > 1:
        how = f"parameters are gathered and gradients scattered for each of {times}"
        hides = "gather_hidden"
    elif layout.zero == 2 and not is_late:
        how = f"parameters are gathered once a step, and gradients scattered for each of {times}"
    else:
        how = (
            "gradients and parameters are exchanged once a step, so more tokens a step make its share smaller"
        )
        behind = "a backward pass"
    return (
        f"Between {ranks} ranks {how}. Another {seconds_text(planned, planned.hidden_data_seconds)} are "
        f"hidden: {facts.constant(hides):.0%} of {behind} can hide traffic, which slows it by "
        f"{facts.constant('overlap_cost'):.0%} of what is hidden."
    )


def _optimiser(facts: _Facts) -> str:
    shard, moved = facts.layout.shard * facts.layout.context, float(facts.work.update_traffic_bytes[0])
    share = f"its share of 1/{shard} of the rank's parameters" if shard > 1 else "all parameters of the rank"
    return f"{moved:g} bytes a parameter through memory once a step, of {share}."


def _fixed(facts: _Facts) -> str:
    return (
        "A constant of the engine for all that no other part counts; steps of more tokens pay it less often."
    )


def _slowest(facts: _Facts) -> str:
    devices = facts.planned.devices
    spreads = math.sqrt(2 * math.log(devices))
    return (
        f"The slowest of {count_text(devices, 'device')} is expected √(2 ln {devices:,}) = {spreads:.1f} "
        f"standard deviations of {facts.constant('jitter'):.2%} behind their mean, and all wait for it."
    )


_SENTENCES: dict[str, Callable[[_Facts], str]] = {
    "matrix": _matrix, "attention": _attention, "elementwise": _elementwise, "launch": _launch, "head": _head,
    "bubble": _bubble, "tensor_traffic": _tensor, "context_traffic": _context, "pipeline_traffic": _pipeline,
    "data_traffic": _data, "optimiser": _optimiser, "fixed": _fixed, "slowest": _slowest,
}  # fmt: skip


def _recomputation(planned: PlannedLayout) -> Iterator[str]:
    """Says what recomputation costs in the parts above, and what the step would need without it."""
    if planned.layout.recompute == "none":
        return
    facts = _Facts(planned)
    again, every = recomputed_seconds(planned), planned.layout.recompute_every_layers
    parts = ", ".join(
        f"{SECONDS[part]} {seconds_text(planned, seconds)}" for part, seconds in again.items() if seconds
    )
    text = (
        f"Recomputation ({planned.layout.recompute}{f' in one layer of {every}' * (every > 1)}) is "
        f"{seconds_text(planned, sum(again.values()))} of these ({parts or 'nothing'}): "
        f"{_recomputed_flops(facts):.0%} more "
        "FLOPs than the model's."
    )
    other = facts.with_layout(recompute="none", recompute_every_layers=1)
    step = seconds_text(planned, other.step_seconds)
    text += f" Without it the step would take {step} and {gb_text(other.peak_bytes)} GB{unfit(other)}."
    yield text


def recomputed_seconds(planned: PlannedLayout) -> dict[str, float]:
    """Returns part → its seconds that recomputation causes, by the planner's formulas."""
    work = _Facts(planned).work
    none = np.zeros(1)
    plain = replace(
        work,
        layers_again=none,
        attention_again=none,
        operators_again=none,
        norms_again=none,
        activations_again=none,
    )
    rates = planned.run.efficiency.of(work)
    now, then = _layer_parts(work, rates), _layer_parts(plain, rates)
    return {part: planned.seconds[part] * (1 - then[part] / now[part]) if now[part] else 0.0 for part in now}


def _layer_parts(work: Workload, rates: Any) -> dict[str, float]:
    """Returns seconds of one layer and micro-batch, by the parts of a step that recomputation changes."""
    layer, tensor = layer_seconds(work, rates), exposed_tensor_seconds(work, rates)
    device = layer.matrix + layer.attention + layer.elementwise + tensor
    traffic = tensor + context_layer_seconds(work, rates)
    launch = layer.total(traffic) - (device + traffic - tensor)
    columns = {
        "matrix": layer.matrix,
        "attention": layer.attention,
        "elementwise": layer.elementwise,
        "launch": launch,
    }
    return {part: float(column[0]) for part, column in (columns | {"tensor_traffic": tensor}).items()}


def _recomputed_flops(facts: _Facts) -> float:
    """Returns recomputed FLOPs by the model's.

    A layer's products are 2 a weight forward, attention 2 × width × sequence.
    """
    work, planned = facts.work, facts.planned
    matrix = work.layers_again + (1 - work.layers_again) * work.operators_again * 0.5
    attention = (
        np.maximum(work.layers_again, work.attention_again) * 2 * work.heads * work.head_dim * work.sequence
    )
    anew = work.layers * (2 * work.layer_parameters * matrix + attention)
    return float(anew[0]) / facts.run.flops_per_token(planned.phase)


def _bound(planned: PlannedLayout) -> str:
    """Names the largest part beside the model's matrix products."""
    rest = {part: seconds for part, seconds in planned.seconds.items() if part not in _MATRIX_WORK}
    part = max(rest, key=rest.get)
    products = sum(planned.seconds.get(name, 0.0) for name in _MATRIX_WORK) / planned.step_seconds
    return (
        f"What bounds it: beside matrix work ({products:.1%} with the head), {SECONDS.get(part, part)} "
        f"takes most, {seconds_text(planned, rest[part])} or {rest[part] / planned.step_seconds:.1%} of the "
        "step."
    )


def _interval(planned: PlannedLayout) -> str:
    return (
        f"Prediction interval: {SHARE:.0%} of measured steps are expected between "
        f"{seconds_text(planned, planned.low_seconds)} and "
        f"{seconds_text(planned, planned.high_seconds)}."
    )

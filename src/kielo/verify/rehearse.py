"""One rank of a real job, at its real size, on this machine: bytes, FLOPs and collectives of one step.

The other ranks do not exist and tensors have no memory (torch's fake process group and fake tensors).
Everything that runs is training's own code: the model is laid out and takes an optimiser step, and each
operator of the rank is watched. The first of two steps warms up: in it torch computes how DTensors split,
which looks like operators at the size of the whole model. The second step is counted.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from kielo.models.blocks.decoder import Decoder
from kielo.parallel.fp8 import scale_weights
from kielo.parallel.materialise import local, materialise
from kielo.parallel.mesh import Mesh, build_mesh
from kielo.parallel.pipeline_parallel import Stages
from kielo.ranks.world import World
from kielo.recipe.cards import Cluster, accelerator, accelerators
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Precision
from kielo.resolve.memory import needed_bytes, usable_bytes
from kielo.resolve.resolved import PhasePlacement, Placement, Resolved, filled
from kielo.resolve.shares import AXES, coordinates
from kielo.resolve.stages import (
    layer_numbers,
    micro_batch_complaint,
    num_stages,
    round_of_micro_batches,
    stages_of_rank,
)
from kielo.resolve.state_bytes import StateBytes, host_bytes, state_bytes
from kielo.train.build import build_step, laid_out, positions_of_rank
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.loop import optimiser_step
from kielo.train.optimiser import Optimiser
from kielo.train.watch.checks import Guard
from kielo.verify.rank_watch import Peak, RankWatch
from kielo.verify.screens import Rehearsal
from kielo.verify.torch_fakes import fake_tensors, fake_world, groups_of


def rehearse(resolved: Resolved, rank: int, site: Cluster | None = None) -> Rehearsal:
    """Return the bytes, FLOPs and collectives of one rank in one step of the heaviest phase.

    site: the cluster. The memory of its nodes is compared with the need of their ranks, if all are like this
    rank.

    The heaviest phase has the largest micro-batches. At most 2p + 2 micro-batches run over p pipeline ranks
    (with gpipe all), because no more are in flight at once. The last micro-batches give the other counts.
    Layers are not compiled, and the precision is the run's first. Raise KieloError for a rank that does not
    exist and for a setting that cannot be rehearsed.
    """
    # A compiler needs values. Operators that it would fuse are counted one by one.
    layout = resolved.placement.layout.model_copy(update={"compile": False})
    placement = resolved.placement.model_copy(update={"layout": layout})
    resolved = resolved.model_copy(update={"placement": placement})
    refuse_unrehearsed(placement, rank)
    started = time.monotonic()
    index = heaviest_phase(resolved)
    phase = placement.phases[index]
    few, many = rehearsed_micro_batches(resolved, phase)
    with fake_world(rank, placement.world_size, has_pipeline=layout.pipeline > 1) as world:
        mesh = build_mesh(world, layout)
        trainable = resolved.identity.phases[index].trainable
        precision: Precision = filled(resolved.identity.train.precision)
        model = laid_out(resolved.identity, placement, mesh, precision, trainable)
        with fake_tensors(), RankWatch(*groups_of(mesh)) as watch:
            step = WatchedStep(resolved, index, mesh, model, world, watch)
            first = step.run(few)
            counts = step.run(many)
            peaks = {
                name: _with_all_inputs(peak, phase.micro_batches_per_step, many)
                for name, peak in watch.ledger.peaks().items()
            }
    per_step = _extended(first, counts, few, many, phase.micro_batches_per_step)
    report = _report(resolved, rank, index, step.held, peaks, per_step, many)
    report.update(_host(resolved, report, site))
    report["seconds"] = time.monotonic() - started
    return report


def refuse_unrehearsed(placement: Placement, rank: int) -> None:
    """Raise KieloError for a rank that does not exist and for a setting that cannot be rehearsed."""
    if not 0 <= rank < placement.world_size:
        raise KieloError(f"rank {rank}: the job has ranks 0 to {placement.world_size - 1}")
    if placement.layout.cpu_offload:
        raise KieloError(
            "layout.cpu_offload = true cannot be rehearsed: the CPU stands in for the device, so the two "
            "memories cannot be counted apart. Fix: layout.cpu_offload = false"
        )


def _report(
    resolved: Resolved,
    rank: int,
    index: int,
    held: StateBytes,
    peaks: dict[str, Peak],
    per_step: dict[tuple[str, Any], int],
    many: int,
) -> Rehearsal:
    """Report bytes between steps, peaks by section, and FLOPs and collectives of a whole step.

    many: micro-batches of the step that was run.
    """
    identity, placement = resolved.identity, resolved.placement
    model, train, trained = identity.model, identity.train, identity.phases[index]
    layout, phase = placement.layout, placement.phases[index]
    computed = state_bytes(model, layout, rank, train.optimiser_state, trained.trainable, train.optimiser)
    peak_phase = max(peaks, key=lambda name: peaks[name].bytes)
    card = accelerator(placement.accelerator) if placement.accelerator in accelerators() else None
    usable, peak_bytes = None if card is None else usable_bytes(card), peaks[peak_phase].bytes
    needed = int(needed_bytes(held.total, peak_bytes))
    return {
        "name": identity.name,
        "torch": torch.__version__,
        "rank": rank,
        "world_size": placement.world_size,
        "axes": {axis: getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1},
        "coordinates": {
            axis: n for axis, n in coordinates(layout, rank).items() if getattr(layout, axis) > 1
        },
        "stages": _stages(resolved, coordinates(layout, rank)["pipeline"]),
        "zero": layout.zero,
        "recompute": layout.recompute,
        "sequence_length": trained.sequence_length,
        "micro_batch_sequences": phase.micro_batch_sequences,
        "micro_batches_per_step": phase.micro_batches_per_step,
        "rehearsed_micro_batches": many,
        "state_bytes": asdict(held),
        "computed_state_bytes": asdict(computed),
        "peaks": {name: {"bytes": peak.bytes, "kinds": peak.kinds} for name, peak in peaks.items()},
        "peak_phase": peak_phase,
        "peak_bytes": peak_bytes,
        "needed_bytes": needed,
        "accelerator": placement.accelerator,
        "usable_bytes": usable,
        "fits": None if usable is None else needed <= usable,
        "flops": {what: per_step["flops", what] for kind, what in per_step if kind == "flops"},
        "collectives": [
            {
                "axis": axis,
                "operation": operation,
                "count": per_step["calls", (axis, operation)],
                "bytes": per_step["bytes", (axis, operation)],
            }
            for axis, operation in sorted(what for kind, what in per_step if kind == "calls")
        ],
    }


def _host(resolved: Resolved, report: Rehearsal, site: Cluster | None) -> Rehearsal:
    """Return the bytes of a node's own memory that its ranks need: copies of a save, and all on a CPU."""
    if site is None:
        return {}
    is_copied = resolved.placement.checkpoint.memory_every_steps > 0
    parameters, gradients, optimiser = report["state_bytes"].values()
    each = host_bytes(parameters, gradients, optimiser, is_offloaded=False, is_copied=is_copied)
    if resolved.placement.device == "cpu":
        each += report["peak_bytes"]
    return {
        "host_bytes_per_node": each * min(site.devices_per_node, resolved.placement.world_size),
        "usable_host_bytes_per_node": site.memory_gib_per_node * 2**30,
    }


class WatchedStep:
    def __init__(
        self,
        resolved: Resolved,
        index: int,
        mesh: Mesh,
        model: Decoder | Stages,
        world: World,
        watch: RankWatch,
    ) -> None:
        identity, placement = resolved.identity, resolved.placement
        self._resolved, self._index, self._mesh, self._watch = resolved, index, mesh, watch
        self.model = materialise(model, world.device, None)
        self._name(parameters_of(self.model), "parameters")
        scale_weights(self.model)
        self._name(model.buffers(), "tables")
        train, chunk_tokens = identity.train, filled(placement.train.loss_chunk_tokens)
        guard = Guard(world.device, train)
        precision: Precision = filled(train.precision)
        step = build_step(model, mesh, train, placement.layout, chunk_tokens, precision, guard)
        self._step = replace(step, on_gradients=(self._begin_update,))
        self._name(_state(self._step.optimiser), "optimiser")
        self.held: StateBytes  # measured in the first watched step, before its update

    def run(self, micro_batches: int) -> dict[tuple[str, Any], int]:
        """Take one optimiser step of `micro_batches`, by the function of `train/loop.py`.

        Return ("flops", what), ("calls", what) and ("bytes", what) → its amount.
        """
        batch = self.batch(micro_batches)
        self._watch.section = "passes"
        self._watch.begin()
        optimiser_step(self._step, batch, self._resolved.identity.learning_rates[0].peak)
        counters = (("flops", self._watch.flops), ("calls", self._watch.calls), ("bytes", self._watch.bytes))
        return {(kind, what): number for kind, counter in counters for what, number in counter.items()}

    def batch(self, micro_batches: int) -> StepBatch:
        identity, placement = self._resolved.identity, self._resolved.placement
        length = identity.phases[self._index].sequence_length
        rows = placement.phases[self._index].micro_batch_sequences
        positions = positions_of_rank(length, self._mesh)
        shape = rows, length // self._mesh["context"].size()
        self._watch.section = "batch"
        batches = []
        for _ in range(micro_batches):
            inputs, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            documents = torch.zeros(shape, dtype=torch.int32) if identity.dataset.mask_documents else None
            keys = torch.zeros(rows, 2, dtype=torch.int32) if identity.train.has_dropout else None
            batches.append(MicroBatch(inputs, labels, documents, keys, positions))
        return StepBatch(1, (), batches, torch.ones((), dtype=torch.int64))

    def _begin_update(self, batch: StepBatch) -> None:
        """Measure the state before the update: gradients are reduced, and the passes hold nothing else."""
        self._watch.section = "update"
        parameters = parameters_of(self.model)
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._name(gradients, "gradients")
        self._name(parameters, "parameters")
        kinds = (parameters, gradients, list(_state(self._step.optimiser)))
        self.held = StateBytes(*(self._watch.ledger.bytes_of(map(local, some)) for some in kinds))

    def _name(self, tensors: Iterable[Tensor], kind: str) -> None:
        self._watch.ledger.name(map(local, tensors), kind)


def heaviest_phase(resolved: Resolved) -> int:
    """Return the phase with the most tokens in a micro-batch; of equals, a phase that trains all modules."""
    identity, placement = resolved.identity, resolved.placement

    def weight(index: int) -> tuple[int, bool, int]:
        placed, phase = placement.phases[index], identity.phases[index]
        tokens = placed.micro_batch_sequences * phase.sequence_length
        return tokens, not phase.trainable, placed.micro_batches_per_step

    return max(range(len(placement.phases)), key=weight)


def rehearsed_micro_batches(resolved: Resolved, phase: PhasePlacement) -> tuple[int, int]:
    layout, all_of_them = resolved.placement.layout, phase.micro_batches_per_step
    ranks, schedule = layout.pipeline, layout.pipeline_schedule
    # With 1F1B at most p are in flight at once, and with one more all ranks are busy; schedules with more
    # stages a rank need a second round to show their peak, in rounds of the run's size.
    a_round = round_of_micro_batches(all_of_them, ranks)
    longest = {"gpipe": all_of_them, "1f1b": ranks + 1}.get(schedule, 2 * max(ranks + 1, a_round))
    most = min(all_of_them, longest if ranks > 1 else 2)
    fitting = [
        number
        for number in range(1, most + 1)
        if ranks == 1 or micro_batch_complaint(schedule, number, ranks, num_stages(layout)) is None
    ] or [all_of_them]
    alike = [number for number in fitting if round_of_micro_batches(number, ranks) == a_round]
    return fitting[0], alike[-1] if schedule.startswith("interleaved") and alike else fitting[-1]


def _extended(
    first: dict[tuple[str, Any], int], counts: dict[tuple[str, Any], int], few: int, many: int, wanted: int
) -> dict[tuple[str, Any], int]:
    """Extrapolate counts to `wanted` micro-batches, by their growth from `few` to `many`."""
    if wanted == many:
        return counts
    grown = {key: counts[key] - first.get(key, 0) for key in counts}
    return {key: counts[key] + grown[key] * (wanted - many) // (many - few) for key in counts}


def _with_all_inputs(peak: Peak, wanted: int, many: int) -> Peak:
    """Return the peak with the inputs of `wanted` micro-batches, which are in memory from the start."""
    more = peak.kinds.get("batch", 0) * (wanted - many) // many
    kinds = {kind: size + more * (kind == "batch") for kind, size in peak.kinds.items()}
    return Peak(peak.bytes + more, kinds)


def _stages(resolved: Resolved, pipeline_rank: int) -> dict[str, list[int]]:
    """Return stage number → its [first, last] layer, [] for a stage without layers."""
    layout = resolved.placement.layout
    if layout.pipeline == 1:
        return {"0": [0, resolved.identity.model.num_hidden_layers - 1]}
    ranges = layer_numbers(layout)
    numbers = stages_of_rank(
        layout.pipeline_schedule, layout.pipeline, pipeline_rank, filled(layout.pipeline_stages_per_rank)
    )
    return {
        str(number): [ranges[number][0], ranges[number][-1]] if ranges[number] else [] for number in numbers
    }


def _state(optimiser: Optimiser) -> Iterator[Tensor]:
    for state in optimiser.algorithm.state.values():
        yield from state.values()


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the model's parameters with a tied embedding's copy, which stages neither name nor optimise."""
    return [p for module in model.modules() for p in module.parameters(recurse=False)]

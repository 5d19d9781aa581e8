"""Assembles a run: the resolved numbers and a world of ranks → the parts that the loop calls, in the order
they need.

All choices that depend on layout, device or recipe are made here, once.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kielo.artifact.alerts import ALERTS_NAME
from kielo.artifact.metrics import METRICS_NAME
from kielo.artifact.weights_folder import resolve_weights
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.checkpoint.store import Store
from kielo.dataset.batches import Batches, heldout_batch
from kielo.models import families
from kielo.parallel.apply import lay_out
from kielo.parallel.context import context_positions
from kielo.parallel.fp8 import refuse_without_fp8, scale_weights
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import Mesh, build_mesh, data_rank, data_ranks, sum_over_data
from kielo.parallel.norm import clip_gradients
from kielo.parallel.world import World, make_host_group
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Identity, Placement, Resolved
from kielo.train.feed import Feed
from kielo.train.forward_backward import ForwardBackward, forward_backward_of
from kielo.train.fp8_probe import Fp8Probe
from kielo.train.guard import Guard
from kielo.train.heldout import HeldOut
from kielo.train.log import Log, MetricsFile, Sink, TensorBoard, Terminal
from kielo.train.meter import Meter
from kielo.train.optimiser import Optimiser, build_optimiser
from kielo.train.precision import next_precision, settle_matrix_products
from kielo.train.profile import Profile
from kielo.train.schedule import learning_rate
from kielo.train.state import Checkpoints, State, note_alert
from kielo.train.step_row import StepRow
from kielo.train.stop import Stop


@dataclass
class Run:
    """The parts of a run, as the loop names them."""

    device: torch.device
    mesh: Mesh
    state: State
    guard: Guard
    learning_rate: Callable[[int], float]
    meter: Meter
    step_row: StepRow
    log: Log
    stop: Stop
    checkpoints: Checkpoints
    alert: Callable[[int, str], None]
    profile: Profile
    # Of a precision, by `compute_in`:
    precision: Precision = "fp32"
    model: nn.Module | None = None
    forward_backward: ForwardBackward | None = None
    clip: Callable[[], Tensor] | None = None
    optimiser: Optimiser | None = None
    heldout: HeldOut | None = None
    # Of a phase, by `enter`:
    feed: Feed | None = None
    last_step: int = 0
    tokens_per_step: int = 0
    sequences_per_step: int = 0

    def restore(self) -> None:
        """Go back to the newest checkpoint; without one the first weights stay."""
        self.checkpoints.restore()
        scale_weights(self.model)

    def forget_model(self) -> None:
        """Give its memory back, for the one that takes its place."""
        self.model = self.forward_backward = self.clip = self.optimiser = self.heldout = None
        self.checkpoints.forget()
        gc.collect()  # hooks and modules hold each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close_feed(self) -> None:
        if self.feed is not None:
            self.feed.close()
            self.feed = None


def assemble(
    resolved: Resolved, world: World, stop: Stop, permit: Callable[[], None], profile_steps: int = 0
) -> Run:
    """Every part of the run `resolved` but those of a phase, on this rank. All ranks call it together.

    permit: raises KieloError when this job may no longer save checkpoints. profile_steps: how many to record.

    Raises KieloError for whatever the parts refuse: tokens that are missing, a layout that does not fit the
    world, a checkpoint of another run.
    """
    identity, placement = resolved.identity, resolved.placement
    device = world.device
    mesh = build_mesh(world, placement)
    checkpoints = Checkpoints(_store(placement, world, permit), resolved)
    guard = Guard(device, identity.max_skipped_steps_in_a_row, identity.fp8.watch_steps)
    meter = Meter(world.size, identity.total_tokens, device)
    stop.use(device)
    run = Run(
        device=device,
        mesh=mesh,
        state=State(),
        guard=guard,
        learning_rate=learning_rate(identity),
        meter=meter,
        step_row=StepRow(meter, guard),
        log=Log(placement.log_every_steps, identity.total_steps, _sinks(identity, placement, world)),
        stop=stop,
        checkpoints=checkpoints,
        alert=_alert(placement) if world.rank == 0 else lambda step, message: None,
        # By then all is compiled and warm.
        profile=Profile(
            placement.train_folder, checkpoints.found.step + 3, profile_steps, device, paused=meter.paused
        ),
    )
    compute_in(run, resolved, next_precision(identity, checkpoints.found))
    return run


def compute_in(run: Run, resolved: Resolved, precision: Precision) -> None:
    """Make `run` one that computes in `precision`: the model and all that holds it, anew, without its
    weights' values where there is a checkpoint to restore. Modules cannot be changed once FSDP2 or a compiler
    has seen them.
    """
    identity, placement = resolved.identity, resolved.placement
    run.forget_model()
    if precision == "fp8":
        refuse_without_fp8(run.device, identity.fp8)
    settle_matrix_products(precision)
    is_restored, weights = run.checkpoints.newest is not None, identity.model.weights
    model = laid_out(identity, placement, run.mesh, precision)
    _fill(model, identity, placement, run.device, is_filled_later=is_restored or weights is not None)
    source_tensors = None
    if weights is not None and not is_restored:
        source_tensors = load_model_weights(
            dict(model.named_parameters()), resolve_weights(weights), identity.model
        )
    forward_backward = forward_backward_of(
        model, identity.z_loss, placement.loss_chunk_tokens, run.mesh, placement, precision
    )
    optimiser = build_optimiser(model, identity)
    run.checkpoints.track(dict(model.named_parameters()), optimiser, run.guard, run.state, source_tensors)
    run.precision, run.model, run.optimiser = precision, model, optimiser
    run.clip = partial(clip_gradients, model, run.mesh, identity.max_gradient_norm)
    run.heldout = _heldout(identity, placement, run.mesh, run.device, model, forward_backward)
    run.forward_backward = forward_backward
    if precision == "fp8":
        optimiser.adamw.register_step_post_hook(lambda *_: scale_weights(model))
        if identity.fp8.probe_every_steps:
            run.forward_backward = Fp8Probe(
                forward_backward,
                model,
                run.mesh,
                identity.fp8.probe_every_steps,
                identity.total_steps,
                run.log.write,
            )


def enter(run: Run, resolved: Resolved, index: int, last_step: int) -> None:
    """Make `run` one of phase `index` of the resolved run, up to `last_step`: all that a phase changes, and
    no more.
    """
    phase, placement = resolved.identity.phases[index], resolved.placement.phases[index]
    run.close_feed()
    run.feed = _feed(resolved, index, last_step, run.mesh, run.device)
    run.last_step = last_step
    run.tokens_per_step, run.sequences_per_step = phase.tokens_per_step, phase.sequences_per_step
    run.meter.use(
        placement.flops_per_token,
        run.state.tokens,
        resolved.placement.peak_tflops.get(run.precision),
        placement.planned_tokens_per_second,
    )
    run.step_row.phase = phase.number


def _store(placement: Placement, world: World, permit: Callable[[], None]) -> Store:
    folder = Path(placement.train_folder)
    return Store(
        folder / "checkpoints",
        placement.keep_newest,
        placement.keep_every_steps,
        make_host_group(world, "checkpoint", placement.start_timeout_seconds),
        on_alert=_alert(placement),
        permit=permit,
    )


def _alert(placement: Placement) -> Callable[[int, str], None]:
    return partial(note_alert, Path(placement.train_folder) / ALERTS_NAME)


def laid_out(identity: Identity, placement: Placement, mesh: Mesh, precision: Precision) -> nn.Module:
    """The model over the mesh, on meta: no rank ever holds more than its shards of a model too
    large for it.
    """
    with torch.device("meta"):
        model = families.build_model(identity.model)
    return lay_out(model, mesh, placement, precision, identity.fp8)


def _fill(
    model: nn.Module, identity: Identity, placement: Placement, device: torch.device, is_filled_later: bool
) -> None:
    config = identity.model
    initial_value = families.module(config.model_type, "model").initial_value
    materialise(
        model,
        device,
        None if is_filled_later else lambda name, shape: initial_value(name, shape, config, identity.seed),
        is_offloaded=placement.cpu_offload,
    )


def _feed(resolved: Resolved, index: int, last_step: int, mesh: Mesh, device: torch.device) -> Feed:
    identity, placement, phase = resolved.identity, resolved.placement, resolved.identity.phases[index]
    batches = Batches(
        Path(placement.tokens_folder),
        identity.seed,
        phase,
        identity.longest_sequence_length,
        placement.end_of_text_id,
        identity.mask_documents,
    )
    read_step = partial(batches.step, data_rank=data_rank(mesh), data_ranks=data_ranks(mesh))
    micro_batch_sequences = placement.phases[index].micro_batch_sequences
    return Feed(read_step, micro_batch_sequences, last_step, device, _positions(phase.sequence_length, mesh))


def _positions(sequence_length: int, mesh: Mesh) -> Tensor | None:
    """Which columns of each sequence this rank takes."""
    axis = mesh["context"]
    if axis.size() == 1:
        return None
    return context_positions(sequence_length, axis.size(), axis.get_local_rank())


def _heldout(
    identity: Identity,
    placement: Placement,
    mesh: Mesh,
    device: torch.device,
    model: nn.Module,
    forward_backward: ForwardBackward,
) -> HeldOut:
    length = identity.phases[0].sequence_length  # of the whole run, so that its scores can be compared
    batch = heldout_batch(
        Path(placement.tokens_folder), length, identity.heldout_sequences, identity.mask_documents
    )
    return HeldOut(
        batch,
        data_rank(mesh),
        data_ranks(mesh),
        partial(sum_over_data, mesh=mesh),
        placement.phases[0].micro_batch_sequences,
        forward_backward,
        placement.heldout_every_steps,
        identity.total_steps,
        device,
        model,
        _positions(length, mesh),
    )


def _sinks(identity: Identity, placement: Placement, world: World) -> list[Sink]:
    if world.rank != 0:
        return []
    folder = Path(placement.train_folder)
    sinks: list[Sink] = [
        Terminal(identity.total_steps, _alert(placement)),
        MetricsFile(folder / METRICS_NAME),
    ]
    if placement.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    return sinks

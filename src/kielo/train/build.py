"""Builds the parts of a run, in the order in which they need each other.

In: the resolved numbers and a world of ranks. All choices that depend on layout, device or recipe are made
here, once.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kielo.artifact.attempt_files import ALERTS_NAME
from kielo.artifact.metrics import METRICS_NAME
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.first_weights import first_settings, load_first_weights
from kielo.dataset.batches import Batch, Batches, filled_up, with_dropout_keys
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.masking import Masking, masking_rate, masking_vocabulary
from kielo.dataset.query import read_sequences
from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.parallel.context_parallel import context_positions
from kielo.parallel.fp8 import refuse_without_fp8, scale_weights
from kielo.parallel.gradient_clipping import clip_gradients
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import Mesh, build_mesh, communicators, data_rank, data_ranks, sum_over_data
from kielo.parallel.parallelise import parallelise
from kielo.parallel.pipeline_parallel import Stages
from kielo.parallel.replicas import Replicas
from kielo.ranks.communicator import TimeLimits
from kielo.ranks.hang_watch import Progress
from kielo.ranks.world import World, make_host_group
from kielo.recipe.sections import Layout, Precision, TrainIdentity
from kielo.resolve.planned_phases import trains
from kielo.resolve.resolved import Identity, Placement, Resolved, filled
from kielo.resolve.stages import SCHEDULES
from kielo.train.callbacks import callbacks_of_packages
from kielo.train.feed import Feed, Replacement
from kielo.train.forward_backward import ForwardBackward, forward_backward_of
from kielo.train.garbage import Garbage
from kielo.train.heldout import HeldOut, HeldOutText, share_of
from kielo.train.log import Log, MetricsFile, Sink, TensorBoard, Terminal, Wandb
from kielo.train.meter import Meter, StepRow
from kielo.train.optimiser import build_optimiser
from kielo.train.parts import Asked, PhaseParts, PrecisionParts, Run, StepParts
from kielo.train.precision import Fp8Probe, next_precision, settle_matrix_products
from kielo.train.profile import Profile
from kielo.train.schedule import learning_rate
from kielo.train.start_checks import FirstLoss
from kielo.train.state import RunCheckpoints, State, note_alert
from kielo.train.stop import Stop
from kielo.train.watch.checks import Divergence, LocalFinite, NotFinite
from kielo.train.watch.guard import Guard
from kielo.train.watch.layer_marks import marked_layers
from kielo.train.watch.replica_check import ReplicaCheck
from kielo.train.watch.resources import Resources
from kielo.train.watch.slow_ranks import LayerTimes, SpeedWatch
from kielo.train.watch.spike_watch import SpikeWatch
from kielo.train.watch.spikes import Spikes


def assemble(
    resolved: Resolved,
    world: World,
    stop: Stop,
    permit: Callable[[], None],
    progress: Progress,
    asked: Asked,
) -> Run:
    """Build every part of the run but those of a phase, on this rank. All ranks call it together.

    permit: raises KieloError when this job may no longer save checkpoints. progress: is told what this rank
    does.

    Raises KieloError for whatever the parts refuse: tokens that are missing, a layout that does not fit the
    world, a checkpoint of another run.
    """
    identity, placement = resolved.identity, resolved.placement
    device, state = world.device, State()
    mesh = build_mesh(world, placement.layout)
    time_limits = TimeLimits(
        communicators(mesh),
        filled(placement.train.start_timeout_seconds),
        placement.train.step_timeout_seconds,
        progress,
    )
    guard = Guard(device, identity.train)
    spikes = Spikes(device, identity.train)
    checkpointer = _checkpointer(placement, world, permit)
    checkpoints = RunCheckpoints(checkpointer, resolved, guard, spikes, state, asked.is_saving)
    meter = Meter(world.size, identity.total_tokens, device)
    stop.use(device, progress.at_files)
    sinks = _sinks(identity, placement, world)
    log = Log(placement.train, identity.total_steps, sinks, progress.at_files)
    alert = _alert(placement) if world.rank == 0 else lambda step, message: None
    precision = next_precision(identity, checkpoints.found)
    spike_watch = SpikeWatch(
        spikes, resolved, checkpoints.go_back_before, lambda: state.spikes, log.write, alert
    )
    replica_check = ReplicaCheck(placement.train, checkpoints.go_back_before)
    return Run(
        asked=asked,
        device=device,
        mesh=mesh,
        time_limits=time_limits,
        state=state,
        guard=guard,
        checks=(
            NotFinite(guard, alert),
            # Before divergence ends the run: going back may help.
            spike_watch,
            Divergence(guard, checkpoints.way_on),
            replica_check,
        ),
        spike_watch=spike_watch,
        replica_check=replica_check,
        speed_watch=SpeedWatch(device, alert),
        learning_rate=learning_rate(identity),
        meter=meter,
        step_row=StepRow(meter, guard),
        log=log,
        stop=stop,
        resources=Resources(
            _alert(placement),
            stop.ask,
            checkpoints.shortage if world.rank == 0 else lambda: None,
            is_looking=world.local_rank == 0,
        ),
        checkpoints=checkpoints,
        alert=alert,
        # At the third step everything is compiled and warm.
        profile=Profile(
            placement.train_folder,
            checkpoints.found.step + 3,
            asked.profile_steps,
            device,
            paused=meter.paused,
        ),
        garbage=_garbage(placement),
        current=_with_periodic(
            _build_precision(resolved, precision, mesh, time_limits, guard, checkpoints, log), asked
        ),
    )


def compute_in(run: Run, resolved: Resolved, precision: Precision) -> None:
    """Replace the run's model, and everything that holds it, by one that computes in `precision`.

    It trains what the step after the newest checkpoint trains. The memory of the old model is freed first.
    Modules cannot be changed once FSDP2 or a compiler has seen them. The caller restores that checkpoint.
    """
    del run.current
    run.checkpoints.forget()
    run.garbage.end()
    gc.collect()  # hooks and modules hold each other
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.current = _with_periodic(
        _build_precision(resolved, precision, run.mesh, run.time_limits, run.guard, run.checkpoints, run.log),
        run.asked,
    )
    run.garbage.begin()


def restore(run: Run) -> None:
    """Restore the newest checkpoint; without one the initial weights stay."""
    run.checkpoints.restore()
    scale_weights(run.current.model)


@contextmanager
def phase_parts(run: Run, resolved: Resolved, index: int, last_step: int) -> Iterator[PhaseParts]:
    """Build the parts for steps of phase `index` up to `last_step`; clipping, meter and rows follow it."""
    phase, placement = resolved.identity.phases[index], resolved.placement.phases[index]
    run.meter.use(
        placement.flops_per_token,
        run.state.tokens,
        resolved.placement.peak_tflops.get(run.current.precision),
        placement.planned_tokens_per_second,
    )
    clip = partial(clip_gradients, run.current.model, run.mesh, resolved.identity.max_gradient_norm(index))
    run.current = replace(run.current, step=replace(run.current.step, clip=clip))
    run.step_row.phase = phase.number
    run.spike_watch.spikes.use(phase.number)
    feed = _feed(run, resolved, index, last_step)
    try:
        with marked_layers(run.current.model, run.device, run.time_limits.progress):
            yield PhaseParts(feed, last_step, phase.tokens_per_step, phase.sequences_per_step)
    finally:
        feed.close()


def build_step(
    model: nn.Module,
    mesh: Mesh,
    train: TrainIdentity,
    layout: Layout,
    loss_chunk_tokens: int,
    precision: Precision,
    guard: Guard,
) -> StepParts:
    """Build the parts of an optimiser step of `model`, which is laid out over `mesh` and has its memory."""
    optimiser = build_optimiser(model, train)
    if precision == "fp8":
        optimiser.algorithm.register_step_post_hook(lambda *_: scale_weights(model))
    return StepParts(
        forward_backward=forward_backward_of(model, mesh, train, loss_chunk_tokens, layout, precision),
        clip=partial(clip_gradients, model, mesh, train.max_gradient_norm),
        guard=guard,
        optimiser=optimiser,
    )


def _with_periodic(parts: PrecisionParts, asked: Asked) -> PrecisionParts:
    return replace(parts, periodic=tuple(make(parts) for make in asked.periodic))


def _build_precision(
    resolved: Resolved,
    precision: Precision,
    mesh: Mesh,
    time_limits: TimeLimits,
    guard: Guard,
    checkpoints: RunCheckpoints,
    log: Log,
) -> PrecisionParts:
    """Build the model and everything that holds it.

    With a checkpoint to restore, the weights get memory but no values.
    """
    identity, placement, device = resolved.identity, resolved.placement, guard.device
    if precision == "fp8":
        refuse_without_fp8(device, identity.train.fp8)
    settle_matrix_products(precision)
    is_restored, weights = checkpoints.newest is not None, identity.model.weights
    trainable = identity.phases[identity.phase_index((checkpoints.newest_step or 0) + 1)].trainable
    model = laid_out(identity, placement, mesh, precision, trainable)
    _fill(model, identity, placement, device, is_filled_later=is_restored or weights is not None)
    source_tensors, source_settings = None, None
    if weights is not None and not is_restored:
        source_tensors = load_first_weights(dict(model.named_parameters()), identity, placement)
        source_settings = first_settings(identity, placement)
    step = build_step(
        model,
        mesh,
        identity.train,
        placement.layout,
        filled(placement.train.loss_chunk_tokens),
        precision,
        guard,
    )
    checkpoints.track(dict(model.named_parameters()), step.optimiser, source_tensors, source_settings)
    heldout = _heldout(identity, placement, mesh, device, model, step.forward_backward)
    if precision == "fp8" and identity.train.fp8.probe_every_steps:
        probe = Fp8Probe(
            step.forward_backward,
            model,
            mesh,
            identity.train.fp8.probe_every_steps,
            identity.total_steps,
            log.write,
            time_limits.paused,
        )
        step = replace(step, on_gradients=(*step.on_gradients, probe))
    replicas, local_finite = Replicas(checkpoints.tensors, mesh), LocalFinite(model, device)
    layer_times = LayerTimes(model, device)
    return PrecisionParts(precision, trainable, model, step, replicas, local_finite, layer_times, heldout)


def _checkpointer(placement: Placement, world: World, permit: Callable[[], None]) -> Checkpointer:
    folder = Path(placement.train_folder)
    checkpointer = Checkpointer(
        folder / "checkpoints",
        placement.checkpoint.keep_newest,
        filled(placement.checkpoint.keep_every_steps),
        make_host_group(world, "checkpoint", world.timeout_seconds),
        on_alert=_alert(placement),
        permit=permit,
    )
    if placement.checkpoint.memory_every_steps:
        checkpointer.use_memory(world.local_rank)
    return checkpointer


def _alert(placement: Placement) -> Callable[[int, str], None]:
    return partial(note_alert, Path(placement.train_folder) / ALERTS_NAME)


def laid_out(
    identity: Identity,
    placement: Placement,
    mesh: Mesh,
    precision: Precision,
    trainable: Sequence[str] = (),
) -> Decoder | Stages:
    """Build the model over the mesh, on meta, so that no rank ever holds more than its shards of it.

    trainable: the modules that get gradients, none for all. The others are frozen before anything wraps them.
    """
    with torch.device("meta"):
        model = families.build_model(identity.model)
    model.restarts_positions = bool(identity.dataset.restart_positions)
    model.make_noise.rate = identity.train.hidden_dropout
    model.make_noise.weight_rate = identity.train.attention_dropout
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(identity.model, trainable, name))
    train = identity.train
    return parallelise(model, mesh, placement.layout, precision, train.fp8, train.gradient_reduce_dtype)


def _fill(
    model: Decoder | Stages,
    identity: Identity,
    placement: Placement,
    device: torch.device,
    is_filled_later: bool,
) -> None:
    config, seed = identity.model, identity.seed
    initial_value = families.module(config.model_type, "model").initial_value
    materialise(
        model,
        device,
        None if is_filled_later else lambda name, shape, box: initial_value(name, shape, config, seed, box),
        is_offloaded=placement.layout.cpu_offload,
    )


def _feed(run: Run, resolved: Resolved, index: int, last_step: int) -> Feed:
    identity, placement, phase = resolved.identity, resolved.placement, resolved.identity.phases[index]
    rank, ranks, placed = data_rank(run.mesh), data_ranks(run.mesh), placement.phases[index]
    rows = placed.micro_batch_sequences * placed.micro_batches_per_step
    prepare, end = prepared(identity, placement), placement.end_of_text_id

    def opened() -> Callable[[int], Batch]:
        batches = Batches(
            Path(placement.tokens_folder),
            identity.seed,
            phase,
            identity.longest_sequence_length,
            end,
            identity.dataset.mask_documents,
        )

        def read_step(step: int) -> Batch:
            samples = batches.samples(step, rank, ranks)
            batch = prepare(read_sequences(batches, step, samples, identity.model.vocab_rows), step)
            if identity.train.has_dropout:
                batch = with_dropout_keys(batch, identity.seed)
            return filled_up(batch, rows, end)

        return read_step

    return Feed(
        opened(),
        placed.micro_batch_sequences,
        last_step,
        run.device,
        positions_of_rank(phase.sequence_length, run.mesh),
        Replacement(opened, run.time_limits.progress.at_files, _alert(placement)),
    )


def prepared(identity: Identity, placement: Placement) -> Callable[[Batch, int], Batch]:
    """Return what makes a step's batch one of the run's objective; the step of held-out text is the last."""
    train = identity.train
    if train.objective == "next_token":
        return lambda batch, step: batch
    vocabulary = masking_vocabulary(placement.tokenizer_folder, train.masking)
    masking = Masking(identity.seed, train.masking, vocabulary, train.causal_share)

    def hide(batch: Batch, step: int) -> Batch:
        rate = masking_rate(train.masking_rate, train.final_masking_rate, step, identity.total_steps)
        return masking.training_batch(batch, rate)

    return hide


def positions_of_rank(sequence_length: int, mesh: Mesh) -> Tensor | None:
    """The columns of each sequence that this rank takes; None if it takes all of them."""
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
    texts, prepare = [], prepared(identity, placement)
    for one in heldout_sets(placement.tokens_folder):
        batch = one.batch(length, identity.train.heldout_sequences, identity.dataset.mask_documents)
        share = share_of(
            prepare(batch, identity.total_steps),
            data_rank(mesh),
            data_ranks(mesh),
            placement.phases[0].micro_batch_sequences,
            positions_of_rank(length, mesh),
        )
        texts.append(HeldOutText(one, share, identity.train.objective == "next_token"))
    return HeldOut(
        texts,
        model,
        forward_backward,
        partial(sum_over_data, mesh=mesh),
        device,
        placement.train.heldout_every_steps,
        identity.total_steps,
    )


def _garbage(placement: Placement) -> Garbage:
    # A schedule that splits the backward leaves graphs, with their activations, that refer to each other.
    layout = placement.layout
    is_split = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    return Garbage(1 if is_split else placement.train.collect_garbage_every_steps)


def _sinks(identity: Identity, placement: Placement, world: World) -> list[Sink]:
    if world.rank != 0:
        return []
    folder, alert = Path(placement.train_folder), _alert(placement)
    sinks: list[Sink] = [
        Terminal(identity.total_steps, alert),
        MetricsFile(folder / METRICS_NAME, alert, identity.tokens_after),
    ]
    if identity.model.weights is not None and identity.model.transplant is None:
        sinks.append(FirstLoss(identity, alert))
    if placement.train.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", alert))
    if placement.train.wandb:
        sinks.append(Wandb(placement.train.wandb, identity.name, folder))
    return sinks + callbacks_of_packages(folder, alert)

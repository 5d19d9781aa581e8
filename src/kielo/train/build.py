"""Build the parts of a run. Choices that depend on layout, device or recipe are made here, once."""

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
from kielo.checkpoint.hugging_face_import import first_settings, load_first_moments, load_first_weights
from kielo.checkpoint.remote_copies import RemoteCopies
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
from kielo.train.heldout import HeldOut, HeldOutText, share_of
from kielo.train.log import Log, MetricsFile, Sink, TensorBoard, Terminal, Wandb
from kielo.train.meter import Meter, StepRow
from kielo.train.optimiser import Optimiser
from kielo.train.parts import Asked, PhaseParts, PrecisionParts, Run, StepParts
from kielo.train.precision import Fp8Probe, next_precision, settle_matrix_products
from kielo.train.profile import Profile
from kielo.train.schedule import learning_rate
from kielo.train.start_checks import FirstLoss
from kielo.train.state import RunCheckpoints, State, note_alert
from kielo.train.stop import Stop
from kielo.train.watch.checks import Divergence, Guard, LocalFinite, NotFinite, ReplicaCheck
from kielo.train.watch.resources import Garbage, Resources
from kielo.train.watch.slow_ranks import LayerTimes, SpeedWatch, marked_layers
from kielo.train.watch.spikes import Spikes, SpikeWatch


def assemble(
    resolved: Resolved, world: World, stop: Stop, permit: Callable[[], None], progress: Progress, asked: Asked
) -> Run:
    """Build every part of the run, except the parts of a phase. All ranks call it together.

    `permit` raises KieloError if this job must not save any more. Raise KieloError for missing tokens, a
    layout that does not fit the world, and a checkpoint of another run.
    """
    identity, placement = resolved.identity, resolved.placement
    device, state, is_first = world.device, State(), world.rank == 0
    mesh = build_mesh(world, placement.layout)
    start_seconds, step_seconds = placement.train.start_timeout_seconds, placement.train.step_timeout_seconds
    time_limits = TimeLimits(communicators(mesh), filled(start_seconds), step_seconds, progress)
    guard = Guard(device, identity.train)
    spikes = Spikes(device, identity.train)
    checkpointer = _checkpointer(placement, world, permit, asked.copies)
    checkpoints = RunCheckpoints(checkpointer, resolved, guard, spikes, state, asked.is_saving)
    meter = Meter(world.size, identity.total_tokens, device)
    stop.use(device, progress.at_files)
    log = Log(placement.train, identity.total_steps, _sinks(identity, placement, world), progress.at_files)
    alert = _alert(placement) if is_first else lambda step, message: None
    go_back_before = checkpoints.go_back_before
    spike_watch = SpikeWatch(spikes, resolved, go_back_before, lambda: state.spikes, log.write, alert)
    replica_check = ReplicaCheck(placement.train, go_back_before)
    shortage = checkpoints.shortage if is_first else lambda: None
    # at the third step everything is compiled and warm
    first_profiled, steps = checkpoints.found.step + 3, asked.profile_steps
    profile = Profile(placement.train_folder, first_profiled, steps, device, paused=meter.paused)
    run = Run(
        asked=asked,
        device=device,
        mesh=mesh,
        time_limits=time_limits,
        state=state,
        guard=guard,
        # spikes come before `Divergence` ends the run: going back may help
        checks=(NotFinite(guard, alert), spike_watch, Divergence(guard, checkpoints.way_on), replica_check),
        spike_watch=spike_watch,
        replica_check=replica_check,
        speed_watch=SpeedWatch(device, alert),
        learning_rate=learning_rate(identity),
        meter=meter,
        step_row=StepRow(meter, guard),
        log=log,
        stop=stop,
        resources=Resources(_alert(placement), stop.ask, shortage, is_looking=world.local_rank == 0),
        checkpoints=checkpoints,
        alert=alert,
        profile=profile,
        garbage=_garbage(placement),
    )
    run.current = _build_precision(run, resolved, next_precision(identity, checkpoints.found))
    return run


def compute_in(run: Run, resolved: Resolved, precision: Precision) -> None:
    """Replace the run's model, and everything that refers to it, by a model that computes in `precision`.

    The caller restores the newest checkpoint. The old model's memory is freed first.
    """
    del run.current
    run.checkpoints.forget()
    run.garbage.end()
    gc.collect()  # hooks and modules hold each other
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.current = _build_precision(run, resolved, precision)
    run.garbage.begin()


def restore(run: Run) -> None:
    run.checkpoints.restore()
    scale_weights(run.current.model)


@contextmanager
def phase_parts(run: Run, resolved: Resolved, index: int, last_step: int) -> Iterator[PhaseParts]:
    """Build the parts for steps of phase `index` up to `last_step`. Clipping, meter and rows follow it."""
    phase, placement = resolved.identity.phases[index], resolved.placement.phases[index]
    peak, planned = resolved.placement.peak_tflops, placement.planned_tokens_per_second
    run.meter.use(placement.flops_per_token, run.state.tokens, peak.get(run.current.precision), planned)
    clip = partial(clip_gradients, run.current.model, run.mesh, resolved.identity.max_gradient_norm(index))
    run.current = replace(run.current, step=replace(run.current.step, clip=clip))
    run.step_row.phase = phase.number
    run.spike_watch.spikes.phase = phase.number
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
    optimiser = Optimiser(model.named_parameters(), train)
    if precision == "fp8":
        optimiser.algorithm.register_step_post_hook(lambda *_: scale_weights(model))
    return StepParts(
        forward_backward=forward_backward_of(model, mesh, train, loss_chunk_tokens, layout, precision),
        clip=partial(clip_gradients, model, mesh, train.max_gradient_norm),
        guard=guard,
        optimiser=optimiser,
    )


def _build_precision(run: Run, resolved: Resolved, precision: Precision) -> PrecisionParts:
    """Build the model and all that refers to it. With a checkpoint to restore, weights get no values."""
    identity, placement, mesh, device = resolved.identity, resolved.placement, run.mesh, run.device
    checkpoints, fp8 = run.checkpoints, identity.train.fp8
    if precision == "fp8":
        refuse_without_fp8(device, fp8)
    settle_matrix_products(precision)
    is_restored, weights = checkpoints.newest is not None, identity.model.weights
    trainable = identity.phases[identity.phase_index((checkpoints.newest_step or 0) + 1)].trainable
    model = laid_out(identity, placement, mesh, precision, trainable)
    config, seed = identity.model, identity.seed
    initial_value = families.module(config.model_type, "model").initial_value
    is_filled_later = is_restored or weights is not None
    fill = None if is_filled_later else lambda name, shape, box: initial_value(name, shape, config, seed, box)
    materialise(model, device, fill, is_offloaded=placement.layout.cpu_offload)
    source_tensors, source_settings = None, None
    if weights is not None and not is_restored:
        source_tensors = load_first_weights(dict(model.named_parameters()), identity, placement)
        source_settings = first_settings(identity, placement)
    chunk_tokens = filled(placement.train.loss_chunk_tokens)
    step = build_step(model, mesh, identity.train, placement.layout, chunk_tokens, precision, run.guard)
    if identity.train.optimiser_from_weights and not is_restored:
        step.optimiser.resume(load_first_moments(step.optimiser.moments(), identity), begun={})
    checkpoints.track(dict(model.named_parameters()), step.optimiser, source_tensors, source_settings)
    heldout = _heldout(run, resolved, model, step.forward_backward)
    if precision == "fp8" and fp8.probe_every_steps:
        every, last, paused = fp8.probe_every_steps, identity.total_steps, run.time_limits.paused
        probe = Fp8Probe(step.forward_backward, model, mesh, every, last, run.log.write, paused)
        step = replace(step, on_gradients=(*step.on_gradients, probe))
    replicas, local_finite = Replicas(checkpoints.tensors, mesh), LocalFinite(model, device)
    layer_times = LayerTimes(model, device)
    parts = PrecisionParts(precision, trainable, model, step, replicas, local_finite, layer_times, heldout)
    return replace(parts, periodic=tuple(make(parts, mesh, run.stop) for make in run.asked.periodic))


def _checkpointer(
    placement: Placement, world: World, permit: Callable[[], None], copies: RemoteCopies | None
) -> Checkpointer:
    folder = Path(placement.train_folder)
    checkpointer = Checkpointer(
        folder / "checkpoints",
        placement.checkpoint.keep_newest,
        filled(placement.checkpoint.keep_every_steps),
        make_host_group(world, "checkpoint", world.timeout_seconds),
        on_alert=_alert(placement),
        permit=permit,
        copies=copies,
    )
    if placement.checkpoint.memory_every_steps:
        checkpointer.use_memory(world.local_rank)
    return checkpointer


def _alert(placement: Placement) -> Callable[[int, str], None]:
    return partial(note_alert, Path(placement.train_folder) / ALERTS_NAME)


def laid_out(
    identity: Identity, placement: Placement, mesh: Mesh, precision: Precision, trainable: Sequence[str] = ()
) -> Decoder | Stages:
    """Build the model over the mesh, on meta, so that no rank ever holds more than its shards.

    trainable: the modules with gradients, or empty for all. The others are frozen before anything wraps them.
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


def _feed(run: Run, resolved: Resolved, index: int, last_step: int) -> Feed:
    identity, placement, phase = resolved.identity, resolved.placement, resolved.identity.phases[index]
    rank, ranks, placed = data_rank(run.mesh), data_ranks(run.mesh), placement.phases[index]
    rows = placed.micro_batch_sequences * placed.micro_batches_per_step
    prepare, end = prepared(identity, placement), placement.end_of_text_id

    def opened() -> Callable[[int], Batch]:
        folder, longest = Path(placement.tokens_folder), identity.longest_sequence_length
        batches = Batches(folder, identity.seed, phase, longest, end, identity.dataset.mask_documents)

        def read_step(step: int) -> Batch:
            samples = batches.samples(step, rank, ranks)
            batch = prepare(read_sequences(batches, step, samples, identity.model.vocab_rows), step)
            if identity.train.has_dropout:
                batch = with_dropout_keys(batch, identity.seed)
            return filled_up(batch, rows, end)

        return read_step

    positions = positions_of_rank(phase.sequence_length, run.mesh)
    replacement = Replacement(opened, run.time_limits.progress.at_files, _alert(placement))
    return Feed(opened(), placed.micro_batch_sequences, last_step, run.device, positions, replacement)


def prepared(identity: Identity, placement: Placement) -> Callable[[Batch, int], Batch]:
    """Return a function that adapts a step's batch to the run's objective. Held-out text is the last step."""
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
    axis = mesh["context"]
    if axis.size() == 1:
        return None
    return context_positions(sequence_length, axis.size(), axis.get_local_rank())


def _heldout(run: Run, resolved: Resolved, model: nn.Module, forward_backward: ForwardBackward) -> HeldOut:
    identity, placement, mesh = resolved.identity, resolved.placement, run.mesh
    length = identity.phases[0].sequence_length  # the same in all phases, so that scores can be compared
    sequences, positions = placement.phases[0].micro_batch_sequences, positions_of_rank(length, mesh)
    texts, prepare = [], prepared(identity, placement)
    for one in heldout_sets(placement.tokens_folder):
        batch = one.batch(length, identity.train.heldout_sequences, identity.dataset.mask_documents)
        batch = prepare(batch, identity.total_steps)
        share = share_of(batch, data_rank(mesh), data_ranks(mesh), sequences, positions)
        texts.append(HeldOutText(one, share, identity.train.objective == "next_token"))
    sum_over_ranks, every_steps = partial(sum_over_data, mesh=mesh), placement.train.heldout_every_steps
    total_steps = identity.total_steps
    return HeldOut(texts, model, forward_backward, sum_over_ranks, run.device, every_steps, total_steps)


def _garbage(placement: Placement) -> Garbage:
    # A schedule that splits the backward leaves graphs that refer to each other, with their activations.
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

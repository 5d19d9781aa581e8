"""Assembles a run: the resolved numbers and a world of ranks → the parts that the loop calls, in the order they need.

All choices that depend on layout, device or recipe are made here, once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kielo.checkpoint.huggingface import load_weights, resolve_weights
from kielo.checkpoint.store import Store
from kielo.dataset.batches import Batches, heldout_batch
from kielo.models import families
from kielo.parallel.apply import lay_out
from kielo.parallel.context import context_positions
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import Mesh, build_mesh, data_rank, data_ranks, sum_over_data
from kielo.parallel.norm import clip_gradients
from kielo.parallel.world import World
from kielo.plan.resolved import Identity, Placement, Resolved
from kielo.train.feed import Feed, StepBatch
from kielo.train.forward_backward import PlainForwardBackward
from kielo.train.guard import Guard
from kielo.train.heldout import HeldOut
from kielo.train.log import Log, MetricsFile, Sink, TensorBoard, terminal
from kielo.train.meter import Meter
from kielo.train.next_token import NextToken, tensor_axis
from kielo.train.optimiser import Optimiser, build_optimiser
from kielo.train.precision import settle_matrix_products
from kielo.train.schedule import learning_rate
from kielo.train.state import Checkpoints, State
from kielo.train.step_row import StepRow
from kielo.train.stop import Stop


@dataclass
class Run:
    """The parts of a run, as the loop names them."""

    total_steps: int
    tokens_per_step: int
    sequences_per_step: int
    state: State
    model: nn.Module
    feed: Feed
    forward_backward: Callable[[StepBatch], Tensor]
    clip: Callable[[], Tensor]
    guard: Guard
    learning_rate: Callable[[int], float]
    optimiser: Optimiser
    meter: Meter
    step_row: StepRow
    log: Log
    heldout: HeldOut
    stop: Stop
    checkpoints: Checkpoints


def assemble(resolved: Resolved, world: World, stop: Stop) -> Run:
    """Every part of the run `resolved`, on this rank. All ranks call it together.

    Raises KieloError for whatever the parts refuse: tokens that are missing, a layout that does not fit the world,
    a checkpoint of another run.
    """
    identity, placement = resolved.identity, resolved.placement
    device = world.device
    settle_matrix_products(identity.precision)
    mesh = build_mesh(world, placement)
    sum_over_ranks = partial(sum_over_data, mesh=mesh)
    objective = NextToken(identity.z_loss, placement.loss_chunk_tokens, tensor_axis(mesh))
    checkpoints = Checkpoints(Store(Path(placement.train_folder) / "checkpoints", placement.keep_newest), resolved)
    model = _model(identity, placement, mesh, device, is_restored_later=checkpoints.newest is not None)
    optimiser = build_optimiser(model, identity)
    guard = Guard(device, identity.max_skipped_steps_in_a_row)
    state = State()
    checkpoints.track(dict(model.named_parameters()), optimiser, guard, state)
    total_tokens = identity.total_steps * identity.tokens_per_step
    meter = Meter(placement.flops_per_token, placement.peak_tflops, world.size, total_tokens, device)
    stop.use(device)
    return Run(
        total_steps=identity.total_steps,
        tokens_per_step=identity.tokens_per_step,
        sequences_per_step=identity.sequences_per_step,
        state=state,
        model=model,
        feed=_feed(identity, placement, mesh, device),
        forward_backward=PlainForwardBackward(model, objective, sum_over_ranks),
        clip=partial(clip_gradients, model, mesh, identity.max_gradient_norm),
        guard=guard,
        learning_rate=learning_rate(identity),
        optimiser=optimiser,
        meter=meter,
        step_row=StepRow(meter, guard),
        log=Log(placement.log_every_steps, identity.total_steps, _sinks(identity, placement, world)),
        heldout=_heldout(identity, placement, mesh, device, model, objective),
        stop=stop,
        checkpoints=checkpoints,
    )


def _model(
    identity: Identity, placement: Placement, mesh: Mesh, device: torch.device, is_restored_later: bool
) -> nn.Module:
    """On meta first, so that no rank ever holds more than its shards of a model too large for it."""
    config = identity.model
    family = families.module(config.model_type, "model")
    with torch.device("meta"):
        model = families.build_model(config)
    lay_out(model, mesh, placement, identity.precision)
    give_memory = partial(materialise, model, device, is_offloaded=placement.cpu_offload)
    if is_restored_later:
        return give_memory(lambda name, shape: torch.empty(shape))
    if config.weights is None:
        return give_memory(lambda name, shape: family.initial_value(name, shape, config, identity.seed))
    give_memory(lambda name, shape: torch.empty(shape))
    names = families.module(config.model_type, "names").to_hugging_face(config)
    load_weights(dict(model.named_parameters()), resolve_weights(config.weights), names)
    return model


def _feed(identity: Identity, placement: Placement, mesh: Mesh, device: torch.device) -> Feed:
    batches = Batches(
        Path(placement.tokens_folder),
        identity.seed,
        identity.sequence_length,
        identity.mixture,
        identity.sequences_per_step,
        placement.end_of_text_id,
        identity.mask_documents,
    )
    batches.check_epochs(identity.total_steps * identity.sequences_per_step, identity.max_epochs)
    read_step = partial(batches.step, data_rank=data_rank(mesh), data_ranks=data_ranks(mesh))
    positions_s = _positions(identity, mesh)
    return Feed(read_step, placement.micro_batch_sequences, identity.total_steps, device, positions_s)


def _positions(identity: Identity, mesh: Mesh) -> Tensor | None:
    """Which columns of each sequence this rank takes."""
    axis = mesh["context"]
    if axis.size() == 1:
        return None
    return context_positions(identity.sequence_length, axis.size(), axis.get_local_rank())


def _heldout(
    identity: Identity,
    placement: Placement,
    mesh: Mesh,
    device: torch.device,
    model: nn.Module,
    objective: NextToken,
) -> HeldOut:
    batch = heldout_batch(
        Path(placement.tokens_folder), identity.sequence_length, identity.heldout_sequences, identity.mask_documents
    )
    return HeldOut(
        batch,
        data_rank(mesh),
        data_ranks(mesh),
        partial(sum_over_data, mesh=mesh),
        placement.micro_batch_sequences,
        objective,
        placement.heldout_every_steps,
        identity.total_steps,
        device,
        model,
        _positions(identity, mesh),
    )


def _sinks(identity: Identity, placement: Placement, world: World) -> list[Sink]:
    if world.rank != 0:
        return []
    folder = Path(placement.train_folder)
    sinks: list[Sink] = [terminal(identity.total_steps), MetricsFile(folder / "metrics.jsonl")]
    if placement.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    return sinks

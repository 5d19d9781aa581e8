"""The comparison of training in Kielo with training in Hugging Face's transformers under accelerate.

Both sides have the same weights, samples, order and settings, in fp32 and one process. Logits, loss,
gradients and optimiser steps are compared. A resolved run and perhaps a checkpoint → `parity.json`, the
certificate. If the two differ, the certificate names the setting or the first layer that differs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from kielo.artifact.manifest import write_stage
from kielo.artifact.megatron_folder import FORM
from kielo.artifact.stage_json import write_json
from kielo.artifact.verify_results import (
    FirstDifference,
    GradientNorms,
    Losses,
    Parity,
    Settings,
    SourceFolder,
    loss_limits,
)
from kielo.artifact.weights_folder import resolve_weights
from kielo.dataset.batches import Batches
from kielo.ranks.world import World
from kielo.resolve.resolved import Identity, Placement, PlannedPhase, Resolved, filled
from kielo.train.feed import Feed, StepBatch
from kielo.verify.certificate import KIND, VERSION, ParityOptions, asked, current_certificate, print_parity
from kielo.verify.hugging_face_side import HuggingFaceSide
from kielo.verify.kielo_side import KieloSide, world_of_one
from kielo.verify.source_folder import compare_source
from kielo.verify.trace import Trace, Values, differing, dtype_names, first_difference, largest_difference

TRAININGS = 3  # how far one parts by some step was seen to vary six-fold with its seed


def rounding_differences(
    begin: Callable[[], tuple[HuggingFaceSide, Feed]], losses: Sequence[float]
) -> list[float]:
    """Measure how far rounding alone takes the losses of two trainings apart: transformers against itself.

    Two correct engines add in different orders, so their gradients differ in the last bits. AdamW divides an
    element's gradient by its own size: where that is near zero, rounding decides the sign, and the weight
    moves by the learning rate up or down. How fast losses part by that depends on the learning rate, the
    text, the weights and the processor, so that no fixed tolerance holds for all. So transformers trains
    again from weights that are moved by one unit in the last place.

    `begin` builds the side and its feed as they were before the first step. `losses` are nats per token of
    each step without a nudge. Return the largest relative difference up to each step.
    """
    largest = [0.0] * len(losses)
    for seed in range(TRAININGS):
        side, feed = begin()
        nudge(side.model.parameters(), seed)
        try:
            for number, loss in enumerate(losses):
                nudged = side.backward(feed.take(number + 1))
                side.update()
                largest[number] = max(largest[number], relative_loss_difference(nudged, loss))
        finally:
            feed.close()
    return list(accumulate(largest, max))


@torch.no_grad()
def nudge(weights: Iterable[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs.to(weight))


def relative_loss_difference(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


GRADIENT_TOLERANCE = 1e-3  # relative; fp32 rounding is about 1e-6, a wrong term is not under 1e-3


def verify_parity(
    resolved: Resolved,
    folder: Path,
    checkpoint: Path | None = None,
    options: ParityOptions | None = None,
    console: Console | None = None,
) -> Parity:
    """Compare both sides and write the certificate to `folder`/parity.json.

    With `model.weights` it first compares the folder itself, read by transformers and by the import
    (`source_folder.py`). It passes if these are equal, the losses of every step agree within the tolerance,
    no setting differs, and the first step's gradients agree. If the whole first step agrees and later losses
    part, they may part by `ROUNDING_FACTOR` times the effect of rounding alone.

    The start is `checkpoint`'s weights, else the run's own (`model.weights`, or the seeded initial values).
    `console` prints the table.
    """
    identity, placement = _scaled(resolved)
    options = (options or ParityOptions()).fitting(identity.model.max_position_embeddings)
    certificate = current_certificate(resolved, folder, checkpoint, options)
    if certificate is not None:
        return certificate
    with write_stage(folder, KIND, VERSION, *asked(resolved, checkpoint, options)) as stage:
        source = None
        # transformers does not read Megatron's files, so there is nothing to compare them with.
        if (weights := identity.model.weights) is not None and not weights.startswith(FORM):
            source = compare_source(resolve_weights(weights), identity.model, options.sequence_length)
        with world_of_one(filled(placement.train.start_timeout_seconds), placement.device) as world:
            certificate = _with_source(_compare(identity, placement, world, checkpoint, options), source)
        write_json(stage.folder, certificate)
        stage.counts.update(
            steps=options.steps,
            passed=certificate.passed,
            max_relative_loss_difference=certificate.max_relative_loss_difference,
        )
    if console is not None:
        print_parity(certificate, console)
    return certificate


def _with_source(found: Parity, source: SourceFolder | None) -> Parity:
    """Return the certificate with its source. Another source is refused even if all steps agree."""
    if source is not None and not source.passed and found.passed:
        where = f"{source.where}, of the source folder" if source.where else "in the source folder"
        first = FirstDifference(
            layer=source.layer, where=where, relative_difference=source.logits_relative_difference
        )
        found = found.model_copy(update={"passed": False, "first_difference": first})
    return found.model_copy(update={"source": source})


def _scaled(resolved: Resolved) -> tuple[Identity, Placement]:
    """Return the run as one process with everything in fp32, by AdamW, at the learning rates of its own
    steps.

    A run of GPUs is checked on the processor if no GPU is here.
    """
    axes = dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor"), 1)
    layout = resolved.placement.layout.model_copy(update=axes | {"cpu_offload": False})
    device = resolved.placement.device if torch.cuda.is_available() else "cpu"
    alone = {"world_size": 1, "layout": layout, "device": device}
    placement = resolved.placement.model_copy(update=alone)
    in_fp32 = {"precision": "fp32", "precision_changes": (), "optimiser_state": "fp32"}
    # transformers trains by AdamW; LAMB is compared with its equations in Kielo's own tests
    train = resolved.identity.train.model_copy(update=in_fp32 | {"optimiser": "adamw"})
    return resolved.identity.model_copy(update={"train": train}), placement


def _small_phase(identity: Identity, options: ParityOptions) -> PlannedPhase:
    """Return the first phase with few and short sequences a step, of one stream: none are packed so short."""
    return identity.phases[0].model_copy(
        update={
            "steps": options.steps,
            "sequence_length": options.sequence_length,
            "packing": "one_stream",
            "sequences_per_step": options.sequences_per_step,
            "tokens_per_step": options.sequences_per_step * options.sequence_length,
        }
    )


def _feed(identity: Identity, placement: Placement, phase: PlannedPhase, device: torch.device) -> Feed:
    """Return the feed of two micro-batches a step, so that summing over them is checked too."""
    folder, length, end = Path(placement.tokens_folder), phase.sequence_length, placement.end_of_text_id
    batches = Batches(folder, identity.seed, phase, length, end, identity.dataset.mask_documents)
    micro_batch_sequences = (phase.sequences_per_step + 1) // 2
    return Feed(lambda step: batches.step(step, 0, 1), micro_batch_sequences, phase.last_step, device)


def _sides(
    identity: Identity, placement: Placement, world: World, checkpoint: Path | None, options: ParityOptions
) -> tuple[KieloSide, HuggingFaceSide]:
    ours = KieloSide(identity, placement, world, checkpoint)
    theirs = HuggingFaceSide(identity, placement.device, ours.parameters(), options.hugging_face_overrides)
    return ours, theirs


def _compare(
    identity: Identity, placement: Placement, world: World, checkpoint: Path | None, options: ParityOptions
) -> Parity:
    ours, theirs = _sides(identity, placement, world, checkpoint, options)
    phase = _small_phase(identity, options)
    feed = _feed(identity, placement, phase, world.device)
    try:
        first_batch = feed.take(1)
        weight = largest_difference(ours.parameters(), theirs.parameters())
        our_trace, their_trace = ours.trace(first_batch, theirs.modules()), theirs.trace(first_batch)
        records, gradient, update = _train(ours, theirs, feed, first_batch, phase.last_step)
    finally:
        feed.close()

    our_settings = ours.settings() | _run_settings(records["ours"], our_trace)
    their_settings = theirs.settings() | _run_settings(records["theirs"], their_trace)
    wrong_settings = differing(our_settings, their_settings)
    losses = {side: [record["loss"] for record in records[side]] for side in records}
    differences = [
        relative_loss_difference(mine, their)
        for mine, their in zip(losses["ours"], losses["theirs"], strict=True)
    ]
    layer = first_difference(our_trace, their_trace, options.tolerance)
    limits = [options.tolerance] * options.steps
    rounding = None
    starts_equal = not layer and not wrong_settings and weight[1] == 0 and gradient[1] <= GRADIENT_TOLERANCE
    if starts_equal and differences[0] <= options.tolerance and not max(differences) <= options.tolerance:
        del ours, theirs  # memory for others

        def begin() -> tuple[HuggingFaceSide, Feed]:
            _, side = _sides(identity, placement, world, checkpoint, options)
            return side, _feed(identity, placement, phase, world.device)

        rounding = rounding_differences(begin, losses["theirs"])
        limits = loss_limits(options.tolerance, rounding)
    over = [not value <= limit for value, limit in zip(differences, limits, strict=True)]
    first_step = over.index(True) + 1 if any(over) else None
    passed = first_step is None and not wrong_settings and gradient[1] <= GRADIENT_TOLERANCE
    norms = {side: [record["gradient_norm"] for record in records[side]] for side in records}
    first = FirstDifference(
        layer=layer.layer if layer else None,
        where=layer.where if layer else None,
        relative_difference=layer.relative_difference if layer else None,
        settings=wrong_settings,
        weight=weight[0] if weight[1] > 0 else None,
        gradient=gradient[0] if gradient[1] > GRADIENT_TOLERANCE else None,
        update=update[0] if first_step else None,
        step=first_step,
    )
    measured = {} if rounding is None else {"rounding_differences": rounding}
    return Parity(
        passed=passed,
        max_relative_loss_difference=max(differences),
        logits_max_difference=(our_trace.logits - their_trace.logits).abs().max().item(),
        gradient_max_relative_difference=gradient[1],
        settings=Settings(ours=our_settings, theirs=their_settings, differing=wrong_settings),
        losses=Losses(**losses, relative_differences=differences, **measured),
        gradient_norms=GradientNorms(**norms),
        first_difference=None if passed else first,
        weights=str(checkpoint or identity.model.weights or f"initial values of seed {identity.seed}"),
        **asdict(options),
    )


def _train(
    ours: KieloSide, theirs: HuggingFaceSide, feed: Feed, first_batch: StepBatch, steps: int
) -> tuple[dict[str, list[dict[str, float]]], tuple[str, float], tuple[str, float]]:
    """Train both sides and compare their gradients and weights in step 1.

    Return (the measurements of each side and step, largest gradient difference, largest weight difference).
    """
    records: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    gradient, nonzero = ("", 0.0), []

    def compare_gradients(batch: StepBatch) -> None:
        nonlocal gradient, nonzero
        if batch.step > 1:
            return
        their_gradients = theirs.gradients()
        largest = max(value.norm().item() for value in their_gradients.values())
        # One that is truly zero (a key's bias without RoPE) is nothing but rounding.
        gradient = largest_difference(ours.gradients(), their_gradients, floor=1e-3 * largest)
        nonzero = [name for name, value in their_gradients.items() if value.norm().item() > 1e-6 * largest]

    for step in range(1, steps + 1):
        batch = first_batch if step == 1 else feed.take(step)
        their_loss = theirs.backward(batch)
        records["ours"].append(ours.step(batch, compare_gradients))
        records["theirs"].append({"loss": their_loss} | theirs.update())
        if step == 1:
            our_weights = ours.parameters()
            update = largest_difference({name: our_weights[name] for name in nonzero}, theirs.parameters())
    return records, gradient, update


def _run_settings(records: list[dict[str, float]], trace: Trace) -> Values:
    """Return settings that only a run shows. The norm after the first clipping exposes a useless clipping."""
    pairs = ((record["clipped_gradient_norm"], record["gradient_norm"]) for record in records)
    clipped = (after for after, before in pairs if after < 0.999 * before)
    tokens = trace.passed["embed"][0]
    return {
        "learning rate of each step": [record["learning_rate"] for record in records],
        "first tokens": tokens[0, :4].tolist(),
        "precision of activations": dtype_names(out for _, out in trace.passed.values()),
        "clipping, norm let through": next(clipped, "never clipped"),
    }

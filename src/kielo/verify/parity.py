"""Is it the same model, trained the same way? Kielo against Hugging Face's transformers under accelerate.

Same weights, same samples in the same order, same settings, fp32, one process: logits, loss, gradients, then
optimiser steps. Data in: a resolved run and perhaps a checkpoint; data out: `parity.json` (the certificate;
`print_parity` makes a table of it), which names, where the two differ, the setting or the first layer that
does.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from kielo.artifact.manifest import hash_manifest, is_current, write_stage
from kielo.artifact.parity import FirstDifference, GradientNorms, Losses, Parity, Settings
from kielo.artifact.stage_json import read_stage_json, write_json
from kielo.dataset.batches import Batches
from kielo.train.feed import Feed, StepBatch
from kielo.verify.hugging_face_side import HuggingFaceSide
from kielo.verify.kielo_side import KieloSide, world_of_one
from kielo.verify.parity_table import print_parity
from kielo.verify.settings import differing
from kielo.verify.trace import first_parting, largest_difference

if TYPE_CHECKING:
    from kielo.resolve.resolved import Identity, Phase, Placement, Resolved

KIND, VERSION = "parity", 2
GRADIENT_TOLERANCE = 1e-3  # relative; fp32 rounding is about 1e-6, a wrong term is not under 1e-3


def verify_parity(
    resolved: "Resolved",
    folder: Path,
    checkpoint: Path | None = None,
    steps: int = 20,
    sequences_per_step: int = 4,
    sequence_length: int = 128,
    tolerance: float = 1e-5,
    hugging_face_overrides: dict[str, Any] | None = None,
    console: Console | None = None,
) -> Parity:
    """The certificate, also written to `folder`/parity.json with a manifest; `passed` is the answer.

    It passes when at every step the losses differ by at most `tolerance` (relative), no setting differs, and
    the first step's gradients agree. Starts from `checkpoint`'s weights, else from those that the run starts
    from (`model.weights`, or the seeded initial values). `hugging_face_overrides` sets keys of the Hugging
    Face side wrong on purpose (`rope_theta`, `rms_norm_eps`, `weight_decay`, …): the check of the check. The
    table goes to `console` where one is given.
    """
    overrides = hugging_face_overrides or {}
    identity, placement = _scaled(resolved)
    phase = _small_phase(identity, steps, sequences_per_step, sequence_length)
    settings = {"steps": steps, "sequences_per_step": sequences_per_step, "tolerance": tolerance,
                "sequence_length": phase.sequence_length, "hugging_face_overrides": overrides}  # fmt: skip
    inputs = {"tokens": identity.tokens_hash}
    if checkpoint is not None:
        inputs["checkpoint"] = hash_manifest(checkpoint)
    section = settings | {"identity": resolved.identity.model_dump(mode="json")}
    if is_current(folder, KIND, VERSION, inputs, section):
        certificate = read_stage_json(folder, Parity)
        # one that failed is looked at again: the cause may have been outside the recipe
        if certificate.passed:
            return certificate
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        with world_of_one(placement.start_timeout_seconds, placement.device) as world:
            found = _compare(identity, placement, phase, world, checkpoint, tolerance, overrides)
        weights = str(checkpoint or identity.model.weights or f"initial values of seed {identity.seed}")
        certificate = Parity(**found, weights=weights, **settings)
        write_json(stage.folder, certificate)
        stage.counts.update(
            steps=steps,
            passed=certificate.passed,
            max_relative_loss_difference=certificate.max_relative_loss_difference,
        )
    if console is not None:
        print_parity(certificate, console)
    return certificate


def _scaled(resolved: "Resolved") -> tuple["Identity", "Placement"]:
    """The run as one process with all in fp32, at the learning rates of its own steps."""
    alone = dict.fromkeys(("world_size", "pipeline", "replicate", "shard", "context", "tensor"), 1)
    placement = resolved.placement.model_copy(update=alone | {"cpu_offload": False})
    in_fp32 = {"precision": "fp32", "precision_changes": (), "optimiser_state": "fp32"}
    return resolved.identity.model_copy(update=in_fp32), placement


def _small_phase(identity: "Identity", steps: int, sequences_per_step: int, sequence_length: int) -> "Phase":
    """The first phase with few and short sequences a step."""
    sequence_length = min(sequence_length, identity.model.max_position_embeddings)
    return identity.phases[0].model_copy(
        update={
            "steps": steps,
            "sequence_length": sequence_length,
            "sequences_per_step": sequences_per_step,
            "tokens_per_step": sequences_per_step * sequence_length,
        }
    )


def _feed(identity: "Identity", placement: "Placement", phase: "Phase", device: torch.device) -> Feed:
    """Of two micro-batches a step, so that summing over them is checked too."""
    batches = Batches(
        Path(placement.tokens_folder), identity.seed, phase, phase.sequence_length, placement.end_of_text_id,
        identity.mask_documents,
    )  # fmt: skip
    micro_batch_sequences = (phase.sequences_per_step + 1) // 2
    return Feed(lambda step: batches.step(step, 0, 1), micro_batch_sequences, phase.last_step, device)


def _compare(
    identity: "Identity",
    placement: "Placement",
    phase: "Phase",
    world: Any,
    checkpoint: Path | None,
    tolerance: float,
    overrides: dict[str, Any],
) -> dict[str, Any]:
    ours = KieloSide(identity, placement, world, checkpoint)
    # Weights in Hugging Face's own files are loaded by Hugging Face's own code, which checks our import too.
    own_files = checkpoint is None and identity.model.weights is not None
    theirs = HuggingFaceSide(
        identity, placement.device, ours.parameters(), overrides, reads_own_files=own_files
    )
    steps = phase.last_step
    feed = _feed(identity, placement, phase, world.device)
    try:
        first_batch = feed.take(1)
        weight = largest_difference(ours.parameters(), theirs.parameters())
        our_trace, their_trace = ours.trace(first_batch, theirs.modules()), theirs.trace(first_batch)
        records, gradient, update = _train(ours, theirs, feed, first_batch, steps)
    finally:
        feed.close()

    our_settings = ours.settings() | _run_settings(records["ours"], our_trace)
    their_settings = theirs.settings() | _run_settings(records["theirs"], their_trace)
    wrong_settings = differing(our_settings, their_settings)
    losses = {side: [record["loss"] for record in records[side]] for side in records}
    differences = [
        _relative(mine, their) for mine, their in zip(losses["ours"], losses["theirs"], strict=True)
    ]
    parting_step = next((step for step, value in enumerate(differences, 1) if not value <= tolerance), None)
    passed = parting_step is None and not wrong_settings and gradient[1] <= GRADIENT_TOLERANCE
    parting = None if passed else first_parting(our_trace, their_trace, tolerance)
    norms = {side: [record["gradient_norm"] for record in records[side]] for side in records}
    return {
        "passed": passed,
        "max_relative_loss_difference": max(differences),
        "logits_max_difference": (our_trace.logits - their_trace.logits).abs().max().item(),
        "gradient_max_relative_difference": gradient[1],
        "settings": Settings(ours=our_settings, theirs=their_settings, differing=wrong_settings),
        "losses": Losses(**losses, relative_differences=differences),
        "gradient_norms": GradientNorms(**norms),
        "first_difference": None
        if passed
        else FirstDifference(
            **(asdict(parting) if parting else {"layer": None, "where": None, "relative_difference": None}),
            settings=wrong_settings,
            weight=weight[0] if weight[1] > 0 else None,
            gradient=gradient[0] if gradient[1] > GRADIENT_TOLERANCE else None,
            update=update[0] if parting_step else None,
            step=parting_step,
        ),
    }


def _train(
    ours: KieloSide, theirs: HuggingFaceSide, feed: Feed, first_batch: StepBatch, steps: int
) -> tuple[dict[str, list[dict[str, float]]], tuple[str, float], tuple[str, float]]:
    """(what each side measured at each step, largest gradient difference and largest weight difference of
    step 1).
    """
    records: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for step in range(1, steps + 1):
        batch = first_batch if step == 1 else feed.take(step)
        losses = {"ours": ours.backward(batch), "theirs": theirs.backward(batch)}
        if step == 1:
            their_gradients = theirs.gradients()
            largest = max(value.norm().item() for value in their_gradients.values())
            # One that is truly zero (a key's bias, where positions do not turn it) is nothing but rounding.
            gradient = largest_difference(ours.gradients(), their_gradients, floor=1e-3 * largest)
            felt = [name for name, value in their_gradients.items() if value.norm().item() > 1e-6 * largest]
        for name, side in (("ours", ours), ("theirs", theirs)):
            records[name].append({"loss": losses[name]} | side.update(step))
        if step == 1:
            our_weights = ours.parameters()
            update = largest_difference({name: our_weights[name] for name in felt}, theirs.parameters())
    return records, gradient, update


def _run_settings(records: list[dict[str, float]], trace: Any) -> dict[str, Any]:
    """Settings that only show in a run: what the optimiser was given, what the embedding saw,
    what came out.
    """
    tokens = trace.passed["embed"][0]
    return {
        "learning rate of each step": [record["learning_rate"] for record in records],
        "first tokens": tokens[0, :4].tolist(),
        "precision of activations": sorted({str(out.dtype)[6:] for _, out in trace.passed.values()}),
        "clipping, norm let through": _norm_let_through(records),
    }


def _norm_let_through(records: list[dict[str, float]]) -> float | str:
    """The norm that gradients had after the first clipping, measured: it tells a clipping that
    does not clip.
    """
    for record in records:
        if record["clipped_gradient_norm"] < 0.999 * record["gradient_norm"]:
            return record["clipped_gradient_norm"]
    return "never clipped"


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-30)

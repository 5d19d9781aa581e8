"""Resolves a recipe on a machine: recipe + machine → `Resolved`, every derived number of a run; torch-free.

Reads the manifests of the run folder's tokens and the tokenizer. Refuses numbers that are not possible, all
of them at once, each with one that is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kielo.dataset.provenance import check_recipe
from kielo.models.families import check, module
from kielo.recipe.cards import Accelerator, accelerator_of_device, accelerators, cluster
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase, full_phases, skip_complaints
from kielo.recipe.sections import (
    Checkpoint,
    DatasetIdentity,
    Layout,
    Model,
    Precision,
    Recipe,
    RecipeIdentity,
    TrainIdentity,
    TrainPlacement,
)
from kielo.resolve.attention_check import attention_complaint
from kielo.resolve.budget import with_budget
from kielo.resolve.complete_model import complete_model
from kielo.resolve.document_positions import position_complaints, with_positions
from kielo.resolve.encoder_check import dropout_complaints, objective_complaints
from kielo.resolve.fp8_check import fp8_complaints, without_fp8
from kielo.resolve.layout_check import layout_complaints
from kielo.resolve.longer_run import goes_on_level, is_longer, way_to_go_on
from kielo.resolve.loss_chunk import loss_chunk_tokens
from kielo.resolve.memory_row import TrainOptions
from kielo.resolve.micro_batch import RankOfRun, micro_batch, micro_batch_up_to
from kielo.resolve.mixture import mixture_of, num_sequences, repeated_too_often
from kielo.resolve.optimiser_check import optimiser_complaints
from kielo.resolve.phases import EpochTokens, merged, plan_learning_rates, plan_phases
from kielo.resolve.precision import chosen_precision, with_precision
from kielo.resolve.resolved import Identity, Phase, PhasePlacement, Placement, Resolved
from kielo.resolve.shares import MOST_FILLED, micro_batches_needed
from kielo.resolve.software import Software, planned
from kielo.resolve.stages import SCHEDULES, layers_of_stages, micro_batch_complaint, num_stages
from kielo.resolve.start_timeout import start_timeout_seconds
from kielo.resolve.text import Text, text_of_run
from kielo.resolve.torch_versions import compile_advice
from kielo.resolve.trainable import flops_per_token, trainable_complaints

# Compiling takes half a minute of a processor, which does some 10^11 of them a second.
_FLOPS_WORTH_COMPILING = 1e14
_MOST_RANKS = 1_000_000  # more than any machine has; what would work is counted up to the number of ranks


@dataclass(frozen=True)
class _Machine:
    """`world_size` ranks on devices of one kind; card: None where no card describes them."""

    world_size: int
    device: str
    card: Accelerator | None
    software: Software


@dataclass(frozen=True)
class _Steps:
    """The phases as the recipe asks for them, and in numbers.

    micro_batches: (sequences, number of them in a step) on one rank, of each of `phases`.
    """

    asked: tuple[FullPhase, ...]
    phases: tuple[Phase, ...]
    micro_batches: tuple[tuple[int, int], ...]
    epoch_tokens: EpochTokens


def resolve(
    recipe: Recipe,
    run_folder: Path | str,
    world_size: int,
    device: str,
    accelerator: str | None = None,
    text: Text | None = None,
    software: Software | None = None,
) -> Resolved:
    """Computes every number of the run.

    world_size: ranks. device: "cpu" or "cuda". accelerator: a card's name or the name that the driver gives
    the device; default: the cluster card's. text: default, that in the run folder. software: default, that
    of a plan for the recipe's cluster. Raises KieloError for missing stages, for a text that this recipe
    would not have made, and with every impossible number.
    """
    run_folder = Path(run_folder)
    if not 1 <= world_size <= _MOST_RANKS:
        raise KieloError(f"--ranks {world_size}: give 1 to {_MOST_RANKS:,}")
    if text is None:
        text = text_of_run(recipe, run_folder)
        check_recipe(recipe, run_folder)
    recipe = with_budget(recipe, text)
    software = software or planned(cluster(recipe.cluster))
    recipe = with_precision(recipe, chosen_precision(recipe, device, software.has_amx, run_folder)[0])
    machine = _Machine(world_size, device, _accelerator(recipe, device, accelerator), software)
    complaints: list[str] = []
    layout = _with_axes(recipe.layout, world_size, complaints)
    model = complete_model(recipe, full_phases(recipe), text.vocabulary_size, complaints)
    complaints += objective_complaints(model.model_type, recipe.train)
    complaints += position_complaints(recipe.dataset, model.model_type)
    complaints += dropout_complaints(model.model_type, recipe.train.attention_dropout)
    complaints += _layout_complaints(model, recipe, machine)
    complaints += trainable_complaints(model, recipe.layout, full_phases(recipe))
    options = tuple(TrainOptions.of(precision, recipe.train) for precision in _precisions(recipe))
    rank = RankOfRun(model, layout, options, None if complaints else machine.card)
    steps = _steps(recipe, rank, text, run_folder, complaints)
    complaints += _precision_complaints(model, recipe, steps.phases[-1].last_step, machine)
    complaints += _step_complaints(recipe, steps, layout.replicate * layout.shard)
    heldout = num_sequences(text.heldout_tokens, steps.phases[0].sequence_length)
    if heldout == 0:
        complaints.append(
            f"{run_folder / 'tokens'}: no held-out text; what would work: a larger dataset.heldout_share "
            f"than {recipe.dataset.heldout_share}, or more text"
        )
    if complaints:
        complaints = list(dict.fromkeys(complaints))  # phases may have the same
        raise KieloError(complaints[0] if len(complaints) == 1 else _listed(recipe, complaints))
    check(model)
    identity = _identity(recipe, model, steps, text.tokens_hash, heldout)
    return Resolved(
        identity=identity, placement=_placement(recipe, identity, layout, machine, steps, text, run_folder)
    )


def _steps(recipe: Recipe, rank: RankOfRun, text: Text, run_folder: Path, complaints: list[str]) -> _Steps:
    asked = full_phases(recipe)
    temperature, tokens_folder = recipe.dataset.temperature, run_folder / "tokens"
    mixtures = [mixture_of(phase, text.tokens, temperature, tokens_folder, complaints) for phase in asked]
    phases = plan_phases(asked, mixtures, recipe.train.batch_ramp, recipe.seed, text.epoch_tokens)
    micro_batches = tuple(
        _micro_batches(phase, asked[phase.number - 1], rank.in_phase(phase.trainable)) for phase in phases
    )
    return _Steps(asked, phases, micro_batches, text.epoch_tokens)


def _layout_complaints(model: Model, recipe: Recipe, machine: _Machine) -> Iterator[str]:
    """Yields why `model` (complete) cannot have this layout."""
    for phase in full_phases(recipe):
        yield from layout_complaints(
            model,
            phase.sequence_length,
            recipe.layout,
            phase.key("sequence_length"),
            machine.software.torch,
        )
        if machine.device == "cuda":
            asks = phase.sequence_length, recipe.dataset.mask_documents, recipe.train.attention_dropout
            complaint = attention_complaint(model, *asks, machine.software.missing_compiler)
            yield from [complaint] if complaint else []


def _step_complaints(recipe: Recipe, steps: _Steps, data_ranks: int) -> Iterator[str]:
    """Yields why ranks cannot share the steps, the text is too short, or the optimiser cannot take them."""
    if "fp8" in _precisions(recipe):
        yield from _fp8_token_complaints(recipe, steps)
    yield from _reduction_complaint(recipe, steps)
    yield from _unshared(steps.asked, steps.phases, data_ranks)
    if recipe.layout.pipeline > 1:
        yield from _unfilled(recipe.layout, steps, data_ranks)
    yield from repeated_too_often(recipe, steps.asked, steps.phases, steps.epoch_tokens)
    yield from skip_complaints(recipe.train.skip_steps, steps.phases[-1].last_step)
    yield from optimiser_complaints(recipe.train)


def _identity(recipe: Recipe, model: Model, steps: _Steps, tokens_hash: str, heldout: int) -> Identity:
    """heldout: sequences of held-out text that there are."""
    train = recipe.train.part(TrainIdentity)
    in_order = {
        "skip_steps": merged(train.skip_steps),
        "precision_changes": tuple(sorted(train.precision_changes)),
        "heldout_sequences": min(train.heldout_sequences, heldout),
    }
    return Identity(
        **dict(recipe.part(RecipeIdentity)),
        model=model,
        dataset=with_positions(recipe.dataset.part(DatasetIdentity), model),
        train=train.model_copy(update=in_order),
        tokens_hash=tokens_hash,
        phases=steps.phases,
        learning_rates=plan_learning_rates(steps.asked, steps.phases),
    )


def _placement(
    recipe: Recipe,
    identity: Identity,
    layout: Layout,
    machine: _Machine,
    steps: _Steps,
    text: Text,
    run_folder: Path,
) -> Placement:
    model, card = identity.model, machine.card
    count = module(model.model_type, "count")
    chunk_tokens = loss_chunk_tokens(recipe.train.loss_chunk_tokens, model, layout, card)
    return Placement(
        world_size=machine.world_size,
        layout=_filled_in(layout, identity, machine),
        train=recipe.train.part(TrainPlacement).model_copy(
            update={
                "loss_chunk_tokens": chunk_tokens,
                "start_timeout_seconds": start_timeout_seconds(recipe),
            }
        ),
        checkpoint=_keeping_some(recipe.checkpoint, identity.total_steps),
        phases=tuple(
            PhasePlacement(
                micro_batch_sequences=size,
                micro_batches_per_step=number,
                flops_per_token=flops_per_token(model, phase.sequence_length, phase.trainable),
            )
            for phase, (size, number) in zip(steps.phases, steps.micro_batches)
        ),
        device=machine.device,
        accelerator=card.name if card else "unknown",
        peak_tflops=card.peak_tflops if card else {},
        parameters=count.parameters(model),
        end_of_text_id=text.end_of_text_id,
        tokenizer_hash=text.tokenizer_hash,
        tokens_folder=str(run_folder / "tokens"),
        tokenizer_folder=str(run_folder / "tokenizer"),
        train_folder=str(run_folder / "train"),
    )


def _filled_in(layout: Layout, identity: Identity, machine: _Machine) -> Layout:
    """Returns the layout, whose axes are known, with everything else that the recipe leaves to Kielo."""
    stages = layers_of_stages(identity.model, identity.longest_sequence_length, layout)
    return layout.model_copy(
        update={
            "compile": _compiles(layout, machine, identity),
            "pipeline_layers": stages if layout.pipeline > 1 else None,
            "pipeline_stages_per_rank": len(stages) // layout.pipeline if layout.pipeline > 1 else None,
        }
    )


def _keeping_some(checkpoint: Checkpoint, total_steps: int) -> Checkpoint:
    """Returns the section with its default: every tenth checkpoint stays, but at most ten of a whole run."""
    if checkpoint.keep_every_steps is not None:
        return checkpoint
    every = checkpoint.every_steps * max(10, math.ceil(total_steps / (10 * checkpoint.every_steps)))
    return checkpoint.model_copy(update={"keep_every_steps": min(every, 2**63 - 1)})  # as much as TOML holds


def consent(old: Identity, new: Resolved, step: int = 0) -> None:
    """Raises KieloError listing the keys that changed unless `step` is a step of both identities.

    Skipped steps, precisions and the response to spikes are not compared: they may change for steps that are
    still to come. So may the length of the run, while the learning rate of the steps up to `step` stays the
    same.
    """
    later = {
        "train": {"skip_steps", "precision", "precision_changes", "fp8", "gradient_reduce_dtype", "spikes"}
    }
    before, after = (
        flat(identity.model_dump(mode="json", exclude=later)) for identity in (old, new.identity)
    )
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    lengths = {"steps", "tokens", "warmup_tokens", "decay_tokens"}
    if is_longer(old, new.identity) and {key.rpartition(".")[2] for key in changed} <= lengths:
        if step and goes_on_level(old, new.identity, step):
            return
        way = f"To make the run longer: {way_to_go_on(old, new.identity, step)}. Or go back"
    else:
        way = "Go back"
    if changed:
        lines = "\n".join(f"  - {key}: was {before.get(key)!r}, is now {after.get(key)!r}" for key in changed)
        if any(key.endswith(".mixture_order") for key in changed):
            lines += (
                "\n    (the order of the samples follows dataset.mixture_order; a run that an earlier Kielo "
                "began goes on with --set dataset.mixture_order=blocks_of_256)"
            )
        if "dataset.restart_positions" in changed:
            lines += (
                "\n    (a run whose learned positions continue through documents goes on with --set "
                "dataset.restart_positions=false)"
            )
        raise KieloError(
            f"{new.placement.train_folder}: holds a run of something else; {len(changed)} keys of what is "
            f"trained changed:\n{lines}\n{way} to the old values, give the recipe another name or folder, "
            "or move this folder away to start anew"
        )


def _with_axes(layout: Layout, world_size: int, complaints: list[str]) -> Layout:
    """Returns the layout whose axes make up `world_size`: shard = 0 takes what is left."""
    others = layout.pipeline * layout.replicate * layout.context * layout.tensor
    if world_size % others == 0 and layout.shard in (0, world_size // others):
        return layout.model_copy(update={"shard": world_size // others})
    sizes = {axis: getattr(layout, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
    asked = " × ".join(f"layout.{axis} = {size}" for axis, size in sizes.items() if size > 1) or "the layout"
    inner = layout.pipeline * layout.context * layout.tensor
    divisors = [str(number) for number in range(1, world_size + 1) if world_size % (number * inner) == 0]
    ways = [f"{others * (layout.shard or 1)} ranks, or a multiple with layout.shard = 0"]
    if divisors:
        ways.append(f"layout.shard = 0 with layout.replicate one of {', '.join(divisors)}")
    complaints.append(f"{asked} does not make up {world_size} ranks; what would work: {'; or '.join(ways)}")
    return layout.model_copy(update={"replicate": 1, "shard": max(1, world_size // inner)})


def _unshared(asked: Sequence[FullPhase], phases: Sequence[Phase], data_ranks: int) -> Iterator[str]:
    """Yields the steps that are no whole sequences, or have fewer of them than there are ranks.

    The small steps of a batch ramp may have fewer.
    """
    for phase in _full_steps(phases):
        of, length, sequences = asked[phase.number - 1], phase.sequence_length, phase.sequences_per_step
        if not of.tokens_per_step % length and sequences >= data_ranks:
            continue
        key, tokens = of.key("tokens_per_step"), of.tokens_per_step
        below = tokens // length * length
        sizes = [size for size in (below, below + length) if size >= length * data_ranks]
        would_work = " or ".join(str(size) for size in sizes or [length * data_ranks])
        fewer = f", or at most {sequences} data-parallel ranks" if sequences < data_ranks else ""
        yield (
            f"{key} = {tokens} is {tokens / length:g} sequences of {of.key('sequence_length')} = {length}, "
            f"for {data_ranks} data-parallel ranks, and each takes whole sequences, one or more; what would "
            f"work: {key.rpartition('.')[2]} {would_work}{fewer}"
        )


def _unfilled(layout: Layout, steps: _Steps, data_ranks: int) -> Iterator[str]:
    """Yields why a pipeline's schedule cannot run the full steps, unless a few empty micro-batches help."""
    schedule, stages = layout.pipeline_schedule, num_stages(layout)
    for phase in _full_steps(steps.phases):
        size, number = steps.micro_batches[steps.phases.index(phase)]
        there_are = math.ceil(math.ceil(phase.sequences_per_step / data_ranks) / size)
        if number - there_are > MOST_FILLED * number:
            complaint = micro_batch_complaint(schedule, there_are, layout.pipeline, stages)
            yield from [complaint] if complaint else []


def _full_steps(phases: Sequence[Phase]) -> Iterator[Phase]:
    """Yields the phases without the small steps of a batch ramp."""
    for phase, following in zip(phases, [*phases[1:], None]):
        if following is None or following.number != phase.number:
            yield phase


def _micro_batches(phase: Phase, asked: FullPhase, rank: RankOfRun) -> tuple[int, int]:
    """Returns (sequences of a micro-batch, micro-batches of a step) on one rank.

    The small steps of a batch ramp have micro-batches no larger than those after them, and mostly the same:
    each size is compiled on its own.
    """
    length, data_ranks = phase.sequence_length, rank.layout.replicate * rank.layout.shard
    sequences, most = (
        max(1, math.ceil(number / data_ranks))
        for number in (phase.sequences_per_step, asked.tokens_per_step // length)
    )
    if asked.micro_batch_sequences is not None:
        size = micro_batch_up_to(rank.layout, sequences, asked.micro_batch_sequences)
    else:
        size = micro_batch(rank, length, most)
        if sequences != most:
            size = micro_batch(rank, length, sequences, at_most=size)
    return size, int(micro_batches_needed(rank.layout, sequences, size))


def _compiles(layout: Layout, machine: _Machine, identity: Identity) -> bool:
    """Returns the recipe's choice, else True where compiled layers work and are faster.

    That is on GPUs, and for bf16 on processors with AMX in runs that are longer than the compiling.
    """
    if layout.compile is not None:
        return layout.compile
    against = (
        machine.software.missing_compiler,
        compile_advice(layout),
    )
    flops = 6 * module(identity.model.model_type, "count").parameters(identity.model) * identity.total_tokens
    is_worth_it = machine.device == "cuda" or (
        machine.software.has_amx and identity.train.precision == "bf16" and flops > _FLOPS_WORTH_COMPILING
    )
    return is_worth_it and not any(against)


def _precisions(recipe: Recipe) -> list[Precision]:
    """Returns the precisions that the run computes in."""
    changes = recipe.train.precision_changes
    return list(dict.fromkeys([recipe.train.precision, *(precision for _, precision in changes)]))


def _fp8_token_complaints(recipe: Recipe, steps: _Steps) -> Iterator[str]:
    """Yields the phases whose micro-batches FP8 cannot multiply.

    The gradient of a weight is a product over a micro-batch's tokens, and FP8 units take 16 values at a time.
    """
    context = recipe.layout.context
    for phase, (sequences, _) in zip(steps.phases, steps.micro_batches):
        tokens = sequences * phase.sequence_length // context
        if tokens % 16:
            key = steps.asked[phase.number - 1].key("sequence_length")
            yield (
                f"{key} = {phase.sequence_length} makes micro-batches of {tokens} tokens on a rank, and FP8 "
                f"multiplies 16 at a time; what would work: a sequence_length in multiples of {16 * context}"
            )


def _reduction_complaint(recipe: Recipe, steps: _Steps) -> Iterator[str]:
    """Yields why gradients cannot be reduced in bf16.

    FSDP2 adds up what micro-batches scatter, until it is summed across replicas, in the reduction's buffer.
    """
    layout, has_several = recipe.layout, any(number > 1 for _, number in steps.micro_batches)
    is_late = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    is_scattered_often = layout.zero > 1 and not is_late and has_several
    if recipe.train.gradient_reduce_dtype == "bf16" and layout.replicate > 1 and is_scattered_often:
        yield (
            f'train.gradient_reduce_dtype = "bf16" with layout.replicate = {layout.replicate} and '
            f"layout.zero = {layout.zero} would add up the gradients of micro-batches in bf16; "
            'what would work: layout.zero = 1, layout.replicate = 1, or train.gradient_reduce_dtype = "fp32"'
        )


def _precision_complaints(model: Model, recipe: Recipe, last_step: int, machine: _Machine) -> Iterator[str]:
    train = recipe.train
    steps = [step for step, _ in train.precision_changes]
    for step in sorted(set(steps)):
        if step > last_step:
            yield f"train.precision_changes: step {step} is beyond the run's last step, {last_step}"
        if steps.count(step) > 1:
            yield (
                f"train.precision_changes: step {step} is there {steps.count(step)} times; each may be there "
                "once"
            )
    if "fp8" not in _precisions(recipe):
        return
    yield from fp8_complaints(model, recipe.layout, train.fp8)
    if machine.device == "cuda" and machine.card is not None and not train.fp8.emulate:
        complaint = without_fp8(machine.card)
        yield from [complaint] if complaint else []


def _accelerator(recipe: Recipe, device: str, name: str | None) -> Accelerator | None:
    """Returns the card that MFU is measured against; None when no card describes the device."""
    if name in accelerators():
        return accelerator_card(name)
    if name is not None:
        return accelerator_of_device(name)
    card = accelerator_card("cpu" if device == "cpu" else cluster(recipe.cluster).accelerator)
    return card if card.device == device else None


def _listed(recipe: Recipe, complaints: list[str]) -> str:
    lines = "\n".join(f"  - {complaint}" for complaint in complaints)
    return f"{len(complaints)} things to put right in {recipe.name}:\n{lines}"


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted key → value; the entries of a list of tables have numbers from 1."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): entry for number, entry in enumerate(value, start=1)}
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values

"""Resolves a recipe on a machine: recipe + machine → `Resolved`, every derived number of a run; torch-free.

It reads the manifests of the run folder's tokens and the tokenizer, and refuses impossible numbers
(`rules.py`), all at once, each with a possible number.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from kielo.artifact.json_object import JsonTable
from kielo.artifact.weights_folder import weights_here
from kielo.dataset.provenance import check_recipe
from kielo.models.parameter_shapes import parameters
from kielo.recipe.cards import Accelerator, accelerator_of_device, accelerators, cluster
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.errors import KieloError
from kielo.recipe.layout_on_nodes import named_entry, on_devices
from kielo.recipe.phases import FullPhase, full_phases
from kielo.recipe.read import run_folder as folder_of_run
from kielo.recipe.sections import (
    Checkpoint,
    CompleteModel,
    DatasetIdentity,
    Layout,
    Recipe,
    RecipeIdentity,
    TrainIdentity,
    TrainPlacement,
)
from kielo.resolve import rules
from kielo.resolve.activation_bytes import loss_chunk_tokens, with_positions
from kielo.resolve.complete_model import complete_model
from kielo.resolve.longer_run import goes_on_level, is_longer, way_to_go_on
from kielo.resolve.memory_row import TrainOptions
from kielo.resolve.micro_batch import RankOfRun, micro_batch, micro_batch_up_to
from kielo.resolve.planned_phases import flops_per_token, merged, plan_learning_rates, plan_phases
from kielo.resolve.resolved import Identity, PhasePlacement, Placement, PlannedPhase, Resolved, filled
from kielo.resolve.shares import micro_batches_needed
from kielo.resolve.software import (
    Software,
    chosen_precision,
    compile_advice,
    file_stall_seconds,
    planned,
    precisions,
    start_timeout_seconds,
    with_precision,
)
from kielo.resolve.stages import layers_of_stages
from kielo.resolve.text import (
    Text,
    has_budget,
    imagined_text,
    mixture_of,
    num_sequences,
    text_of_run,
    with_budget,
)

# Compiling takes half a minute of a CPU, in which it computes about this many FLOPs.
_FLOPS_WORTH_COMPILING = 1e14
_MOST_RANKS = 1_000_000  # more than any machine has
_MOST_STEPS = 10**7  # more than any run has


def resolve(
    recipe: Recipe,
    run_folder: Path | str,
    world_size: int,
    device: str,
    accelerator: str | None = None,
    text: Text | None = None,
    software: Software | None = None,
) -> Resolved:
    """Compute every number of the run.

    `world_size` is the number of ranks, `device` "cpu" or "cuda", and `accelerator` a card's name or the
    driver's name of the device. Defaults are the cluster card's accelerator, the run folder's text, and the
    software of a plan for the recipe's cluster. Raise KieloError for missing stages, for text that another
    recipe made, and with every impossible number.
    """
    software = software or planned(cluster(recipe.cluster))
    machine = rules.Machine(world_size, device, _accelerator(recipe, device, accelerator), software)
    return _resolved(recipe, Path(run_folder), machine, text, rules.STEP_RULES)


def resolve_to_score(
    recipe: Recipe,
    run_folder: Path,
    world_size: int,
    device: str,
    accelerator: str | None,
    software: Software,
) -> Resolved:
    """Compute the placement of a trained model, to score or verify it.

    Arguments and errors are as in `resolve`, but the ranks need not be able to share a training step.
    """
    machine = rules.Machine(world_size, device, _accelerator(recipe, device, accelerator), software)
    return _resolved(recipe, run_folder, machine, None, rules.TEXT_RULES)


def _resolved(
    recipe: Recipe,
    run_folder: Path,
    machine: rules.Machine,
    text: Text | None,
    step_rules: tuple[rules.StepRule, ...],
) -> Resolved:
    world_size, device, is_imagined = filled(machine.world_size), filled(machine.device), text is not None
    if not 1 <= world_size <= _MOST_RANKS:
        raise KieloError(f"--ranks {world_size} does not fit. Fix: 1 to {_MOST_RANKS:,}")
    if text is None:
        text = text_of_run(recipe, run_folder)
        check_recipe(recipe, run_folder)
    of_all_nodes = recipe
    recipe = _with_replicas(on_devices(with_budget(recipe, text), world_size), world_size)
    recipe = with_precision(recipe, chosen_precision(recipe, device, machine.software.has_amx, run_folder)[0])
    asked = full_phases(recipe)
    model = complete_model(recipe, asked, text.vocabulary_size, is_imagined)
    case = rules.Case(recipe, model, machine, asked, text.vocabulary_size)
    found = rules.complaints(case, (*rules.MACHINE_RULES, *rules.MODEL_RULES, *rules.LAYOUT_RULES))
    layout = _with_axes(recipe.layout, world_size)
    asks_tasks = recipe.evaluate.every_steps > 0
    options = tuple(
        TrainOptions.of(precision, recipe.train, (), asks_tasks) for precision in precisions(recipe.train)
    )
    compiles = (
        device == "cuda" and machine.software.missing_compiler is None and compile_advice(layout) is None
    )
    counted = layout.model_copy(update={"compile": compiles}) if layout.compile is None else layout
    steps = _steps(recipe, asked, text, RankOfRun(model, counted, options, None if found else machine.card))
    of_steps = rules.StepCase(recipe, asked, text, run_folder / "tokens", steps)
    found = [*found, *rules.complaints(of_steps, step_rules)]
    rules.refuse(recipe, [named_entry(of_all_nodes, world_size, message) for message in found])
    heldout = num_sequences(text.heldout_tokens, steps.phases[0].sequence_length)
    identity = _identity(recipe, model, asked, steps, text.tokens_hash, heldout)
    placement = _placement(recipe, identity, layout, machine, steps, text, run_folder)
    return Resolved(identity=identity, placement=placement)


def refuse_before_text(
    recipe: Recipe, world_size: int | None = None, device: str | None = None, software: Software | None = None
) -> None:
    """Raise KieloError for every rule that the recipe breaks, before there is a text.

    Without the training's `world_size`, `device` and `software` only rules on the model and the layout are
    checked. No rule is checked if the weights or the ready tokenizer are not on this machine yet.
    """
    weights = recipe.model.weights
    if weights is not None and weights_here(weights) is None:
        return
    if not has_budget(recipe):  # the text decides the length: assume the longest run
        tokens = _MOST_STEPS * recipe.train.tokens_per_step
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"tokens": tokens})})
    try:
        text = imagined_text(recipe)
    except KieloError:
        return
    if world_size is None or device is None:
        rules.refuse(recipe, rules.complaints(case_before_text(recipe, text), rules.LAYOUT_RULES))
    else:
        # The run folder can say in which precision the run began.
        resolve(recipe, folder_of_run(recipe), world_size, device, text=text, software=software)


def case_before_text(recipe: Recipe, text: Text | None = None) -> rules.Case:
    """Return the recipe with its complete model. Raise KieloError for every rule on the model that it breaks.

    By default `text` is as much as the recipe asks for.
    """
    text = text or imagined_text(recipe)
    model = complete_model(recipe, full_phases(recipe), text.vocabulary_size, is_imagined=True)
    machine = rules.Machine(software=planned(cluster(recipe.cluster)))
    case = rules.Case.of(recipe, model, machine, text.vocabulary_size)
    rules.refuse(recipe, rules.complaints(case, rules.MODEL_RULES))
    return case


def _steps(recipe: Recipe, asked: Sequence[FullPhase], text: Text, rank: RankOfRun) -> rules.Steps:
    mixtures = [mixture_of(phase, text, recipe.dataset) for phase in asked]
    phases = plan_phases(asked, mixtures, recipe.train.batch_ramp, recipe.seed, text.epoch_tokens)
    micro_batches = tuple(
        _micro_batches(phase, asked[phase.number - 1], rank.in_phase(phase.trainable)) for phase in phases
    )
    return rules.Steps(phases, micro_batches, rank.layout.replicate * rank.layout.shard)


def _identity(
    recipe: Recipe,
    model: CompleteModel,
    asked: Sequence[FullPhase],
    steps: rules.Steps,
    tokens_hash: str,
    heldout: int,
) -> Identity:
    """Return the identity. heldout: number of sequences of held-out text."""
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
        learning_rates=plan_learning_rates(asked, steps.phases),
    )


def _placement(
    recipe: Recipe,
    identity: Identity,
    layout: Layout,
    machine: rules.Machine,
    steps: rules.Steps,
    text: Text,
    run_folder: Path,
) -> Placement:
    model, card = identity.model, machine.card
    limits = {
        "loss_chunk_tokens": loss_chunk_tokens(recipe.train.loss_chunk_tokens, model, layout, card),
        "start_timeout_seconds": start_timeout_seconds(recipe),
    }
    return Placement(
        world_size=machine.world_size,
        layout=_filled_in(layout, identity, machine),
        train=recipe.train.part(TrainPlacement).model_copy(update=limits),
        checkpoint=_keeping_some(recipe.checkpoint, identity.total_steps),
        phases=tuple(
            PhasePlacement(
                micro_batch_sequences=size,
                micro_batches_per_step=number,
                flops_per_token=flops_per_token(model, phase.sequence_length, phase.trainable),
            )
            for phase, (size, number) in zip(steps.phases, steps.micro_batches, strict=True)
        ),
        device=machine.device,
        accelerator=card.name if card else "unknown",
        peak_tflops=card.peak_tflops if card else {},
        parameters=parameters(model),
        end_of_text_id=text.end_of_text_id,
        file_stall_seconds=file_stall_seconds(recipe),
        tokenizer_hash=text.tokenizer_hash,
        tokens_folder=str(run_folder / "tokens"),
        tokenizer_folder=str(run_folder / "tokenizer"),
        train_folder=str(run_folder / "train"),
    )


def _filled_in(layout: Layout, identity: Identity, machine: rules.Machine) -> Layout:
    """Return the layout, whose axes are known, with everything else that the recipe leaves to Kielo."""
    stages = layers_of_stages(identity.model, identity.longest_sequence_length, layout)
    return layout.model_copy(
        update={
            "compile": _compiles(layout, machine, identity),
            "pipeline_layers": stages if layout.pipeline > 1 else None,
            "pipeline_stages_per_rank": len(stages) // layout.pipeline if layout.pipeline > 1 else None,
        }
    )


def _keeping_some(checkpoint: Checkpoint, total_steps: int) -> Checkpoint:
    """Return the section with its default: every tenth checkpoint stays, but at most ten of a run."""
    if checkpoint.keep_every_steps is not None:
        return checkpoint
    every = checkpoint.every_steps * max(10, math.ceil(total_steps / (10 * checkpoint.every_steps)))
    return checkpoint.model_copy(update={"keep_every_steps": min(every, 2**63 - 1)})  # TOML's largest number


def consent(old: Identity, new: Resolved, step: int = 0) -> None:
    """Raise KieloError listing the changed keys unless `step` is a step of both identities.

    Skipped steps, precisions and the response to spikes can change for future steps. So can the length of the
    run, if the learning rate of the steps up to `step` stays the same.
    """
    later = {"skip_steps", "precision", "precision_changes", "fp8", "gradient_reduce_dtype", "spikes"}
    both = (old, new.identity)
    before, after = (flat(one.model_dump(mode="json", exclude={"train": later})) for one in both)
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
        if "dataset.restart_positions" in changed:
            lines += (
                "\n    (a run whose learned positions continue through documents resumes with --set "
                "dataset.restart_positions=false)"
            )
        raise KieloError(
            f"{new.placement.train_folder}: contains a different run: {len(changed)} training settings "
            "differ:\n"
            f"{lines}\n{way} to the old values, give the recipe another name or folder, or move this folder "
            "away to start again"
        )


def _with_replicas(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with the number of copies that replicate = 0 asks for."""
    layout = recipe.layout
    if layout.replicate:
        return recipe
    group = layout.pipeline * layout.context * layout.tensor * max(1, layout.shard)
    copies = max(1, world_size // group) if layout.shard else 1
    return recipe.model_copy(update={"layout": layout.model_copy(update={"replicate": copies})})


def _with_axes(layout: Layout, world_size: int) -> Layout:
    """Return the layout whose axes make up `world_size`: shard = 0 takes the remaining ranks.

    If none can, which is a complaint, return the nearest without copies, to find other complaints.
    """
    others = layout.pipeline * layout.replicate * layout.context * layout.tensor
    if world_size % others == 0 and layout.shard in (0, world_size // others):
        return layout.model_copy(update={"shard": world_size // others})
    inner = layout.pipeline * layout.context * layout.tensor
    return layout.model_copy(update={"replicate": 1, "shard": max(1, world_size // inner)})


def _micro_batches(phase: PlannedPhase, asked: FullPhase, rank: RankOfRun) -> tuple[int, int]:
    """Return (sequences of a micro-batch, micro-batches of a step) on a rank.

    Micro-batches of a batch ramp's small steps are no larger than later ones, and mostly equal, because each
    size is compiled separately.
    """
    length, data_ranks = phase.sequence_length, rank.layout.replicate * rank.layout.shard
    numbers = (phase.sequences_per_step, asked.tokens_per_step // length)
    sequences, most = (max(1, math.ceil(number / data_ranks)) for number in numbers)
    if asked.micro_batch_sequences is not None:
        size = micro_batch_up_to(rank.layout, sequences, asked.micro_batch_sequences)
    else:
        size = micro_batch(rank, length, most)
        if sequences != most:
            size = micro_batch(rank, length, sequences, at_most=size)
    return size, int(micro_batches_needed(rank.layout, sequences, size))


def _compiles(layout: Layout, machine: rules.Machine, identity: Identity) -> bool:
    """Return the recipe's choice, else True if compiled layers work and are faster.

    Compiled layers are faster on GPUs, and for bf16 on CPUs with AMX in runs longer than compiling.
    """
    if layout.compile is not None:
        return layout.compile
    against = (machine.software.missing_compiler, compile_advice(layout))
    flops = 6 * parameters(identity.model) * identity.total_tokens
    is_worth_it = machine.device == "cuda" or (
        machine.software.has_amx and identity.train.precision == "bf16" and flops > _FLOPS_WORTH_COMPILING
    )
    return is_worth_it and not any(against)


def _accelerator(recipe: Recipe, device: str, name: str | None) -> Accelerator | None:
    if name in accelerators():
        return accelerator_card(name)
    if name is not None:
        return accelerator_of_device(name)
    card = accelerator_card("cpu" if device == "cpu" else cluster(recipe.cluster).accelerator)
    return card if card.device == device else None


def flat(content: JsonTable, prefix: str = "") -> JsonTable:
    """Return dotted key → value. Entries of a list of tables have numbers from 1."""
    values: JsonTable = {}
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): entry for number, entry in enumerate(value, start=1)}
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values

"""`kielo evaluate` on the ranks of a job, in the layout of the run. Rank 0 has the result."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.lease import held
from kielo.artifact.manifest import Stage, write_stage
from kielo.artifact.scores import Scores
from kielo.artifact.stage_json import write_json
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.provenance import check_recipe, check_tokenizer
from kielo.evaluate.contender import MOST_TOKENS_PER_FORWARD
from kielo.evaluate.evaluation import KIND, VERSION, WantedScores, wanted_scores
from kielo.evaluate.layout_contender import load_checkpoint_on_ranks, load_hugging_face_on_ranks
from kielo.evaluate.log_tasks import log_tasks
from kielo.evaluate.score import place_of_checkpoint, place_of_folder, refuse_tasks, score, with_tasks
from kielo.models.families import read_hf_config
from kielo.ranks.world import World, world_of_job
from kielo.recipe.cards import accelerator, accelerators
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel, Layout, Precision, Recipe
from kielo.resolve import rules
from kielo.resolve.memory import scoring_bytes, usable_bytes
from kielo.resolve.memory_row import MemoryColumns, StepSize, TrainOptions, memory_row
from kielo.resolve.resolved import Identity, Resolved, filled, placed_as_trained
from kielo.resolve.stages import layers_of_stages

MOST_SHARDS = 4096


def make_scores_on_ranks(
    recipe: Recipe,
    placed: Resolved,
    run_folder: Path,
    checkpoint: Callable[[], Path],
    precision: Precision = "fp32",
) -> Scores | None:
    """Score a run's checkpoint in the placement of `placed`. All ranks call it. Return None on other ranks.

    `checkpoint` finds it, on rank 0. Current scores are read. Scores in bf16 have another section than scores
    in fp32, so that each replaces the other.
    """
    refuse_encoder(recipe)
    with world_of(placed) as world, ExitStack() as until_the_end:
        ranks = Agreement()
        ranks.on_first(lambda: refuse_tasks(recipe))
        ranks.on_first(lambda: until_the_end.enter_context(held(run_folder)))
        wanted = ranks.on_first(lambda: _wanted(recipe, run_folder, checkpoint(), precision))
        current = ranks.on_first(wanted.current)
        if isinstance(current, Scores):
            return current if world.rank == 0 else None
        resolved = ranks.on_first(lambda: placed_as_trained(placed, run_folder))
        refuse_too_large(resolved, precision, bool(recipe.evaluate.tasks))
        made: list[Stage] = []  # on rank 0
        writing = write_stage(wanted.folder, KIND, VERSION, wanted.inputs, wanted.section)
        ranks.on_first(lambda: made.append(until_the_end.enter_context(writing)))
        contender = load_checkpoint_on_ranks(
            wanted.checkpoint, resolved, run_folder / "tokenizer", world, precision
        )
        folder = None if world.rank else made[0].folder
        scores = score(contender, wanted.checkpoint.name, recipe, run_folder, folder=folder)
        place = place_of_checkpoint(wanted).in_precision(precision)
        scores = with_tasks(scores, contender, recipe, place)
        ranks.on_first(lambda: write_json(made[0].folder, scores))
        if world.rank:
            return None
        bits = scores.bits_per_byte.content()
        made[0].counts |= {"bits_per_byte": bits, "heldout_bytes": scores.heldout_bytes}
        log_tasks(recipe, run_folder, read_state(wanted.checkpoint).step or 0, scores)
        return scores


def evaluate_hugging_face_on_ranks(
    recipe: Recipe, placed: Resolved, run_folder: Path, folder: Path, precision: Precision = "fp32"
) -> Scores | None:
    """Score a Hugging Face folder on the held-out text of a run, in the recipe's layout.

    Write nothing but the results of tasks, beside the run's own.
    """
    with world_of(placed) as world:
        ranks = Agreement()
        ranks.on_first(lambda: refuse_tasks(recipe))
        resolved = ranks.on_first(lambda: placed_for_folder(recipe, placed, run_folder, folder))
        refuse_too_large(resolved, precision, bool(recipe.evaluate.tasks))
        contender = load_hugging_face_on_ranks(folder, resolved, world, precision)
        scores = score(contender, str(folder), recipe, run_folder)
        place = ranks.on_first(lambda: place_of_folder(run_folder, folder))
        scores = with_tasks(scores, contender, recipe, place.in_precision(precision))
        return scores if world.rank == 0 else None


def refuse_encoder(recipe: Recipe) -> None:
    if recipe.train.objective == "masked_tokens":
        raise KieloError(
            'train.objective = "masked_tokens": an encoder is scored by one process. '
            "Fix: kielo evaluate RECIPE without --ranks"
        )


def refuse_too_large(resolved: Resolved, precision: Precision, asks_tasks: bool) -> None:
    """Raise KieloError if the model's scoring does not fit the devices, before anything is loaded."""
    placement = resolved.placement
    card = accelerator(placement.accelerator) if placement.accelerator in accelerators() else None
    usable = None if card is None else usable_bytes(card)
    if card is None or usable is None:
        return
    needed = bytes_of_scoring(resolved, placement.layout, precision, asks_tasks)
    if needed <= usable:
        return
    layout, shards = placement.layout, placement.layout.shard
    ranks = placement.world_size // shards
    while shards < MOST_SHARDS and needed > usable:
        shards *= 2
        larger = layout.model_copy(update={"shard": shards})
        needed = bytes_of_scoring(resolved, larger, precision, asks_tasks)
    before = bytes_of_scoring(resolved, layout, precision, asks_tasks)
    fix = f"{shards * ranks} ranks" if needed <= usable else "layout.tensor or layout.pipeline of more ranks"
    raise KieloError(
        f"scoring in {precision} needs {before / 1e9:.1f} GB on each of {placement.world_size} devices, and "
        f"{usable / 1e9:.1f} GB of a {card.name} are usable. Fix: {fix}"
    )


def bytes_of_scoring(resolved: Resolved, layout: Layout, precision: Precision, asks_tasks: bool) -> int:
    """Return the bytes that scoring reserves on the fullest device, with windows of the longest sequence.

    asks_tasks: with the whole logits of questions. Rehearsals (`verify/rehearse_scoring.py`) need at most 5 %
    more.
    """
    identity, placement = resolved.identity, resolved.placement
    length = identity.longest_sequence_length
    size = StepSize(length, max(1, MOST_TOKENS_PER_FORWARD // length), 1)
    chunk_tokens = placement.train.loss_chunk_tokens
    options = TrainOptions(precision, loss_chunk_tokens=chunk_tokens, asks_tasks=asks_tasks)
    card = accelerator(placement.accelerator) if placement.accelerator in accelerators() else None
    row = memory_row(identity.model, layout, size, options, card)
    return int(scoring_bytes(MemoryColumns.of([row]))[0])


def world_of(placed: Resolved) -> AbstractContextManager[World]:
    train, device = placed.placement.train, placed.placement.device
    return world_of_job(filled(train.start_timeout_seconds), device, train.step_timeout_seconds)


def _wanted(recipe: Recipe, run_folder: Path, checkpoint: Path, precision: Precision) -> WantedScores:
    wanted = wanted_scores(recipe, run_folder, checkpoint)
    if precision == "fp32":
        return wanted
    return replace(wanted, section=wanted.section | {"precision": precision})


def placed_for_folder(recipe: Recipe, placed: Resolved, run_folder: Path, folder: Path) -> Resolved:
    """Return the recipe's placement with the model of a Hugging Face folder."""
    refuse_encoder(recipe)
    check_recipe(recipe, run_folder)
    check_tokenizer(run_folder)
    rows = {"vocab_multiple": placed.identity.model.vocab_multiple}  # which tensor ranks divide
    model = read_hf_config(folder).model_copy(update=rows)
    if FAMILIES[model.model_type].is_encoder:
        raise KieloError(f"{folder}: an encoder, for which bits per byte are not defined. Fix: a decoder")
    layout = recipe.layout.model_copy(
        update={axis: getattr(placed.placement.layout, axis) for axis in ("replicate", "shard")}
    )
    case = rules.Case.of(recipe, model, rules.Machine(placed.placement.world_size)).with_layout(layout)
    rules.refuse(recipe, rules.complaints(case, rules.LAYOUT_RULES))
    return _with_model(placed, model, layout)


def _with_model(placed: Resolved, model: CompleteModel, layout: Layout) -> Resolved:
    identity: Identity = placed.identity.model_copy(update={"model": model})
    stages = layers_of_stages(model, identity.longest_sequence_length, layout)
    update = {
        "pipeline_layers": stages if layout.pipeline > 1 else None,
        "pipeline_stages_per_rank": len(stages) // layout.pipeline if layout.pipeline > 1 else None,
    }
    placed_layout = placed.placement.layout.model_copy(update=update)
    placement = placed.placement.model_copy(update={"layout": placed_layout})
    return Resolved(identity=identity, placement=placement)

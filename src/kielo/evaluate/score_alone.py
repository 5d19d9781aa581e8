"""The row of `watch/history.jsonl` of one checkpoint, or of the weights from which a run started."""

import time
from pathlib import Path
from typing import Any

from kielo.artifact.attempt_files import now
from kielo.artifact.checkpoint_folder import saved_step
from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.score_history import ScoredCheckpoint
from kielo.evaluate.contender import load_hugging_face
from kielo.evaluate.evaluation import wanted_scores
from kielo.evaluate.history_subject import Subject, inputs_of
from kielo.evaluate.log_tasks import log_tasks
from kielo.evaluate.score import place_of_folder, score, score_checkpoint, with_tasks
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe


def score_alone(recipe: Recipe, run_folder: Path, subject: Subject) -> ScoredCheckpoint:
    """Score without the baselines, which do not change. Write only results of tasks."""
    began = time.monotonic()
    inputs = inputs_of(recipe, run_folder, subject)
    found = (_base_scores if subject.is_base else _checkpoint_scores)(recipe, run_folder, subject)
    return ScoredCheckpoint(
        model=subject.name,
        inputs=inputs,
        scored_at=now(),
        seconds=round(time.monotonic() - began, 1),
        **found,
    )


def _checkpoint_scores(recipe: Recipe, run_folder: Path, subject: Subject) -> dict[str, Any]:
    tokens = read_state(subject.path).tokens
    masked, in_turn = score_checkpoint(wanted_scores(recipe, run_folder, subject.path), has_baselines=False)
    found: dict[str, Any] = {"step": saved_step(subject.path), "tokens": tokens}
    if in_turn is not None:
        log_tasks(recipe, run_folder, found["step"], in_turn)
        found["scores"] = in_turn
    return found | ({"masked_scores": masked} if masked else {})


def _base_scores(recipe: Recipe, run_folder: Path, subject: Subject) -> dict[str, Any]:
    contender = load_hugging_face(subject.path, longest_sequence_length(recipe))
    scores = score(contender, subject.name, recipe, run_folder, has_baselines=False)
    scores = with_tasks(scores, contender, recipe, place_of_folder(run_folder, subject.path))
    log_tasks(recipe, run_folder, 0, scores)
    return {"step": 0, "tokens": 0, "is_base": True, "scores": scores}

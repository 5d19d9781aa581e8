"""`watch/history.jsonl` of a run: the scores of its checkpoints, one after another. Torch-free.

The folder is not the evaluate stage's, which is replaced as a whole. Beside the history, a watch that has
come to its end leaves `watch/ended`, with a line for each checkpoint that it passed over.
"""

from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from kielo.artifact.attempt_files import UtcTime, read_lines
from kielo.artifact.scores import MaskedScores, Scores
from kielo.artifact.stage_json import JsonObject

WATCH_FOLDER = "watch"
HISTORY_NAME, ENDED_NAME = "history.jsonl", "ended"
# Inputs that decide the text that is scored. Bits per byte of other text do not compare.
TEXT_INPUTS = ("tokens", "evaluation_texts")


class ScoredCheckpoint(JsonObject):
    """The scores of a checkpoint, or of the weights from which the run started."""

    step: int
    """Optimiser steps since the start of the run; 0 for the weights from which it started."""
    tokens: int | None
    """Tokens since the start of the run; null: the checkpoint does not say."""
    model: str
    """Name of the checkpoint's folder, or model.weights of the recipe."""
    is_base: bool = False
    """The weights from which the run started, with their own tokenizer."""
    inputs: dict[str, str]
    """Hash of each input: checkpoint or weights, tokenizer, text and settings."""
    scored_at: UtcTime
    seconds: float
    scores: Scores | None = None
    """Scores of a model that predicts next tokens, without baselines."""
    masked_scores: MaskedScores | None = None
    """Scores of an encoder."""


def history_path(run_folder: Path) -> Path:
    return run_folder / WATCH_FOLDER / HISTORY_NAME


def read_history(run_folder: Path) -> list[ScoredCheckpoint]:
    """Return all rows in the order of the file; [] without a file. A damaged line is skipped."""
    rows = []
    for content in read_lines(history_path(run_folder)):
        with suppress(ValidationError):  # a person's line
            rows.append(ScoredCheckpoint.model_validate(content))
    return rows


def comparable(rows: list[ScoredCheckpoint]) -> list[ScoredCheckpoint]:
    """Return the last row of each step on the newest row's text, by step. The base model's row is first."""
    if not rows:
        return []
    text = [rows[-1].inputs.get(name) for name in TEXT_INPUTS]
    last = {
        (not row.is_base, row.step): row
        for row in rows
        if [row.inputs.get(name) for name in TEXT_INPUTS] == text
    }
    return [last[key] for key in sorted(last)]

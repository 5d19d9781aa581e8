"""`metrics.jsonl`: the rows that a run logs, a JSON object a line, each kind of row a type. Torch-free.

A key of its own identifies each kind. A line that is no row is skipped and never an error: a person can edit
the file, and a killed attempt leaves half a line.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from kielo.artifact.scores import TaskScore

logger = logging.getLogger(__name__)
METRICS_NAME = "metrics.jsonl"
_BEGINNING = b'{"step": '  # of every row that Kielo writes


class Row(BaseModel):
    """A row of an unknown kind, from another Kielo or a person."""

    model_config = ConfigDict(frozen=True, strict=True, use_attribute_docstrings=True)

    step: int
    """Optimiser steps since the start of the run, skipped steps included."""


class _RowWithTokens(Row):
    tokens: int | None = None
    """Tokens since step 1, skipped tokens included."""


class _RowOfPhase(_RowWithTokens):
    samples: int | None = None
    """Sequences since step 1, skipped sequences included."""
    phase: int | None = None
    """Number of the phase in the recipe, from 1."""


class TrainingStep(_RowOfPhase):
    loss: float | None
    """Loss of this step in nats per counted token, over all ranks, with z-loss. null: not finite; with a
    gradient norm of 0, no label of the step counts."""
    gradient_norm: float | None = None
    """L2 norm of the gradient over all ranks, before clipping; null: not finite."""
    learning_rate: float | None = None
    tokens_per_second: float
    """Over all ranks since the last logged step, without held-out text and saving."""
    planned_tokens_per_second: float | None = None
    """The planner's forecast over all ranks; null: no card knows the machine."""
    tflops_per_second: float | None = None
    """TFLOP/s of a rank: model FLOPs, without recomputation."""
    mfu: float | None = None
    """Model FLOPs utilisation of a rank, 0 to 1; null: no card has the accelerator's peak."""
    seconds: float
    """Seconds of training since the start of this attempt."""
    seconds_left: float | None = None
    """Remaining seconds of training at this speed."""
    skipped: int | None = None
    """Steps since step 1 without an update, because it was not finite."""
    without_labels: int | None = None
    """Steps since step 1 in which no label counted."""

    @property
    def has_no_label(self) -> bool:
        return self.loss is None and self.gradient_norm == 0


class HeldOutScore(BaseModel):
    model_config = Row.model_config

    loss: float | None
    """Nats a counted token, without z-loss; null: not finite, or no token counts."""
    bits_per_byte: float | None = None
    """By the tokens a byte of the whole set; null: not finite, or not known."""
    languages: list[str] = []


class HeldOutLoss(_RowWithTokens):
    """The loss on held-out text after a step."""

    heldout_loss: float | None
    """Nats a counted token, without z-loss; null: not finite, or no token counts."""
    heldout_bits_per_byte: float | None = None
    """null: not finite, or the folder of tokens does not say its bytes."""
    heldout_sets: dict[str, HeldOutScore] | None = None
    """Score of each source's held-out text, and of texts from outside of the mixture."""


class PassedOver(_RowOfPhase):
    """Steps up to `step` whose text was skipped without training."""

    passed_over_from: int
    passed_over_for: str = "skip_steps"
    """Reason: "skip_steps" of the recipe, or "spike", after which the run went back."""


class Spike(Row):
    """A rise of loss or gradient norm above the noise of the steps before."""

    spike_from: int
    """First step of the rise."""
    spike_to: int
    outcome: str
    """"passed": it ended by itself; "told": it did not, and training continues; "went back": to `step`."""
    highest_loss: float | None
    """Highest loss of these steps; null: not finite."""
    usual_loss: float | None
    """Median of the loss of the steps before; null: not finite."""
    highest_loss_step: int


class PrecisionChange(_RowWithTokens):
    """A change of precision after `step`."""

    precision: str
    """Precision of the following steps: fp32, bf16 or fp8."""


class PrecisionVerdict(PrecisionChange):
    """The verdict on `precision`, a watched change."""

    precision_from: int
    outcome: str
    """"kept", or "taken back": the run continues in the precision before."""
    loss_rise: float | None
    """Largest rise of the mean loss, as a share of the loss before the change; null: not finite."""
    gradient_norm_rise: float | None
    """Largest rise of the mean gradient norm, as a share of the norm before the change; null: not finite."""


class Fp8GradientProbe(Row):
    """The gradient of a step in FP8, compared with bf16."""

    fp8_gradient_cosine: float | None
    """Cosine of the angle between them, -1 to 1; null: not finite."""


class TaskScores(_RowWithTokens):
    """The scores of a task of `evaluate.tasks` after a step, or of each task of a group."""

    scored_task: str
    """Name in `evaluate.tasks`."""
    task_scores: list[TaskScore]
    """A score of each metric."""
    unscored: str = ""
    """Why a score is missing."""


# Kinds by the key that identifies them, first match first: a verdict also has a change's key.
KINDS: dict[str, type[Row]] = {
    "loss": TrainingStep,
    "heldout_loss": HeldOutLoss,
    "scored_task": TaskScores,
    "passed_over_from": PassedOver,
    "fp8_gradient_cosine": Fp8GradientProbe,
    "spike_from": Spike,
    "outcome": PrecisionVerdict,
    "precision": PrecisionChange,
}
Kind = TypeVar("Kind", bound=Row)


def read_row(line: bytes) -> Row | None:
    try:
        content = from_json(line)  # four times as fast as json.loads
        kind = next((kind for key, kind in KINDS.items() if key in content), Row)
        return kind.model_validate(content)
    except (ValueError, TypeError):  # no JSON, no object, or other types
        return None


def write_row(row: Row) -> str:
    """Return the row's line. Numbers that JSON lacks (NaN, infinity) are null."""
    return json.dumps(_finite(row.model_dump(exclude_unset=True))) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file in order, [] without a file. Warn of other lines."""
    rows, odd = split_metrics(path)
    if odd:
        logger.warning("%s: %s; skipped", path, describe_odd(odd))
    return [row for row, _ in rows]


def of_kind(rows: list[Row], kind: type[Kind]) -> list[Kind]:
    return [row for row in rows if isinstance(row, kind)]


def split_metrics(path: Path) -> tuple[list[tuple[Row, bytes]], list[tuple[int, bytes]]]:
    """Return (row, line) of rows and (number, line) of others, but not of half a line at the end."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    rows, odd = [], []
    for number, line in enumerate(lines, start=1):
        row = read_row(line)
        if row is not None:
            rows.append((row, line))
        elif line.strip() and (number < len(lines) or line[: len(_BEGINNING)] != _BEGINNING[: len(line)]):
            odd.append((number, line))
    return rows, odd


def describe_odd(odd: list[tuple[int, bytes]]) -> str:
    """Return e.g. "3 lines are no row of a run (number 4, 5, 9)"."""
    numbers = ", ".join(str(number) for number, _ in odd[:10]) + (", …" if len(odd) > 10 else "")
    return f"{len(odd)} line{'s are' if len(odd) > 1 else ' is'} no row of a run (number {numbers})"

"""`metrics.jsonl`: the rows that a run logs, one JSON object a line, each kind of row a type. Torch-free.

A key that only one kind of row has tells the kind. A person may have edited the file, and a killed attempt
leaves half a line: a line that is no row is passed over, and is never an error.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

logger = logging.getLogger(__name__)
METRICS_NAME = "metrics.jsonl"
_BEGINNING = b'{"step": '  # of every row that Kielo writes


class Row(BaseModel):
    """A row of a kind that this Kielo does not know: another one or a person wrote it."""

    model_config = ConfigDict(frozen=True, strict=True, use_attribute_docstrings=True)

    step: int
    """Optimiser steps since the start of the run, those passed over included."""


class TrainingStep(Row):
    """A training step that was logged."""

    tokens: int | None = None
    """Tokens since step 1."""
    samples: int | None = None
    """Sequences since step 1."""
    phase: int | None = None
    """The phase's number in the recipe, from 1."""
    loss: float | None
    """Loss of this step in nats per counted token, over all ranks, the z-loss included.

    null: not finite; with a gradient norm of 0: no label of the step counts.
    """
    gradient_norm: float | None = None
    """L2 norm of the gradient over all ranks, before clipping; null: not finite."""
    learning_rate: float | None = None
    """Learning rate of this step."""
    tokens_per_second: float
    """Tokens per second over all ranks since the last logged step; held-out text and saving are left out."""
    planned_tokens_per_second: float | None = None
    """Tokens per second over all ranks that the planner expects; null: no card knows the machine."""
    tflops_per_second: float | None = None
    """TFLOP/s of one rank: model FLOPs, without recomputation."""
    mfu: float | None = None
    """Model FLOPs utilisation of one rank, 0 to 1; null: no card gives the accelerator's peak."""
    seconds: float
    """Seconds of training since the start of this attempt."""
    seconds_left: float | None = None
    """Seconds of training that are left at this speed."""
    skipped: int | None = None
    """Steps since step 1 whose update was left out because it was not finite."""
    without_labels: int | None = None
    """Steps since step 1 in which no label counted."""

    @property
    def has_no_label(self) -> bool:
        """Return True if no label of the step counts."""
        return self.loss is None and self.gradient_norm == 0


class HeldOutScore(BaseModel):
    """The score of one held-out set."""

    model_config = ConfigDict(frozen=True, strict=True, use_attribute_docstrings=True)

    loss: float | None
    """Loss in nats a counted token, without z-loss; null: not finite, or no token counts."""
    bits_per_byte: float | None = None
    """Bits per byte of the text, by the tokens a byte of the whole set; null: not finite, or not known."""
    languages: list[str] = []
    """Codes of the languages that the set is in."""


class HeldOutLoss(Row):
    """The loss on held-out text after a step."""

    tokens: int | None = None
    """Tokens since step 1."""
    heldout_loss: float | None
    """Loss on held-out text in nats a counted token, without z-loss; null: not finite, or no token counts."""
    heldout_bits_per_byte: float | None = None
    """Bits per byte of that text; null: not finite, or the folder of tokens does not say its bytes."""
    heldout_sets: dict[str, HeldOutScore] | None = None
    """Score of each source's held-out text, and of texts from outside of the mixture."""


class PassedOver(Row):
    """Steps that were passed over without training, up to `step`."""

    tokens: int | None = None
    """Tokens since step 1, those passed over included."""
    samples: int | None = None
    """Sequences since step 1, those passed over included."""
    phase: int | None = None
    """The phase's number in the recipe, from 1."""
    passed_over_from: int
    """The first step that was passed over."""
    passed_over_for: str = "skip_steps"
    """Why: "skip_steps", as the recipe says, or "spike", after which the run went back."""


class Spike(Row):
    """A rise of loss or gradient norm that stood out of the noise of the steps before it."""

    spike_from: int
    """The first step that stood out."""
    spike_to: int
    """The last step that stood out."""
    outcome: str
    """"passed": it came back by itself; "told": it did not, and training goes on; "went back": to `step`."""
    highest_loss: float | None
    """Highest loss of these steps; null: not finite."""
    usual_loss: float | None
    """Median of the loss of the steps before; null: not finite."""
    highest_loss_step: int
    """The step of the highest loss."""


class PrecisionChange(Row):
    """A change of precision after `step`."""

    tokens: int | None = None
    """Tokens since step 1."""
    precision: str
    """The precision of the steps that follow: fp32, bf16 or fp8."""


class PrecisionVerdict(PrecisionChange):
    """The verdict on a change of precision that was watched. Its `precision` is the one that was judged."""

    precision_from: int
    """The first step in that precision."""
    outcome: str
    """"kept", or "taken back": then the run goes on in the precision before."""
    loss_rise: float | None
    """Largest rise of the mean loss, as a share of the loss before the change; null: not finite."""
    gradient_norm_rise: float | None
    """Largest rise of the mean gradient norm, as a share of the norm before the change; null: not finite."""


class Fp8GradientProbe(Row):
    """The gradient of a step in FP8 beside the one in bf16."""

    fp8_gradient_cosine: float | None
    """Cosine of the angle between the two, -1 to 1; null: not finite."""


# Kinds by a key that identifies them. The first that fits is taken: a verdict has a change's key as well.
KINDS: dict[str, type[Row]] = {
    "loss": TrainingStep,
    "heldout_loss": HeldOutLoss,
    "passed_over_from": PassedOver,
    "fp8_gradient_cosine": Fp8GradientProbe,
    "spike_from": Spike,
    "outcome": PrecisionVerdict,
    "precision": PrecisionChange,
}
Kind = TypeVar("Kind", bound=Row)


def read_row(line: bytes) -> Row | None:
    """Return the row that a line holds, of its own kind; None for a line that is no row."""
    try:
        content = from_json(line)  # four times as fast as json.loads
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    kind = next((kind for key, kind in KINDS.items() if key in content), Row)
    try:
        return kind.model_validate(content)
    except ValidationError:
        return None


def write_row(row: Row) -> str:
    """Return the row's line. Numbers that JSON lacks (NaN, infinity) are written as null."""
    return json.dumps(_finite(row.model_dump(exclude_unset=True))) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file in order; none where there is no file. Warns of other lines."""
    rows, odd = split_metrics(path)
    if odd:
        logger.warning("%s: %s; passed over", path, describe_odd(odd))
    return [row for row, _ in rows]


def of_kind(rows: list[Row], kind: type[Kind]) -> list[Kind]:
    """Return the rows of this kind, in their order."""
    return [row for row in rows if isinstance(row, kind)]


def split_metrics(path: Path) -> tuple[list[tuple[Row, bytes]], list[tuple[int, bytes]]]:
    """Return (row, line) of each row, and (line number, line) of each line that is no row.

    The half line that a killed attempt left at the end is in neither.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    rows, odd = [], []
    for number, line in enumerate(lines, start=1):
        row = read_row(line)
        if row is not None:
            rows.append((row, line))
        elif line.strip() and not (
            number == len(lines) and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]
        ):
            odd.append((number, line))
    return rows, odd


def describe_odd(odd: list[tuple[int, bytes]]) -> str:
    """Return e.g. "3 lines are no row of a run (number 4, 5, 9)"."""
    numbers = ", ".join(str(number) for number, _ in odd[:10]) + (", …" if len(odd) > 10 else "")
    return f"{len(odd)} line{'s are' if len(odd) > 1 else ' is'} no row of a run (number {numbers})"

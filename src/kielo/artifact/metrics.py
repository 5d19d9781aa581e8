"""`metrics.jsonl`: the rows that a run logs, one JSON object a line; `train/log.py` says what is in them.
Torch-free.

A person may have edited the file, and a killed attempt leaves half a line: what is no row is passed over,
never an error.
"""

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_NUMBERS = frozenset((
    "step", "tokens", "samples", "phase", "loss", "gradient_norm", "learning_rate", "tokens_per_second",
    "planned_tokens_per_second", "tflops_per_second", "mfu", "seconds", "seconds_left", "skipped", "heldout_loss",
    "passed_over_from", "precision_from", "loss_rise", "gradient_norm_rise", "fp8_gradient_cosine",
))  # fmt: skip
_BEGINNING = b'{"step": '  # of every row that Kielo writes
_TEXTS = frozenset(("precision", "outcome"))
_OF_A_TRAINING_STEP = ("tokens_per_second", "seconds")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in order; none where there is no file. Warns of the lines that are none."""
    rows, odd = split_metrics(path)
    if odd:
        logger.warning("%s: %s; passed over", path, describe_odd(odd))
    return rows


def split_metrics(path: Path) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    """(rows, (line number, line) of all that is no row), less the half line that a killed attempt left at the
    end.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    rows, odd = [], []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and not (
            number == len(lines) and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]
        ):
            odd.append((number, line))
    return rows, odd


def describe_odd(odd: list[tuple[int, bytes]]) -> str:
    """E.g. "3 lines are no rows of a run (4, 5, 9)"."""
    numbers = ", ".join(str(number) for number, _ in odd[:10]) + (", …" if len(odd) > 10 else "")
    return f"{len(odd)} line{'s are' if len(odd) > 1 else ' is'} no row of a run (number {numbers})"


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"))  # of bytes json would guess the encoding
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    numbers = (row[key] for key in _NUMBERS & row.keys())
    texts = (row[key] for key in _TEXTS & row.keys())
    if not all(value is None or type(value) in (int, float) for value in numbers):
        return None
    if not all(isinstance(value, str) for value in texts):
        return None
    if "loss" in row and any(row.get(key) is None for key in _OF_A_TRAINING_STEP):
        return None
    return row

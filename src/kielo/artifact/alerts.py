"""`train/alerts.jsonl`: what went wrong in a run without stopping it, one JSON object a line."""

import json
from datetime import UTC, datetime
from pathlib import Path

from kielo.artifact.stage_json import JsonObject

ALERTS_NAME = "alerts.jsonl"


class Alert(JsonObject):
    """One alert."""

    time: str
    """Date and time in UTC, ISO 8601, to the second."""
    step: int
    """Optimiser steps since the start of the run."""
    message: str
    """The error, as a sentence."""


def append_alert(path: Path, step: int, message: str) -> None:
    """Append an alert of now to the file. OSError where it cannot be written."""
    alert = Alert(time=datetime.now(UTC).isoformat(timespec="seconds"), step=step, message=message)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(alert.content(), ensure_ascii=False) + "\n")

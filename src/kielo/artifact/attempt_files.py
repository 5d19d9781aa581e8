"""Notes of attempts in `train/`: `attempts.jsonl`, `alerts.jsonl` (JSON lines) and `outcome.json`."""

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

ALERTS_NAME = "alerts.jsonl"
UtcTime = Annotated[str, Field(description="Date and time in UTC, ISO 8601, to the second.")]


class Alert(JsonObject):
    """A fault that did not stop training."""

    time: UtcTime
    step: int
    """Optimiser steps since the start of the run."""
    message: str


def append_alert(path: Path, step: int, message: str) -> None:
    alert = Alert(time=now(), step=step, message=message)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(alert.content(), ensure_ascii=False) + "\n")


# 75: EX_TEMPFAIL, "stopped on purpose, start again". 76: ranks ended because one of them was stuck
# (`ranks/heartbeat.py`). torchrun flattens exit codes, so `outcome.json` has them.
EXIT_CODES = {"finished": 0, "failed": 1, "requeue": 75, "hung": 76}
# Environment variable: the file for a rank's `Refusal`, which the process that started the rank reads.
REFUSAL_FILE = "KIELO_REFUSAL_FILE"
# Environment variable: the name of an attempt, by which the process that started the ranks finds its outcome.
STARTED_BY = "KIELO_STARTED_BY"


Ending = Literal["finished", "failed", "requeue", "hung"]


class Outcome(JsonFile):
    """The end of an attempt at training."""

    FILE_NAME: ClassVar[str] = "outcome.json"

    outcome: Ending
    """"requeue": a signal or a step stopped it, it saved, and it must be started again. "hung": a rank was
    stuck."""
    step: int | None
    """Optimiser steps since the start of the run; null: the ranks ended without a message."""
    tokens: int | None
    """Tokens since the start of the run; null as for `step`."""
    exit_code: int
    """0 finished, 1 failed, 75 requeue, 76 hung."""
    message: str
    """The reason, and how to resume; can be empty."""
    started_by: str = ""
    """Name of the attempt from the process that started the ranks; empty: none."""
    blamed_nodes: list[str] = []
    """Hosts of the stuck ranks, if known."""


class Refusal(JsonObject):
    message: str  # the reason and the fix
    blamed_nodes: list[str] = []  # hosts of the ranks that were stuck at the start
    is_usage: bool = False  # the command has wrong flags or values, so that a repeated attempt fails too


def note_refusal(refusal: Refusal) -> None:
    """Write the refusal to the file that `KIELO_REFUSAL_FILE` names, if any. Raise OSError if that fails."""
    if file := os.environ.get(REFUSAL_FILE):
        Path(file).write_text(json.dumps(refusal.content(), ensure_ascii=False), encoding="utf-8")


def read_refusal(file: Path) -> Refusal | None:
    """Return the refusal in `file`, or None. Text that is no JSON becomes the message."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        return Refusal.model_validate_json(text) if text else None
    except ValidationError:
        return Refusal(message=text)


def stopped_before_training(how: str = "") -> Outcome:
    """Return the outcome of an attempt that a signal ended before its first step. how: the ranks' end."""
    why = f"stopped before training began{how and f' ({how})'}; nothing was changed"
    message, code = f"{why}. Fix: the same command starts it", EXIT_CODES["requeue"]
    return Outcome(outcome="requeue", step=None, tokens=None, exit_code=code, message=message)


ATTEMPTS_NAME = "attempts.jsonl"


class Change(JsonObject):
    """A value of `resolved.toml` that differs from the attempt before."""

    key: str
    """With dots."""
    before: str
    """JSON; empty: the key did not exist."""
    after: str
    """JSON; empty: the key does not exist."""


class Beginning(JsonObject):
    """The beginning of an attempt. It has the last signs of the attempt before, perhaps without `End`."""

    began_at: UtcTime
    from_step: int
    """Step of the checkpoint that it resumes from; 0: the first weights."""
    ranks: int
    hosts: list[str]
    """Host name of each rank, in order."""
    versions: dict[str, str]
    """Versions of Python and of the packages that decide an output."""
    seen_step: int | None
    """Last step that the attempt before had logged; null: none."""
    seen_at: str | None
    """Time of that step, as `began_at`."""
    changes: list[Change]


class End(JsonObject):
    """The end of the attempt that began before it."""

    ended_at: UtcTime
    outcome: str
    """finished, requeue, hung or failed, as in outcome.json."""
    step: int | None
    message: str
    """The reason, and how to resume."""


def append(folder: Path, line: Beginning | End) -> None:
    append_line(folder / ATTEMPTS_NAME, line)


def append_line(path: Path, line: JsonObject) -> None:
    """Append a line to a file of lines, and bring it to the disk. OSError."""
    text = json.dumps(line.content(), ensure_ascii=False) + "\n"
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read() == b"\n" else "\n" + text  # after half a line of a killed attempt
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_attempts(folder: Path) -> list[Beginning | End]:
    found: list[Beginning | End] = []
    for content in read_lines(folder / ATTEMPTS_NAME):
        with suppress(ValidationError):  # a person's line
            found.append((Beginning if "began_at" in content else End).model_validate(content))
    return found


def read_lines(path: Path) -> list[JsonTable]:
    """Return the JSON objects of a file of lines, none without a file. Half a line is skipped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [content for content in found if isinstance(content, dict)]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

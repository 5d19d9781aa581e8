"""Read and write the notes of attempts in `train/`: `attempts.jsonl`, `alerts.jsonl` and `outcome.json`."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ValidationError

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile, JsonObject

# `train/alerts.jsonl`: what went wrong in a run without stopping it, one JSON object a line.


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


# `train/outcome.json`: the end of an attempt at training. torchrun flattens exit codes, so they are here.


# 75: EX_TEMPFAIL, "stopped on purpose, start me again"
# 76: ranks ended because one of them was stuck (`ranks/heartbeat.py`)
EXIT_CODES = {"finished": 0, "failed": 1, "requeue": 75, "hung": 76}
# environment variable: the file in which a rank tells what started it why it did not begin, as a `Refusal`
REFUSAL_FILE = "KIELO_REFUSAL_FILE"
# environment variable: a name by which the process that started the ranks knows the outcome of their attempt
STARTED_BY = "KIELO_STARTED_BY"


Ending = Literal["finished", "failed", "requeue", "hung"]


class Outcome(JsonFile):
    """The end of one attempt at training."""

    FILE_NAME: ClassVar[str] = "outcome.json"

    outcome: Ending
    """"requeue": stopped by a signal or at a step, saved, and to be started again.
    "hung": a rank was stuck."""
    step: int | None
    """Optimiser steps since the start of the run; null: the ranks ended without saying."""
    tokens: int | None
    """Tokens since the start of the run; null: the ranks ended without saying."""
    exit_code: int
    """0 finished, 1 failed, 75 requeue, 76 hung."""
    message: str
    """The reason, and how to go on; empty where there is nothing to say."""
    started_by: str = ""
    """A name that the process which started the ranks gave the attempt; empty: none did."""
    blamed_nodes: list[str] = []
    """Hosts of the ranks that were stuck, as far as that is known."""


class Refusal(JsonObject):
    """Why training did not begin."""

    message: str
    """The reason, and how to fix it."""
    blamed_nodes: list[str] = []
    """Hosts of the ranks that were stuck at the start."""
    is_usage: bool = False
    """The command has wrong flags or values, so a repeated attempt fails too."""


def note_refusal(refusal: Refusal) -> None:
    """Write the refusal to the file that `KIELO_REFUSAL_FILE` names, if any. Raise OSError if that fails."""
    if file := os.environ.get(REFUSAL_FILE):
        Path(file).write_text(json.dumps(refusal.content(), ensure_ascii=False), encoding="utf-8")


def read_refusal(file: Path) -> Refusal | None:
    """Return the refusal in `file`; None if there is none. Text that is no JSON becomes the message."""
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
    message = (
        f"stopped before training began{how and f' ({how})'}; nothing was changed, the same command starts it"
    )
    return Outcome(
        outcome="requeue", step=None, tokens=None, exit_code=EXIT_CODES["requeue"], message=message
    )


# `train/attempts.jsonl`: when each attempt at a run began and ended, and on what; a JSON object a line.
#
# An attempt that was killed has no line for its end; the beginning of the next one says what was last seen
# of it.


ATTEMPTS_NAME = "attempts.jsonl"


class Change(JsonObject):
    """A value of `resolved.toml` that an attempt has and the one before had not."""

    key: str
    """The key, with dots."""
    before: str
    """The value before, as JSON; empty: the key was not there."""
    after: str
    """The value now, as JSON; empty: the key is not there."""


class Beginning(JsonObject):
    """The beginning of an attempt."""

    began_at: str
    """Date and time in UTC, ISO 8601, to the second."""
    from_step: int
    """The step of the checkpoint from which it goes on; 0: from the first weights."""
    ranks: int
    """Ranks that train."""
    hosts: list[str]
    """Name of the host of each rank, in their order."""
    versions: dict[str, str]
    """Versions of Python and of the packages that decide an output."""
    seen_step: int | None
    """The last step that the attempt before it had logged; null: none."""
    seen_at: str | None
    """When that was, as `began_at`."""
    changes: list[Change]
    """Keys that are resolved differently than for the attempt before it."""


class End(JsonObject):
    """The end of the attempt that began before it."""

    ended_at: str
    """Date and time in UTC, ISO 8601, to the second."""
    outcome: str
    """finished, requeue, hung or failed, as in outcome.json."""
    step: int | None
    """The last step that it took."""
    message: str
    """The reason, and how to go on."""


def append(folder: Path, line: Beginning | End) -> None:
    """Append a line to the file in the train folder, and bring it to the disk. OSError where it cannot."""
    text = json.dumps(line.content(), ensure_ascii=False) + "\n"
    with open(folder / ATTEMPTS_NAME, "a", encoding="utf-8") as file:
        if file.tell() and not _ends_whole(folder / ATTEMPTS_NAME):
            text = "\n" + text
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_attempts(folder: Path) -> list[Beginning | End]:
    """Return the lines of the file in the train folder; lines that are none are passed over."""
    found: list[Beginning | End] = []
    for content in read_lines(folder / ATTEMPTS_NAME):
        try:
            found.append((Beginning if "began_at" in content else End).model_validate(content))
        except ValidationError:  # a person's line
            continue
    return found


def read_lines(path: Path) -> list[JsonTable]:
    """Return the JSON objects of a file of lines, none without a file; half a line is passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # there is none, or it is for people to look at
        return []
    found = []
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def now() -> str:
    """Return date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _ends_whole(path: Path) -> bool:
    """Return False after half a line of an attempt that was killed while it wrote."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

"""`train/outcome.json`: the end of an attempt at training. torchrun flattens exit codes, so they are here."""

from typing import ClassVar, Literal

from kielo.artifact.stage_json import JsonFile

# 75: EX_TEMPFAIL, "stopped on purpose, start me again"
# 76: ranks ended because one of them was stuck (`parallel/heartbeat.py`)
EXIT_CODES = {"finished": 0, "failed": 1, "requeue": 75, "hung": 76}
# environment variable: the file in which a rank tells the process that started it why it did not begin
REFUSAL_FILE = "KIELO_REFUSAL_FILE"
# environment variable: a name by which the process that started the ranks knows the outcome of their attempt
STARTED_BY = "KIELO_STARTED_BY"


class Outcome(JsonFile):
    """The end of one attempt at training."""

    FILE_NAME: ClassVar[str] = "outcome.json"

    outcome: Literal["finished", "failed", "requeue", "hung"]
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


def stopped_before_training(how: str = "") -> Outcome:
    """Returns the outcome of an attempt that a signal ended before its first step. how: the ranks' end."""
    message = (
        f"stopped before training began{how and f' ({how})'}; nothing was changed, the same command starts it"
    )
    return Outcome(
        outcome="requeue", step=None, tokens=None, exit_code=EXIT_CODES["requeue"], message=message
    )

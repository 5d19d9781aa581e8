"""The result of one task of EleutherAI's harness: a stage folder with result.json and questions.jsonl.

The folder's name has the hash of the checkpoint, the task and its settings. So other results stay beside it.
"""

from typing import ClassVar

from pydantic import Field

from kielo.artifact.json_object import JsonTable
from kielo.artifact.stage_json import JsonFile

TASKS_FOLDER = "evaluate_tasks"  # of a run, with a folder for each model that was scored
QUESTIONS_NAME = "questions.jsonl"  # a question with the model's answers and its metrics on each line


class TaskResult(JsonFile):
    """A task's metrics as the harness computed them."""

    FILE_NAME: ClassVar[str] = "result.json"

    task: str
    metrics: JsonTable
    """Metric or its standard error, with the filter, such as `acc_stderr,none` → value or "N/A"."""
    version: str
    questions: int = Field(ge=1)
    shots: int = Field(ge=0)
    chance: dict[str, float] = {}
    """Metric → the value of guessing, if it is known."""
    shortened: int = 0
    """Prompts whose beginning did not fit the model's sequences."""

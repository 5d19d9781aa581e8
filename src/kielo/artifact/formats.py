"""The formats with a JSON Schema, the recipe and files that stages exchange. A line adds a format."""

from dataclasses import dataclass
from typing import Any, Union

from pydantic import BaseModel, TypeAdapter

from kielo.artifact import attempt_files, metrics, score_history
from kielo.artifact.attempt_files import Outcome
from kielo.artifact.folder_copies import CheckpointCopies
from kielo.artifact.json_object import JsonTable
from kielo.artifact.launch_files import Ladder, Launch, MadeSite
from kielo.artifact.prefetched import Prefetched
from kielo.artifact.scores import MaskedScores, Scores, Summary
from kielo.artifact.stage_counts import Funnel, RowMap, TokenizerMeasure
from kielo.artifact.stage_json import JsonFile
from kielo.artifact.task_result import TASKS_FOLDER, TaskResult
from kielo.artifact.token_sources import TokenFiles
from kielo.artifact.verify_results import Parity, Preflight
from kielo.recipe.schema import DIALECT, json_schema
from kielo.recipe.sections import Recipe


@dataclass(frozen=True)
class Format:
    """A format: its file in the run's folder (of a site in runs/), its content, types of it or its lines."""

    file: str
    content: str
    types: tuple[type[BaseModel], ...]


def _whole_file(folder: str, kind: type[JsonFile]) -> Format:
    return Format(folder + kind.FILE_NAME, (kind.__doc__ or "").partition("\n")[0], (kind,))


FORMATS = {
    "recipe": Format("recipe.toml", "The settings of a run, written by a person.", (Recipe,)),
    "funnel": _whole_file("corpus/", Funnel),
    "tokenizer": _whole_file("tokenizer/", TokenizerMeasure),
    "row_map": _whole_file("tokenizer/", RowMap),
    "token_files": _whole_file("tokens/", TokenFiles),
    "metrics": Format(
        "train/" + metrics.METRICS_NAME,
        "A row of the training log, one JSON object a line.",
        (*metrics.KINDS.values(), metrics.Row),
    ),
    "alerts": Format(
        "train/" + attempt_files.ALERTS_NAME,
        "A fault that did not stop training, one JSON object a line.",
        (attempt_files.Alert,),
    ),
    "attempts": Format(
        "train/" + attempt_files.ATTEMPTS_NAME,
        "The beginning or the end of an attempt at training, one JSON object a line.",
        (attempt_files.Beginning, attempt_files.End),
    ),
    "outcome": _whole_file("train/", Outcome),
    "checkpoint_copies": _whole_file("train/", CheckpointCopies),
    "launch": _whole_file("launch/0001/", Launch),
    "prefetched": _whole_file("", Prefetched),
    "site": _whole_file("sites/CLUSTER/", MadeSite),
    "ladder": _whole_file("launch/ladder_SITE/", Ladder),
    "parity": _whole_file("verify/", Parity),
    "scores": _whole_file("evaluate/", Scores),
    "masked_scores": _whole_file("evaluate/", MaskedScores),
    "history": Format(
        f"{score_history.WATCH_FOLDER}/{score_history.HISTORY_NAME}",
        "The scores of a checkpoint beside the training, one JSON object a line.",
        (score_history.ScoredCheckpoint,),
    ),
    "task_result": _whole_file(f"{TASKS_FOLDER}/MODEL/TASK/", TaskResult),
    "preflight": _whole_file("", Preflight),
    "summary": _whole_file("", Summary),
}


def schema_of(name: str) -> JsonTable:
    if name == "recipe":
        return json_schema()
    found = FORMATS[name]
    kinds: Any = Union[found.types]  # noqa: UP007 - of a tuple
    schema = TypeAdapter(kinds).json_schema()
    return {"$schema": DIALECT, **schema, "title": found.file, "description": found.content}

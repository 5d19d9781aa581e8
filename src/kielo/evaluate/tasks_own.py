"""A person's own tasks: a TOML file and a JSONL file of questions → a task of the harness.

The TOML file has the keys of `OwnTask`. A line of the JSONL file is a question of the task's kind:

* multiple_choice: {"question": …, "choices": [text, …], "answer": text or number from 0}
* cloze: {"text": "… ____ …", "choices": …, "answer": …}; the likelihoods of whole texts are compared
* generation: {"question": …, "answer": text or [text, …]}; the model writes up to the end of a line
"""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from kielo.artifact.json_object import JsonTable, first_wrong
from kielo.evaluate.texts import text_lines
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Section

BLANK = "____"


class OwnTask(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    kind: Literal["multiple_choice", "cloze", "generation"]
    questions: str
    """JSONL file of questions, beside the TOML file."""
    examples: str = ""
    """JSONL file of examples, which come before a question. Default: other questions."""
    before: str = ""
    """Text before each question."""
    after: str = ""
    """Text between a question and its answer."""
    language: str = ""
    measures: str = ""
    version: str = "1"


def own_tasks(folder: Path) -> dict[str, Path]:
    """Return name → file of the own tasks in a folder. Raise KieloError for a wrong file.

    A TOML file without the keys kind and questions is another program's.
    """
    files = [path for path in sorted(folder.glob("*.toml")) if {"kind", "questions"} & _content(path).keys()]
    return {read_own_task(path).name: path for path in files}


def read_own_task(path: Path) -> OwnTask:
    try:
        return OwnTask.model_validate(_content(path))
    except ValidationError as error:
        raise KieloError(f"{path}: not an own task ({first_wrong(error)})") from None


def _content(path: Path) -> JsonTable:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KieloError(f"{path}: not valid TOML: {error}") from None


def harness_task(path: Path) -> tuple[OwnTask, JsonTable]:
    """Return the own task, and its settings for the harness. Raise KieloError with file and line."""
    own = read_own_task(path)
    questions = _documents(own, path.parent / own.questions)
    splits = {"test": questions}
    if own.examples:
        splits["examples"] = _documents(own, path.parent / own.examples)
    is_generated = own.kind == "generation"
    settings: JsonTable = {
        "task": own.name,
        "custom_dataset": lambda **_: _datasets(splits),
        "test_split": "test",
        "fewshot_split": "examples" if own.examples else "test",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "metadata": {"version": own.version},
    }
    if is_generated:
        stops = {"until": ["\n"], "do_sample": False, "max_gen_toks": 64}
        metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
        exact = {"ignore_case": True, "ignore_punctuation": True}
        return own, settings | {
            "output_type": "generate_until",
            "generation_kwargs": stops,
            "metric_list": [metric | exact],
        }
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
    ]
    delimiter = {"target_delimiter": ""} if own.kind == "cloze" else {}
    return own, settings | delimiter | {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "metric_list": metrics,
    }


def _datasets(splits: dict[str, list[JsonTable]]) -> Any:
    from datasets import Dataset

    return {name: Dataset.from_list(documents) for name, documents in splits.items()}


def _documents(own: OwnTask, path: Path) -> list[JsonTable]:
    """Return the questions as the harness takes them: prompt, choices and answer."""
    if not path.is_file():
        raise KieloError(f"{path}: there is no such file, which the task {own.name} names")
    found = [
        _document(own, f"{path}, line {number}", line) for number, line in text_lines(path) if line.strip()
    ]
    if not found:
        raise KieloError(f"{path}: no questions")
    return found


def _document(own: OwnTask, where: str, line: str) -> JsonTable:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise KieloError(f"{where}: not a JSON object. Fix: one object on each line")
    text = _texts(where, content, "text" if own.kind == "cloze" else "question", str)
    if own.kind == "generation":
        answer = _texts(where, content, "answer", (str, list))
        return {
            "prompt": f"{own.before}{text}{own.after}",
            "answer": [answer] if isinstance(answer, str) else answer,
        }
    choices = _texts(where, content, "choices", list)
    if len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise KieloError(f"{where}: choices does not fit. Fix: two texts or more")
    answer = _texts(where, content, "answer", (str, int))
    place = choices.index(answer) if answer in choices else answer
    if not isinstance(place, int) or not 0 <= place < len(choices):
        raise KieloError(
            f"{where}: answer = {answer!r} is none of the choices. Fix: a choice or its number from 0"
        )
    if own.kind == "multiple_choice":
        return {"prompt": f"{own.before}{text}{own.after}", "choices": choices, "answer": place}
    if text.count(BLANK) != 1:
        raise KieloError(f"{where}: text has {text.count(BLANK)} blanks. Fix: one {BLANK}")
    return {"prompt": own.before, "choices": [text.replace(BLANK, one) for one in choices], "answer": place}


def _texts(where: str, content: JsonTable, key: str, kind: Any) -> Any:
    if not isinstance(value := content.get(key), kind) or isinstance(value, bool):
        raise KieloError(f"{where}: {key} is missing or of another type")
    return value


def own_tasks_of(folders: Iterable[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        for name, path in own_tasks(folder).items():
            if name in found:
                raise KieloError(f"{path}: another own task, {found[name]}, has the name {name!r}")
            found[name] = path
    return found

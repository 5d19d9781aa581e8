"""Tasks of EleutherAI's harness on a `Contender`: names → scores with standard errors.

Each task is a stage folder of its own with its questions (`artifact/task_result.py`), so its score stays, and
a later call asks the other tasks. A task that cannot be scored is named with its reason, and the others are
scored. On several ranks rank 0 alone loads, asks and writes (`asked_by_first.py`).
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import Hashes, hash_json, is_current, write_stage
from kielo.artifact.scores import TaskScore
from kielo.artifact.stage_json import read_stage_json, write_json
from kielo.artifact.task_result import QUESTIONS_NAME, TaskResult
from kielo.evaluate.asked_by_first import asked_by_first
from kielo.evaluate.contender import Contender
from kielo.evaluate.tasks_data import harness_surroundings, quiet_bars
from kielo.evaluate.tasks_harness import Harness, NotScored
from kielo.evaluate.tasks_wanted import WantedTask
from kielo.recipe.errors import KieloError, print_text, sentence
from kielo.recipe.sections import Evaluate, Precision

KIND, VERSION = "task", 1
# Metrics for which guessing is right once in as many questions as there are choices.
_ONE_OF_CHOICES = ("acc", "acc_norm", "acc_bytes")
# Errors of the device or of other ranks, and errors among them that functions of task files raise.
_NOT_OF_TASKS = (MemoryError, RuntimeError)
_OF_TASKS = (NotImplementedError, RecursionError)


@dataclass(frozen=True)
class Place:
    """The folder of a model's results of tasks, and the hashes of their inputs."""

    folder: Path
    inputs: Hashes

    def in_precision(self, precision: Precision) -> "Place":
        """Return the place of results in this precision, apart from results in another precision."""
        more = {} if precision == "fp32" else {"precision": precision}
        return replace(self, inputs={**self.inputs, **more})


def score_tasks(
    contender: Contender, settings: Evaluate, place: Place
) -> tuple[list[TaskScore], dict[str, str]]:
    """Score the tasks of the settings. Return the scores, and each task without a score with its reason.

    All ranks of the contender call it together.
    """

    def work(contender: Contender) -> tuple[list[TaskScore], dict[str, str]]:
        scores: dict[tuple[str, str, int], TaskScore] = {}
        unscored: dict[str, str] = {}
        with harness_surroundings():
            harness = Harness(settings)
            scoring = _Scoring(contender, settings, place, harness)
            for wanted in harness.wanted:
                try:
                    found = list(scoring.scores_of(wanted))
                except NotScored as problem:
                    unscored[wanted.name] = str(problem)
                    continue
                scores |= {(one.task, one.metric, one.shots): one for one in found}
        return list(scores.values()), unscored

    return asked_by_first(contender, work)


def score_task(
    contender: Contender, settings: Evaluate, name: str, folders: str, before_batch: Callable[[], None]
) -> tuple[list[TaskScore], str]:
    """Score a task, or each task of a group, and keep no results. Return the scores, or why there are none.

    All ranks of the contender call it together. folders: `hash_of_folders` before the training. Files of
    tasks that a person has edited since then, or broken, give no scores, and the training continues.
    before_batch: called on rank 0 before each batch of questions. It raises KieloError to end the task.
    """

    def work(contender: Contender) -> tuple[list[TaskScore], str]:
        def logits(tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
            before_batch()
            return contender.logits(tokens_bs, documents_bs)

        asked = replace(contender, logits=logits)
        with harness_surroundings():
            try:
                before_batch()
                harness = Harness(settings)
            except (KieloError, OSError) as problem:
                return [], sentence(problem) or str(problem)
            if harness.hash_of_folders != folders:
                return [], "evaluate.task_folders: files have changed since the training started"
            (wanted,) = (one for one in harness.wanted if one.name == name)
            try:
                return list(_Scoring(asked, settings, None, harness).scores_of(wanted)), ""
            except NotScored as problem:
                return [], str(problem)

    return asked_by_first(contender, work)


class _Scoring:
    def __init__(
        self, contender: Contender, settings: Evaluate, place: Place | None, harness: Harness
    ) -> None:
        self._contender, self._settings, self._place, self._harness = contender, settings, place, harness
        # By name and settings, because a group can change the settings of its tasks.
        self._results: dict[tuple[str, str], TaskResult] = {}

    def scores_of(self, wanted: WantedTask) -> Iterator[TaskScore]:
        """Yield the scores of a task, or of the tasks of a group and then the group's own."""
        loaded = self._harness.load(wanted)
        if loaded.own is not None:
            wanted = replace(wanted, language=loaded.own.language, measures=loaded.own.measures)
        mine: dict[str, TaskResult] = {}
        for name, task in loaded.tasks.items():
            key = name, _hash_of_settings(task)  # before it is asked, which changes them
            if key not in self._results:
                self._results[key] = self._result(name, task)
            mine[name] = self._results[key]
            yield from self._scores(mine[name], wanted)
        for name, group in loaded.groups.items():
            if group.has_aggregation:
                yield from self._scores(_of_group(name, group, mine), wanted)

    def _scores(self, result: TaskResult, wanted: WantedTask) -> Iterator[TaskScore]:
        settings = self._settings
        layout: dict[str, Any] = {"chat": True} if settings.task_chat else {}
        if result.shots:
            layout["seed"] = settings.task_seed
        for key, value in result.metrics.items():
            metric, _, of_filter = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = result.metrics.get(f"{metric}_stderr,{of_filter}")
            yield TaskScore(
                task=result.task,
                metric=key,
                value=float(value),
                standard_error=float(error) if isinstance(error, int | float) else None,
                questions=result.questions,
                shots=result.shots,
                chance=result.chance.get(metric),
                language=wanted.language,
                measures=wanted.measures,
                version=result.version,
                **layout,
            )

    def _result(self, name: str, task: Any) -> TaskResult:
        """Return the task's result, from its folder if it has been scored."""
        if self._place is None:
            return self._ask(name, task)[0]
        settings = self._settings
        section = {
            "task": name, "harness": self._harness.version, "shots": settings.shots,
            "limit": settings.task_limit, "seed": settings.task_seed, "chat": settings.task_chat,
            "sequence_length": self._contender.sequence_length, "file": _hash_of_settings(task),
        }  # fmt: skip
        inputs = {**self._place.inputs, "task_folder": self._harness.hash_of(name)}
        identity = hash_json([inputs, section])[:8]
        folder = self._place.folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:80]}-{identity}"

        if is_current(folder, KIND, VERSION, inputs, section):
            found = read_stage_json(folder, TaskResult)
            if found is not None:
                return found
        result, samples = self._ask(name, task)
        cut = f"; {result.shortened:,} prompts lose their beginning" if result.shortened else ""
        print_text(f"task {name}: {result.questions:,} questions, {result.shots} shots{cut}")
        with write_stage(folder, KIND, VERSION, inputs, section) as stage:
            write_json(stage.folder, result)
            lines = (json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in samples)
            (stage.folder / QUESTIONS_NAME).write_text("".join(lines), encoding="utf-8")
        return result

    def _ask(self, name: str, task: Any) -> tuple[TaskResult, list[JsonTable]]:
        try:
            return _asked(self._contender, name, task, self._settings)
        except Exception as error:
            if isinstance(error, _NOT_OF_TASKS) and not isinstance(error, _OF_TASKS):
                raise
            reason = error if isinstance(error, KieloError) else f"{type(error).__name__}: {error}"
            raise NotScored(str(reason)) from error


def _hash_of_settings(task: Any) -> str:
    """Return the hash of a task's file with its functions, as its group changed it."""
    content = {key: value for key, value in task.dump_config().items() if key != "metadata"}
    # A function without a source has its address.
    return hash_json(re.sub(r"0x[0-9a-f]+", "", json.dumps(content, sort_keys=True, default=str)))


def _asked(
    contender: Contender, name: str, task: Any, settings: Evaluate
) -> tuple[TaskResult, list[JsonTable]]:
    """Ask the contender all questions of a task. Return the result, and each question with its answers."""
    from lm_eval.evaluator import evaluate

    # By its name, because the file imports the harness, which a run without tasks does not need.
    make_model = import_module("kielo.evaluate.tasks_model").ContenderLM
    if not len(task.eval_docs):
        raise KieloError("its set of questions is empty")
    # As the harness's program does: a task that says 0 keeps it.
    own_shots = task.get_config("num_fewshot")
    if settings.shots is not None and own_shots != 0:
        task.set_config(key="num_fewshot", value=settings.shots)
    elif own_shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=settings.task_seed)
    model = make_model(contender, settings.task_chat)
    chat = {"apply_chat_template": settings.task_chat, "fewshot_as_multiturn": settings.task_chat}
    with quiet_bars():
        found = evaluate(model, {"tasks": {name: task}, "groups": {}}, limit=settings.task_limit, **chat)
    metrics = {
        key: value.item() if hasattr(value, "item") else value
        for key, value in found["results"][name].items()
        if "," in key
    }
    samples = found["samples"][name]
    result = TaskResult(
        task=name,
        metrics=metrics,
        version=str(found["versions"][name]),
        questions=found["n-samples"][name]["effective"],
        shots=found["n-shot"][name],
        chance=_chance(task, samples),
        shortened=model.shortened,
    )
    return result, samples


def _chance(task: Any, samples: Sequence[JsonTable]) -> dict[str, float]:
    """Return the value of guessing, for metrics that compare the likelihoods of choices."""
    is_usual = task.OUTPUT_TYPE == "multiple_choice" and task.get_config("process_results") is None
    if not is_usual:
        return {}
    documents = {one["doc_id"]: one["doc"] for one in samples}
    shares = [1 / len(task.doc_to_choice(document)) for document in documents.values()]
    return dict.fromkeys(_ONE_OF_CHOICES, sum(shares) / len(shares))


def _of_group(name: str, group: Any, results: dict[str, TaskResult]) -> TaskResult:
    """Return the harness's own mean over the tasks of a group."""
    members = [results[task.task_name] for task in group.get_all_tasks()]
    metrics = {one.task: {**one.metrics, "sample_len": one.questions} for one in members}
    found = group.aggregate(metrics)
    chances = [one.chance for one in members]
    return TaskResult(
        task=name,
        metrics={key: value for key, value in found.items() if "," in key},
        version=str(group.version),
        questions=found["sample_len"],
        shots=max(one.shots for one in members),
        chance=chances[0] if all(one == chances[0] for one in chances) else {},
    )

"""Scores of the tasks of checkpoints in TensorBoard and W&B, with the tags of `evaluate.every_steps`.

RUN/evaluate_log/tensorboard is a run of its own in TensorBoard, because two processes cannot write the same.
The run in W&B is NAME_evaluate.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from kielo.artifact.metrics import TaskScores
from kielo.artifact.scores import Scores
from kielo.recipe.errors import first_line, print_text
from kielo.recipe.sections import Recipe
from kielo.train.log import Sink, TensorBoard, Wandb

FOLDER = "evaluate_log"


def log_tasks(recipe: Recipe, run_folder: Path, step: int, scores: Scores) -> None:
    """Write a checkpoint's scores of tasks, if `train.tensorboard` or `train.wandb` say so.

    A logger that fails is a warning, because the scores are kept in files.
    """
    if not scores.tasks:
        return
    folder, train = run_folder / FOLDER, recipe.train
    sinks: dict[str, Callable[[], Sink]] = {}
    if train.tensorboard and importlib.util.find_spec("tensorboard") is not None:
        sinks["TensorBoard"] = lambda: TensorBoard(folder / "tensorboard", _warn)
    if train.wandb:
        sinks["W&B"] = lambda: Wandb(train.wandb, f"{recipe.name}_evaluate", folder)
    row = TaskScores(step=step, scored_task="", task_scores=scores.tasks)
    for name, make in sinks.items():
        try:
            folder.mkdir(exist_ok=True)
            sink = make()
            sink.start(0)
            sink.write(row)
            sink.close()
        except Exception as error:  # of another package, or a full disk
            _warn(step, f"{name} has no scores of tasks ({type(error).__name__}: {first_line(error)})")


def _warn(step: int, message: str) -> None:
    print_text(f"warning: step {step:,}: {message}")

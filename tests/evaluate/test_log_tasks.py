"""Scores of a checkpoint's tasks in TensorBoard and W&B, whose packages are stood in for."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.scores import Scores, TaskScore
from kielo.evaluate.log_tasks import log_tasks
from kielo.recipe.sections import Recipe

RECIPE = {
    "name": "tiny", "language": "et", "corpus": {"sources": "text.txt"}, "train": {"wandb": "estonian"},
}  # fmt: skip
TASKS = [TaskScore(task="xcopa_et", metric="acc,none", value=0.5, questions=9, shots=0)]


def scores(tasks: list[TaskScore]) -> Scores:
    return Scores.model_construct(tasks=tasks)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect what both loggers get."""
    found: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=found.append, finish=lambda: found.append("finished")
    )
    init = lambda **how: found.append((how["project"], how["name"], how["dir"])) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    writer = SimpleNamespace(add_scalar=lambda *scalar: found.append(scalar), close=lambda: None)
    make = lambda log_dir, purge_step: found.append(log_dir) or writer  # noqa: E731
    board = SimpleNamespace(SummaryWriter=make)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr("kielo.evaluate.log_tasks.importlib.util.find_spec", lambda name: board)
    return found


def test_tasks_are_scalars_of_the_checkpoints_step(sent: list, tmp_path: Path) -> None:
    """Nothing is written without tasks, nor if the recipe asks for no logger."""
    recipe = Recipe.model_validate(RECIPE)
    log_tasks(recipe, tmp_path, 40, scores([]))
    assert sent == [] and not list(tmp_path.iterdir())
    log_tasks(recipe, tmp_path, 40, scores(TASKS))
    own = tmp_path / "evaluate_log"
    assert sent == [
        str(own / "tensorboard"), ("task/xcopa_et/acc", 0.5, 40),
        ("estonian", "tiny_evaluate", str(own)), {"step": 40, "task/xcopa_et/acc": 0.5}, "finished",
    ]  # fmt: skip
    sent.clear()
    train = recipe.train.model_copy(update={"wandb": "", "tensorboard": False})
    log_tasks(recipe.model_copy(update={"train": train}), tmp_path, 40, scores(TASKS))
    assert sent == []


def test_a_logger_that_fails_is_a_warning(
    sent: list, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    recipe = Recipe.model_validate(RECIPE)
    log_tasks(recipe, tmp_path, 40, scores(TASKS))
    assert sent[-1] == ("task/xcopa_et/acc", 0.5, 40)
    assert capsys.readouterr().out == (
        "warning: step 40: W&B has no scores of tasks (ConnectionError: no network)\n"
    )

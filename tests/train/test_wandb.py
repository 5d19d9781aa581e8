"""Weights & Biases gets the rows that TensorBoard gets; tested against a stand-in for its package."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.metrics import HeldOutLoss
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train.log import Log, Wandb
from tests.train.test_log import row


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The three calls of wandb that are used, which note what they were given."""
    seen = SimpleNamespace(init=[], rows=[], finished=0, metrics=[])

    def init(**options: Any) -> SimpleNamespace:
        seen.init.append(options)
        return SimpleNamespace(
            define_metric=lambda *names, **how: seen.metrics.append((names, how)),
            log=seen.rows.append,
            finish=lambda: setattr(seen, "finished", seen.finished + 1),
        )

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return seen


def test_rows_go_to_the_project_and_an_attempt_goes_on_with_its_run(stand_in, tmp_path: Path) -> None:
    for step in (0, 10):
        log = Log(TrainPlacement(), 20, [Wandb("finnish", "my_run", tmp_path)])
        log.start(step)
        log.write(row(step + 10, 2.5))
        log.write(HeldOutLoss(step=step + 10, heldout_loss=1.5))
        log.close()
    first, second = stand_in.init
    assert first == second and first["resume"] == "allow"
    assert (first["project"], first["name"]) == ("finnish", "my_run")
    assert [sent["step"] for sent in stand_in.rows] == [10, 10, 20, 20] and stand_in.finished == 2
    assert stand_in.rows[0]["train/loss"] == 2.5 and stand_in.rows[1] == {"step": 10, "heldout/loss": 1.5}
    assert stand_in.metrics[0] == (("*",), {"step_metric": "step"})


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(KieloError, match="pip install wandb"):
        Wandb("finnish", "my_run", tmp_path)

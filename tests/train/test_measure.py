"""Steps that are only measured: they are logged, and nothing of them is saved."""

from pathlib import Path

import pytest
import torch

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.artifact.stage_json import read_json
from kielo.plan.measured_run import measured_speed
from kielo.recipe.errors import KieloError
from kielo.train.run import measure, train
from tests.train.tiny_run import resolve, write_tokens


def test_measured_steps_are_those_of_the_training(tmp_path: Path) -> None:
    """The losses of steps 1 to 6 have the bits of a training's; no checkpoint and no manifest is written."""
    torch.set_num_threads(1)
    for name in ("measured", "trained"):
        write_tokens(tmp_path / name / "tokens")
    resolved = resolve(tmp_path / "measured", total_steps=10)
    for _ in range(2):  # a second attempt begins at step 1 too
        assert measure(resolved, 6).outcome == "finished"
    train(resolve(tmp_path / "trained", total_steps=10), max_steps=6)
    rows = {
        name: of_kind(read_metrics(tmp_path / name / "train/metrics.jsonl"), TrainingStep)
        for name in ("measured", "trained")
    }
    assert [row.step for row in rows["measured"]] == [1, 2, 3, 4, 5, 6]
    assert [row.loss for row in rows["measured"]] == [row.loss for row in rows["trained"]]
    assert not list((tmp_path / "measured").glob("train/checkpoints/step_*"))
    assert not (tmp_path / "measured/train/manifest.json").exists()
    assert read_json(tmp_path / "measured/train", Outcome).step == 6
    assert measured_speed(tmp_path / "measured").steps == 4


def test_a_run_that_has_trained_is_not_measured(tmp_path: Path) -> None:
    """Its log is its own; and there must be as many steps as are asked for."""
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    resolved = resolve(tmp_path, total_steps=4)
    with pytest.raises(KieloError, match="--measure 5: only 4 steps of the run are left. Fix: --measure 4"):
        measure(resolved, 5)
    train(resolved, max_steps=2)
    with pytest.raises(KieloError, match="contains a trained run, and its log is not for measurements"):
        measure(resolved, 2)

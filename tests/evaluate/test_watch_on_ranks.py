"""The watch of a run on two ranks: the scores of one process, whatever is damaged."""

import shutil
from pathlib import Path

import pytest

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.score_history import history_path, read_history
from kielo.cli.main import main
from kielo.evaluate.history_subject import Subject
from kielo.evaluate.score_alone import score_alone
from kielo.recipe.read import read_recipe
from tests.cli.test_run import write_recipe


@pytest.mark.full
def test_ranks_score_checkpoints_as_one_process_does(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Each once, and a damaged checkpoint is passed over by all ranks, which continue with the others."""
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    every = ["--set", "checkpoint.every_steps=5", "--set", "checkpoint.keep_newest=9"]
    assert main(["run", str(recipe), "--to", "train", *every]) == 0
    folders = step_folders(run / "train" / "checkpoints")[::-1]
    assert len(folders) > 2
    damaged = next(folders[0].glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"\0" * 8)
    capfd.readouterr()
    words = ["evaluate", str(run), "--watch", "--once", "--ranks", "2"]
    assert main(words) == 1
    said = capfd.readouterr().out
    assert f"{folders[0].name}: passed over: " in said and f"{len(folders) - 1} scored now, 1 p" in said
    rows = read_history(run)
    assert [row.model for row in rows] == [folder.name for folder in folders[1:]]
    shutil.move(history_path(run), tmp_path / "history")
    read = read_recipe(str(run)).recipe
    for row, folder in zip(rows, folders[1:], strict=True):
        alone = score_alone(read, run, Subject(folder.name, folder))
        assert (row.inputs, row.step, row.tokens) == (alone.inputs, alone.step, alone.tokens)
        ours, theirs = row.scores, alone.scores
        assert ours.bits_per_byte.model == pytest.approx(theirs.bits_per_byte.model, rel=1e-6)
        assert [one.text for one in ours.samples] == [one.text for one in theirs.samples]
    shutil.move(tmp_path / "history", history_path(run))
    assert main(words) == 1
    assert "0 scored now, 1 passed over" in capfd.readouterr().out and len(read_history(run)) == len(rows)


def test_a_watch_scores_in_fp32(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", str(tmp_path), "--watch", "--precision", "bf16"]) == 1
    assert "--watch scores in fp32. Fix: leave out --precision" in capsys.readouterr().err

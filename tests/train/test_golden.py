"""A run that an older Kielo began goes on, and one that it finished counts as finished."""

import shutil
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest
from kielo.train.records import is_finished, withdraw_manifest
from kielo.train.run import train
from tests.resolve.golden_runs import GOLDEN, golden_recipe, golden_resolved
from tests.started_ranks import run_ranks

VERSIONS = sorted(GOLDEN.glob("version_*"))


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def version(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_a_run_goes_on_from_the_checkpoint_of_every_version(version: Path, tmp_path: Path) -> None:
    """Its steps 5 to 10 end with the loss and the held-out loss of the run that was not upgraded."""
    shutil.copytree(GOLDEN / "tokens", tmp_path / "tokens")
    shutil.copytree(version / "checkpoint", tmp_path / "train" / "checkpoints" / "step_00000004")
    (outcome,) = run_ranks(train, 1, golden_resolved("tiny", tmp_path))
    assert (outcome.outcome, outcome.step) == ("finished", 10)
    undisturbed, now = (read_manifest(folder) for folder in (version / "finished_train", tmp_path / "train"))
    for key in ("loss", "heldout_loss"):
        assert now.counts[key] == pytest.approx(undisturbed.counts[key], rel=1e-5)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"shard": 2, "zero": 3}], ids=["tensor", "shard"])
def test_it_goes_on_in_another_layout(layout: dict[str, int], tmp_path: Path) -> None:
    """Two ranks go on from the newest version's checkpoint to the same losses, within the order of sums."""
    version = VERSIONS[-1]
    shutil.copytree(GOLDEN / "tokens", tmp_path / "tokens")
    shutil.copytree(version / "checkpoint", tmp_path / "train" / "checkpoints" / "step_00000004")
    recipe = golden_recipe("tiny")
    recipe = recipe.model_copy(update={"layout": recipe.layout.model_copy(update=layout)})
    results = run_ranks(train, 2, golden_resolved("tiny", tmp_path, recipe, ranks=2))
    assert {(outcome.outcome, outcome.step) for outcome in results} == {("finished", 10)}
    undisturbed, now = (read_manifest(folder) for folder in (version / "finished_train", tmp_path / "train"))
    for key in ("loss", "heldout_loss"):
        assert now.counts[key] == pytest.approx(undisturbed.counts[key], rel=1e-5)


def test_what_cannot_go_on_says_why(tmp_path: Path) -> None:
    """Another model: the key is named, and the checkpoint stays. (A later format: tests/resolve.)"""
    shutil.copytree(GOLDEN / "tokens", tmp_path / "tokens")
    checkpoint = tmp_path / "train" / "checkpoints" / "step_00000004"
    shutil.copytree(VERSIONS[-1] / "checkpoint", checkpoint)
    recipe = golden_recipe("tiny")
    wider = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"intermediate_size": 2 * recipe.model.intermediate_size})
        }
    )
    with pytest.raises(Exception, match=r"model\.intermediate_size"):
        run_ranks(train, 1, golden_resolved("tiny", tmp_path, wider))
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        path.name for path in (VERSIONS[-1] / "checkpoint").iterdir()
    )


def test_a_finished_run_of_every_version_is_finished(version: Path, tmp_path: Path) -> None:
    """Another recipe's run is not; and a run that goes on withdraws the manifest of its own version."""
    shutil.copytree(version / "finished_train", tmp_path / "train")
    resolved = golden_resolved("tiny", tmp_path)
    assert is_finished(resolved)
    train_section = resolved.identity.train.model_copy(update={"z_loss": 0.5})
    other = resolved.identity.model_copy(update={"train": train_section})
    other = resolved.model_copy(update={"identity": other})
    assert not is_finished(other)
    withdraw_manifest(other)
    assert is_finished(resolved)
    withdraw_manifest(resolved)
    assert read_manifest(tmp_path / "train") is None

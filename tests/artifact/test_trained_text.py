"""Text that a run was trained on is not made again; the message says what changed and the fix."""

from pathlib import Path

import pytest

from kielo.artifact.manifest import write_stage
from kielo.artifact.trained_text import has_trained, refuse_to_replace, refuse_while_trained_on
from kielo.recipe.errors import KieloError


def stage(folder: Path, *files: str, **inputs: str) -> Path:
    with write_stage(folder, "trial", 1, inputs, {}) as made:
        for name in files:
            (made.folder / name).write_text(name)
    return folder


def test_what_counts_as_trained(tmp_path) -> None:
    """A checkpoint, a damaged one, or a finished stage; no other folder."""
    checkpoints = tmp_path / "train" / "checkpoints"
    assert not has_trained(tmp_path)
    checkpoints.mkdir(parents=True)
    (checkpoints / "newest").mkdir()
    assert not has_trained(tmp_path)
    for name in ("step_00000005", "step_00000005.damaged"):
        (checkpoints / name).mkdir()
        assert has_trained(tmp_path)
        (checkpoints / name).rmdir()
    (checkpoints / "newest").rmdir()
    checkpoints.rmdir()
    (tmp_path / "train").rmdir()
    stage(tmp_path / "train")
    assert has_trained(tmp_path)


def test_the_first_four_differences_are_named(tmp_path) -> None:
    """Say how to mend damage, if there is nothing else."""
    folder, checkpoints = tmp_path / "tokens", tmp_path / "train" / "checkpoints"
    stage(folder, "a", "b", **dict.fromkeys("abcde", "1"))
    (checkpoints / "step_00000007").mkdir(parents=True)
    (checkpoints / "step_00000012").mkdir()

    def told(why: str, advice: str, **inputs: str) -> None:
        with pytest.raises(KieloError) as caught:
            refuse_to_replace(folder, "trial", 1, inputs, {})
        assert str(caught.value) == (
            f"{folder}: would be made again (changed since it was made: {why}), but {checkpoints} has "
            f"step_00000012, which was trained on it. Nothing was changed. Fix: {advice}"
            "--from train continues on the text as it is; --set name=NEW makes a new run of the changed "
            "text; or restore the old text and values; or move "
            f"{tmp_path / 'train'} away to start again at step 0"
        )

    same = dict.fromkeys("abcde", "1")
    refuse_to_replace(folder, "trial", 1, same, {})
    told("input a, input b, input c, input d", "", e="1")
    told("input a, input b, input c, input d, …", "", e="2")
    (folder / "b").write_text("B")
    told("input a, file b", "", **same | {"a": "2"})
    told("file b", f"move {folder} away, and it is made again from the same text; ", **same)
    for path in checkpoints.iterdir():
        path.rmdir()
    refuse_to_replace(folder, "trial", 1, {}, {})
    refuse_while_trained_on(folder, "why")

"""The manifest of a checkpoint vouches for itself: its step, its version, its own digest."""

import pytest

from kielo.artifact.checkpoint_faults import FaultyCheckpoint
from kielo.artifact.checkpoint_manifest import read_checkpoint_manifest
from tests.artifact.small_checkpoint import checkpoint


def test_a_manifest_of_another_step_or_with_a_flipped_bit(tmp_path) -> None:
    folder = checkpoint(tmp_path / "step_00000001")
    found = read_checkpoint_manifest(folder)
    assert (found.kind, found.version, found.wall_seconds) == ("checkpoint", 2, 1.235)
    assert found.counts == {"step": 1, "tensor_bytes": 100, "save_id": "0" * 16}
    moved = folder.rename(tmp_path / "step_00000002")
    with pytest.raises(FaultyCheckpoint, match="is the manifest of another checkpoint, that of step 1"):
        read_checkpoint_manifest(moved)
    copied = moved.rename(tmp_path / "mine")
    assert read_checkpoint_manifest(copied).counts["step"] == 1
    text = (copied / "manifest.json").read_text()
    for wrong in (
        text.replace('"step": 1', '"step": 2'),
        text + " ",
        text.replace('"version": 2', '"version": 3'),
    ):
        (copied / "manifest.json").write_text(wrong)
        with pytest.raises(FaultyCheckpoint, match="is not what was written .its own checksum differs"):
            read_checkpoint_manifest(copied)

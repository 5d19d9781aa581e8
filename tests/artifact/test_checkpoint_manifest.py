"""The manifest of a checkpoint vouches for itself: its step, its version, its own digest."""

import json
from pathlib import Path

import pytest

from kielo.artifact.checkpoint_folder import FaultyCheckpoint
from kielo.artifact.checkpoint_index import read_checkpoint_manifest
from kielo.artifact.manifest import hash_json
from tests.artifact.small_checkpoint import checkpoint


def test_a_manifest_of_another_step_or_with_a_flipped_bit(tmp_path) -> None:
    folder = checkpoint(tmp_path / "step_00000001")
    found = read_checkpoint_manifest(folder)
    assert (found.kind, found.version, found.wall_seconds) == ("checkpoint", 2, 1.235)
    assert found.counts == {"step": 1, "tensor_bytes": 100, "save_id": "0" * 16}
    moved = folder.rename(tmp_path / "step_00000002")
    with pytest.raises(FaultyCheckpoint, match="is the manifest of another checkpoint, of step 1"):
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
        with pytest.raises(FaultyCheckpoint, match="differs from what was written .its own checksum differs"):
            read_checkpoint_manifest(copied)


def rewritten(folder: Path, **changes: object) -> str:
    """Changes the manifest, with a right digest of what it says then; returns the message about it."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["xxh3_128"]
    content |= changes
    path.write_text(
        json.dumps(content | {"xxh3_128": hash_json(content)}, indent=1, ensure_ascii=False) + "\n"
    )
    with pytest.raises(FaultyCheckpoint) as caught:
        read_checkpoint_manifest(folder)
    return str(caught.value).removeprefix(f"checkpoint {folder} is ")


def test_manifests_of_something_else(tmp_path) -> None:
    """Refuse a manifest of another kind or version, one without an index, and a missing one."""
    altered = (
        "damaged: manifest.json differs from what was written (its own checksum differs), so no file beside "
        "it can be checked"
    )
    other = "of another version: manifest.json is of version {}, written by kielo 9.8, and this Kielo reads "
    for changes, told in (
        ({"kind": "trial"}, "damaged: manifest.json is the manifest of a trial, not of a checkpoint"),
        (
            {"files": {"other": {}}},
            "damaged: manifest.json is the manifest of a checkpoint, not of a checkpoint",
        ),
        ({"version": 3, "versions": {"kielo": "9.8"}}, other.format(3)),
        ({"version": 1, "versions": {"kielo": "9.8"}}, other.format(1)),
        ({"version": "3", "versions": {"kielo": "9.8"}}, altered),
        ({"version": 3, "kind": "trial"}, altered),
        ({"version": 3, "versions": {}}, altered),
        ({"more": 1}, altered),
    ):
        folder = checkpoint(tmp_path / str(len(list(tmp_path.iterdir()))) / "step_00000001")
        assert rewritten(folder, **changes).startswith(told), changes
    (folder / "manifest.json").unlink()
    for make, told in (
        (lambda: None, "damaged: manifest.json is missing: the save did not finish"),
        (lambda: (folder / "manifest.json").mkdir(), "damaged: manifest.json is missing"),
    ):
        make()
        with pytest.raises(FaultyCheckpoint, match=f"step_00000001 is {told}$"):
            read_checkpoint_manifest(folder)
    (folder / "manifest.json").rmdir()
    for content in (b"\xff", b"[]", b"{}", b"5", b"{"):
        (folder / "manifest.json").write_bytes(content)
        with pytest.raises(
            FaultyCheckpoint, match=r"is damaged: manifest\.json (is not|differs from) what was written \("
        ):
            read_checkpoint_manifest(folder)

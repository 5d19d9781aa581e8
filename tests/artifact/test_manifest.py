"""A folder with a manifest is whole; one without is not finished."""

import errno
import json

import pytest

from kielo.artifact.manifest import (
    check_sizes,
    differences,
    expire,
    hash_file,
    hash_manifest,
    is_current,
    read_manifest,
    write_stage,
)
from kielo.artifact.trained_text import refuse_to_replace
from kielo.recipe.errors import KieloError

INPUTS, SECTION = {"raw": "0a1b"}, {"sizes": (1, 2), "name": "é"}


def _write(folder, text="text", inputs=INPUTS):
    with write_stage(folder, "trial", 1, inputs, SECTION) as stage:
        (stage.folder / "deep").mkdir()
        (stage.folder / "deep" / "a.txt").write_text(text)
        stage.counts["lines"] = 3


def test_same_inputs_and_section_mean_nothing_to_do(tmp_path):
    """Current for what made it; not for another input, section, kind or version, nor when a file lost
    bytes."""
    folder = tmp_path / "a run" / "stage"
    assert not is_current(folder, "trial", 1, INPUTS, SECTION)
    _write(folder)
    assert is_current(folder, "trial", 1, INPUTS, SECTION)
    assert not is_current(folder, "trial", 2, INPUTS, SECTION)
    assert not is_current(folder, "other", 1, INPUTS, SECTION)
    assert not is_current(folder, "trial", 1, {"raw": "ffff"}, SECTION)
    assert not is_current(folder, "trial", 1, INPUTS, {"sizes": [1, 3], "name": "é"})
    manifest = read_manifest(folder)
    assert manifest.counts == {"lines": 3} and manifest.wall_seconds >= 0
    assert manifest.files["deep/a.txt"]["xxh3_128"] == hash_file(folder / "deep/a.txt")
    for other in ("tex", "Text"):
        (folder / "deep" / "a.txt").write_text(other)
        assert not is_current(folder, "trial", 1, INPUTS, SECTION)
        assert differences(folder, "trial", 1, INPUTS, SECTION) == ["file deep/a.txt"]


def test_what_changed_is_named_and_an_expired_stage_is_made_again(tmp_path):
    """Inputs, settings and version by name; of no stage nothing. `expire` leaves files and folder."""
    folder = tmp_path / "stage"
    expire(folder)
    assert differences(folder, "trial", 1, INPUTS, SECTION) == []
    _write(folder)
    assert differences(folder, "trial", 1, {"raw": "0", "more": "1"}, SECTION | {"name": "e"}) == [
        "input raw", "input more", "name (was 'é', is 'e')",
    ]  # fmt: skip
    assert differences(folder, "trial", 2, INPUTS, SECTION) == ["kind and version (were trial 1, are trial 2)"]
    check_sizes(folder, read_manifest(folder), ["deep/a.txt"])
    expire(folder)
    assert differences(folder, "trial", 1, INPUTS, SECTION) == ["input expired"]
    (folder / "deep" / "a.txt").write_text("longer than it was")
    with pytest.raises(KieloError, match=r"a\.txt: it has 18 bytes, and the stage wrote 4"):
        check_sizes(folder, read_manifest(folder), ["deep/a.txt"])


def test_what_a_checkpoint_was_trained_on_is_not_replaced(tmp_path):
    """Neither by other inputs nor where a checkpoint was set aside; without one, or without the stage, it may be made."""
    folder = tmp_path / "tokens"
    changed = ("trial", 1, {"raw": "other"}, SECTION)
    step = tmp_path / "train" / "checkpoints" / "step_00000005"
    step.mkdir(parents=True)
    refuse_to_replace(folder, *changed)
    _write(folder)
    refuse_to_replace(folder, "trial", 1, INPUTS, SECTION)
    for name in ("step_00000005", "step_00000005.damaged"):
        step = step.rename(step.with_name(name))
        with pytest.raises(KieloError, match=f"input raw.*{name}.*--from train"):
            refuse_to_replace(folder, *changed)
    step.rmdir()
    refuse_to_replace(folder, *changed)


def test_failure_leaves_the_old_folder_and_nothing_else(tmp_path):
    """An exception in the middle changes nothing; a full disk says so as a KieloError."""
    folder = tmp_path / "stage"
    _write(folder, "old")
    before = hash_manifest(folder)
    with pytest.raises(ZeroDivisionError), write_stage(folder, "trial", 1, {}, {}) as stage:
        (stage.folder / "half").write_text("h")
        raise ZeroDivisionError
    with pytest.raises(KieloError, match="no space left"), write_stage(folder, "trial", 1, {}, {}):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert hash_manifest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_hash_names_the_output_not_the_occasion(tmp_path):
    """The same output made twice, at other times and with other counts of seconds, has one hash; other text
    another."""
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        _write(tmp_path / name, text)
    path = tmp_path / "b" / "manifest.json"
    content = json.loads(path.read_text()) | {
        "wall_seconds": 99.0,
        "written_at": "1999-01-01",
        "versions": {},
    }
    path.write_text(json.dumps(content))
    assert hash_manifest(tmp_path / "a") == hash_manifest(tmp_path / "b") != hash_manifest(tmp_path / "c")


def test_rewriting_replaces_and_a_torn_manifest_is_named(tmp_path):
    """A second writing replaces the first whole; an unreadable manifest is a KieloError with its path."""
    folder = tmp_path / "stage"
    _write(folder, "one")
    (folder / "stray").write_text("not of the stage")
    _write(folder, "two")
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    (folder / "manifest.json").write_text('{"kind": "tri')
    with pytest.raises(KieloError, match="manifest.json"):
        read_manifest(folder)

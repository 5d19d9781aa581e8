"""A folder with a manifest is whole; one without is not finished."""

import errno
import json
import os
import platform
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from kielo.artifact import manifest
from kielo.artifact.durable import marked
from kielo.artifact.manifest import (
    check_sizes,
    differences,
    expire,
    hash_file,
    hash_json,
    hash_manifest,
    is_current,
    read_manifest,
    refuse_foreign,
    rewrite_counts,
    write_stage,
)
from kielo.artifact.stage_folder import StageFolder
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
    assert manifest.files["deep/a.txt"].xxh3_128 == hash_file(folder / "deep/a.txt")
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
    assert differences(folder, "trial", 2, INPUTS, SECTION) == [
        "kind and version (were trial 1, are trial 2)"
    ]
    check_sizes(folder, read_manifest(folder), ["deep/a.txt"])
    expire(folder)
    assert differences(folder, "trial", 1, INPUTS, SECTION) == ["input expired"]
    (folder / "deep" / "a.txt").write_text("longer than it was")
    with pytest.raises(KieloError, match=r"a\.txt: it has 18 bytes, but the stage wrote 4"):
        check_sizes(folder, read_manifest(folder), ["deep/a.txt"])


def test_what_a_checkpoint_was_trained_on_is_not_replaced(tmp_path):
    """Neither by other inputs nor where a checkpoint was set aside;
    without one, or without the stage, it may be made.
    """
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
    with (
        pytest.raises(KieloError, match="trial stage was not written: No space left"),
        write_stage(folder, "trial", 1, {}, {}),
    ):
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
    _write(folder, "two")
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text('{"kind": "tri')
    with pytest.raises(
        KieloError,
        match=r"manifest\.json: not a readable manifest of Kielo's \(Invalid JSON.*move .*stage away",
    ):
        read_manifest(folder)
    odd_version = content | {"version": "1"}
    del content["written_at"]
    for odd, told in ((content, "written_at: Field required"), (odd_version, "version: .*int")):
        (folder / "manifest.json").write_text(json.dumps(odd))
        with pytest.raises(KieloError, match=rf"manifest\.json: not a readable manifest .*\({told}"):
            read_manifest(folder)


def test_what_the_stage_did_not_write_is_never_replaced(tmp_path):
    """A file without a manifest, one beside those that it lists and another kind's folder are kept; Kielo's
    own texts are replaced.
    """
    folder = tmp_path / "stage"
    folder.mkdir()
    _write(folder, "into an empty folder")
    (folder / "card.md").write_text(marked("written later, by another stage\n"))
    (folder / ".card.md.4711.kielo-partial").write_text("what a kill left")
    _write(folder, "again")
    for name in ("a person's.txt", "deep/notes", "card.md"):
        (folder / name).write_text("mine")
        with pytest.raises(KieloError, match=name):
            _write(folder, "third")
        assert (folder / name).read_text() == "mine" and (folder / "deep" / "a.txt").read_text() == "again"
        (folder / name).unlink()
    with (
        pytest.raises(KieloError, match="manifest.json of a trial stage"),
        write_stage(folder, "other", 1, {}, {}),
    ):
        pass
    (folder / "manifest.json").unlink()
    with pytest.raises(KieloError, match="stage: contains deep, which Kielo's trial stage did not write"):
        _write(folder, "third")
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_file_that_appears_during_the_work_is_not_lost(tmp_path):
    """The stage looks again, before the exchange, for what a person put into the folder while it worked."""
    folder = tmp_path / "stage"
    _write(folder, "old")
    with (
        pytest.raises(KieloError, match="stage: contains notes, which Kielo's trial stage did not write"),
        write_stage(folder, "trial", 1, {}, {}),
    ):
        (folder / "notes").write_text("mine")
    assert (folder / "notes").read_text() == "mine" and (folder / "deep" / "a.txt").read_text() == "old"


def test_the_folder_aside_is_ours_or_left_alone(tmp_path):
    """A killed attempt's is used again and removed; one that Kielo did not make is refused;
    an exchange is ended.
    """
    folder, aside = tmp_path / "stage", tmp_path / ".stage.kielo"
    aside.mkdir()
    (aside / "new").mkdir()
    (aside / "new" / "mine").write_text("a person's")
    with pytest.raises(KieloError, match=r"\.stage\.kielo is not Kielo's"):
        _write(folder)
    assert (aside / "new" / "mine").read_text() == "a person's"
    shutil.rmtree(aside)
    _write(folder, "old")
    killed = StageFolder(folder, "trial", "")
    killed.begin()
    killed.close()
    (killed.new / "half").write_text("h")
    folder.rename(aside / "old")  # killed between the two renames
    with pytest.raises(ZeroDivisionError), write_stage(folder, "trial", 1, {}, {}) as stage:
        assert list(stage.folder.iterdir()) == []
        raise ZeroDivisionError
    assert (folder / "deep" / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_failed_exchange_keeps_the_old_content(tmp_path, monkeypatch):
    """The second rename fails: the old folder is back in its place, and the message names the folder."""
    folder = tmp_path / "stage"
    _write(folder, "old")
    replace = os.replace

    def refused(source, target):
        if Path(target) == folder and Path(source).name == "new":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(KieloError, match="stage: the trial stage was not written: Input/output error"):
        _write(folder, "new")
    assert (folder / "deep" / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_two_at_once_do_not_share_the_folder_aside(tmp_path):
    """The second is refused, and the first one ends well."""
    folder = tmp_path / "stage"
    with write_stage(folder, "trial", 1, {}, {}) as stage:
        (stage.folder / "a.txt").write_text("first")
        with pytest.raises(KieloError, match="another process is writing"):
            _write(folder)
    assert (folder / "a.txt").read_text() == "first"


@pytest.mark.parametrize("is_whole_run", [False, True])
def test_a_link_to_another_place_stays_and_its_target_is_filled(tmp_path, is_whole_run):
    """RUN/stage -> elsewhere, or the run folder itself:
    the data lies where the link leads, also the second time.
    """
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").mkdir()
    link = tmp_path / ("link" if is_whole_run else "run/stage")
    link.symlink_to(tmp_path / "scratch")
    folder = link / "stage" if is_whole_run else link
    for text in ("one", "two"):
        _write(folder, text)
        assert link.is_symlink() and (folder / "deep" / "a.txt").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"scratch", "run", link.parts[len(tmp_path.parts)]}
    )
    assert (tmp_path / "scratch" / ("stage" if is_whole_run else "") / "manifest.json").is_file()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ([] if is_whole_run else ["stage"])


def test_what_cannot_be_a_stage_folder_is_refused(tmp_path):
    """A dangling link, a file, and a place below a file; nothing is made."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "stage")
    before = sorted(tmp_path.iterdir())
    for folder, told in (
        ("dangling", "Is its disk mounted"),
        ("file", "a file"),
        ("file/stage", "Not a directory"),
    ):
        with pytest.raises(KieloError, match=f"{folder}: .*{told}"):
            _write(tmp_path / folder)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "mine"


def test_small_files_of_a_stage_are_hashed_and_large_ones_are_not(tmp_path, monkeypatch) -> None:
    """At the border and above it; a changed size counts for both, and a file not listed is refused."""
    assert manifest.HASHED_BYTES == 1024 * 1024
    monkeypatch.setattr(manifest, "HASHED_BYTES", 4)
    for content, other, is_noticed in (
        (b"abcd", b"abcx", True),
        (b"abcde", b"abcdx", False),
        (b"abcde", b"abcd", True),
    ):
        folder = tmp_path / f"{content.decode()}{other.decode()}"
        with write_stage(folder, "trial", 1, {}, {}) as stage:
            (stage.folder / "a").write_bytes(content)
        (folder / "a").write_bytes(other)
        assert is_current(folder, "trial", 1, {}, {}) is not is_noticed
    listed = read_manifest(folder)
    with pytest.raises(
        KieloError, match="a: it has 4 bytes, but the stage wrote 5 bytes. Fix: put the file back"
    ):
        check_sizes(folder, listed, ["a"])
    with pytest.raises(KieloError, match="b: is not listed in manifest.json"):
        check_sizes(folder, listed, ["b"])
    (folder / "a").unlink()
    with pytest.raises(KieloError, match="a: it is missing, but the stage wrote 5"):
        check_sizes(folder, listed, ["a"])
    assert hash_json({"b": [1, "é"], "a": None}) == xxhash.xxh3_128_hexdigest(
        '{"a":null,"b":[1,"é"]}'.encode()
    )


def test_the_whole_manifest_of_a_stage(tmp_path, monkeypatch) -> None:
    """Write JSON with a line's end, thousandths of seconds, a date to the second, and versions if asked."""
    monkeypatch.setattr(manifest, "time", SimpleNamespace(monotonic=iter([5.0, 8.25049]).__next__))
    folder = tmp_path / "a" / "stage"
    with write_stage(folder, "trial", 7, {"raw": "0a"}, {"name": "é", "sizes": (1, 2)}) as stage:
        (stage.folder / "b").write_bytes(b"")
        (stage.folder / "a" / "c").mkdir(parents=True)
        (stage.folder / "a" / "c" / "d").write_bytes(b"12")
        stage.counts["n"] = (3,)
    text = (folder / "manifest.json").read_text()
    content = json.loads(text)
    assert text == json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", content.pop("written_at"))
    versions = content.pop("versions")
    assert versions["python"] == platform.python_version() and "kielo" in versions
    assert versions["numpy"] == np.__version__
    digests = {data: xxhash.xxh3_128_hexdigest(data) for data in (b"", b"12")}
    assert content == {
        "kind": "trial", "version": 7, "inputs": {"raw": "0a"}, "section": {"name": "é", "sizes": [1, 2]},
        "counts": {"n": [3]}, "wall_seconds": 3.25,
        "files": {
            "a/c/d": {"bytes": 2, "xxh3_128": digests[b"12"]}, "b": {"bytes": 0, "xxh3_128": digests[b""]},
        },
    }  # fmt: skip
    assert list(content["files"]) == ["a/c/d", "b"]
    rewrite_counts(folder, {"n": 4})
    assert read_manifest(folder).counts == {"n": 4}
    rewrite_counts(tmp_path / "none", {})
    expire(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(
        KieloError, match=r"none: no manifest\.json, so this stage is not finished. Fix: run it first"
    ):
        hash_manifest(tmp_path / "none")


def test_a_stage_of_another_migration_is_current(tmp_path) -> None:
    """The section of its manifest is read as this version stores it."""
    folder = tmp_path / "stage"
    with write_stage(folder, "trial", 1, {}, {"old": 3}):
        pass
    renamed = lambda section: {"new": section["old"]}  # noqa: E731
    assert is_current(folder, "trial", 1, {}, {"new": 3}, renamed)
    assert differences(folder, "trial", 1, {}, {"new": 4}, renamed) == ["new (was 3, is 4)"]
    assert differences(folder, "trial", 1, {}, {"new": 3}) == ["old (was 3, is None)", "new (was None, is 3)"]


def test_a_link_in_a_stage_is_not_kielos(tmp_path) -> None:
    """Read the manifest of a folder or of a file; refuse a manifest that is a folder."""
    folder = tmp_path / "stage"
    (tmp_path / "elsewhere").mkdir()
    _write(folder)
    for target in ("elsewhere", "gone"):
        (folder / "deep" / "link").symlink_to(tmp_path / target)
        with pytest.raises(
            KieloError, match="stage: contains deep/link, which Kielo's trial stage did not write or"
        ):
            refuse_foreign(folder, "trial")
        (folder / "deep" / "link").unlink()
    refuse_foreign(folder, "trial")
    (tmp_path / "other" / "manifest.json").mkdir(parents=True)
    with pytest.raises(KieloError, match=r"other/manifest\.json: cannot be read \(Is a directory\)"):
        read_manifest(tmp_path / "other")
    assert read_manifest(tmp_path / "gone") is None

"""The folder aside of a stage: whose it is, what is kept in it, and how an exchange ends."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from kielo.artifact.stage_folder import StageFolder
from kielo.recipe.errors import KieloError


@pytest.fixture
def stage(tmp_path) -> StageFolder:
    return StageFolder(tmp_path / "stage", "trial", "1a2b")


@pytest.fixture
def aside(tmp_path) -> Path:
    return tmp_path / ".stage.kielo"


def filled(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(name)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_first_line_says_which_stage_it_is(stage, aside) -> None:
    """Lines are in the file as soon as they are written, and stay when the folder is opened again."""
    assert stage.head == b'{"stage": "trial", "folder": "stage", "identity": "1a2b"}\n'
    assert stage.journal is None
    stage.close()
    stage.begin()
    stage.journal.write(b"more\n")
    assert names_in(aside) == ["journal.jsonl", "new"]
    assert stage.journal_path.read_bytes() == stage.head + b"more\n"
    stage.close()
    stage.begin()
    assert stage.journal_path.read_bytes() == stage.head + b"more\n"
    assert json.loads(stage.head)["folder"] == stage.place.name
    stage.close()


def test_new_is_emptied_unless_its_files_are_gone_on_with(stage, aside) -> None:
    for is_resumed, left in ((True, ["half"]), (None, [])):
        filled(aside / "new", "half")
        (aside / "journal.jsonl").touch()
        stage.begin(*([is_resumed] if is_resumed else []))
        assert names_in(stage.new) == left
        stage.close()


def test_what_can_be_a_stage_folder(stage, aside, tmp_path, monkeypatch) -> None:
    """Nothing yet, a folder, or a link to one; not a file, a link to nothing or the root of a disk."""
    stage.refuse()
    (tmp_path / "stage").mkdir()
    stage.refuse()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "stage")
    with pytest.raises(KieloError, match="stage: the root of a file system, which no finished trial"):
        stage.refuse()
    monkeypatch.undo()
    (tmp_path / "stage").rmdir()
    (tmp_path / "stage").touch()
    with pytest.raises(
        KieloError, match="stage: a file, but the trial stage makes a folder. Fix: move it away"
    ):
        stage.refuse()
    (tmp_path / "stage").unlink()
    (tmp_path / "stage").symlink_to("elsewhere")
    with pytest.raises(KieloError, match="stage: a symbolic link to elsewhere, which is no folder"):
        StageFolder(tmp_path / "stage", "trial", "").refuse()
    (tmp_path / "elsewhere").mkdir()
    linked = StageFolder(tmp_path / "stage", "trial", "")
    linked.refuse()
    assert linked.place == (tmp_path / "elsewhere").resolve()
    assert linked.new == linked.place.parent / ".elsewhere.kielo" / "new"


def test_whose_the_folder_aside_is(stage, aside, tmp_path) -> None:
    """An empty one and one with a journal are Kielo's; nothing is done in any other."""
    aside.mkdir()
    stage.refuse()
    stage.remove()  # a kill after the journal went
    assert not aside.exists()
    filled(aside, "journal.jsonl")
    stage.refuse()
    filled(aside / "new", "half")
    filled(aside, "mine")
    stage.refuse()
    stage.remove()
    assert names_in(aside) == ["journal.jsonl", "mine"]
    (aside / "journal.jsonl").unlink()
    elsewhere = filled(tmp_path / "elsewhere", "journal.jsonl")
    for make in (
        lambda: None,
        aside.touch,
        lambda: aside.symlink_to(elsewhere),
        lambda: aside.symlink_to("gone"),
    ):
        make()
        with pytest.raises(KieloError, match=r"\.stage\.kielo is not Kielo's, which would work there"):
            stage.refuse()
        stage.remove()
        assert os.path.lexists(aside)
        shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()
    assert names_in(elsewhere) == ["journal.jsonl"]


@pytest.mark.parametrize(
    ("in_place", "has_journal", "left"),
    [("new content", True, "new content"), ("", True, "before"), (None, True, "before"), (None, False, None)],
)
def test_how_an_exchange_ends_that_was_killed(in_place, has_journal, left, stage, aside, tmp_path) -> None:
    """Old content goes where its place is taken, and back where it is empty; never without the mark."""
    filled(aside / "old", "before")
    if has_journal:
        (aside / "journal.jsonl").touch()
    if in_place is not None:
        (tmp_path / "stage").mkdir()
    if in_place:
        filled(tmp_path / "stage", in_place)
    stage.settle()
    assert (names_in(tmp_path / "stage") if left else None) == ([left] if left else None)
    assert (aside / "old").exists() is not has_journal and (tmp_path / "stage").exists() is has_journal


def test_old_content_that_cannot_be_removed_stops_nothing(stage, aside, tmp_path, monkeypatch) -> None:
    def stuck(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("busy")

    filled(aside / "old", "before")
    filled(aside, "journal.jsonl")
    filled(tmp_path / "stage", "after")
    monkeypatch.setattr(shutil, "rmtree", stuck)
    stage.settle()
    assert names_in(tmp_path / "stage") == ["after"]


def test_publication_replaces_what_was_there(stage, tmp_path) -> None:
    filled(tmp_path / "stage", "before")
    stage.begin()
    filled(stage.new, "after")
    stage.publish()
    assert names_in(tmp_path) == ["stage"] and names_in(tmp_path / "stage") == ["after"]
    assert stage.journal.closed


def test_discarding_touches_only_what_this_process_holds(stage, aside) -> None:
    """Not the folder aside of another process, nor after `close`."""
    filled(aside, "journal.jsonl")
    stage.discard()
    assert aside.exists()
    stage.begin()
    with pytest.raises(
        KieloError, match=r"\.stage\.kielo: another process is writing there. Fix: wait for it"
    ):
        (other := StageFolder(stage.folder, "trial", "")).begin()
    assert other.journal.closed
    other.discard()
    stage.close()
    stage.discard()
    assert aside.exists()
    stage.begin()
    stage.discard()
    assert not aside.exists() and stage.journal.closed


def test_a_file_system_without_locks_is_worked_on(stage, monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    stage.begin()
    assert not stage.journal.closed and stage.new.is_dir()
    stage.close()

"""Files that are written aside: what is left of them, and what a disk's refusal becomes."""

import errno
import os
import stat
from pathlib import Path

import pytest

from kielo.artifact import durable
from kielo.artifact.durable import DurableFile, bring_tree_to_disk, disk_problems_reported, is_aside
from kielo.artifact.this_place import this_place
from kielo.recipe.errors import KieloError


def test_a_file_has_its_name_when_it_is_whole(tmp_path) -> None:
    """Folders are made; the one before stays until then; an exception leaves nothing."""
    path = tmp_path / "a" / "b" / "c.txt"
    with DurableFile(path) as file:
        assert file.write(b"one") == 3
        (aside,) = path.parent.iterdir()
        assert aside.name == f".c.txt.{this_place()}.{os.getpid()}.kielo-partial" and is_aside(aside.name)
    assert path.read_bytes() == b"one" and os.listdir(path.parent) == ["c.txt"]
    with pytest.raises(ZeroDivisionError), DurableFile(path) as file:
        file.write(b"two")
        raise ZeroDivisionError
    assert path.read_bytes() == b"one" and os.listdir(path.parent) == ["c.txt"]
    file.abandon()
    for name in ("c.txt", ".c.txt.kielo-partial", ".c.txt.1.kielo-partial.x", "x.c.txt.1.kielo-partial"):
        assert not is_aside(name)


def test_a_file_that_cannot_be_named_leaves_nothing(tmp_path, monkeypatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="broken"), DurableFile(tmp_path / "a"):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space, or set `folder` in the recipe to a larger disk"),
        (errno.EDQUOT, "free some space, or set `folder` in the recipe to a larger disk"),
        (
            errno.EFBIG,
            "raise the limit of file sizes (ulimit -f), or set `folder` in the recipe to another disk",
        ),
        (errno.EROFS, "set `folder` in the recipe to a disk that can be written"),
        (errno.EACCES, "set `folder` in the recipe to one that can be written"),
        (errno.EIO, "mend that, and run the same command"),
    ],
)
def test_what_a_disk_refuses(number, advice) -> None:
    for error, told in ((OSError(number, "why", "f"), "why (f)"), (OSError(number, "why"), "why")):
        with pytest.raises(KieloError) as caught, disk_problems_reported("it"):
            raise error
        assert str(caught.value) == f"it was not written: {told}. Fix: {advice}"


def test_what_is_no_refusal_of_a_disk() -> None:
    """A pipe that ended, and errors of another kind, pass through; an error without a number is told."""
    for error in (BrokenPipeError("pipe"), BlockingIOError(11, "no process"), ValueError("other")):
        with pytest.raises(type(error)), disk_problems_reported("it"):
            raise error
    odd = "^it was not written: odd. Fix: mend that"
    with pytest.raises(KieloError, match=odd), disk_problems_reported("it"):
        raise OSError("odd")


def test_all_of_a_tree_is_brought_to_the_disk(tmp_path, monkeypatch) -> None:
    """Folders and files at any depth, and the folder itself; what a link leads to is another's."""
    (tmp_path / "tree" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("tree/a", "tree/deep/b", "tree/deep/er/c", "elsewhere/d"):
        (tmp_path / name).touch()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "dangling").symlink_to("gone")
    brought: list[Path] = []
    monkeypatch.setattr(durable, "bring_to_disk", brought.append)
    bring_tree_to_disk(tmp_path / "tree")
    names = sorted(str(path.relative_to(tmp_path)) for path in brought)
    assert names == ["tree", "tree/a", "tree/deep", "tree/deep/b", "tree/deep/er", "tree/deep/er/c"]


def test_a_file_system_without_fsync_of_folders_is_warned_of_once(tmp_path, monkeypatch, caplog) -> None:
    """CIFS, FUSE and some of Ceph answer EINVAL for a folder; of a file the same answer is an error."""
    real = os.fsync

    def refused(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    with caplog.at_level("WARNING", logger="kielo"):
        for name in ("a", "b"):
            with DurableFile(tmp_path / name) as file:
                file.write(b"one")
            assert (tmp_path / name).read_bytes() == b"one"
        bring_tree_to_disk(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in said and "no fsync of folders" in said

    def of_files(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", of_files)
    with pytest.raises(OSError, match="Invalid"):
        bring_tree_to_disk(tmp_path)

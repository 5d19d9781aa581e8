"""A stage of large files goes on where a kill left it, and says on a full disk what is missing."""

import errno
import hashlib
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from kielo.artifact import resumable_stage
from kielo.artifact.manifest import read_manifest
from kielo.artifact.resumable_stage import FinishedFile, ResumableStage
from kielo.recipe.errors import KieloError


def stage_in(tmp_path: Path, version: int = 3) -> ResumableStage:
    return ResumableStage(tmp_path / "export", "trial", version, {"a": "1"}, {"b": (2, 5)})


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def add(stage: ResumableStage, name: str, data: bytes) -> None:
    (stage.new / name).write_bytes(data)
    stage.add(name, FinishedFile(bytes=len(data), sha256=sha256(data)))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_stage_from_its_first_file_to_its_name(tmp_path, monkeypatch) -> None:
    """The manifest lists all but what is not to be listed; sha256 are in its counts."""
    monkeypatch.setattr(resumable_stage, "time", SimpleNamespace(monotonic=iter([100.0, 107.12345]).__next__))
    stage = stage_in(tmp_path)
    stage.refuse()
    stage.begin()
    stage.write("small", b"abc")
    stage.write("README", b"text", is_listed=False)
    add(stage, "big", b"12345")
    assert stage.finished == {"big": FinishedFile(bytes=5, sha256=sha256(b"12345"))}
    assert not stage.is_written() and not stage.is_done()
    stage.finish({"n": (3,)})
    assert stage.is_written() and not stage.is_done()
    found = read_manifest(stage.new)
    assert (found.kind, found.version, found.inputs, found.section) == ("trial", 3, {"a": "1"}, {"b": [2, 5]})
    assert found.counts == {"n": [3], "sha256": {"big": sha256(b"12345"), "small": sha256(b"abc")}}
    assert found.content()["files"] == {
        "big": {"bytes": 5}, "small": {"bytes": 3, "xxh3_128": xxhash.xxh3_128_hexdigest(b"abc")},
    }  # fmt: skip
    assert list(found.files) == ["big", "small"] and found.wall_seconds == 7.123
    written = datetime.fromisoformat(found.written_at)
    assert written.utcoffset().total_seconds() == 0 and "." not in found.written_at
    stage.publish()
    assert stage.is_done() and names_in(tmp_path) == ["export"]
    assert names_in(tmp_path / "export") == ["README", "big", "manifest.json", "small"]
    assert (tmp_path / "export" / "README").read_bytes() == b"text"
    monkeypatch.undo()
    assert stage_in(tmp_path).is_done() and not stage_in(tmp_path, 4).is_done()


def test_what_a_killed_publish_left_goes_and_files_of_another_attempt_stay(tmp_path) -> None:
    stage = stage_in(tmp_path)
    stage.begin()
    stage.finish({})
    stage.publish()
    aside = tmp_path / ".export.kielo"
    for left, is_kept in (("old", False), ("new", True)):
        (aside / left).mkdir(parents=True)
        (aside / "journal.jsonl").touch()
        assert stage_in(tmp_path).is_done() and aside.exists() is is_kept


def test_what_another_wrote_is_refused(tmp_path) -> None:
    """Before the work, and after it: a person may have put a file there in the meantime."""
    stage = stage_in(tmp_path)
    stage.begin()
    stage.finish({})
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").touch()
    for action in (stage.refuse, stage.publish):
        with pytest.raises(
            KieloError, match="export: contains mine, which Kielo's trial stage did not write"
        ):
            action()
    assert names_in(tmp_path / "export") == ["mine"] and stage.is_written()
    stage.discard()
    assert names_in(tmp_path) == ["export"]


def test_finished_files_are_kept_and_all_else_goes(tmp_path) -> None:
    """A file that is cut or gone counts no more; small ones, folders and links are made again."""
    first = stage_in(tmp_path)
    first.begin()
    for name in ("one", "two", "three"):
        add(first, name, name.encode())
    first.write("small", b"s")
    (first.new / "half").write_bytes(b"h")
    (first.new / "folder").mkdir()
    (first.new / "folder" / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (first.new / "link").symlink_to(tmp_path / "elsewhere")
    first.close()
    (first.new / "two").write_bytes(b"t")
    (first.new / "three").unlink()
    second = stage_in(tmp_path)
    second.begin()
    assert second.finished == {"one": FinishedFile(bytes=3, sha256=sha256(b"one"))}
    assert names_in(second.new) == ["one"] and (tmp_path / "elsewhere").is_dir()
    with pytest.raises(KieloError, match="another process is writing there"):
        stage_in(tmp_path).begin()
    second.discard()
    assert names_in(tmp_path) == ["elsewhere"]


@pytest.mark.parametrize(
    ("torn", "kept"),
    [
        (b"", ["one", "two"]),
        (b'{"file": "th', ["one", "two"]),
        (b"no JSON\n" + b'{"file": "x"}\n', ["one", "two"]),
    ],
)
def test_a_torn_journal_is_cut_after_its_last_sound_line(torn, kept, tmp_path) -> None:
    stage = stage_in(tmp_path)
    stage.begin()
    for name in kept:
        add(stage, name, name.encode())
    stage.close()
    journal = tmp_path / ".export.kielo" / "journal.jsonl"
    sound = journal.read_bytes()
    assert sound.count(b"\n") == 3
    journal.write_bytes(sound + torn)
    again = stage_in(tmp_path)
    again.begin()
    assert list(again.finished) == kept and journal.read_bytes() == sound
    add(again, "three", b"3")
    assert journal.read_bytes() == sound + b'{"file": "three", "bytes": 1, "sha256": "%s"}\n' % (
        sha256(b"3").encode()
    )
    again.close()


def test_files_of_another_stage_are_not_gone_on_with(tmp_path) -> None:
    """The journal begins anew with the line of this one."""
    other = stage_in(tmp_path, version=2)
    other.begin()
    add(other, "one", b"1")
    other.close()
    journal = tmp_path / ".export.kielo" / "journal.jsonl"
    before = journal.read_bytes()
    stage = stage_in(tmp_path)
    stage.begin()
    assert stage.finished == {} and names_in(stage.new) == []
    assert (
        journal.read_bytes().count(b"\n") == 1 and journal.read_bytes() != before.partition(b"\n")[0] + b"\n"
    )
    stage.close()


def test_a_full_disk_tells_what_is_missing(tmp_path, monkeypatch) -> None:
    """Bytes that were announced, less those of the files that were finished since."""
    asked = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(Path(path).is_dir())
        return SimpleNamespace(total=9000, used=8000, free=1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    stage = stage_in(tmp_path)

    def told(number: int, why: str, files: int) -> str:
        assert str(stage.stopped(OSError(number, "broken"))) == (
            f"{tmp_path / 'export'}: the trial was not finished: {why}. {files} finished files stay in "
            f"{tmp_path / '.export.kielo' / 'new'}. Fix: the same command resumes from there"
        )

    told(errno.ENOSPC, "disk full: 0 more bytes are needed, 1,000 are free", 0)
    stage.begin()
    stage.expect(1000)
    with pytest.raises(OSError, match="No space left on device") as caught:
        stage.expect(1001)
    assert caught.value.errno == errno.ENOSPC
    stage.expect(900)
    add(stage, "one", b"1" * 20)
    add(stage, "two", b"2" * 33)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        told(number, "disk full: 847 more bytes are needed, 1,000 are free", 2)
    told(errno.ENXIO, "a file or device: broken", 2)
    assert all(asked)
    stage.close()

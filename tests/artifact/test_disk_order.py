"""A power cut undoes nothing that is finished: what has a name is on the disk, and so is the name.

Of folders of checkpoints: tests/checkpoint/test_disk_order.py.
"""

import os

import numpy as np
import pytest

from kielo.artifact.attempt_files import End, append
from kielo.artifact.checkpoint_index import CheckpointIndex, write_index
from kielo.artifact.documents import DocumentWriter
from kielo.artifact.durable import DurableFile, make_folder, write_own_text
from kielo.artifact.lease import Lease
from kielo.artifact.manifest import expire, read_manifest, rewrite_counts, write_stage
from kielo.artifact.resumable_stage import FinishedFile, ResumableStage
from kielo.artifact.stage_folder import StageFolder
from kielo.artifact.token_shards import TokenShardWriter, join_token_shards
from tests.disk_order import DiskOrder


@pytest.fixture
def order(monkeypatch) -> DiskOrder:
    return DiskOrder(monkeypatch)


def brought(path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_wrong_order_is_named(order, tmp_path) -> None:
    """A name before its content, content after its fsync, and names that were not brought to the disk."""
    old, new = tmp_path / "old", tmp_path / "new"
    assert order.complaints(new) == ["it was never named"]
    (old / "deep").mkdir(parents=True)
    (old / "deep" / "a").write_text("a")
    for path in (old / "deep" / "a", old, tmp_path):
        brought(path)
    (old / "deep" / "a").write_text("more")
    os.rename(old, new)
    assert order.complaints(new) == [
        f"{new / 'deep'} was named before it was on the disk",
        f"{new / 'deep' / 'a'} was named before it was on the disk",
        "its name was not brought to the disk",
    ]
    assert not order.is_on_disk(new / "deep" / "a") and order.is_on_disk(new)
    for path in (new / "deep" / "a", new / "deep"):
        brought(path)
    os.replace(new, old)
    brought(tmp_path)
    assert order.complaints(old) == [] and order.is_on_disk(old / "deep" / "a")


def test_a_durable_file(order, tmp_path) -> None:
    """The file, its name, and the folders that were made for it; the file before it stays until then."""
    path = tmp_path / "some" / "folder" / "file"
    for content in (b"one", b"two"):
        with DurableFile(path) as file:
            assert file.write(content) == 3
            assert content == b"one" or path.read_bytes() == b"one"
        assert order.complaints(path) == [] and path.read_bytes() == content
    made = [tmp_path, tmp_path / "some"]
    assert order.events[:2] == [f"fsync {folder}" for folder in made]
    make_folder(tmp_path / "some" / "folder")
    assert len(order.events) == 2 + 2 * 3, "a folder that is there needs nothing"


def test_texts_marks_and_shards(order, tmp_path) -> None:
    """All that writes one file by itself, whole or not at all."""
    write_own_text(tmp_path / "card.md", "text\n")
    for part in ("one", "two"):
        with TokenShardWriter(tmp_path / part, 10, has_loss_mask=True) as shard:
            shard.add(np.array([1, 2]))
    join_token_shards([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    with DocumentWriter(tmp_path / "d.jsonl.zst") as documents:
        documents.add({"text": "a"})
    names = [
        f"{shard}{suffix}" for shard in ("one", "two", "both") for suffix in (".bin", ".loss_mask", ".idx")
    ]
    for name in ("card.md", "d.jsonl.zst", *names):
        assert order.complaints(tmp_path / name) == [], name


def test_a_stage_is_on_the_disk_before_its_manifest_and_its_name(order, tmp_path) -> None:
    """Also files that another program wrote, in folders; the manifest is the last file; twice."""
    folder, new = tmp_path / "runs" / "stage", tmp_path / "runs" / ".stage.kielo" / "new"
    for text in ("first", "second"):
        with write_stage(folder, "trial", 1, {}, {}) as stage:
            assert stage.folder == new
            (new / "deep").mkdir()
            (new / "deep" / "a.txt").write_text(text)
            with DocumentWriter(new / "b.jsonl.zst") as documents:
                documents.add({"text": text})
        assert order.complaints(folder) == [] and (folder / "deep" / "a.txt").read_text() == text
        assert order.complaints(new / "manifest.json") == []
        manifest = order.events.index(f"name {new}/manifest.json")
        for path in (new / "deep", new / "deep" / "a.txt", new):
            assert f"fsync {path}" in order.events[:manifest], path
        order.events.clear()
    assert set(read_manifest(folder).files) == {"deep/a.txt", "b.jsonl.zst"}
    for change in (expire, lambda folder: rewrite_counts(folder, {"a": 1})):
        change(folder)
        assert order.complaints(folder / "manifest.json") == []


def test_the_mark_of_a_folder_aside_is_on_the_disk_before_its_content(order, tmp_path) -> None:
    """A power cut that kept the content and not the journal would leave a folder that Kielo refuses."""
    stage = StageFolder(tmp_path / "stage", "trial", "1")
    stage.begin()
    aside = tmp_path / ".stage.kielo"
    assert order.is_on_disk(stage.journal_path) and stage.journal_path.read_bytes() == stage.head
    assert order.events == [
        f"fsync {tmp_path}",  # which has the name of the folder aside
        f"fsync {aside / 'journal.jsonl'}",
        f"fsync {aside}",
    ]
    stage.close()
    stage.begin()  # the mark is there
    assert len(order.events) == 3
    stage.close()


def test_the_names_of_finished_files_are_on_the_disk_before_their_folder_has_its_name(
    order, tmp_path
) -> None:
    """Whoever wrote them: `publish` asks no more than that the files themselves are on the disk."""
    stage = StageFolder(tmp_path / "stage", "trial", "1")
    stage.begin()
    (stage.new / "a").write_text("a")
    brought(stage.new / "a")
    stage.publish()
    assert order.complaints(tmp_path / "stage") == [] and (tmp_path / "stage" / "a").read_text() == "a"


def test_old_content_goes_back_to_its_place_durably(order, tmp_path) -> None:
    """After a kill between the two names of an exchange."""
    folder, aside = tmp_path / "stage", tmp_path / ".stage.kielo"
    with write_stage(folder, "trial", 1, {}, {}) as stage:
        (stage.folder / "a").write_text("a")
    stage = StageFolder(folder, "trial", "1")
    stage.begin()
    folder.rename(aside / "old")
    stage.close()
    stage.begin()
    assert order.complaints(folder) == [] and (folder / "a").read_text() == "a"
    stage.close()


def resumable(folder) -> ResumableStage:
    return ResumableStage(folder, "trial", 1, {"a": "1"}, {"b": 2})


def test_a_journal_vouches_for_what_is_on_the_disk(order, tmp_path) -> None:
    """Each line that a later attempt goes on from is on the disk when `add` returns; at last all is."""
    journal = tmp_path / ".export.kielo" / "journal.jsonl"
    journal.parent.mkdir()
    journal.write_bytes(b'{"another": "stage"}\n')
    stage = resumable(tmp_path / "export")
    stage.begin()
    assert order.is_on_disk(journal) and journal.read_bytes().count(b"\n") == 1
    for name in ("one", "two"):
        with DurableFile(stage.new / name) as file:
            file.write(name.encode())
        stage.add(name, FinishedFile(bytes=3, sha256="0"))
        assert order.is_on_disk(journal) and name.encode() in journal.read_bytes()
    stage.write("three", b"3")
    assert order.complaints(stage.new / "three") == []
    stage.finish({"n": 3})
    assert order.complaints(stage.new / "manifest.json") == []
    stage.publish()
    assert order.complaints(tmp_path / "export") == []


def test_a_lease_is_on_the_disk_when_it_is_taken(order, tmp_path) -> None:
    lease = Lease.take(tmp_path)
    assert order.is_on_disk(lease.path) and lease.token in lease.path.read_text()


def test_an_index_and_the_end_of_an_attempt_are_on_the_disk(order, tmp_path) -> None:
    """Files of a checkpoint, which a manifest vouches for, and lines for people after a failure."""
    write_index(tmp_path, CheckpointIndex("0" * 16, 1, {}), {"model/a": "{}"})
    assert order.is_on_disk(tmp_path / "index.json")
    for step in (1, 2):
        append(tmp_path, End(ended_at="2026-11-23", outcome="failed", step=step, message=""))
        assert order.is_on_disk(tmp_path / "attempts.jsonl")
    assert (tmp_path / "attempts.jsonl").read_text().count("\n") == 2

"""Copies of checkpoints at an address: verified, resumed, and nothing removed here before."""

import json
import shutil
from itertools import count
from pathlib import Path

import fsspec
import pytest
import torch

from kielo.artifact import folder_copies, remote_files
from kielo.artifact.checkpoint_inspection import check_checkpoint
from kielo.artifact.folder_copies import copy_checkpoints, download_folder, not_copied, upload_folder
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.remote_copies import RemoteCopies
from kielo.cli.main import main
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Checkpoint
from tests.object_storage import bucket

NUMBER = count()


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(remote_files, "FIRST_WAIT_SECONDS", 0.0)
    return f"memory://copies{next(NUMBER)}"


def saved(folder: Path, *steps: int, **keys) -> Path:
    checkpointer = Checkpointer(folder / "train" / "checkpoints", **keys)
    for step in steps:
        checkpointer.save(step, {"a": torch.arange(8.0) + step}, {"step": step})
    checkpointer.settle()
    checkpointer.close()
    return folder / "train" / "checkpoints"


def test_all_checkpoints_there_and_back(tmp_path, address):
    """The copies have the same bytes, a second call sends nothing, and a copy that comes back is whole."""
    checkpoints, lines = saved(tmp_path / "run", 10, 20), []
    assert copy_checkpoints(checkpoints, address, lines.append) == ["step_00000010", "step_00000020"]
    files = fsspec.filesystem("memory")
    for path in (path for path in checkpoints.rglob("*/*") if "newest" not in str(path)):
        there = address.removeprefix("memory:/") + "/" + path.relative_to(checkpoints).as_posix()
        assert files.cat_file(there) == path.read_bytes()
    sent = len(lines)
    assert copy_checkpoints(checkpoints, address, lines.append) == [] and len(lines) == sent
    back = download_folder(f"{address}/step_00000010", tmp_path / "back", lines.append)
    assert check_checkpoint(back) is None
    for path in back.iterdir():
        assert path.read_bytes() == (checkpoints / "step_00000010" / path.name).read_bytes()
    with pytest.raises(KieloError, match="step_00000010: is there already, and stays"):
        download_folder(f"{address}/step_00000010", tmp_path / "back", lines.append)


def test_an_interrupted_copy_resumes_and_has_no_manifest_before(tmp_path, address, monkeypatch):
    checkpoints, files = saved(tmp_path / "run", 10), fsspec.filesystem("memory")
    real = type(files).put_file
    sent: list[str] = []

    def cut(self, here, there, **keys):
        if len(sent) == 1:
            raise KeyboardInterrupt
        sent.append(Path(there).name)
        return real(self, here, there, **keys)

    monkeypatch.setattr(type(files), "put_file", cut)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoints(checkpoints, address, print)
    there = address.removeprefix("memory:/") + "/step_00000010"
    assert not files.exists(f"{there}/manifest.json") and len(not_copied(checkpoints, address)) == 1
    with pytest.raises(KieloError, match="has no manifest.json, so no finished copy"):
        download_folder(f"{address}/step_00000010", tmp_path / "back", print)
    again: list[str] = []
    monkeypatch.setattr(
        type(files),
        "put_file",
        lambda self, here, to, **keys: again.append(Path(to).name) or real(self, here, to),
    )
    copy_checkpoints(checkpoints, address, print)
    assert sent[0] not in again and again[-1] == "manifest.json" and not not_copied(checkpoints, address)


def test_a_copy_with_other_bytes_is_no_copy(tmp_path, address, monkeypatch):
    checkpoints, files = saved(tmp_path / "run", 10), fsspec.filesystem("memory")
    monkeypatch.setattr(type(files), "put_file", lambda self, here, to, **keys: self.pipe_file(to, b"other"))
    with pytest.raises(KieloError, match="was read back with other bytes than"):
        copy_checkpoints(checkpoints, address, print)
    assert len(not_copied(checkpoints, address)) == 1


def test_another_run_s_copies_stay(tmp_path, address):
    """They are refused. A step that the same run saved again takes the place of its own copy."""
    first, other = saved(tmp_path / "a", 10), saved(tmp_path / "b", 10)
    copy_checkpoints(first, address, print)
    with pytest.raises(KieloError, match="another step_00000010 is there, and stays. Fix: another address"):
        copy_checkpoints(other, address, print)
    with pytest.raises(KieloError, match="another step_00000010 is there"):
        upload_folder(other / "step_00000010", address, print)
    shutil.rmtree(first / "step_00000010")
    saved(tmp_path / "a", 10)
    assert copy_checkpoints(first, address, print) == ["step_00000010"]
    back = download_folder(f"{address}/step_00000010", tmp_path / "back", print)
    assert (back / "manifest.json").read_bytes() == (first / "step_00000010" / "manifest.json").read_bytes()


def test_a_copy_that_another_run_begins_is_left_alone(tmp_path, address, monkeypatch):
    """Neither run writes into the copy of the other, and one refusal stops no other checkpoint's copy."""
    first, other = saved(tmp_path / "a", 10), saved(tmp_path / "b", 10, 20)
    files = fsspec.filesystem("memory")
    real = type(files).put_file

    def cut(self, here, there, **keys):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(files), "put_file", cut)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoints(first, address, print)
    monkeypatch.setattr(type(files), "put_file", real)
    with pytest.raises(KieloError, match="another step_00000010 is there, and stays"):
        copy_checkpoints(other, address, print)
    assert [path.name for path in not_copied(other, address)] == ["step_00000010"]
    shutil.rmtree(first / "step_00000010")
    saved(tmp_path / "a", 10)  # went back, and saved other bytes
    assert copy_checkpoints(first, address, print) == ["step_00000010"]
    there = address.removeprefix("memory:/") + "/step_00000010"
    assert not files.exists(f"{there}/{folder_copies.CLAIM_NAME}")


def test_a_step_saved_again_during_its_copy_is_not_mixed(tmp_path, address, monkeypatch):
    """The copy has no manifest until all its files are of one save."""
    checkpoints, files = saved(tmp_path / "run", 10), fsspec.filesystem("memory")
    real = type(files).put_file
    sent: list[str] = []

    def save_between(self, here, there, **keys):
        real(self, here, there, **keys)
        if not sent:
            sent.append(there)
            shutil.rmtree(checkpoints / "step_00000010")
            saved(tmp_path / "run", 10)

    monkeypatch.setattr(type(files), "put_file", save_between)
    assert copy_checkpoints(checkpoints, address, print) == []
    there = address.removeprefix("memory:/") + "/step_00000010"
    assert sent and not files.exists(f"{there}/manifest.json")
    assert copy_checkpoints(checkpoints, address, print) == ["step_00000010"]
    assert download_folder(f"{address}/step_00000010", tmp_path / "back", print).is_dir()


def test_a_damaged_copy_is_not_brought_back(tmp_path, address):
    copy_checkpoints(saved(tmp_path / "run", 10), address, print)
    files = fsspec.filesystem("memory")
    there = address.removeprefix("memory:/") + "/step_00000010/rank_00000.safetensors"
    content = bytearray(files.cat_file(there))
    content[-1] ^= 1
    files.pipe_file(there, bytes(content))
    with pytest.raises(KieloError, match="the copy is damaged: rank_00000.safetensors"):
        download_folder(f"{address}/step_00000010", tmp_path / "back", print)
    assert not list((tmp_path / "back").iterdir())


class Waiting(RemoteCopies):
    """Copies that are never made."""

    def begin(self, step: int) -> None:
        pass


def test_no_checkpoint_is_removed_before_its_copy(tmp_path, address):
    copies = Waiting(tmp_path / "run" / "train" / "checkpoints", address, print)
    checkpoints = saved(tmp_path / "run", 10, 20, 30, 40, keep_newest=2, copies=copies)
    names = {path.name for path in checkpoints.glob("step_*")}
    assert names == {f"step_{step:08d}" for step in (10, 20, 30, 40)}
    copy_checkpoints(checkpoints, address, print)
    saved(tmp_path / "run", 50, keep_newest=2, copies=copies)
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_00000040", "step_00000050"}


def test_the_address_of_copies():
    for wrong, words in (("bucket", "no address"), ("s3://a:b@bucket", "name or password")):
        with pytest.raises(ValueError, match=words):
            Checkpoint(copy_to=wrong)
    assert Checkpoint(copy_to="s3://bucket/run").copy_to == "s3://bucket/run"


def test_the_verb_needs_an_address(tmp_path, capsys):
    checkpoints = saved(tmp_path / "run", 10)
    assert main(["checkpoint", "copy", str(tmp_path / "run"), "--to", str(tmp_path / "x")]) == 1
    assert "copies go to an address, or from it" in capsys.readouterr().err
    place = f"file://{tmp_path / 'there'}"
    assert main(["checkpoint", "copy", str(tmp_path / "run"), "--to", place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [f"{place}/step_00000010"]
    assert main(["checkpoint", "copy", f"{place}/step_00000010", "--to", str(tmp_path / "back")]) == 0
    assert check_checkpoint(tmp_path / "back" / "step_00000010") is None
    assert folder_copies.not_copied(checkpoints, place) == []


@pytest.mark.full
def test_a_process_copies_beside_the_training(tmp_path):
    """A failure is an alert, the next checkpoint tries again, and the end names what is not copied."""
    alerts: list[str] = []
    there = tmp_path / "there"
    there.write_text("a file where the folder should be")
    folder = tmp_path / "run" / "train" / "checkpoints"
    copies = RemoteCopies(folder, f"file://{there}", lambda step, message: alerts.append(message))
    saved(tmp_path / "run", 10, 20, 30, copies=copies)
    copies.finish(30)
    assert "could not be copied to" in alerts[0] and "tried again after the next checkpoint" in alerts[0]
    assert "not copied to" in alerts[-1] and "step_00000010, step_00000020, step_00000030" in alerts[-1]
    there.unlink()
    alerts.clear()
    saved(tmp_path / "run", 40, copies=copies)
    copies.finish(40)
    assert not alerts and len(list(there.glob("step_*/manifest.json"))) == 4


@pytest.mark.full
def test_copies_in_a_bucket_of_s3(tmp_path, monkeypatch):
    with bucket(monkeypatch, "copies"):
        checkpoints = saved(tmp_path / "run", 10)
        assert copy_checkpoints(checkpoints, "s3://copies/run", print) == ["step_00000010"]
        back = download_folder("s3://copies/run/step_00000010", tmp_path / "back", print)
        assert check_checkpoint(back) is None

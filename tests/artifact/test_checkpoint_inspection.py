"""A checkpoint is found, described and listed as a person counts it."""

import json
from importlib import metadata

import pytest

from kielo.artifact import checkpoint_inspection
from kielo.artifact.checkpoint_folder import FaultyCheckpoint, fault_of_reading
from kielo.artifact.checkpoint_inspection import (
    checkpoints_folder,
    describe_checkpoint,
    describe_tensors,
    find_checkpoints,
    find_faults,
    list_checkpoints,
    newest_checkpoint,
    newest_complete,
    newest_whole,
    refuse_no_checkpoint,
    state_after_verification,
)
from kielo.recipe.errors import KieloError
from tests.artifact.small_checkpoint import checkpoint
from tests.bar import bars_of


def test_a_checkpoint_is_described(tmp_path) -> None:
    """Parts by dtype with elements and bytes; tied tensors once; files with their sizes."""
    of_run = tmp_path / "run" / "train" / "checkpoints"
    first = checkpoint(of_run / "step_00000001", tokens=10, loss=2.5)
    second = checkpoint(of_run / "step_00000002", 2)
    told = describe_checkpoint(first)
    assert told["parts"] == [
        {"part": "model", "dtype": "BF16", "tensors": 2, "elements": 10, "bytes": 20},
        {"part": "model", "dtype": "F32", "tensors": 1, "elements": 5, "bytes": 20},
        {"part": "optimiser", "dtype": "BOOL", "tensors": 1, "elements": 7, "bytes": 7},
        {"part": "optimiser", "dtype": "F8_E4M3", "tensors": 1, "elements": 6, "bytes": 6},
    ]
    shown = ("state", "step", "tokens", "samples", "loss", "save_id", "recipe")
    assert {key: told[key] for key in shown} == {
        "state": "complete", "step": 1, "tokens": 10, "samples": None, "loss": 2.5, "save_id": "0" * 16,
        "recipe": None,
    }  # fmt: skip
    assert told["files"] == {
        path.name: path.stat().st_size for path in first.iterdir() if path.name != "manifest.json"
    }
    rows = describe_tensors(first)
    assert rows[0] == {"name": "model/a", "dtype": "BF16", "shape": [3, 2], "chunks": 2, "tied_to": None}
    assert rows[-1] == {"name": "model/tied", "dtype": "F32", "shape": [5], "chunks": 1, "tied_to": "model/b"}
    (of_run / "newest").symlink_to("step_00000002")
    for place in (tmp_path / "run", tmp_path / "run" / "train", of_run):
        assert checkpoints_folder(place) == of_run and find_checkpoints(place) == [second, first]
    assert find_checkpoints(first) == [first] and find_checkpoints(of_run / "newest") == [second]
    with pytest.raises(
        KieloError, match="neither a checkpoint nor a run folder with checkpoints. Fix: a folder"
    ):
        find_checkpoints(tmp_path)
    with pytest.raises(
        KieloError, match="not the folder of a checkpoint. Fix: one that `kielo checkpoint list RUN` names"
    ):
        refuse_no_checkpoint(tmp_path)
    refuse_no_checkpoint(first)
    size = sum(path.stat().st_size for path in first.iterdir())
    for checksums, state in ((True, "verified"), (False, "complete")):
        row = list_checkpoints(of_run, checksums)[1]
        assert row.pop("written_at").endswith("+00:00")
        assert row == {
            "name": first.name,
            "step": 1,
            "tokens": 10,
            "loss": 2.5,
            "bytes": size,
            "state": state,
        }
    (second / "index.json").unlink()
    assert newest_whole([second, first]) == first and newest_whole([second]) == second
    assert list_checkpoints(of_run)[0]["state"] == "damaged: index.json is missing"
    damaged, unreadable = (
        fault_of_reading("a", FileNotFoundError()),
        fault_of_reading("b", OSError(5, "broken")),
    )
    assert state_after_verification([]) == "verified"
    assert state_after_verification([unreadable, damaged]).startswith(
        "damaged: a is missing; b: broken (EIO)"
    )


def test_all_faults_are_found_with_a_bar_of_bytes(tmp_path, monkeypatch) -> None:
    """One for each file of each checkpoint; one without a manifest has that fault, and adds no bytes."""
    bars = bars_of(monkeypatch, checkpoint_inspection)
    paths = [checkpoint(tmp_path / f"step_0000000{step}", step) for step in (1, 2, 3)]
    sizes = {path: sum(file.stat().st_size for file in path.iterdir() if "manifest" not in file.name)
             for path in paths}  # fmt: skip
    (paths[1] / "rank_00000.safetensors").write_bytes(b"short")
    (paths[1] / "index.json").unlink()
    (paths[2] / "manifest.json").unlink()
    found = find_faults(paths)
    assert {path: [str(fault) for fault in faults] for path, faults in found.items()} == {
        paths[0]: [],
        paths[1]: [
            "damaged: index.json is missing",
            "damaged: rank_00000.safetensors is 5 bytes long instead of "
            f"{(paths[0] / 'rank_00000.safetensors').stat().st_size}",
        ],
        paths[2]: ["damaged: manifest.json is missing: the save did not finish"],
    }
    (bar,) = bars
    total = sizes[paths[0]] + sizes[paths[1]]
    assert sum(bar.updates) == total and len(bar.updates) == 4
    assert bar.options == {
        "total": total, "unit": "B", "unit_scale": True, "desc": "verifying", "disable": None,
    }  # fmt: skip


def test_a_damaged_checkpoint_is_known_by_its_name(tmp_path) -> None:
    """Also without an index; a link to one is called by the name that it leads to; a file is none."""
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "newest").symlink_to("step_00000004")
    assert find_checkpoints(tmp_path / "step_00000004") == [tmp_path / "step_00000004"]
    assert find_checkpoints(tmp_path / "newest") == [tmp_path.resolve() / "step_00000004"]
    (tmp_path / "step_00000005").touch()
    for name in ("other", "step_00000005", "gone"):
        with pytest.raises(KieloError, match=f"{name}: not the folder of a checkpoint"):
            refuse_no_checkpoint(tmp_path / name)


def test_the_newest_whole_checkpoint_of_a_run(tmp_path) -> None:
    """Newer damaged ones are told; one that cannot be read or is of another version is not passed over."""
    folder = tmp_path / "train" / "checkpoints"
    none = f"^{folder} has no complete checkpoint. Fix: run the train stage first$"
    with pytest.raises(KieloError, match=none):
        newest_checkpoint(tmp_path)
    first, second, third = (checkpoint(folder / f"step_0000000{step}", step) for step in (1, 2, 3))
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warnings.append) == third and warnings == []
    for path in (third, second):
        (path / "index.json").unlink()
    told = [f"checkpoint {path} is damaged: index.json is missing" for path in (third, second)]
    assert newest_complete(folder) == (first, told)
    assert newest_checkpoint(tmp_path) == first == newest_checkpoint(tmp_path, warnings.append)
    assert warnings == told
    content = json.loads((third / "manifest.json").read_text())
    (third / "manifest.json").write_text(json.dumps(content | {"version": 9, "xxh3_128": "other"}))
    with pytest.raises(
        FaultyCheckpoint, match="step_00000003 is of another version: manifest.json is of version 9, wr"
    ):
        newest_checkpoint(tmp_path)
    (third / "manifest.json").unlink()
    (first / "index.json").unlink()
    with pytest.raises(
        KieloError, match=r"has no complete checkpoint \(checkpoint .*3 is damaged: .*; checkpoint .*2 is"
    ):
        newest_checkpoint(tmp_path, warnings.append)
    assert list_checkpoints(folder)[0] == {
        "name": "step_00000003", "step": 3, "tokens": None, "loss": None, "written_at": None,
        "bytes": (third / "rank_00000.safetensors").stat().st_size,
        "state": "damaged: manifest.json is missing: the save did not finish",
    }  # fmt: skip


def test_the_facts_of_a_checkpoint(tmp_path) -> None:
    """Its identity and average, who wrote it, and a fault of the index itself."""
    identity = {"format_version": 2, "name": "murre", "model": {"x": 1}}
    source = {"name": "step_00000002", "step": 2, "save_id": "2"}
    path = checkpoint(tmp_path / "step_00000001", samples=6, identity=identity, averaged_from=[source])
    told = describe_checkpoint(path)
    assert (told["checkpoint"], told["recipe"], told["model"]) == (str(path), "murre", {"x": 1})
    assert (told["averaged_from"], told["samples"]) == ([source], 6)
    assert (
        told["written_at"].endswith("+00:00") and told["written_by"] == f"kielo {metadata.version('kielo')}"
    )
    index = path / "index.json"
    index.write_bytes(index.read_bytes().replace(b'"step": 1', b'"step": 8'))
    assert describe_checkpoint(path)["state"].startswith(
        "damaged: index.json is not what was written: block 0 ("
    )

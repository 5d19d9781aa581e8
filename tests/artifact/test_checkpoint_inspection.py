"""A checkpoint is found, described and listed as a person counts it."""

import pytest

from kielo.artifact.checkpoint_faults import fault_of_reading
from kielo.artifact.checkpoint_inspection import (
    checkpoints_folder,
    describe_checkpoint,
    describe_tensors,
    find_checkpoints,
    newest_whole,
    refuse_no_checkpoint,
    state_after_verification,
)
from kielo.artifact.whole_checkpoints import list_checkpoints
from kielo.recipe.errors import KieloError
from tests.artifact.small_checkpoint import checkpoint


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
    with pytest.raises(KieloError, match="neither a checkpoint nor a run folder with checkpoints; give"):
        find_checkpoints(tmp_path)
    with pytest.raises(KieloError, match="not the folder of a checkpoint; `kielo checkpoint list RUN` names"):
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

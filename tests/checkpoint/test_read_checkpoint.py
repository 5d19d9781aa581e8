"""Whole tensors of a checkpoint, and complaints that list eight names."""

import pytest
import torch

from kielo.artifact.checkpoint_index import CheckpointIndex, read_index
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.read_checkpoint import fill, missing_names, read_tensors, some_names
from kielo.recipe.errors import KieloError


def test_eight_names_and_how_many_more() -> None:
    names = list("abcdefghij")
    assert some_names(names[:8]) == "a, b, c, d, e, f, g, h"
    assert some_names(names[:9]) == "a, b, c, d, e, f, g, h and 1 more"
    assert some_names(names) == "a, b, c, d, e, f, g, h and 2 more" and some_names([]) == ""
    index = CheckpointIndex("0", 1, {}, unread=tuple(names))
    assert missing_names("c", index, []) is None
    assert missing_names("c", index, ["x", "y"]) == (
        "checkpoint c does not hold x, y; it holds a, b, c, d, e, f, g, h and 2 more"
    )


def test_tensors_of_one_process(tmp_path) -> None:
    """All or those named, tied ones too, with their dtypes; a damaged file only where it is needed."""
    checkpointer = Checkpointer(tmp_path)
    first = torch.arange(6.0).view(2, 3)
    tensors = {
        "model/a": first,
        "model/tied": first,
        "model/n": torch.tensor(7),
        "model/none": torch.zeros(0, 4),
    }
    checkpointer.save(5, tensors, {"x": 1})
    path = checkpointer.settle()
    found = read_tensors(path)
    assert set(found) == set(tensors) and all(found[name].equal(one) for name, one in tensors.items())
    assert found["model/n"].dtype == torch.int64 and list(read_tensors(path, ["model/tied"])) == [
        "model/tied"
    ]
    assert read_tensors(path, iter(["model/n"]))["model/n"].item() == 7
    with pytest.raises(KieloError, match="does not hold model/z; it holds model/a"):
        read_tensors(path, ["model/z"])
    file = path / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(
        KieloError, match="step_00000005 is damaged: rank_00000.safetensors is not what was written"
    ):
        read_tensors(path, ["model/a"])
    assert read_tensors(path, []) == {} and read_index(path).aliases == {"model/tied": "model/a"}


def test_what_a_checkpoint_cannot_fill(tmp_path) -> None:
    """Before any tensor changes: another shape, or numbers that the tensor's dtype cannot hold."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, {"a": torch.ones(2, 3), "b": torch.ones(2).bfloat16()}, {"x": 1})
    path = checkpointer.settle()
    for wrong, told in (
        ({"b": torch.zeros(2, dtype=torch.float16)}, "b is stored as BF16, which torch.float16 cannot hold"),
        ({"a": torch.zeros(2, 3).bfloat16()}, "a is stored as F32, which torch.bfloat16 cannot hold"),
        ({"a": torch.zeros(3, 2)}, "a has the shape [2, 3], not [3, 2] as here"),
    ):
        tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(2)} | wrong
        with pytest.raises(KieloError) as caught:
            fill(path, tensors, Agreement())
        assert str(caught.value) == f"checkpoint {path}: {told}"
        assert all(not tensor.any() for tensor in tensors.values())
    wide = {"a": torch.zeros(2, 3).double(), "b": torch.zeros(2)}
    assert fill(path, wide, Agreement()) == {"x": 1} and all(tensor.eq(1).all() for tensor in wide.values())
    (path / "rank_00000.safetensors").unlink()
    with pytest.raises(
        KieloError, match="step_00000005 cannot be read: .*No such file or directory.* on rank 0"
    ):
        fill(path, wide, Agreement())

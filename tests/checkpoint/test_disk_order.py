"""A checkpoint that has its name is on the disk, and so is the name: saves, averages, copies in memory."""

import os
from pathlib import Path

import pytest
import torch

from kielo.checkpoint import node_memory
from kielo.checkpoint.average import average
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.publish import point_newest, publish
from tests.disk_order import DiskOrder


@pytest.fixture
def order(monkeypatch) -> DiskOrder:
    return DiskOrder(monkeypatch)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model/a": torch.full((3, 4), value), "model/b": torch.full((2,), value).bfloat16()}


def saved(folder: Path, *steps: int) -> Checkpointer:
    checkpointer = Checkpointer(folder)
    for step in steps:
        checkpointer.save(step, tensors(float(step)), {"step": step})
        checkpointer.settle()
    return checkpointer


def test_a_save(order, tmp_path) -> None:
    """Rank files, index and manifest, then the name; also where the step exists; `newest` follows it."""
    saved(tmp_path, 100, 200, 200)
    for step in ("step_00000100", "step_00000200"):
        assert order.complaints(tmp_path / step) == []
    assert order.events[-2:] == [f"name {tmp_path / 'newest'}", f"fsync {tmp_path}"]
    before = order.events.count(f"fsync {tmp_path}")
    point_newest(tmp_path / "step_00000100")
    assert order.events.count(f"fsync {tmp_path}") == before + 1


def test_a_folder_that_takes_the_name_of_a_step(order, tmp_path) -> None:
    """`publish` asks no more than that the files are on the disk, and leaves nothing to the next call."""
    partial, final = tmp_path / "step_00000001.0.partial", tmp_path / "step_00000001"
    for text in ("one", "two"):
        partial.mkdir()
        with open(partial / "a", "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        publish(partial, final)
        assert order.complaints(final) == [] and (final / "a").read_text() == text


def test_an_average(order, tmp_path) -> None:
    saved(tmp_path / "run", 1, 2)
    to = average(sorted((tmp_path / "run").glob("step_*")), tmp_path / "averages" / "both")
    assert order.complaints(to) == [] and f"fsync {tmp_path}" in order.events


def test_a_copy_in_memory_that_becomes_a_checkpoint(order, tmp_path, monkeypatch) -> None:
    """The copy itself need not be on a disk; the checkpoint that a restart makes of it is."""
    monkeypatch.setattr(node_memory, "MEMORY_FOLDER", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.use_memory(0)
    checkpointer.save(100, tensors(1.0), {"step": 100})
    checkpointer.copy_to_memory(110, tensors(2.0), {"step": 110})
    checkpointer.close()
    restarted = Checkpointer(tmp_path / "run")
    restarted.use_memory(0)
    assert restarted.newest() == tmp_path / "run" / "step_00000110"
    assert order.complaints(tmp_path / "run" / "step_00000110") == []

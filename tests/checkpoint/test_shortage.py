"""Room for the next save, as it is asked for while nothing is saved."""

import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kielo.artifact.checkpoint_index import read_index
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.saving import room_needed
from kielo.recipe.errors import KieloError

TENSORS = {"model/a": torch.ones(2, 3), "model/b": torch.ones(5).bfloat16()}


def test_room_for_the_next_save(tmp_path, monkeypatch) -> None:
    """On the disk of the folder or of one above it that is there; not while a save is under way."""
    checkpointer = Checkpointer(tmp_path / "a" / "b")
    checkpointer.reserve(TENSORS)
    num_bytes, num_files = room_needed(checkpointer.planner.whole, 0)
    assert num_bytes > 24 + 10 and num_files == 5
    free, asked = [num_bytes + num_files * 4096], []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(Path(path))
        return SimpleNamespace(f_bavail=free[0], f_frsize=1, f_files=0, f_favail=0)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs)
        assert checkpointer.shortage() is None
        free[0] -= 1
        assert checkpointer.shortage().startswith(
            f"disk full: it needs about {free[0] + 1:,} bytes, {free[0]:,} are"
        )
    assert asked == [tmp_path] * 2
    published, may_go_on = threading.Event(), threading.Event()

    def permit() -> None:
        """Asked before the save, and again by the thread that writes, before it is published."""
        if threading.current_thread() is not threading.main_thread():
            published.set()
            may_go_on.wait(60)

    checkpointer = Checkpointer(tmp_path / "c", permit=permit)
    checkpointer.save(1, TENSORS, {})
    assert published.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs)
        free[0] = 0
        assert checkpointer.shortage() is None
        may_go_on.set()
        checkpointer.settle()
        assert checkpointer.shortage().startswith("disk full")


def test_a_save_is_refused_before_it_is_written(tmp_path, monkeypatch) -> None:
    """By one byte; the state as JSON counts too, here 8 bytes. A save id has sixteen figures of base 16."""
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.reserve(TENSORS)
    num_bytes, num_files = room_needed(checkpointer.planner.whole, 8)
    enough = num_bytes + num_files * 4096
    for free_bytes in (enough - 1, enough):
        disk = SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_files=0, f_favail=0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path, disk=disk: disk)
            checkpointer.save(1, TENSORS, {"x": 1})
            if free_bytes < enough:
                told = f"was not saved .*: disk full: it needs about {enough:,} bytes, {free_bytes:,} are"
                with pytest.raises(KieloError, match=told):
                    checkpointer.settle()
                assert list((tmp_path / "run").iterdir()) == []
            else:
                assert checkpointer.settle() == tmp_path / "run" / "step_00000001"
    assert re.fullmatch("[0-9a-f]{16}", read_index(tmp_path / "run" / "step_00000001").save_id)

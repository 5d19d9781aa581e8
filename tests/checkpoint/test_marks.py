"""Marks that keep a checkpoint from being pruned while a process without the run's lease reads it."""

import os
import time
from pathlib import Path

from kielo.artifact.checkpoint_marks import EXPIRY_SECONDS, kept_from_pruning
from kielo.checkpoint.publish import prune
from tests.checkpoint.test_by_hand import names_in, steps_in


def test_pruning_leaves_what_is_read_until_the_next_save(tmp_path: Path) -> None:
    paths = steps_in(tmp_path, 1, 2, 3, 4)
    with kept_from_pruning(paths[0]) as problem:
        assert not problem
        prune(paths[3], 1, 0)
        assert [path.exists() for path in paths] == [True, False, False, True]
    assert names_in(tmp_path) == ["step_00000001", "step_00000004"]
    prune(paths[3], 1, 0)
    assert names_in(tmp_path) == ["step_00000004"]


def test_a_mark_lives_by_its_beat(tmp_path: Path) -> None:
    """A mark that its reader renews keeps; an old mark keeps nothing, and goes."""
    paths = steps_in(tmp_path, 1, 2)
    with kept_from_pruning(paths[0], beat_seconds=0.005):
        (mark,) = tmp_path.glob("*.in_use")
        os.utime(mark, (0, 0))
        limit = time.monotonic() + 10
        while mark.stat().st_mtime == 0 and time.monotonic() < limit:
            time.sleep(0.005)
        prune(paths[1], 1, 0)
        assert paths[0].exists()
    mark.touch()
    old = time.time() - EXPIRY_SECONDS - 1
    os.utime(mark, (old, old))
    prune(paths[1], 1, 0)
    assert names_in(tmp_path) == ["step_00000002"]


def test_a_folder_without_room_for_a_mark(tmp_path: Path) -> None:
    with kept_from_pruning(tmp_path / "gone" / "step_00000001") as problem:
        assert problem == "No such file or directory (ENOENT)"

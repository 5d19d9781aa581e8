"""Files that ask a running training to save or stop, and that the ranks leave together."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kielo.artifact.checkpoint_folder import step_folders
from kielo.ranks.world import leave_together, start_world
from kielo.recipe.errors import KieloError
from kielo.train import signals as triggers_module
from kielo.train.run import train
from kielo.train.signals import Triggers
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


def test_each_touch_of_save_is_answered_once(tmp_path: Path) -> None:
    """A file from before the start asks for nothing; a later touch does, once; stop asks until it is gone."""
    (tmp_path / "triggers").mkdir()
    save = tmp_path / "triggers" / "save"
    save.touch()
    triggers = Triggers(tmp_path, look_seconds=0)
    assert triggers.look() == (False, False)
    os.utime(save, ns=(1, 1))
    assert [triggers.look(), triggers.look()] == [(False, True), (False, False)]
    triggers.refuse_start()
    (tmp_path / "triggers" / "stop").touch()
    assert [triggers.look(), triggers.look()] == [(True, False), (True, False)]
    with pytest.raises(
        KieloError, match="triggers/stop: asks this run to stay stopped. Fix: remove that file"
    ):
        triggers.refuse_start()


def test_files_are_looked_at_every_five_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on; what was asked for in between is answered at the next look."""
    now = [100.0]
    monkeypatch.setattr(triggers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    triggers = Triggers(tmp_path)
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "stop").touch()
    (tmp_path / "triggers" / "save").touch()
    found = []
    for seconds in (0.0, 4.9, 0.1, 4.0):
        now[0] += seconds
        found.append(triggers.look())
    assert found == [(True, True), (False, False), (True, False), (False, False)]


def test_a_run_saves_and_stops_when_files_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Touched after step 2 and made after step 4: checkpoints of both; the run waits for the file to go."""
    torch.set_num_threads(1)
    write_tokens(tmp_path / "tokens")
    asked = iter([(False, False), (False, True), (False, False), (True, False)])
    monkeypatch.setattr(Triggers, "look", lambda self: next(asked))
    outcome = train(resolve(tmp_path, every_steps=100))
    assert (outcome.outcome, outcome.step) == ("requeue", 4)
    assert [path.name[-2:] for path in step_folders(tmp_path / "train" / "checkpoints")] == ["04", "02"]
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "stop").touch()
    with pytest.raises(KieloError, match="triggers/stop"):
        train(resolve(tmp_path))


def on_rank(folder: Path) -> bool:
    world = start_world(60, "cpu")
    if world.rank == 0:
        time.sleep(0.3)
        (folder / "outcome").touch()
    leave_together(30)
    return (folder / "outcome").exists()


def test_no_rank_leaves_before_rank_0_has_written(tmp_path: Path) -> None:
    """A launcher ends all ranks when one exits with a code: rank 0's last words would be lost."""
    assert run_ranks(on_rank, 2, tmp_path) == [True, True]

"""Drills of disaster: kills all along a save, damage of every kind, a disk that fills up.

No accident costs more than the newest checkpoint, and none is loaded without a message.
"""

import builtins
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from kielo.artifact import checkpoint_folder
from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.checkpoint_inspection import list_checkpoints, newest_complete
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.ranks.world import make_host_group, start_world
from kielo.recipe.errors import KieloError
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks

CALLS = ("open", "fsync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir")


def state(value: float) -> dict[str, torch.Tensor]:
    """24 matrices and a vector of bf16, each full of `value`."""
    tensors = {f"model/{number}": torch.full((16, 8), value) for number in range(24)}
    return tensors | {"model/norm": torch.full((5,), value, dtype=torch.bfloat16)}


def save(folder: Path, *steps: int, keep_newest: int = 2) -> Path:
    """Checkpoints whose tensors are full of their step's number."""
    checkpointer = Checkpointer(folder, keep_newest)
    for step in steps:
        checkpointer.save(step, state(float(step)), {"step": step})
    return checkpointer.settle()


class Killer:
    """Counts calls of all threads that change the file system; kills the process at call number `at`."""

    def __init__(self, at: int | None):
        self.calls, self._at, self._one = 0, at, threading.Lock()
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        original = builtins.open

        def open_counted(file, mode="r", *args, **kwargs):
            if "r" in mode:
                return original(file, mode, *args, **kwargs)
            return _Written(self._counted(original)(file, mode, *args, **kwargs), self)

        builtins.open = open_counted

    def count(self) -> None:
        with self._one:
            if self.calls == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1

    def _counted(self, function):
        def call(*args, **kwargs):
            self.count()
            return function(*args, **kwargs)

        return call


class _Written:
    """An open file whose writes are counted, and reach the file one by one."""

    def __init__(self, file, killer: Killer):
        self._file, self._killer = file, killer

    def write(self, data):
        self._killer.count()
        written = self._file.write(data)
        self._file.flush()
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def save_and_die(folder: Path, step: int, at: int | None) -> int:
    """Calls that the save made, if it survives."""
    killer = Killer(at)
    save(folder, step)
    return killer.calls


def survivors(folder: Path, *steps: int) -> int:
    """Returns the step restored after a kill: one of `steps`; a next save then leaves no litter."""
    checkpointer = Checkpointer(folder)
    path = checkpointer.newest()
    assert checkpointer.warnings == [] and newest_complete(folder) == (path, [])
    tensors = state(0.0)
    step = checkpointer.restore(path, tensors)["step"]
    assert step in steps and all(tensor.eq(step).all() for tensor in tensors.values())
    save(folder, 900)
    assert sorted(entry.name for entry in folder.iterdir()) == ["newest", path.name, "step_00000900"]
    assert (folder / "newest").resolve().name == "step_00000900"
    return step


@pytest.mark.parametrize(("step", "points"), [(300, 16), (200, 8)])
def test_a_kill_anywhere_in_a_save_leaves_a_whole_checkpoint(tmp_path, step, points):
    """A kill at any call of a save restores the old step or the new one, also for a step that exists."""
    save(tmp_path / "before", 100, 200)

    def attempt(at: int | None) -> list[int]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "run", symlinks=True)
        return run_ranks(save_and_die, 1, tmp_path / "run", step, at, timeout_seconds=30)

    calls = attempt(None)[0]
    assert calls >= points
    came_back = Counter()
    for number in range(points):
        with pytest.raises(RuntimeError, match="ended without a word .killed"):
            attempt(number * calls // points)
        came_back[survivors(tmp_path / "run", 200, step)] += 1
    assert set(came_back) == {200, step}, "some kills came before and some after it was published"


def save_together_and_die(folder: Path, victim: int, at: int) -> None:
    world = start_world(30, "cpu")
    checkpointer = Checkpointer(folder, group=make_host_group(world, "checkpoint", 30))
    if world.rank == victim:
        Killer(at)
    checkpointer.save(300, state(300.0), {"step": 300})
    checkpointer.settle()


@pytest.mark.parametrize(("victim", "at"), [(0, 1), (0, 12), (0, 22), (1, 0), (1, 13)])
def test_a_rank_killed_in_a_save_of_two_leaves_a_whole_checkpoint(tmp_path, victim, at):
    """The other rank ends with an error and publishes no half; earlier checkpoints stay whole."""
    save(tmp_path, 100, 200)
    with pytest.raises(RuntimeError, match=rf"rank {victim}\] ended without a word \(killed"):
        run_ranks(save_together_and_die, 2, tmp_path, victim, at, timeout_seconds=30)
    assert survivors(tmp_path, 200, 300) == 200


def _flip(content: bytearray, chance: random.Random, _: bytes) -> bytes:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def _zero(content: bytearray, chance: random.Random, _: bytes) -> bytes:
    start = chance.choice([place for place, byte in enumerate(content) if byte])
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    return content


def _cut(content: bytearray, chance: random.Random, _: bytes) -> bytes:
    return content[: chance.randrange(len(content))]


def _remove(content: bytearray, chance: random.Random, _: bytes) -> None:
    return None


def _swap(content: bytearray, chance: random.Random, older: bytes) -> bytes:
    return older


DAMAGES = (_flip, _zero, _cut, _remove, _swap)


@pytest.mark.parametrize("damages", [100, pytest.param(500, marks=pytest.mark.full)])
def test_five_hundred_damages_are_noticed_and_named(tmp_path, monkeypatch, damages):
    """Every reader names the damaged file of the newest checkpoint, and the older one is used."""
    monkeypatch.setattr(checkpoint_folder, "BLOCK_BYTES", 1000)
    before, run = tmp_path / "before", tmp_path / "run"
    save(before, 100, 200)
    names = sorted(path.name for path in (before / "step_00000200").iterdir())
    assert names == ["index.json", "manifest.json", "rank_00000.safetensors"]
    chance, done = random.Random(11), Counter()
    for number in range(damages):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(before, run, symlinks=True)
        damage, name = DAMAGES[number % len(DAMAGES)], chance.choice(names)
        path = run / "step_00000200" / name
        whole, older = path.read_bytes(), (run / "step_00000100" / name).read_bytes()
        content = damage(bytearray(whole), chance, older)
        if content is None:
            path.unlink()
        else:
            assert content != whole
            path.write_bytes(content)

        for read in (read_tensors, lambda path: Checkpointer(run).restore(path, state(0.0))):
            with pytest.raises(KieloError, match=name):
                read(path.parent)
        found, warnings = newest_complete(run)
        assert found == run / "step_00000100" and len(warnings) == 1 and name in warnings[0]
        checkpointer = Checkpointer(run)
        assert checkpointer.newest() == found and read_plain(found) == {"step": 100}
        assert (
            len(checkpointer.warnings) == 1
            and name in checkpointer.warnings[0]
            and "step_00000200" in checkpointer.warnings[0]
        )
        assert sorted(entry.name for entry in run.iterdir()) == [
            "newest",
            "step_00000100",
            "step_00000200.damaged",
        ]
        assert (
            (run / "newest").resolve() == found
            and checkpointer.newest() == found
            and not checkpointer.warnings
        )
        done[damage, name] += 1
    assert len(done) == len(DAMAGES) * len(names) and done.total() == damages


def test_a_whole_checkpoint_under_another_name_is_refused(tmp_path):
    """Files of an older checkpoint in the newest one's folder are noticed, though they agree."""
    save(tmp_path, 100, 200)
    for path in (tmp_path / "step_00000100").iterdir():
        shutil.copy(path, tmp_path / "step_00000200")
    found, warnings = newest_complete(tmp_path)
    assert (
        found == tmp_path / "step_00000100" and "manifest of another checkpoint, of step 100" in warnings[0]
    )


def fill(folder: Path, times: FaultTimes) -> None:
    """Saves 0.8 MiB each step and keeps all, on a disk too small for them, until there is room again."""
    alerts: dict[int, str] = {}
    asked: dict[int, float] = {}

    def alert(step: int, message: str) -> None:
        alerts[step] = message
        times.note("planted", asked[step])
        times.note("found")

    checkpointer = Checkpointer(folder, keep_newest=100, on_alert=alert)
    tensor, steps = torch.zeros(200_000), 0
    for step in range(1, 13):
        tensor += 1  # training
        steps += 1
        if alerts:
            times.note("next_step")
        asked[step] = time.monotonic()
        checkpointer.save(step, {"model/a": tensor}, {"step": step})
    with pytest.raises(KieloError) as last:
        checkpointer.settle()
    assert steps == 12 and alerts[12] == str(last.value)
    saved = [row["step"] for row in list_checkpoints(folder, checksums=True) if row["state"] == "verified"]
    assert saved == sorted(set(range(1, 13)) - set(alerts), reverse=True) and 1 < len(saved) < 12
    assert sorted(path.name for path in folder.iterdir()) == [
        "newest",
        *(f"step_{step:08d}" for step in saved[::-1]),
    ]
    shutil.rmtree(folder / "step_00000001")
    checkpointer.save(13, {"model/a": tensor}, {"step": 13})
    assert read_tensors(checkpointer.settle())["model/a"].eq(12).all()
    print(alerts[12])


@pytest.mark.parametrize(("options", "words"), [
    ("size=6m", ("disk full", "needs about 8", "bytes, ", "are free", "keep_newest")),
    pytest.param(
        "size=60m,nr_inodes=40", ("too few inodes", "needs 5, ", "are free", "keep_newest"),
        marks=pytest.mark.full,
    ),
])  # fmt: skip
def test_a_disk_that_fills_stops_no_training(tmp_path, options, words, fault_times):
    """A full small file system: the alert gives bytes needed and free, old checkpoints stay whole.

    Room that is freed is used again.
    """
    script = (
        "import sys, pathlib; from tests.checkpoint.test_drills import fill, FaultTimes; "
        "fill(pathlib.Path(sys.argv[1]), FaultTimes(pathlib.Path(sys.argv[2])))"
    )
    mount = (
        f'mount -t tmpfs -o {options} tmpfs "$1" 2>/dev/null || exit 77; '
        'exec "$2" -c "$3" "$1/checkpoints" "$4"'
    )
    programs = [str(tmp_path), sys.executable, script, str(fault_times.folder)]
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", *programs]
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    ):
        pytest.skip("no file system may be mounted here")
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if outcome.returncode == 77:
        pytest.skip("no file system may be mounted here")
    assert outcome.returncode == 0, outcome.stderr
    assert all(word in outcome.stdout for word in ("step_00000012 was not saved", *words)), outcome.stdout

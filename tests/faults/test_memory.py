"""A training that uses up the memory of its control group: it saves and stops before the kernel ends it."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kielo.artifact.checkpoint_folder import step_folders
from kielo.train import build
from kielo.train.feed import Feed
from kielo.train.run import train
from kielo.train.watch.resources import Resources, host_memory
from tests.fault_times import FaultTimes, and_watch
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

MIB = 2**20
LIMIT, LEFT, LEAK = 384 * MIB, 80 * MIB, 4 * MIB  # bytes of the group, left in it at first, lost each step
STEPS = 40
LIMITS = ("memory.limit_in_bytes", "memory.max")  # names of its file, version 1 and 2


@pytest.fixture
def group() -> Iterator[Path]:
    """The folder of a control group (version 1 or 2) with a limit of memory."""
    made = _group_folder()
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"needs root and control groups: {error}")
    try:
        limit = next((made / name for name in LIMITS if (made / name).exists()), None)
        if limit is None:
            pytest.skip("control groups do not limit memory here")
        limit.write_text(str(LIMIT))
        yield made
    finally:
        made.rmdir()


def _group_folder() -> Path:
    """Returns where a group inside of this process's own may be made; one of version 2 beside it, as a group
    that holds processes has none with limits inside.
    """
    name = f"kielo_{os.getpid()}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory", path.lstrip("/"), name)
    return Path("/sys/fs/cgroup", path.lstrip("/")).parent / name


def leak(folder: Path, group: Path, is_watched: bool, times: FaultTimes) -> str:
    """Trains in a group that is nearly full, and keeps more memory at every step; returns the message of the
    outcome.
    """
    (group / "cgroup.procs").write_text(str(os.getpid()))
    take, kept = Feed.take, []

    def take_and_keep(feed: Feed, step: int):
        times.note("planted")
        kept.append(b"x" * (LEAK if kept else host_memory().available - LEFT))
        return take(feed, step)

    Feed.take = take_and_keep
    build.Resources = partial(Resources, look_seconds=0 if is_watched else 3600)
    return train(resolve(folder, total_steps=STEPS)).message


def test_a_leak_ends_in_a_save(tmp_path, group, fault_times):
    """The outcome names the group's limit; the same command, without the leak, goes on from the save."""
    write_tokens(tmp_path / "tokens")
    (message,) = run_ranks(leak, 1, tmp_path, group, True, fault_times)
    fault_times.note("found")
    assert "of 0.4 GB (the job's limit (cgroup)) are taken" in message, message
    (saved,) = step_folders(tmp_path / "train" / "checkpoints")
    assert f"saved as {saved}" in message and int(saved.name[-3:]) < STEPS
    again = resolve(tmp_path, total_steps=STEPS)
    assert run_ranks(and_watch, 1, fault_times, train, again)[0].outcome == "finished"


def test_the_kernel_ends_one_that_does_not_look(tmp_path, group, fault_times):
    write_tokens(tmp_path / "tokens")
    with pytest.raises(RuntimeError, match="without a word .killed"):
        run_ranks(leak, 1, tmp_path, group, False, fault_times)
    assert step_folders(tmp_path / "train" / "checkpoints") == []

"""What a run may use up: host memory, /dev/shm and the disk; told before, and left in time."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from kielo.artifact.checkpoint_folder import step_folders
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.train import build
from kielo.train.run import train
from kielo.train.watch import resources
from kielo.train.watch.resources import HostMemory, Resources, host_memory
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

GIB = 2**30
MEMINFO = f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {6 * GIB // 1024} kB\n"


@pytest.mark.parametrize(
    ("groups", "files", "available", "owner"),
    [
        ("0::/\n", {}, 6, "the node"),
        (
            "0::/job/step\n",  # the limit is of the group around it; cache is not taken, but shmem in it is
            {
                "job/memory.max": f"{4 * GIB}\n",
                "job/memory.current": f"{3 * GIB}\n",
                "job/memory.stat": f"anon 1\nfile {2 * GIB}\nshmem {GIB}\n",
                "job/step/memory.max": "max\n",
                "job/step/memory.current": f"{GIB}\n",
                "job/step/memory.stat": "file 0\nshmem 0\n",
            },
            2,
            "cgroup",
        ),
        (
            "5:cpuset:/job\n4:cpu,memory:/job\n0::/\n",
            {
                "memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
                "memory/job/memory.stat": f"cache 5\ntotal_cache {GIB}\ntotal_shmem 0\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",  # none
                "memory/memory.usage_in_bytes": "1\n",
                "memory/memory.stat": "total_cache 0\ntotal_shmem 0\n",
            },
            2,
            "cgroup",
        ),
    ],
    ids=["node", "version 2", "version 1"],
)
def test_the_smallest_limit_counts(tmp_path, groups, files, available, owner):
    """Files as the kernel writes them (proc(5), cgroup-v2 and cgroup-v1 documents), with known sums."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (files | {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = host_memory(tmp_path)
    assert memory.available == available * GIB and owner in memory.owner


def test_this_machine_has_memory_left_and_an_unknown_one_says_nothing(tmp_path):
    memory = host_memory()
    assert 0 < memory.available < memory.limit and 0 < memory.taken_share < 1
    assert host_memory(tmp_path) is None


class Watched:
    """Resources whose readings are given; `time` is that of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shortage: Callable[[], str | None] = lambda: None):
        self.alerts: list[str] = []
        self.causes: list[str] = []
        self.time, self.available = 0.0, 0
        monkeypatch.setattr(resources.time, "monotonic", lambda: self.time)
        self.resources = Resources(
            lambda step, message: self.alerts.append(message),
            self.causes.append,
            shortage,
            is_looking=True,
            read_memory=lambda: HostMemory(self.available, 1000, "the node"),
        )

    def look(self, seconds: float, available: int) -> None:
        self.time, self.available = self.time + seconds, available
        self.resources.look(1)


def test_memory_that_is_short_but_does_not_grow_is_told_once(monkeypatch):
    """Another job may have taken it before: nothing would be won by stopping."""
    watched = Watched(monkeypatch)
    for _ in range(30):
        watched.look(5, 20)
    assert len(watched.alerts) == 1 and "98%" in watched.alerts[0] and not watched.causes
    watched.look(5, 500)
    watched.look(5, 20)  # short again: 2 % are left, and it has grown by 48 % in 5 s
    assert len(watched.alerts) == 2


def test_memory_that_grows_slowly_stops_the_run_at_the_reserve(monkeypatch):
    """0.1 % a minute: told below 10 %, stopped below 3 %."""
    watched, available = Watched(monkeypatch), 120
    while not watched.causes:
        watched.look(60, available)
        available -= 1
    assert watched.available == 29 and "97%" in watched.causes[0]
    assert ["the kernel ends the run" in alert for alert in watched.alerts] == [True, False]


def test_memory_that_grows_fast_stops_the_run_while_there_is_time_to_save(monkeypatch):
    """2 % in 5 s: at less than 10 % the last of it would be gone in 24 s; while 11 % are left nobody acts."""
    watched, left = Watched(monkeypatch), []
    for available in range(400, 0, -20):
        watched.look(5, available)
        left += [available] * bool(watched.causes)
    assert left[0] == 80


def test_what_is_said_of_memory(monkeypatch):
    """Taken, and grown since the first look; 10 % left are no alert, 9.9 % are; the reserve stops nobody."""
    monkeypatch.setattr(resources.socket, "gethostname", lambda: "nid1")
    watched = Watched(monkeypatch)
    for available in (130, 100):
        watched.look(600, available)
        assert watched.alerts == []
    for available in (99, 31, 30):
        watched.look(600, available)
    taken = "host memory of nid1: 90% of 0.0 GB (the node) are taken, 0.00 GB more than after this attempt's"
    assert len(watched.alerts) == 1 and watched.causes == []
    assert watched.alerts[0] == f"{taken} first step. When none is left, the kernel ends the run"
    watched.look(600, 29)
    assert watched.alerts[1].endswith(". The run saves and stops before the kernel ends it")
    assert watched.alerts[1] == watched.causes[0] + ". The run saves and stops before the kernel ends it"


def test_memory_that_was_taken_from_the_start_stops_nobody(monkeypatch):
    """A run that has grown by no more than the reserve, 30 of 1000, would have no more after a new start."""
    watched = Watched(monkeypatch)
    for available in (59, 29):
        watched.look(600, available)
    assert watched.causes == []
    watched.look(600, 28)
    assert len(watched.causes) == 1


@pytest.mark.parametrize(("seconds", "stops"), [(19.0, False), (20.0, True), (60.0, True), (61.0, False)])
def test_growth_is_measured_over_20_to_60_seconds(monkeypatch, seconds, stops):
    """From 90 to 60 of 1000 bytes: at that pace no byte is left after 38 to 120 s; 2 min are for a save."""
    watched = Watched(monkeypatch)
    watched.look(0, 90)
    watched.look(seconds, 60 if seconds < 60 else 59)
    assert bool(watched.causes) == stops
    watched.look(1, 95)  # memory that comes back gives all the time
    assert len(watched.causes) == stops


def test_a_look_is_taken_every_few_seconds_and_by_one_rank(monkeypatch):
    watched = Watched(monkeypatch, shortage=lambda: looks.append(1))
    looks: list[int] = []
    for _ in range(11):
        watched.look(1, 900)
    assert len(looks) == 3
    Resources(pytest.fail, pytest.fail, pytest.fail, is_looking=False).look(1)


def test_a_disk_without_room_for_the_next_save_is_told_again_only_after_it_had_room(monkeypatch):
    answers = iter(["disk full", "disk full", None, "disk full"])
    watched = Watched(monkeypatch, lambda: next(answers))
    for _ in range(4):
        watched.look(5, 900)
    assert len(watched.alerts) == 2 and watched.alerts[0].endswith("cannot be saved: disk full")


def test_shared_memory_that_is_nearly_full_is_told(monkeypatch):
    class Full:
        f_bavail, f_blocks, f_frsize = 5, 100, 4096

    watched = Watched(monkeypatch)
    watched.look(5, 900)
    monkeypatch.setattr(resources.os, "statvfs", lambda folder: Full)
    watched.look(5, 900)
    assert watched.alerts == []  # a twentieth is free
    Full.f_bavail = 4
    watched.look(5, 900)
    assert len(watched.alerts) == 1
    assert watched.alerts[0].startswith("/dev/shm") and "16,384 bytes are free" in watched.alerts[0]


def test_a_checkpointer_knows_whether_the_next_save_finds_room(tmp_path, monkeypatch):
    """Asked with the bytes and inodes that `os.statvfs` gives, before the folder exists and after a save."""
    tensors = {"weight": torch.zeros(1000)}
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.reserve(tensors)
    real = os.statvfs

    def with_free(**free: int) -> Callable[[Path], os.statvfs_result]:
        names = [name for name in dir(os.statvfs_result) if name.startswith("f_") and name != "f_fsid"]
        return lambda folder: type("Free", (), {name: getattr(real(folder), name) for name in names} | free)

    assert checkpointer.shortage() is None
    checkpointer.save(1, tensors, {})
    checkpointer.settle()
    assert checkpointer.shortage() is None
    monkeypatch.setattr(os, "statvfs", with_free(f_bavail=5, f_frsize=1024))
    assert checkpointer.shortage().startswith("disk full: it needs about 24,")  # 4,000, and five 4 KiB blocks
    monkeypatch.setattr(os, "statvfs", with_free(f_files=100, f_favail=4))
    assert checkpointer.shortage().startswith("too few inodes: it needs 5, 4 are free")
    checkpointer.close()


def of_shrinking_memory(folder: Path) -> str:
    """Trains while the memory of rank 1's node, which is full after the first look, gets less."""
    torch.set_num_threads(1)
    readings = iter([500, 80, 20, 20, 20, 20])
    resources_of = partial(
        Resources, read_memory=lambda: HostMemory(next(readings), 1000, "the node"), look_seconds=0
    )

    def of_two_nodes(alert, ask, shortage, is_looking):
        return resources_of(alert, ask, shortage, is_looking=not is_looking)

    build.Resources = of_two_nodes
    return train(resolve(folder, shard=2)).message


def test_a_run_saves_and_stops_before_the_kernel_ends_it(tmp_path):
    """8 % left on rank 1's node after step 2 (told), 2 % after step 3: all ranks stop, saved, with cause."""
    write_tokens(tmp_path / "tokens")
    messages = run_ranks(of_shrinking_memory, 2, tmp_path, timeout_seconds=100)
    assert messages[0] == messages[1] and "98% of 0.0 GB (the node) are taken" in messages[0]
    assert [path.name for path in step_folders(tmp_path / "train" / "checkpoints")] == ["step_00000003"]
    outcome = json.loads((tmp_path / "train" / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["step"], outcome["message"]) == ("requeue", 3, messages[0])
    alerts = [json.loads(line) for line in (tmp_path / "train" / "alerts.jsonl").read_text().splitlines()]
    told = [(alert["step"], alert["message"]) for alert in alerts if "host memory" in alert["message"]]
    assert [step for step, _ in told] == [2, 3] and "saves and stops" in told[1][1]

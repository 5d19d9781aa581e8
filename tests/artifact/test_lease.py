"""Two jobs never train in one folder, and a dead one keeps nobody out."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.lease import HANDED_DOWN, Holder, Lease, held
from kielo.recipe.errors import KieloError
from kielo.train import build
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

BEAT_SECONDS = 0.1
ZOMBIES: list[subprocess.Popen] = []
# A process that takes the lease when it is told to, says how that went, and holds it until its input ends. It
# waits before it makes its own, so that all who race have seen that the one before is dead.
HOLD = """
import sys, time
from kielo.recipe.errors import KieloError
from kielo.artifact import lease
create = lease._create
lease._create = lambda *what: (time.sleep(float(sys.argv[3])), create(*what))[1]
print("ready", flush=True)
sys.stdin.readline()
try:
    with lease.Lease.take(sys.argv[1], float(sys.argv[2])).beating():
        print("held", flush=True)
        sys.stdin.read()
except KieloError as error:
    print(error, flush=True)
"""


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("lease.*"))


def taker(folder: Path, wait_seconds: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(folder), str(BEAT_SECONDS), str(wait_seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout.readline() == "ready\n"
    return process


def killed_holder(folder: Path) -> Path:
    """A lease whose process was killed, and is a zombie until this one ends."""
    process = taker(folder)
    ZOMBIES.append(process)  # collected when it is forgotten
    process.stdin.write("go\n")
    assert process.stdout.readline() == "held\n"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return folder / leases(folder)[-1]


def foreign_holder(folder: Path, host: str = "nid001234") -> Path:
    """A lease as another machine would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lease.00000007.json"
    holder = {"token": "t", "host": host, "machine": "m", "pid": 1, "process_started": 1,
              "slurm_job_id": "77", "started_at": "2026-11-21T12:00:00+00:00"}  # fmt: skip
    path.write_text(json.dumps(holder))
    return path


def test_a_live_holder_refuses_others_and_gives_back_at_the_end(tmp_path, monkeypatch):
    """The refusal names process, host, Slurm job and what works; afterwards nothing of the lease is left."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with pytest.raises(ZeroDivisionError), Lease.take(tmp_path, BEAT_SECONDS).beating() as lease:
        lease.check()
        with pytest.raises(
            KieloError, match=rf"process {os.getpid()} on .*Slurm job 4711.*since 20.*scancel 4711"
        ):
            Lease.take(tmp_path, BEAT_SECONDS)
        assert leases(tmp_path) == ["lease.00000001.json"]
        raise ZeroDivisionError
    assert leases(tmp_path) == []


def test_a_killed_holder_of_this_machine_is_replaced_at_once(tmp_path):
    """No waiting for beats (an hour each here), even when its process number was given to another process."""
    killed_holder(tmp_path)
    with Lease.take(tmp_path, 3600).beating() as lease:
        lease.check()
        assert leases(tmp_path) == ["lease.00000002.json"]
    dead = killed_holder(tmp_path)
    dead.write_text(json.dumps(json.loads(dead.read_text()) | {"pid": os.getppid()}))
    with Lease.take(tmp_path, 3600).beating() as lease:
        lease.check()


def test_a_silent_holder_elsewhere_is_replaced_and_a_beating_one_is_not(tmp_path, caplog):
    """The beat as our own clock sees it is all that counts:
    a time of change in the future or the past says nothing.
    """
    silent, beating = foreign_holder(tmp_path / "silent"), foreign_holder(tmp_path / "beating")
    os.utime(silent, (2**33, 2**33))
    os.utime(beating, (0, 0))
    with Lease.take(tmp_path / "silent", BEAT_SECONDS).beating() as lease:
        lease.check()
    assert "nid001234 (Slurm job 77)" in caplog.text and "no sign of life" in caplog.text

    beats = iter(range(1, 10**6))
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS / 2):
            os.utime(beating, (0, next(beats)))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(KieloError, match=r"nid001234 \(Slurm job 77\)"):
            Lease.take(tmp_path / "beating", BEAT_SECONDS)
    finally:
        stop.set()
        thread.join()
    assert leases(tmp_path / "beating") == ["lease.00000007.json"]


def test_a_lease_is_handed_down_and_gone_on_with(tmp_path, monkeypatch):
    """Blocks within a block have its lease, which stays until the outer one ends;
    another job's token is worth nothing.
    """
    with held(tmp_path) as outer:
        with held(tmp_path) as inner:
            inner.check()
            assert inner.path == outer.path and inner.token == outer.token
        outer.check()
        with held(tmp_path / "other") as other:
            assert other.token != outer.token
        with held(tmp_path) as again:
            assert again.token == outer.token
        monkeypatch.setenv(HANDED_DOWN, other.token)
        with pytest.raises(KieloError, match="another job works in this folder"), held(tmp_path):
            pass
        monkeypatch.setenv(HANDED_DOWN, outer.token)
    assert leases(tmp_path) == [] and not os.environ[HANDED_DOWN]


def test_a_lease_cut_short_does_not_keep_the_folder(tmp_path):
    """A lease whose maker died between making and filling it is taken over like a silent one."""
    (tmp_path / "lease.00000003.json").write_text('{"token": ')
    with Lease.take(tmp_path, BEAT_SECONDS).beating() as lease:
        lease.check()
        assert leases(tmp_path) == ["lease.00000004.json"]


def test_of_eight_that_race_for_a_dead_lease_one_wins(tmp_path):
    """One wins, and seven are told who it is; the winner keeps the lease undisturbed."""
    killed_holder(tmp_path)
    takers = [taker(tmp_path, 0.3) for _ in range(8)]
    for process in takers:
        process.stdin.write("go\n")
    words = [process.stdout.readline() for process in takers]
    assert words.count("held\n") == 1, words
    assert sum("another job works in this folder" in word for word in words) == 7, words
    assert leases(tmp_path) == ["lease.00000002.json"]
    for process in takers:
        process.stdin.close()
        assert process.wait(60) == 0
    assert leases(tmp_path) == []


def test_a_holder_that_was_only_frozen_notices_before_it_publishes(tmp_path):
    """check() raises after the lease was taken and names the taker,
    whom the old holder's end does not disturb.
    """
    old = Lease.take(tmp_path, BEAT_SECONDS)
    content = json.loads(old.path.read_text()) | {"host": "elsewhere"}
    old.path.write_text(json.dumps(content))  # as one on another machine sees it, silent
    taker = Lease.take(tmp_path, BEAT_SECONDS)
    with taker.beating():
        with (
            old.beating(),
            pytest.raises(KieloError, match=f"process {os.getpid()} on .* works in this folder"),
        ):
            old.check()
        taker.check()
    with pytest.raises(KieloError, match="removed or replaced"):
        taker.check()  # given back: it vouches for nothing more


@pytest.fixture
def before_creation(monkeypatch):
    """before_creation(action): runs `action` once, after a taker's look and before it makes its own lease."""

    def do(action) -> None:
        real, waiting = os.open, [action]

        def create(path, flags, *more):
            if flags & os.O_EXCL and waiting:
                waiting.pop()()
            return real(path, flags, *more)

        monkeypatch.setattr(os, "open", create)

    return do


def dead_holder(folder: Path, number: int = 1) -> Path:
    """A lease of this machine whose process is none any more."""
    with Lease.take(folder, 3600).beating() as lease:
        content = json.loads(lease.path.read_text())
    path = folder / f"lease.{number:08d}.json"
    path.write_text(json.dumps(content | {"process_started": content["process_started"] - 1}))
    return path


def test_a_taker_that_slept_finds_a_later_holder(tmp_path, before_creation):
    """Others took the dead lease over and went on to the next number: its own is taken back."""
    live = Lease.take(tmp_path / "other", 3600).path.read_text()
    dead_holder(tmp_path)
    before_creation(lambda: (tmp_path / "lease.00000003.json").write_text(live))
    with pytest.raises(KieloError, match="another job works in this folder"):
        Lease.take(tmp_path, 3600)
    assert leases(tmp_path) == ["lease.00000001.json", "lease.00000003.json"]


def test_a_taker_that_slept_finds_the_dead_lease_changed(tmp_path, before_creation):
    """Others have come and gone, and one of them holds the first number now: there are not two holders."""
    live = Lease.take(tmp_path / "other", 3600).path.read_text()
    dead = dead_holder(tmp_path)
    before_creation(lambda: dead.write_text(live))
    with pytest.raises(KieloError, match="another job works in this folder"):
        Lease.take(tmp_path, 3600)
    assert leases(tmp_path) == ["lease.00000001.json"]


def test_a_taker_that_slept_finds_nobody(tmp_path, before_creation):
    """All others are gone: it begins at number 1, as any other taker would now."""
    dead = dead_holder(tmp_path)
    before_creation(dead.unlink)
    lease = Lease.take(tmp_path, 3600)
    assert leases(tmp_path) == [lease.path.name] == ["lease.00000001.json"]


def test_all_earlier_leases_go_when_a_dead_one_is_taken_over(tmp_path):
    for number in (1, 2, 5):
        dead_holder(tmp_path, number)
    assert Lease.take(tmp_path, 3600).path.name == "lease.00000006.json"
    assert leases(tmp_path) == ["lease.00000006.json"]


@pytest.mark.parametrize("look", [1, 15, None])
def test_a_holder_elsewhere_is_looked_at_fifteen_times(look, tmp_path, monkeypatch, caplog):
    """Five looks for each of three beats: a beat before the last look refuses; without one it is dead."""
    path, sleeps = foreign_holder(tmp_path), []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == look:
            os.utime(path, (1, 1))

    monkeypatch.setattr(time, "sleep", sleep)
    if look is None:
        assert Lease.take(tmp_path, 10.0).path.name == "lease.00000008.json"
        assert "nid001234 (Slurm job 77), since 2026-11-21T12:00:00+00:00 gave no sign of life for 30 s" in (
            caplog.text
        )
    else:
        with pytest.raises(KieloError, match=r"process 1 on nid001234 .*stop it \(scancel 77\)"):
            Lease.take(tmp_path, 10.0)
    assert sleeps == [2.0] * (look or 15)


def test_a_lease_that_is_released_while_it_is_looked_at_is_free(tmp_path, monkeypatch):
    path = foreign_holder(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: path.unlink())
    assert Lease.take(tmp_path, 10.0).path.name == "lease.00000001.json"


def test_a_holder_says_who_it_is(tmp_path, monkeypatch):
    """With its Slurm job where it has one."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for job, told in ((None, ""), ("4711", " (Slurm job 4711)")):
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        holder = Holder(**json.loads(Lease.take(tmp_path / str(job), 3600).path.read_text()))
        assert (
            str(holder) == f"process {os.getpid()} on {socket.gethostname()}{told}, since {holder.started_at}"
        )
        assert holder.is_here() and holder.is_running()
        for change in ({"host": "other"}, {"machine": "other"}):
            assert not replace(holder, **change).is_here()
        assert not replace(holder, process_started=1).is_running()
        assert not replace(holder, pid=2**22 + 1).is_running()  # Linux' largest is 2^22


def test_a_token_is_worth_the_newest_lease_of_its_folder_alone(tmp_path):
    lease = Lease.take(tmp_path, 3600)
    found = Lease.with_token(tmp_path, lease.token)
    assert found.path == lease.path and found.token == lease.token
    found.check()
    assert Lease.with_token(tmp_path, "other") is None and Lease.with_token(tmp_path / "gone", "x") is None
    foreign_holder(tmp_path)
    assert Lease.with_token(tmp_path, lease.token) is None
    with pytest.raises(KieloError, match="lease.00000001.json is no longer this job's: it was removed"):
        os.unlink(lease.path)
        lease.check()


def train_until_told(resolved: Any, signs: Path) -> str:
    """The first job: waits before its second step until the second job was refused."""
    original = build.Feed.take

    def take(self: Any, step: int) -> Any:
        if step == 2:
            (signs / "is training").touch()
            wait_for(signs / "go on")
        return original(self, step)

    build.Feed.take = take
    return train(resolved).outcome


def wait_for(path: Path) -> None:
    until = time.monotonic() + 240  # torch may be imported first
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert path.exists()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_job_is_refused_on_all_ranks_and_the_first_goes_on(tmp_path, fault_times):
    """The second job changes no file of the first, whose outcome is its own;
    then the folder is free again.
    """
    run, signs = tmp_path / "run", tmp_path / "signs"
    signs.mkdir()
    write_tokens(run / "tokens")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run_ranks, train_until_told, 1, resolve(run, total_steps=3), signs)
        wait_for(signs / "is training")
        before = files_of(run)
        try:
            fault_times.note("planted")
            with pytest.raises(
                RuntimeError, match="(?s)rank 0.*another job works in this.*rank 1.*another job works in this"
            ):
                run_ranks(train, 2, resolve(run, shard=2, total_steps=3))
            fault_times.note("found")
            assert files_of(run) == before
        finally:
            (signs / "go on").touch()
        assert first.result() == ["finished"]
    assert json.loads((run / "train" / "outcome.json").read_text())["outcome"] == "finished"
    assert leases(run) == []


def test_a_run_whose_lease_was_taken_publishes_nothing_more(tmp_path, monkeypatch):
    """Taken over after step 3: no checkpoint of step 4, no manifest, no outcome; the taker's lease stays."""
    write_tokens(tmp_path / "tokens")
    torch.set_num_threads(1)
    original = build.Feed.take

    def take(self: Any, step: int) -> Any:
        if step == 4:
            wait_for(tmp_path / "train" / "checkpoints" / "newest")  # step 2 is published by a thread
            foreign_holder(tmp_path).rename(tmp_path / "lease.00000002.json")
        return original(self, step)

    monkeypatch.setattr(build.Feed, "take", take)
    with pytest.raises(KieloError, match="nid001234.*works in this folder; this job stops"):
        train(resolve(tmp_path, total_steps=6, every_steps=2))
    assert sorted(os.listdir(tmp_path / "train" / "checkpoints")) == ["newest", "step_00000002"]
    assert leases(tmp_path) == ["lease.00000001.json", "lease.00000002.json"]
    assert not {"outcome.json", "manifest.json"} & set(os.listdir(tmp_path / "train"))


def test_a_lease_of_an_earlier_version_keeps_others_out(tmp_path):
    """It was in RUN/train: a live one refuses, a dead one goes."""
    (tmp_path / "train").mkdir()
    dead = dead_holder(tmp_path / "train")
    assert Lease.take(tmp_path, 3600).path.name == "lease.00000001.json" and not dead.exists()
    (tmp_path / "lease.00000001.json").unlink()
    live = Lease.take(tmp_path / "train", 3600)
    with pytest.raises(KieloError, match="another job works in this folder"):
        Lease.take(tmp_path, 3600)
    assert live.path.exists() and leases(tmp_path) == []

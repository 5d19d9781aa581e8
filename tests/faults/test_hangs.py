"""A job of which one rank is stuck ends by itself, with exit code 76: rank, node and line are named.

So does one whose ranks do not agree on a collective. Ranks are forked (tests/started_ranks.py), and one gets
stuck in the middle of a step. Without heartbeats the others would wait for `train.step_timeout_seconds`,
600 s.
"""

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components import loader

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.stage_json import read_json
from kielo.dataset.batches import Batches
from kielo.ranks.hang_watch import Progress
from kielo.train import build
from kielo.train.feed import Feed
from kielo.train.run import train
from tests.fault_times import FaultTimes
from tests.faults.unlike_collectives import BEGIN
from tests.house.checks import ROOT
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

STUCK_STEP = 5
# In torch 2.10 gloo notes no collectives.
HAS_FLIGHT_RECORD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def freeze() -> None:
    """Freezes this rank between two beats, soon after a save, whose limit is long."""
    time.sleep(0.1)  # the end of the save was told at once
    os.kill(os.getpid(), signal.SIGSTOP)


def freeze_and_end() -> None:
    """Freezes this rank, which ends when it is woken for its stacks, as a fault of faulthandler ends it."""
    faulthandler.unregister(signal.SIGUSR2)
    freeze()


def read_for_ever() -> None:
    time.sleep(600)


def receive() -> None:
    dist.recv(torch.ones(1), 0)


def get_stuck(folder: Path, stuck_rank: int, how: str, times: FaultTimes) -> None:
    """Train on two ranks, one of which gets stuck as it takes the batch of a step."""
    take = Feed.take

    def take_or_not(feed: Feed, step: int):
        if step == STUCK_STEP and dist.get_rank() == stuck_rank:
            times.note("planted")
            globals()[how]()
        return take(feed, step)

    Feed.take = take_or_not
    train(resolve(folder, shard=2, micro_batch=1, hang_seconds=3.0, every_steps=2))


def lose_heartbeats(folder: Path) -> Outcome:
    """Train on two ranks: in step 5 the heartbeats of rank 1 fail, and then it takes longer than a hang."""
    take, limits, is_failing = Feed.take, Progress.limits, threading.Event()

    def take_late(feed: Feed, step: int):
        if step == STUCK_STEP:
            time.sleep(1.5)  # three beats, which say that this rank takes steps, whose limit is short
            is_failing.set()
            time.sleep(7.0)
        return take(feed, step)

    def limits_or_not(progress: Progress) -> tuple[float, float]:
        is_of_heartbeats = threading.current_thread() is not threading.main_thread()
        if dist.get_rank() == 1 and is_failing.is_set() and is_of_heartbeats:
            raise ValueError("planted")
        return limits(progress)

    Feed.take, Progress.limits = take_late, limits_or_not
    return train(resolve(folder, shard=2, micro_batch=1, hang_seconds=3.0, every_steps=2))


def test_a_fault_of_heartbeats_ends_no_training(tmp_path):
    """A rank whose heartbeats have failed is not taken for one that is stuck."""
    write_tokens(tmp_path / "tokens")
    assert [outcome.outcome for outcome in run_ranks(lose_heartbeats, 2, tmp_path)] == ["finished"] * 2


def fail_alone(folder: Path) -> None:
    """Train on two ranks, of which rank 0 fails in step 5, and waits for the other at its end.

    What each writes to stderr is in a file.
    """
    take, rank = Feed.take, int(os.environ["RANK"])
    sys.stderr = open(folder / f"stderr_{rank}.txt", "w", buffering=1)  # noqa: SIM115

    def take_or_fail(feed: Feed, step: int):
        if step == STUCK_STEP and dist.get_rank() == 0:
            raise ValueError("planted")
        return take(feed, step)

    Feed.take = take_or_fail
    train(resolve(folder, shard=2, micro_batch=1, hang_seconds=3.0, every_steps=2))


def test_a_rank_that_failed_alone_says_why(tmp_path):
    """The other rank names it with its error, not as a frozen process, which would be woken and killed.

    Either may write the outcome last, as the one that failed gives the folder back.
    """
    write_tokens(tmp_path / "tokens")
    with pytest.raises(RuntimeError, match="rank 1. ended without a word.*\n.*still running.*: rank 0"):
        run_ranks(fail_alone, 2, tmp_path)
    outcome = read_json(tmp_path / "train", Outcome)
    assert outcome.outcome in ("failed", "hung") and "ValueError: planted" in outcome.message
    said = (tmp_path / "stderr_1.txt").read_text()
    assert "The cause: rank 0 on" in said and "(it failed: ValueError: planted)" in said


def wait_for_text(folder: Path, seconds: float, hang_seconds: float) -> Outcome:
    """Train on two ranks: from step 5 on the text of rank 1 does not answer for so long, on a file system
    that may stall for six seconds.
    """
    read, comes_back = build.read_sequences, []

    def read_late(batches: Batches, step: int, *given: Any):
        if step >= STUCK_STEP and int(os.environ["RANK"]) == 1:
            comes_back.append(time.monotonic() + seconds)
            time.sleep(max(0.0, comes_back[0] - time.monotonic()))
        return read(batches, step, *given)

    build.read_sequences = read_late
    return train(resolve(folder, shard=2, micro_batch=1, hang_seconds=hang_seconds, file_stall_seconds=6.0))


def test_a_stall_of_files_within_the_limit_ends_no_run(tmp_path):
    """It is longer than a hang; the second reader has the text."""
    write_tokens(tmp_path / "tokens")
    outcomes = run_ranks(wait_for_text, 2, tmp_path, 4.5, 3.0)
    assert [outcome.outcome for outcome in outcomes] == ["finished"] * 2
    assert "no answer for 3 s. Another reader" in (tmp_path / "train" / "alerts.jsonl").read_text()


def test_a_stall_of_files_beyond_the_limit_ends_the_run(tmp_path):
    """The rank that waits says so before the others take it for stuck."""
    write_tokens(tmp_path / "tokens")
    with pytest.raises(RuntimeError, match="step 5: the text: 2 readers had no answer for 3 s each"):
        run_ranks(wait_for_text, 2, tmp_path, 60.0, 6.5)


# Who is stuck and how; what the message names; the rank whose stacks show the line.
CASES = {
    "frozen": (1, "freeze", ["rank 1 on", "stopped by a signal", "without a heartbeat"], 1),
    "frozen, with the store": (0, "freeze", ["rank 0 on", "stopped by a signal", "of its store"], 0),
    "data that do not come": (1, "read_for_ever", ["rank 1 on", "in read_for_ever", "rank 0 waits at"], 1),
    "another collective than the others": (1, "receive", ["all ranks wait", "in receive", "hang again"], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stuck_rank_is_named(tmp_path, case, fault_times):
    """The outcome names it, every rank's stacks are on the disk, and no process is left."""
    stuck_rank, how, named, shown = CASES[case]
    write_tokens(tmp_path / "tokens")
    with pytest.raises(RuntimeError, match="without a word"):
        run_ranks(get_stuck, 2, tmp_path, stuck_rank, how, fault_times)
    fault_times.note("found")
    outcome = read_json(tmp_path / "train", Outcome)
    # Collectives that do not match are a fault of the program, which is not tried again.
    end = ("failed", 1) if how == "receive" else ("hung", 76)
    assert (outcome.outcome, outcome.exit_code) == end
    # A frozen rank that is asked for its stacks goes on until it is ended, for some quick steps, so that its
    # line may be a later one.
    assert outcome.step >= STUCK_STEP if how == "freeze" else outcome.step == STUCK_STEP
    for words in named:
        assert words in outcome.message
    stacks = {int(file.stem[5:]): file.read_text() for file in (tmp_path / "train" / "stacks").iterdir()}
    line = "most recent call first" if how == "freeze" else f"in {how}"
    assert stacks.keys() == {0, 1} and line in stacks[shown]
    if HAS_FLIGHT_RECORD:
        frozen = {stuck_rank} if how == "freeze" else set()
        assert recorded(tmp_path / "train" / "flight_record") == {0, 1} - frozen


def recorded(folder: Path) -> set[int]:
    """The ranks whose record torch's reader reads, with collectives of all ranks in it."""
    dumps = [loader.read_dump("rank_", str(file)) for file in folder.iterdir()]
    names = {dump["rank"]: {entry["profiling_name"] for entry in dump["entries"]} for dump in dumps}
    return {rank for rank in names if "gloo:all_reduce" in names[rank]}


def test_a_frozen_rank_that_ends_when_it_is_woken_is_named_too(tmp_path, fault_times):
    """The hang is told before the rank is woken: its end makes the others end at once."""
    write_tokens(tmp_path / "tokens")
    with pytest.raises(RuntimeError, match="without a word"):
        run_ranks(get_stuck, 2, tmp_path, 1, "freeze_and_end", fault_times)
    outcome = read_json(tmp_path / "train", Outcome)
    assert outcome.outcome == "hung" and "stopped by a signal" in outcome.message


def freeze_for_6_s() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_data() -> None:
    time.sleep(6.0)


def pause(folder: Path, late_rank: int, how: str) -> Outcome:
    """Train on two ranks, one of which is late in step 15. What the other one logs is in a file."""
    take = Feed.take

    def take_late(feed: Feed, step: int):
        if step == 15 and dist.get_rank() == late_rank:
            globals()[how]()
        if step > 15:
            time.sleep(0.3)  # the next looks come before the end
        return take(feed, step)

    Feed.take = take_late
    logging.getLogger("kielo").addHandler(logging.FileHandler(folder / "log.txt"))
    return train(resolve(folder, shard=2, micro_batch=1))


# Who is late and how; what one line names; what a later one says before the seconds.
PAUSES = {
    "data that come late": (
        (1, "wait_for_data"),
        ["s without progress (steps usually pause for ", "The cause: rank 1 on ", ", while rank 0 waits at "],
        "continues after ",
    ),
    "a frozen rank that serves the store": (
        (0, "freeze_for_6_s"),
        ["the store has not answered for ", ". Rank 0 on "],
        "the store answers after ",
    ),
}


@pytest.mark.parametrize("case", PAUSES)
def test_the_cause_of_a_pause_is_named_before_it_is_a_hang(tmp_path, case):
    """One line names the rank, another says when the steps go on; the training is not ended."""
    late, words, over = PAUSES[case]
    write_tokens(tmp_path / "tokens")
    assert [outcome.outcome for outcome in run_ranks(pause, 2, tmp_path, *late)] == ["finished"] * 2
    lines = (tmp_path / "log.txt").read_text().splitlines()
    told = [number for number, line in enumerate(lines) if all(word in line for word in words)]
    assert told and "The ranks end if it lasts " in lines[told[0]], lines
    seconds = [float(line.split()[-2]) for line in lines[told[0] :] if over in line]
    assert seconds and 2.5 < seconds[0] < 15.0, lines


# Starts ranks as `kielo train tiny.toml --ranks 2` does; their program is another one.
UNLIKE = """
import sys
from kielo.cli.main import main
from kielo.train import start_ranks
class Unlike(start_ranks.Ranks):
    def __init__(self, arguments, *others):
        super().__init__(["-m", "tests.faults.unlike_collectives", sys.argv[1], *arguments[2:]], *others)
start_ranks.Ranks = Unlike
sys.exit(main(["train", "tiny.toml", "--ranks", "2"]))
"""


def test_a_collective_of_another_shape_names_both_lines(packed, fault_times):
    """gloo ends the rank that receives more than it has room for, whose stack is printed, and the other one
    says where it waited. The ranks are tried once more, as after any signal, and not a third time.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", UNLIKE, "1"],
        cwd=packed,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    told = []
    try:
        for line in process.stdout:
            told.append(line)
            if line.startswith(BEGIN):
                fault_times.note("planted")
            elif "The ranks are restarted" in line:
                fault_times.note("found")
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
    told = "".join(told)
    assert told.count(BEGIN) == 4, told
    assert "rank 1 ended with SIGABRT (rank 0: the ranks lost each other at " in told, told
    assert told.count("in sum_eight (") == 2 and told.count(" in sum_four\n") == 2, told
    assert "not restarted: twice the same failure at the same step" in told, told

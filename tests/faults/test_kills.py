"""A run that is killed or stopped at any point ends bitwise equal to an undisturbed run.

A rank is forked from a process that has torch loaded already (tests/started_ranks.py); it kills itself, or
asks itself to stop, at the point that the case names; the next one goes on to the end, and the last
checkpoint is compared tensor by tensor.
"""

import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from kielo.artifact.attempt_files import Outcome
from kielo.checkpoint import publish
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.recipe.errors import KieloError
from kielo.train.feed import Feed
from kielo.train.log import Log
from kielo.train.run import train
from kielo.train.state import RunCheckpoints
from tests.fault_times import FaultTimes, and_watch
from tests.faults.trial import belongings, kielo, rest_marked_full, start, went_well
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

STEPS = 20
RUN = {
    "total_steps": STEPS, "heldout_every_steps": 6, "log_every_steps": 4, "every_steps": 5,
    "schedule": "wsd", "warmup_steps": 4, "decay_steps": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A folder with tokens and a run that was left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_tokens(folder / "tokens")
    run_ranks(go_on, 1, folder, folder / "whole")
    return folder


@pytest.fixture(scope="module")
def begun(undisturbed) -> Path:
    """The run's training folder, stopped and saved after step 7."""
    run_ranks(go_on, 1, undisturbed, undisturbed / "begun", 7)
    return undisturbed / "begun"


@pytest.fixture
def in_progress(begun, tmp_path) -> Path:
    """A copy of `begun`, to be gone on with."""
    return Path(shutil.copytree(begun, tmp_path / "train"))


def go_on(folder: Path, train_folder: Path, max_steps: int | None = None) -> Outcome:
    return train(resolve(folder, **RUN, train_folder=str(train_folder)), max_steps=max_steps)


def go_on_until(
    folder: Path, train_folder: Path, times: FaultTimes, owner: str, method: str, calls: int, is_after: bool
) -> None:
    """Train, and be killed before (or after) the call number `calls` of one part's method."""
    part = {"Feed": Feed, "Log": Log, "RunCheckpoints": RunCheckpoints, "publish": publish}[owner]
    original, done = getattr(part, method), 0

    def die() -> None:
        times.note("planted")
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args, **kwargs):
        nonlocal done
        done += 1
        if done == calls and not is_after:
            die()
        result = original(*args, **kwargs)
        if done == calls and is_after:
            die()
        return result

    setattr(part, method, counted)
    go_on(folder, train_folder)


def ends_like(undisturbed: Path, train_folder: Path) -> None:
    """The last checkpoints hold the same tensors, bit by bit."""
    name = f"step_{STEPS:08d}"
    whole, ours = (
        read_tensors(folder / "checkpoints" / name) for folder in (undisturbed / "whole", train_folder)
    )
    assert whole.keys() == ours.keys()
    for tensor in whole:
        assert torch.equal(whole[tensor], ours[tensor]), tensor


KILLS = {
    "before the first step": ("Feed", "take", 1, False),
    "in step 2": ("Feed", "take", 2, True),
    "in step 4, with a log row": ("Feed", "take", 4, True),
    "in the step of a checkpoint": ("Feed", "take", 5, True),
    "as the first save begins": ("RunCheckpoints", "save", 1, False),
    "while the first save is written": ("RunCheckpoints", "save", 1, True),
    "before the first is published": ("publish", "publish", 1, False),
    "after the first is published": ("publish", "publish", 1, True),
    "in step 6, at held-out text": ("Feed", "take", 6, True),
    "in step 9": ("Feed", "take", 9, True),
    "as the second save begins": ("RunCheckpoints", "save", 2, False),
    "before the second is published": ("publish", "publish", 2, False),
    "while old ones are pruned": ("publish", "prune", 3, False),
    "after old ones are pruned": ("publish", "prune", 3, True),
    "in step 14": ("Feed", "take", 14, False),
    "in the last step": ("Feed", "take", 20, True),
    "before the last is published": ("publish", "publish", 4, False),
}


# One of each kind of moment: before and after all that is written, and one in a step.
KILLS_KEPT = (
    "before the first step",
    "in the step of a checkpoint",
    "while the first save is written",
    "before the first is published",
    "after the first is published",
    "while old ones are pruned",
    "in the last step",
    "before the last is published",
)


@pytest.mark.parametrize("when", rest_marked_full(KILLS, KILLS_KEPT))
def test_killed(undisturbed, tmp_path, when, fault_times):
    """kill -9, then the same command: bitwise the run that was never killed."""
    with pytest.raises(RuntimeError, match=r"\[rank 0\] ended without a word"):
        run_ranks(go_on_until, 1, undisturbed, tmp_path / "train", fault_times, *KILLS[when])
    fault_times.note("found")
    run_ranks(and_watch, 1, fault_times, go_on, undisturbed, tmp_path / "train")
    ends_like(undisturbed, tmp_path / "train")


def test_killed_again_and_again(undisturbed, tmp_path, fault_times):
    """Three attempts in a row die, one of them before it reached a checkpoint of its own."""
    for calls in (7, 6, 3):
        with pytest.raises(RuntimeError, match=r"\[rank 0\] ended without a word"):
            run_ranks(
                go_on_until, 1, undisturbed, tmp_path / "train", fault_times, "Feed", "take", calls, True
            )
    run_ranks(go_on, 1, undisturbed, tmp_path / "train")
    ends_like(undisturbed, tmp_path / "train")


BORDERS = [1, 4, 5, 6, 14, 15, 19]  # each step is one in test_stopped_at_every_step


@pytest.mark.parametrize("step", rest_marked_full(BORDERS, [5]))
def test_stopped_at_a_border(undisturbed, tmp_path, step):
    """Saved and stopped after the first step, the last, those of log, held-out text, checkpoint, the end of
    warm-up and decay.
    """
    outcome = run_ranks(go_on, 1, undisturbed, tmp_path / "train", step)[0]
    assert outcome.outcome == "requeue" and outcome.step == step
    outcome = run_ranks(go_on, 1, undisturbed, tmp_path / "train")[0]
    assert outcome.outcome == "finished"
    ends_like(undisturbed, tmp_path / "train")


def test_stopped_at_every_step(undisturbed, tmp_path):
    """Twenty attempts of one step each."""
    torch.set_num_threads(1)  # as in a rank
    for step in range(1, STEPS + 1):
        go_on(undisturbed, tmp_path / "train", step)
    ends_like(undisturbed, tmp_path / "train")


def changed(folder: Path, train_folder: Path, changes: dict) -> str:
    try:
        train(resolve(folder, **RUN | changes, train_folder=str(train_folder)))
    except KieloError as error:
        return str(error)
    return ""


CHANGES = {
    "seed": 4, "weight_decay": 0.2, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6,
    "max_gradient_norm": 9.0,
    "z_loss": 0.1, "mask_documents": False, "name": "other", "language": "fi",
    "learning_rate": 1e-2, "total_steps": 15, "optimiser_state": "bf16", "warmup_steps": 5,
    "mixture": {"books": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGES)
def test_a_run_in_progress_with_another_identity(undisturbed, in_progress, key, fault_times):
    """A change in mid-run of what is trained is refused with the key, and the checkpoints stay as they were,
    byte for byte.
    """
    before = belongings(in_progress / "checkpoints")
    fault_times.note("planted")
    message = run_ranks(changed, 1, undisturbed, in_progress, {key: CHANGES[key]})[0]
    fault_times.note("found")
    named = {
        "learning_rate": "learning_rates",
        "total_steps": "phases",
        "warmup_steps": "learning_rates",
        "mixture": "phases",
    }
    assert named.get(key, key) in message and "o back to the old values" in message
    assert before and belongings(in_progress / "checkpoints") == before


def test_a_run_goes_on_after_another_identity_was_refused(undisturbed, in_progress):
    """With the old values it ends with the bits of the run that was left alone."""
    assert "seed" in run_ranks(changed, 1, undisturbed, in_progress, {"seed": CHANGES["seed"]})[0]
    run_ranks(go_on, 1, undisturbed, in_progress)
    ends_like(undisturbed, in_progress)


PLACEMENTS = {
    "micro_batch": 2, "loss_chunk_tokens": 7, "log_every_steps": 1, "heldout_every_steps": 3,
    "every_steps": 2,
    "keep_newest": 3, "keep_every_steps": 5, "recompute": "full",
}  # fmt: skip


@pytest.mark.parametrize("key", PLACEMENTS)
def test_a_run_in_progress_with_another_placement(undisturbed, in_progress, key):
    """A change in mid-run of how it is computed and watched is taken;
    the result differs at most by the order of additions.
    """
    assert run_ranks(changed, 1, undisturbed, in_progress, {key: PLACEMENTS[key]}) == [""]
    whole, ours = (
        read_tensors(folder / "checkpoints" / f"step_{STEPS:08d}")
        for folder in (undisturbed / "whole", in_progress)
    )
    for name in whole:
        torch.testing.assert_close(whole[name], ours[name], rtol=1e-4, atol=1e-6)


LAYOUTS = {
    "two shards": {"shard": 2},
    "two replicas": {"replicate": 2},
    "context": {"context": 2},
    "tensor": {"tensor": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_on_other_ranks(undisturbed, in_progress, layout, fault_times):
    """Begun on one rank, finished on two: the same samples, the same weights within rounding."""
    fault_times.note("planted")
    resumed = and_watch, 2, fault_times, changed, undisturbed, in_progress, LAYOUTS[layout]
    assert run_ranks(*resumed) == ["", ""]
    whole, ours = (
        read_tensors(folder / "checkpoints" / f"step_{STEPS:08d}")
        for folder in (undisturbed / "whole", in_progress)
    )
    for name in whole:
        torch.testing.assert_close(whole[name], ours[name], rtol=1e-3, atol=1e-5)


def children(process: int) -> list[int]:
    """The processes that a process has started, the oldest first."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(number) for number in text.split()]


TWO_RANKS = ["train", "tiny.toml", "--ranks", "2", "--set", "train.log_every_steps=1"]


@pytest.fixture(scope="module")
def of_two_ranks(_packed, tmp_path_factory) -> Path:
    """The training folder of a run of two ranks that was left alone."""
    workplace = tmp_path_factory.mktemp("two_ranks") / "workplace"
    shutil.copytree(_packed, workplace, symlinks=True)
    went_well(kielo(workplace, *TWO_RANKS))
    return workplace / "run/train"


@pytest.mark.parametrize(
    ("victim", "by"),
    [(0, signal.SIGKILL), pytest.param(1, signal.SIGKILL, marks=pytest.mark.full), (1, signal.SIGSTOP)],
    ids=["rank 0", "rank 1", "rank 1, frozen"],
)
def test_a_rank_that_is_killed_is_started_again(victim, by, packed, of_two_ranks, fault_times):
    """`kielo train --ranks 2` goes on by itself, and ends with the bits of a run that was left alone.

    A rank that is frozen is named by its heartbeats, and killed.
    """
    hang = ["--set", "train.hang_seconds=3"] if by == signal.SIGSTOP else []
    process = start(packed, *TWO_RANKS, *hang)
    steps, told = [], []

    def read_messages() -> None:
        for line in process.stderr:
            told.append(line)
            if "The ranks are restarted" in line:
                fault_times.note("found")

    reader = threading.Thread(target=read_messages, daemon=True)
    reader.start()
    for line in process.stdout:
        if line.startswith("step ") and "loss" in line.split("held-out")[0]:
            steps.append(int(line.split()[1].partition("/")[0]))
            if steps == list(range(1, 7)):  # the checkpoint of step 5 is whole
                (template,) = children(process.pid)
                os.kill(children(template)[victim], by)
                fault_times.note("planted")
            elif len(steps) > max(steps):
                fault_times.note("next_step")
    assert process.wait(timeout=60) == 0
    reader.join(timeout=60)
    told = "".join(told)
    assert steps.count(6) == 2 and steps[-15:] == list(range(6, 21)), told
    named = f"rank {victim} ended with SIGKILL" if by == signal.SIGKILL else f"The cause: rank {victim} on"
    assert named in told, told
    assert re.search("restarted from (step_00000005|the start)", told), told
    whole, ours = (
        read_tensors(folder / "checkpoints" / f"step_{STEPS:08d}")
        for folder in (of_two_ranks, packed / "run/train")
    )
    for tensor in whole:
        assert torch.equal(whole[tensor], ours[tensor]), tensor

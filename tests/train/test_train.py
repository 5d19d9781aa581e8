"""Whole runs on real ranks: the same losses on any, the same run through a stop,
and no step that is not finite.
"""

import errno
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.checkpoint_index import CheckpointIndex, read_plain
from kielo.artifact.checkpoint_inspection import list_checkpoints
from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import HeldOutLoss, TrainingStep, of_kind, read_metrics
from kielo.checkpoint import saving
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.batches import Batches
from kielo.recipe.errors import KieloError, sentence
from kielo.resolve.resolved import Resolved
from kielo.train.feed import Feed
from kielo.train.records import is_finished
from kielo.train.run import train
from tests.alerts import alerts
from tests.fault_times import FaultTimes, and_watch
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, SEQUENCES, resolve, write_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens")
    return tmp_path


def on_rank(
    resolved: Resolved, stop_at: int | None = None, times: FaultTimes | None = None
) -> dict[str, Any]:
    """Trains as one rank and records each step's samples. At `stop_at` SIGTERM reaches one rank alone."""
    is_chosen = int(os.environ["RANK"]) == resolved.placement.world_size - 1
    samples: dict[int, tuple[int, ...]] = {}
    original_take = Feed.take

    def take(self: Any, step: int) -> Any:
        batch = original_take(self, step)
        samples[step] = batch.samples
        if is_chosen and step == stop_at:
            if times is not None:
                times.note("planted")
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    Feed.take = take
    return {"outcome": train(resolved), "samples": samples}


def step_rows(folder: Path) -> list[TrainingStep]:
    return of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)


def heldout_losses(folder: Path) -> list[float]:
    return [
        row.heldout_loss for row in of_kind(read_metrics(folder / "train" / "metrics.jsonl"), HeldOutLoss)
    ]


def samples_of_steps(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Step → sample numbers over all ranks, sorted; tensor and context ranks share theirs."""
    steps = results[0]["samples"]
    return {step: sorted({s for result in results for s in result["samples"][step]}) for step in steps}


def weights(folder: Path, step: int = 20) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "train" / "checkpoints" / f"step_{step:08d}")


# (loss, gradient norm) of each step, and the held-out losses.
Curve = tuple[list[tuple[float, float]], list[float]]


def curve(folder: Path, **layout: Any) -> Curve:
    """Trains eight steps in a new folder; held-out text is scored twice."""
    write_tokens(folder / "tokens")
    resolved = resolve(folder, total_steps=8, heldout_every_steps=4, **layout)
    results = run_ranks(on_rank, resolved.placement.world_size, resolved)
    assert {result["outcome"].outcome for result in results} == {"finished"}
    assert is_finished(resolved)
    return [(row.loss, row.gradient_norm) for row in step_rows(folder)], heldout_losses(folder)


@pytest.fixture(scope="module")
def curve_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """A whole step in one micro-batch."""
    return curve(tmp_path_factory.mktemp("one_rank"), micro_batch=8)


@pytest.mark.parametrize("layout", [
    {"micro_batch": 3},  # 3 + 3 + 2, and an empty sequence
    {"shard": 3, "micro_batch": 2},  # 3, 3 and 2 sequences, in two micro-batches each
    pytest.param({"shard": 4, "micro_batch": 2, "zero": 3}, marks=pytest.mark.full),
    pytest.param({"shard": 2, "replicate": 2, "micro_batch": 1}, marks=pytest.mark.full),
    pytest.param({"tensor": 2, "shard": 2, "cpu_offload": True}, marks=pytest.mark.full),
    pytest.param(
        {"context": 2, "tensor": 2, "micro_batch": 4, "recompute": "full"}, marks=pytest.mark.full
    ),
    pytest.param(
        {"context": 2, "shard": 2, "context_attention": "ulysses", "zero": 2, "micro_batch": 1},
        marks=pytest.mark.full,
    ),
], ids="-".join)  # fmt: skip
def test_losses_and_norms_do_not_depend_on_layout_or_micro_batches(
    tmp_path: Path, curve_of_one_rank: Curve, layout: dict[str, Any]
) -> None:
    """Losses, gradient norms and the held-out losses are the same within 1e-5 on 1, 3 and 4 ranks."""
    steps, scores = curve_of_one_rank
    assert len(steps) == 8 and len(scores) == 2
    assert steps[-1][0] < steps[0][0] - 0.3, "it does not learn"
    found_steps, found_scores = curve(tmp_path, **layout)
    torch.testing.assert_close(torch.tensor(found_steps), torch.tensor(steps), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found_scores), torch.tensor(scores), rtol=1e-5, atol=0)


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, fault_times: FaultTimes) -> None:
    """SIGTERM to one rank at a random step: exit code 75; on as many ranks bitwise the same weights, on
    others the same samples, and metrics with each step once.
    """
    stop_at = random.randint(2, 10)
    print("stop at", stop_at)
    steps = {"total_steps": 12, "heldout_every_steps": 5}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for place in (whole, stopped):
        write_tokens(place / "tokens")
    undisturbed = samples_of_steps(run_ranks(on_rank, 2, resolve(whole, shard=2, **steps)))
    assert undisturbed[3] == list(range(2 * SEQUENCES, 3 * SEQUENCES))

    first = run_ranks(on_rank, 2, resolve(stopped, shard=2, **steps), stop_at, fault_times)
    fault_times.note("found")
    assert [result["outcome"].exit_code for result in first] == [75, 75]
    outcome = json.loads((stopped / "train" / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["step"], outcome["exit_code"]) == ("requeue", stop_at, 75)
    assert not (stopped / "train" / "manifest.json").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.system(f"cp -r '{stopped}/tokens' '{stopped}/train' '{elsewhere}'")

    second = run_ranks(and_watch, 2, fault_times, on_rank, resolve(stopped, shard=2, **steps))
    assert {result["outcome"].exit_code for result in second} == {0}
    assert samples_of_steps(first) | samples_of_steps(second) == undisturbed
    expected, found = weights(whole, 12), weights(stopped, 12)
    assert expected.keys() == found.keys() and len(expected) > 20
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [row.step for row in step_rows(stopped)] == list(range(1, 13))
    assert [row.loss for row in step_rows(stopped)] == [row.loss for row in step_rows(whole)]

    # Another number of ranks and other micro-batches; test_any_layout.py has other axes.
    other_ranks = run_ranks(on_rank, 3, resolve(elsewhere, shard=3, micro_batch=1, **steps))
    assert samples_of_steps(first) | samples_of_steps(other_ranks) == undisturbed
    losses = [[row.loss for row in step_rows(place)] for place in (elsewhere, whole)]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)


def test_a_step_that_is_not_finite_is_skipped_by_all(tmp_path: Path) -> None:
    """One rank's infinite loss skips the step everywhere and is counted;
    two in a row are, and the run ends well. Alerts name the rank that read the spoilt text.
    """
    folder = tmp_path
    write_tokens(folder / "tokens", spoilt_steps=(3, 5, 6))
    resolved = resolve(folder, shard=2, log_every_steps=1, total_steps=8)
    results = run_ranks(on_rank, 2, resolved)
    assert {result["outcome"].outcome for result in results} == {"finished"}
    rows = step_rows(folder)
    assert [row.skipped for row in rows] == [0, 0, 1, 1, 2, 3, 3, 3]
    assert [row.step for row in rows if row.loss is None] == [3, 5, 6]
    assert all(tensor.isfinite().all() for tensor in weights(folder, 8).values())
    plain = read_plain(folder / "train" / "checkpoints" / "step_00000008")
    assert plain["optimiser_updates"] == 5, "a bad step was taken"
    assert samples_of_steps(results)[4] == list(range(3 * SEQUENCES, 4 * SEQUENCES)), (
        "a skipped step's data are behind us"
    )
    told = alerts(folder / "train")
    assert [alert["step"] for alert in told] == [3, 5, 6]
    for alert, rank in zip(told, ranks_of_spoilt_text(resolved, (3, 5, 6))):
        assert f"First seen by rank {rank} (" in alert["message"] and alert["message"].endswith(": its loss")


def ranks_of_spoilt_text(resolved: Resolved, steps: Iterable[int]) -> list[int]:
    """The rank, of two, that reads a spoilt sequence of "books" in each step."""
    identity, folder = resolved.identity, Path(resolved.placement.tokens_folder)
    spoilt = [token // LENGTH for token in read_manifest(folder).section["spoilt"]]
    batches = Batches(folder, identity.seed, identity.phases[0], LENGTH, 0, True)
    found = []
    for step in steps:
        located = batches.order.locate(batches.samples(step))
        is_spoilt = (located.source == batches.names.index("books")) & np.isin(located.sequence, spoilt)
        (sample,) = np.flatnonzero(is_spoilt)
        found.append(int(sample) % 2)
    return found


def test_a_stop_among_bad_steps_saves_and_removes_nothing(tmp_path: Path) -> None:
    """The checkpoint is there beside all earlier ones, which is told; it counts on where it was; later ones
    are pruned again.
    """
    torch.set_num_threads(1)
    folder = tmp_path
    write_tokens(folder / "tokens", spoilt_steps=(12, 13))
    resolved = resolve(folder, every_steps=5, heldout_every_steps=100)
    checkpoints = folder / "train" / "checkpoints"
    assert train(resolved, max_steps=13).outcome == "requeue"
    assert [row["step"] for row in list_checkpoints(checkpoints)] == [13, 10, 5]
    plain = read_plain(checkpoints / "step_00000013")
    assert plain["guard"]["in_a_row"] == 2 and plain["trouble"] == {"sound_step": 10, "unsound_step": 13}
    alert = alerts(folder / "train")[-1]
    assert alert["step"] == 13 and "last 2 steps were not finite" in alert["message"]
    assert train(resolved, max_steps=15).outcome == "requeue"
    assert [row["step"] for row in list_checkpoints(checkpoints)] == [15, 13, 10]
    assert train(resolved).outcome == "finished"
    assert [row["step"] for row in list_checkpoints(checkpoints)] == [20, 15]


def test_three_such_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    """The error names the step and what helps, on every rank; outcome.json says failed."""
    folder = tmp_path
    write_tokens(folder / "tokens", spoilt_steps=(4, 5, 6))
    resolved = resolve(folder, shard=2)
    with pytest.raises(
        RuntimeError,
        match="(?s)rank 0.*KieloError: step 6: .*not finite 3 steps in a row.*rank 1.*KieloError",
    ):
        run_ranks(on_rank, 2, resolved)
    outcome = json.loads((folder / "train" / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["exit_code"], outcome["step"]) == ("failed", 1, 6)
    assert (
        "train.learning_rate" in outcome["message"]
        and "No checkpoint had been saved before step 4" in outcome["message"]
    )


def on_rank_that_falls_silent(resolved: Resolved) -> str:
    """Trains; the last rank is late for step 2 by more than the short limit, and for step 4 for good."""
    late = {2: 1.3, 4: 2.5} if os.environ["RANK"] == "1" else {}
    original_take = Feed.take

    def take(self: Any, step: int) -> Any:
        time.sleep(late.get(step, 0))
        return original_take(self, step)

    Feed.take = take
    try:
        return train(resolved).outcome
    except RuntimeError as error:
        step = json.loads(Path(resolved.placement.train_folder, "outcome.json").read_text())["step"]
        return f"step {step}: {sentence(error)}"


def test_a_rank_that_falls_silent_ends_the_others_within_the_limit(folder: Path) -> None:
    """The limit is long for the first two steps and short for the later ones; the message names the key."""
    waiting, silent = run_ranks(
        on_rank_that_falls_silent, 2, resolve(folder, shard=2, step_timeout_seconds=1)
    )
    assert re.search(r"step [34]: .*the ranks lost each other .*1000ms.*train.step_timeout_seconds", waiting)
    assert re.match("step [34]: ", silent)


def test_one_process_needs_no_launcher_and_another_identity_is_refused(folder: Path) -> None:
    """max_steps stops and saves; the same run goes on;
    a changed learning rate is refused by name, unharmed.
    """
    torch.set_num_threads(1)
    assert train(resolve(folder, total_steps=6), max_steps=4).outcome == "requeue"
    with pytest.raises(KieloError, match=r"learning_rates.1.peak: was 0.005, is now 0.1"):
        train(resolve(folder, total_steps=6, learning_rate=0.1))
    assert json.loads((folder / "train" / "outcome.json").read_text())["exit_code"] == 75
    resolved = resolve(folder, total_steps=6, tensorboard=True)
    assert train(resolved) == Outcome(outcome="finished", step=6, tokens=6 * 128, exit_code=0, message="")
    assert any((folder / "train" / "tensorboard").iterdir())
    manifest = json.loads((folder / "train" / "manifest.json").read_text())
    assert (
        manifest["counts"]["steps"] == 6 and manifest["counts"]["heldout_loss"] == heldout_losses(folder)[-1]
    )
    before = (folder / "train" / "manifest.json").stat().st_mtime_ns
    assert train(resolved).message.startswith("nothing to do")
    assert (folder / "train" / "manifest.json").stat().st_mtime_ns == before


def test_deterministic_kernels_are_used_and_on_a_cpu_give_the_same_bits(tmp_path: Path) -> None:
    """train.deterministic holds for all steps, and what it set is taken back at the end."""
    torch.set_num_threads(1)
    seen, original_take = [], Feed.take

    def take(self: Any, step: int) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic)
        return original_take(self, step)

    ended = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "take", take)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the patch takes it back
        patch.delenv("CUBLAS_WORKSPACE_CONFIG")
        for is_deterministic in (False, True):
            folder = tmp_path / str(is_deterministic)
            write_tokens(folder / "tokens")
            train(resolve(folder, total_steps=4, deterministic=is_deterministic))
            assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == is_deterministic
            ended.append(weights(folder, 4))
    assert seen == [False] * 4 + [True] * 4
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert ended[0].keys() == ended[1].keys()
    assert all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())


def test_a_checkpoint_that_cannot_be_saved_stops_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at one save is told in alerts.jsonl and the next save succeeds;
    at the last save it ends the run.
    """
    torch.set_num_threads(1)
    full_at = {4, 8}
    original = saving.write_index

    def write_index(folder: Path, index: CheckpointIndex, entries: dict[str, str]) -> dict[str, Any]:
        if index.step in full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(folder, index, entries)

    monkeypatch.setattr(saving, "write_index", write_index)
    resolved = resolve(folder, total_steps=8, every_steps=2)
    with pytest.raises(KieloError, match="step_00000008 was not saved .*disk full"):
        train(resolved)
    told = alerts(folder / "train")
    assert [alert["step"] for alert in told] == [4, 8]
    assert "step_00000004 was not saved" in told[0]["message"]
    assert json.loads((folder / "train" / "outcome.json").read_text())["outcome"] == "failed"
    rows = list_checkpoints(folder / "train" / "checkpoints", checksums=True)
    assert [(row["step"], row["state"]) for row in rows] == [(6, "verified"), (2, "verified")]
    assert rows[0]["loss"] == step_rows(folder)[5].loss and rows[0]["tokens"] == 6 * 128
    full_at.clear()
    assert train(resolved).outcome == "finished"

"""Steps on tokens of which a part carries loss: they are Hugging Face's with labels -100, in any layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.checkpoint_index import read_plain
from kielo.artifact.manifest import write_stage
from kielo.artifact.metrics import HeldOutLoss, TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShardWriter
from kielo.dataset.batches import NOT_COUNTED, Batches
from kielo.train.log import describe
from kielo.train.run import train
from kielo.verify.parity import ParityOptions, verify_parity
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, SEQUENCES, VOCABULARY, resolve

# Another order of the same fp32 sums; the parity check's own tolerance of gradients and losses is 1e-5.
TOLERANCE = 1e-6


def write_chats(folder: Path, share: float = 0.25) -> None:
    """Two sources, one with a mask: that share of its tokens carries loss, in runs, a long stretch none."""
    generator = np.random.default_rng(7)
    with write_stage(folder, "tokens", 1, {}, {}) as stage:
        counts: dict[str, Any] = {}
        for name, documents in (("books", 30), ("news", 4), ("heldout", 5)):
            has_mask = name != "news"
            with TokenShardWriter(stage.folder / name, VOCABULARY + 1, has_mask) as writer:
                lengths = generator.integers(5, 60, documents)
                carries = np.repeat(generator.random(int(lengths.sum()) // 4 + 9) < share, 4)
                carries[4 * LENGTH : 20 * LENGTH] = False
                for length, start in zip(lengths, np.cumsum(lengths) - lengths):
                    row = np.append(np.sort(generator.integers(1, VOCABULARY, length - 1)), 0)
                    writer.add(row, carries[start : start + length] if has_mask else None)
            counts[name] = {"tokens": int(lengths.sum()), "documents": documents, "bytes": 1}
            if has_mask:
                counts[name] |= {
                    "tokens_with_loss": int(carries[: lengths.sum()].sum()),
                    "bytes_with_loss": 70,
                }
        stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})


def train_on_chats(folder: Path, **changes: Any) -> tuple[torch.Tensor, list[float]]:
    """Returns losses and gradient norms of eight steps, [8, 2], and the held-out losses."""
    write_chats(folder / "tokens")
    resolved = resolve(folder, total_steps=8, heldout_every_steps=4, **changes)
    run_ranks(train, resolved.placement.world_size, resolved, timeout_seconds=100)
    rows = read_metrics(folder / "train" / "metrics.jsonl")
    steps = [(row.loss, row.gradient_norm) for row in of_kind(rows, TrainingStep)]
    return torch.tensor(steps, dtype=torch.float64), [row.heldout_loss for row in of_kind(rows, HeldOutLoss)]


def test_loss_and_gradients_are_hugging_faces(tmp_path: Path) -> None:
    """Eight steps of transformers' model on the same tokens, labels -100 where nothing is counted: losses and
    gradients within 1e-5. A whole sequence of a step counts nothing."""
    write_chats(tmp_path / "tokens")
    resolved = resolve(tmp_path)
    options = ParityOptions(steps=8, sequence_length=LENGTH, sequences_per_step=SEQUENCES)
    certificate = verify_parity(resolved, tmp_path / "verify", None, options)
    assert certificate.passed and certificate.max_relative_loss_difference <= 1e-5
    assert certificate.gradient_max_relative_difference <= 1e-5
    batches = Batches(tmp_path / "tokens", 3, resolved.identity.phases[0], LENGTH, 0, True)
    counted = [(batches.step(step, 0, 1).labels != NOT_COUNTED).sum(axis=1) for step in range(1, 9)]
    assert min(map(min, counted)) == 0 and 0 < np.sum(counted) < 8 * SEQUENCES * LENGTH * 2 / 3


def test_a_step_without_a_counted_token_has_no_loss(tmp_path: Path) -> None:
    """It is logged and saved without one, and counted; weights stay finite, and the run ends.

    So is held-out text of which no token counts.
    """
    write_chats(tmp_path / "tokens", share=0)
    resolved = resolve(tmp_path, total_steps=2, mixture={"books": 1.0})
    train(resolved)
    rows = read_metrics(tmp_path / "train" / "metrics.jsonl")
    steps, heldout = of_kind(rows, TrainingStep), of_kind(rows, HeldOutLoss)
    assert [(row.loss, row.gradient_norm, row.skipped, row.without_labels) for row in steps] == [
        (None, 0.0, 0, 1), (None, 0.0, 0, 2),
    ]  # fmt: skip
    assert all(row.has_no_label for row in steps)
    assert [(row.heldout_loss, row.heldout_bits_per_byte) for row in heldout] == [(None, None)]
    (saved,) = step_folders(tmp_path / "train" / "checkpoints")
    assert read_plain(saved)["loss"] is None
    assert describe(steps[1]).startswith("no label counts  norm 0.00")
    assert describe(heldout[0]) == "held-out text: no label counts"


def test_steps_with_and_without_counted_tokens_are_told_apart(tmp_path: Path) -> None:
    """Those whose labels all have a mask of 0 have no loss, the others have one."""
    write_chats(tmp_path / "tokens", share=0.02)
    resolved = resolve(tmp_path, total_steps=12, mixture={"books": 1.0})
    train(resolved)
    rows = of_kind(read_metrics(tmp_path / "train" / "metrics.jsonl"), TrainingStep)
    batches = Batches(tmp_path / "tokens", 3, resolved.identity.phases[0], LENGTH, 0, True)
    counted = [int((batches.step(step, 0, 1).labels != NOT_COUNTED).sum()) for step in range(1, 13)]
    assert [row.loss is None for row in rows] == [number == 0 for number in counted]
    assert rows[-1].without_labels == counted.count(0) and 0 < counted.count(0) < 12


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"shard": 2, "micro_batch": 2}, {"context": 2, "micro_batch": 4}, {"tensor": 2, "micro_batch": 4},
        {"pipeline": 2, "pipeline_layers": (1, 1), "micro_batch": 2}, {"shard": 3, "micro_batch": 2},
    ],
    ids=str,
)  # fmt: skip
def test_every_layout_counts_the_same_tokens(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Ranks that count different numbers of tokens: losses, gradient norms and held-out losses of eight steps
    are those of one process."""
    truth, heldout = train_on_chats(tmp_path / "one", micro_batch=8)
    found, found_heldout = train_on_chats(tmp_path / "many", **layout)
    torch.testing.assert_close(found, truth, rtol=TOLERANCE, atol=0)
    assert found_heldout == pytest.approx(heldout, rel=TOLERANCE)

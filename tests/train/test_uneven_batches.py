"""Steps that data-parallel ranks or micro-batches do not divide: every loss is that of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.dataset.batches import NOT_COUNTED, Batch, filled_up
from kielo.resolve.resolved import Resolved
from kielo.train import build
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

# Two ranks that hold each half of a sum add it up in another order than one process: fp32 has 24 bits.
TOLERANCE = 1e-6


def counting_empty_sequences(resolved: Resolved) -> None:
    """Trains as one rank whose empty sequences count: they predict end-of-text."""

    def counted(batch: Batch, sequences: int, end: int) -> Batch:
        filled = filled_up(batch, sequences, end)
        filled.labels[len(batch.inputs) :] = end
        return filled

    build.filled_up = counted
    train(resolved)


def losses(folder: Path, entry: Any = train, **layout: Any) -> torch.Tensor:
    """Losses and gradient norms of six steps, [6, 2]."""
    write_tokens(folder / "tokens")
    resolved = resolve(folder, total_steps=6, **layout)
    run_ranks(entry, resolved.placement.world_size, resolved, timeout_seconds=100)
    rows = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)
    return torch.tensor([(row.loss, row.gradient_norm) for row in rows], dtype=torch.float64)


@pytest.mark.full
def test_empty_sequences_change_no_loss(tmp_path: Path) -> None:
    """8 sequences a step, with masks of documents: 3, 3 and 2 on three ranks in micro-batches of 2, and 9
    through two pipeline stages in micro-batches of 3, are those of one process; where empty sequences count,
    they are not.
    """
    truth = losses(tmp_path / "one", micro_batch=8)
    for number, layout in enumerate((
        {"shard": 3, "micro_batch": 2}, {"shard": 3, "micro_batch": 3, "zero": 3},
        {"pipeline": 2, "pipeline_layers": (1, 1), "micro_batch": 3}, {"shard": 3, "micro_batch": 1},
    )):  # fmt: skip
        found = losses(tmp_path / str(number), **layout)
        torch.testing.assert_close(found, truth, rtol=TOLERANCE, atol=0)
    broken = losses(tmp_path / "broken", counting_empty_sequences, shard=3, micro_batch=2)
    assert ((broken - truth).abs() / truth > 100 * TOLERANCE).any()


@pytest.mark.parametrize("masks", [False, True])
def test_empty_sequences_count_nothing(masks: bool) -> None:
    """Rows are added below those that there are, of end-of-text and labels that do not count."""
    rows = np.arange(6).reshape(2, 3)
    batch = Batch(rows, rows + 1, rows.astype(np.int32) if masks else None, np.array([4, 7]))
    filled = filled_up(batch, 4, end_of_text_id=9)
    assert np.array_equal(filled.inputs[:2], rows) and (filled.inputs[2:] == 9).all()
    assert np.array_equal(filled.labels[:2], rows + 1) and (filled.labels[2:] == NOT_COUNTED).all()
    assert (filled.documents is None) == (not masks)
    assert filled.samples.tolist() == [4, 7] and filled_up(batch, 2, 9) is batch

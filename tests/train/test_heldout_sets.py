"""Losses and bits per byte of each source's held-out text, as the loop logs them."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kielo.artifact.manifest import read_manifest
from kielo.artifact.metrics import HeldOutLoss, of_kind, read_metrics
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.pack import pack
from kielo.models.families import build_model, complete
from kielo.recipe.sections import Model
from kielo.tokenizer.train import train_tokenizer
from kielo.train.log import describe, set_scalars
from kielo.train.run import train
from tests.dataset.test_batches import make_documents, recipe, write_corpus
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve

LENGTH = 16
MODEL = complete(Model(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=8, vocab_size=400, max_position_embeddings=LENGTH, initializer_range=0.2,
), LENGTH)  # fmt: skip


def test_sets_are_scored_as_one_process_scores_them(tmp_path: Path) -> None:
    """On one rank and on two: each set's loss is plain cross-entropy of the saved weights on all its tokens
    (1e-5: the ranks add in another order), and its bits per byte are those of its text."""
    write_corpus(tmp_path / "corpus", make_documents(150))
    train_tokenizer(recipe(), tmp_path / "corpus", tmp_path / "tokenizer")
    pack(recipe(), tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "tokens")
    rows = []
    for ranks in (1, 2):
        resolved = resolve(
            tmp_path, shard=ranks, model=MODEL, mixture={"a": 3.0, "b": 1.0}, total_steps=2, warmup_steps=1,
            decay_steps=1, heldout_sequences=10_000, mask_documents=False,
            train_folder=str(tmp_path / f"train{ranks}"),
        )  # fmt: skip
        run_ranks(train, ranks, resolved)
        (row,) = of_kind(read_metrics(tmp_path / f"train{ranks}" / "metrics.jsonl"), HeldOutLoss)
        rows.append(row)
    model = build_model(MODEL)
    saved = read_tensors(tmp_path / "train1" / "checkpoints" / "step_00000002")
    prefix = "model/"
    weights = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
    model.load_state_dict(weights)
    for one in heldout_sets(tmp_path / "tokens"):
        batch = one.batch(LENGTH, 10_000)
        with torch.no_grad():
            logits = model.logits(model(torch.from_numpy(batch.inputs)))
        loss = F.cross_entropy(logits.flatten(0, 1)[:, :400], torch.from_numpy(batch.labels).flatten()).item()
        for row in rows:
            score = row.heldout_sets[one.name] if one.name else None
            logged = (
                (score.loss, score.bits_per_byte) if score else (row.heldout_loss, row.heldout_bits_per_byte)
            )
            bits = loss / math.log(2) * one.tokens / one.text_bytes
            assert logged == pytest.approx((loss, bits), rel=1e-5)
    assert "bits per byte (a " in describe(rows[0]) and ", b " in describe(rows[0])
    scores = read_manifest(tmp_path / "train1").counts["heldout_sets"]
    assert [tag for tag, _ in set_scalars(scores)] == [
        "heldout_loss/et/a", "heldout_bits_per_byte/et/a", "heldout_loss/et/b", "heldout_bits_per_byte/et/b",
    ]  # fmt: skip

"""An encoder on longer and longer sequences, with a ramp, a masking schedule, LAMB and dropout: the same
samples, masks and weights however the run is interrupted and on however many ranks it goes on.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kielo.artifact.manifest import write_stage
from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.artifact.token_shards import TokenShardWriter
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.dataset.batches import NOT_COUNTED
from kielo.recipe.read import read_recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.text import imagined_text
from kielo.train import build
from kielo.train.run import train
from tests.house.checks import ROOT
from tests.started_ranks import run_ranks
from tests.train.test_masked_tokens import write_tokenizer
from tests.train.tiny_run import VOCABULARY

RECIPE = """
name = "lengths"
language = "et"
corpus.sources = ["text.txt"]
dataset = { sequence_length = 16 }
checkpoint = { every_steps = 100 }

[model]
model_type = "ltg_bert"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 4
position_bucket_size = 8

[train]
objective = "masked_tokens"
masking_rate = 0.5
final_masking_rate = 0.1
optimiser = "lamb"
hidden_dropout = 0.2
attention_dropout = 0.2
tokens_per_step = 512
batch_ramp = { first_tokens_per_step = 128, step_tokens = 128, tokens = 768 }
learning_rate = 1e-2
precision = "fp32"
log_every_steps = 1
heldout_every_steps = 100
tensorboard = false

[[phases]]
tokens = 2816
micro_batch_sequences = 8

[[phases]]
tokens = 2048
sequence_length = 32
micro_batch_sequences = 4

[[phases]]
tokens = 1024
sequence_length = 64
micro_batch_sequences = 2
"""
# (length, tokens of a step) of each, by hand
STEPS = [(16, 128)] * 2 + [(16, 256)] + [(16, 384)] + [(16, 512)] * 3 + [(32, 512)] * 4 + [(64, 512)] * 2
IN_THE_RAMP, IN_THE_MIDDLE = 3, 9


def resolved_in(folder: Path, ranks: int = 1) -> Resolved:
    """The recipe above in a run folder with tokens of one source and of held-out text."""
    if not (folder / "tokens").exists():
        folder.mkdir(exist_ok=True)
        (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
        write_tokenizer(folder / "tokenizer")
        generator = np.random.default_rng(5)
        with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
            counts = {}
            for name, documents in (("text", 400), ("heldout", 20)):
                lengths = generator.integers(5, 60, documents)
                with TokenShardWriter(stage.folder / name, VOCABULARY + 1) as writer:
                    for length in lengths:
                        writer.add(np.append(np.sort(generator.integers(1, VOCABULARY, length)), 0))
                counts[name] = {
                    "tokens": int(lengths.sum()) + documents, "documents": documents, "bytes": 1,
                }  # fmt: skip
            stage.counts.update({"heldout": counts.pop("heldout"), "sources": counts})
    return resolve(read_recipe(folder / "recipe.toml", []).recipe, folder, ranks, "cpu")


Sequences = dict[int, dict[int, tuple[Any, ...]]]  # step → sample → its inputs, labels and keys of dropout


def on_rank(resolved: Resolved, max_steps: int | None = None) -> Sequences:
    """Trains; returns what was trained on."""
    torch.set_num_threads(1)
    steps: Sequences = {}
    original = build.Feed.take

    def take(self: Any, step: int) -> Any:
        batch = original(self, step)
        rows = zip(*(
            torch.cat([getattr(piece, name) for piece in batch.micro_batches]).tolist()
            for name in ("inputs_bs", "labels_bs", "dropout_keys_b2")
        ))  # fmt: skip
        steps[step] = dict(zip(batch.samples, rows))  # fewer than rows, where ranks do not divide the step
        return batch

    build.Feed.take = take
    try:
        train(resolved, max_steps)
        return steps
    finally:
        build.Feed.take = original


def losses(folder: Path) -> list[float]:
    rows = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)
    return [row.loss for row in rows]


def last_tensors(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / "train" / "checkpoints" / f"step_{len(STEPS):08d}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequences]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, on_rank(resolved_in(folder))


def test_steps_and_shares_hidden_are_those_asked_for(whole: tuple[Path, Sequences]) -> None:
    """Lengths, sizes and sample numbers by hand; the rate of each step within five standard deviations of
    spans of 3 tokens.
    """
    _, steps = whole
    first_sample = 0
    for (number, sequences), (length, tokens) in zip(sorted(steps.items()), STEPS, strict=True):
        assert list(sequences) == list(range(first_sample, first_sample + tokens // length))
        first_sample += tokens // length
        assert {len(inputs) for inputs, _, _ in sequences.values()} == {length}
        labels = np.array([labels for _, labels, _ in sequences.values()])
        rate = 0.5 - 0.4 * (number - 1) / (len(STEPS) - 1)
        deviation = (rate * (1 - rate) / (tokens / 3)) ** 0.5
        # documents' ends, one of thirty-three tokens, are never hidden; at least one span is
        assert abs((labels != NOT_COUNTED).mean() - rate) < 5 * deviation + 0.05


def test_a_stop_in_the_ramp_and_inside_a_length_changes_no_bit(
    whole: tuple[Path, Sequences], tmp_path: Path
) -> None:
    """Sequences, masks, keys of dropout, losses, weights and moments."""
    stopped = tmp_path / "stopped"
    found: Sequences = {}
    for max_steps in (IN_THE_RAMP, IN_THE_MIDDLE, None):
        found |= on_rank(resolved_in(stopped), max_steps)
    assert found == whole[1] and losses(stopped) == losses(whole[0])
    one, other = last_tensors(whole[0]), last_tensors(stopped)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_other_ranks_go_on_with_the_same_samples_and_masks(
    whole: tuple[Path, Sequences], tmp_path: Path
) -> None:
    """Two ranks go on in the ramp, and one inside the second length: bitwise the same sequences, masks and
    keys; losses within 1e-5, which is the order of sums in fp32.
    """
    changed = tmp_path / "changed"
    found = on_rank(resolved_in(changed), IN_THE_RAMP)
    for part in run_ranks(on_rank, 2, resolved_in(changed, ranks=2), IN_THE_MIDDLE):
        for step, sequences in part.items():
            found[step] = dict(sorted((found.get(step, {}) | sequences).items()))
    found |= on_rank(resolved_in(changed))
    assert found == whole[1]
    assert losses(changed) == pytest.approx(losses(whole[0]), rel=1e-5)


def test_the_docs_recipe_is_hplts_schedule(tmp_path: Path) -> None:
    """31,250 steps of 4,194,304 tokens: 70 % at length 128, 20 % at 256 and 10 % at 512."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    block = re.search(r'```toml\n(name = "et_bert".*?)```', text, re.S)[1]
    (tmp_path / "recipe.toml").write_text(block, encoding="utf-8")
    recipe = read_recipe(tmp_path / "recipe.toml", []).recipe
    identity = resolve(recipe, tmp_path, 128, "cpu", text=imagined_text(recipe)).identity
    phases = identity.phases
    assert {phase.tokens_per_step for phase in phases} == {4_194_304} and identity.total_steps == 31_250
    assert [phase.sequence_length for phase in phases] == [128, 256, 512]
    assert [phase.steps for phase in phases] == [21_875, 6_250, 3_125]
    assert identity.train.optimiser == "lamb"

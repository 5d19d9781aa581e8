"""Training on masked tokens: the same on another number of ranks from the middle on, and it learns."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kielo.artifact.metrics import HeldOutLoss, TrainingStep, of_kind, read_metrics
from kielo.dataset.batches import NOT_COUNTED
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.models.families import complete
from kielo.recipe.sections import Model
from kielo.resolve.resolved import Resolved
from kielo.train.feed import MicroBatch
from kielo.train.forward_backward import NextToken, pick_counted
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import LENGTH, VOCABULARY, resolve, write_tokens


def write_tokenizer(folder: Path) -> None:
    """The words 1 to 66 of the tiny run, its end of text 0, and a mask token."""
    names = {"[SEP]": 0} | {f"w{number}": number for number in range(1, VOCABULARY)} | {"[MASK]": VOCABULARY}
    tokenizer = Tokenizer(WordLevel(names, unk_token="[SEP]"))
    tokenizer.add_special_tokens(["[SEP]", "[MASK]"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"sep_token": "[SEP]", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


LTG_BERT = complete(Model(
    model_type="ltg_bert", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=4, vocab_size=VOCABULARY + 1,
    vocab_multiple=10, max_position_embeddings=LENGTH, position_bucket_size=8, tie_word_embeddings=True,
    attention_bias=True, mlp_bias=False, hidden_act="gelu_new",
), LENGTH)  # fmt: skip


def plan(folder: Path, **changes) -> Resolved:
    settings = {
        "model": LTG_BERT, "objective": "masked_tokens", "masking": "span", "masking_rate": 0.4,
        "tokenizer_folder": str(folder / "tokenizer"),
    }  # fmt: skip
    return resolve(folder, **(settings | changes))


def losses(folder: Path) -> list[float]:
    rows = of_kind(read_metrics(folder / "train" / "metrics.jsonl"), TrainingStep)
    return [row.loss for row in rows]


@pytest.mark.parametrize("hidden", [0.0, 0.15, 1.0])
def test_the_head_of_counted_tokens_gives_the_whole_loss(hidden: float) -> None:
    """Loss and gradients are those of the head of all tokens within 1e-6 (another order of the same fp32
    sums), for no label, few and all; a micro-batch with few has few rows.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    labels = inputs.masked_fill(torch.rand(inputs.shape, generator=generator) >= hidden, NOT_COUNTED)
    counted = int((labels != NOT_COUNTED).sum())
    found = []
    for picks in (False, True):
        model = families.build_model(LTG_BERT)
        init_weights(model, 3)
        micro_batch = MicroBatch(inputs, labels, None, counted=counted)
        loss = NextToken(1e-3, 48, picks_counted=picks)(model, micro_batch, torch.tensor(max(counted, 1.0)))
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert (found[0][0] > 1) == (counted > 0)
    rows, picked = pick_counted(torch.zeros(4, LENGTH, 1), labels, counted)
    assert torch.equal(picked[:counted], labels[labels != NOT_COUNTED]) and len(rows) == len(picked)
    assert (picked[counted:] == NOT_COUNTED).all() and len(picked) < counted + 4 * LENGTH / 16 + 1


@pytest.mark.full
def test_a_run_goes_on_with_the_same_masks_on_another_number_of_ranks(tmp_path: Path) -> None:
    """In the middle of the rate's schedule from one rank to two: losses within 1e-5, as between layouts of a
    decoder; other masks change them by far more. Held-out loss falls, and has no bits per byte.
    """
    for name in ("whole", "changed"):
        (tmp_path / name).mkdir()
        write_tokens(tmp_path / name / "tokens")
        write_tokenizer(tmp_path / name / "tokenizer")
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    run_ranks(train, 1, plan(whole))
    run_ranks(train, 1, plan(changed), 10)
    run_ranks(train, 2, plan(changed, shard=2))
    assert losses(changed) == pytest.approx(losses(whole), rel=1e-5)
    assert len(set(losses(whole))) == 20 and losses(whole)[-1] < losses(whole)[0] < 1.2 * math.log(VOCABULARY)
    heldout = of_kind(read_metrics(whole / "train" / "metrics.jsonl"), HeldOutLoss)
    assert heldout[-1].heldout_loss < heldout[0].heldout_loss and heldout[-1].heldout_bits_per_byte is None

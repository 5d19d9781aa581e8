"""Training on hidden tokens and causal sequences in one batch: against two models, and in other layouts."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kielo.artifact.metrics import TrainingStep, of_kind, read_metrics
from kielo.dataset.batches import NOT_COUNTED, Batches
from kielo.dataset.masking import Masking, masking_vocabulary
from kielo.models import families
from kielo.models.blocks.decoder import init_weights
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.test_masked_tokens import losses, plan, write_tokenizer
from tests.train.tiny_run import LENGTH, write_tokens

SHARE = 0.5


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_tokens(folder / "tokens")
    write_tokenizer(folder / "tokenizer")
    return folder


def test_loss_and_gradients_are_those_of_two_models(tmp_path: Path) -> None:
    """The first step's loss and gradient norm are the sums of a call of masked and one of causal sequences,
    each token with the same weight, within 1e-6: another order of the same fp32 sums.
    """
    resolved = plan(made(tmp_path), causal_share=SHARE, total_steps=1, z_loss=0.0, micro_batch=4)
    train(resolved)
    (step,) = of_kind(read_metrics(tmp_path / "train" / "metrics.jsonl"), TrainingStep)

    batch = Batches(tmp_path / "tokens", 3, resolved.identity.phases[0], LENGTH, 0, True).step(1, 0, 1)
    vocabulary = masking_vocabulary(tmp_path / "tokenizer", "span")
    masking = Masking(3, "span", vocabulary, SHARE)
    is_causal = torch.from_numpy(masking.training_batch(batch, 0.4).documents[:, 0] < 0)
    assert 0 < is_causal.sum() < len(is_causal)
    hidden = masking.hide(batch, 0.4)
    model = families.build_model(resolved.identity.model)
    init_weights(model, 3)
    masked = [torch.from_numpy(one)[~is_causal] for one in (hidden.inputs, hidden.labels, batch.documents)]
    causal = [torch.from_numpy(one)[is_causal] for one in (batch.inputs, batch.labels, -1 - batch.documents)]
    nats, counted = torch.zeros(()), 0
    for (inputs, labels, documents), is_shifted in ((masked, True), (causal, False)):
        logits = model.logits(model(inputs, documents))
        if is_shifted:  # the token at a place is predicted at the place before
            logits, labels = logits[:, :-1], labels[:, 1:]
        nats = nats + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        counted += int((labels != NOT_COUNTED).sum())
    loss = nats / counted
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-6)


@pytest.mark.full
def test_a_hybrid_run_goes_on_bit_by_bit_and_on_other_ranks(tmp_path: Path) -> None:
    """Stopped after ten of twenty steps: on one rank the same losses to the bit, on two within 1e-5, as
    between layouts of a decoder; other causal sequences would change them by far more.
    """
    whole, again, changed = (made(tmp_path / name) for name in ("whole", "again", "changed"))
    run_ranks(train, 1, plan(whole, causal_share=SHARE))
    for folder, ranks in ((again, 1), (changed, 2)):
        run_ranks(train, 1, plan(folder, causal_share=SHARE), 10)
        run_ranks(train, ranks, plan(folder, causal_share=SHARE, shard=ranks))
    assert losses(again) == losses(whole) and len(set(losses(whole))) == 20
    assert losses(changed) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(whole)[-1] < losses(whole)[0]

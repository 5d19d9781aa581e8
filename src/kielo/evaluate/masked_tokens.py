"""The scores of an encoder on hidden tokens of held-out text, beside baselines with the same training text.

Tokens are hidden as at the end of training, and the same tokens each time. Bits per byte are not defined for
an encoder: it predicts some tokens from all others, and not each token from the tokens before it.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from kielo.artifact.scores import Accuracy, MaskedScores
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.masking import Masking, masking_vocabulary
from kielo.evaluate.contender import Contender
from kielo.evaluate.token_baselines import TokenBaselines
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity

MOST_SEQUENCES = 2048
_SEQUENCES_AT_ONCE = 16


def score_masked_tokens(
    contender: Contender, name: str, identity: Identity, run_folder: Path
) -> MaskedScores:
    """Score the contender `name` on the held-out text of a run. Raise KieloError for NaN."""
    train, length = identity.train, identity.phases[0].sequence_length
    vocabulary = masking_vocabulary(run_folder / "tokenizer", train.masking)
    text = heldout_sets(run_folder / "tokens")[0].batch(
        length, MOST_SEQUENCES, identity.dataset.mask_documents
    )
    masking = Masking(identity.seed, train.masking, vocabulary, train.causal_share)
    hidden = masking.hide(text, train.final_masking_rate)
    is_label = hidden.labels != NOT_COUNTED
    if not is_label.any():
        raise KieloError(f"{run_folder / 'tokens'}: the held-out text has no token to hide")
    loss, right = _loss_and_right(contender, hidden)
    if not np.isfinite(loss):
        raise KieloError(
            f"{contender.name}: the model's loss is {loss}: its weights are damaged, or overflow"
        )
    labels = hidden.labels[is_label]
    baselines = TokenBaselines(run_folder / "tokens", vocabulary)
    before, after = (np.full_like(hidden.inputs, vocabulary.mask_id) for _ in range(2))
    before[:, 1:], after[:, :-1] = hidden.inputs[:, :-1], hidden.inputs[:, 1:]
    before, after = before[is_label], after[is_label]
    return MaskedScores(
        model=name,
        accuracy=Accuracy(
            model=right / len(labels),
            unigram=float((labels == baselines.unigram).mean()),
            bigram=float((labels == baselines.bigram(before)).mean()),
            neighbours=float((labels == baselines.neighbours(before, after)).mean()),
        ),
        loss=loss,
        hidden_tokens=len(labels),
        sequences=len(hidden.labels),
        sequence_length=length,
        masking=train.masking,
        masking_rate=train.final_masking_rate,
        seed=identity.seed,
    )


@torch.inference_mode()
def _loss_and_right(contender: Contender, batch: Batch) -> tuple[float, int]:
    """Return (mean nats per label, number of labels that have the largest logit)."""
    loss, right, counted = 0.0, 0, 0
    for start in range(0, len(batch.inputs), _SEQUENCES_AT_ONCE):
        rows = slice(start, start + _SEQUENCES_AT_ONCE)
        inputs, labels = (
            torch.from_numpy(array[rows]).to(contender.device) for array in (batch.inputs, batch.labels)
        )
        documents = None
        if batch.documents is not None:
            documents = torch.from_numpy(batch.documents[rows]).to(contender.device)
        is_label = labels != NOT_COUNTED
        logits, wanted = contender.logits(inputs, documents)[is_label].float(), labels[is_label]
        loss += F.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        counted += len(wanted)
    return loss / counted, right

"""Scores an encoder on hidden tokens of held-out text, beside two baselines that saw the same training text.

The tokens are hidden as at the end of training, the same ones whenever a run is scored. Bits per byte are not
defined for an encoder: it predicts some tokens from all others, and not each from those before it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from kielo.artifact.masked_scores import Accuracy, MaskedScores
from kielo.dataset.batches import NOT_COUNTED, Batch, open_shard, packed_manifest
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.masking import Masking, MaskingVocabulary, masking_vocabulary
from kielo.evaluate.contender import Contender
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity

MOST_SEQUENCES = 2048
_TRAINING_TOKENS = 20_000_000  # of each source, that the baselines count
_SEQUENCES_AT_ONCE = 16


def score_masked_tokens(
    contender: Contender, name: str, identity: Identity, run_folder: Path
) -> MaskedScores:
    """Scores the contender, which `name` names, on the held-out text of a run. Raises KieloError for NaN."""
    train, length = identity.train, identity.phases[0].sequence_length
    vocabulary = masking_vocabulary(run_folder / "tokenizer", train.masking)
    text = heldout_sets(run_folder / "tokens")[0].batch(
        length, MOST_SEQUENCES, identity.dataset.mask_documents
    )
    hidden = Masking(identity.seed, train.masking, vocabulary).hide(text, train.final_masking_rate)
    is_label = hidden.labels != NOT_COUNTED
    if not is_label.any():
        raise KieloError(f"{run_folder / 'tokens'}: the held-out text has no token to hide")
    loss, right = _loss_and_right(contender, hidden)
    if not np.isfinite(loss):
        raise KieloError(
            f"{contender.name}: the model's loss is {loss}: its weights are damaged, or overflow"
        )
    labels = hidden.labels[is_label]
    unigram, follower = _most_frequent(run_folder / "tokens", vocabulary)
    before = np.full_like(hidden.inputs, vocabulary.mask_id)
    before[:, 1:] = hidden.inputs[:, :-1]
    bigram = np.where(before == vocabulary.mask_id, unigram, follower[before])[is_label]
    return MaskedScores(
        model=name,
        accuracy=Accuracy(
            model=right / len(labels),
            unigram=float((labels == unigram).mean()),
            bigram=float((labels == bigram).mean()),
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
    """Returns (mean nats per label, number of labels that have the largest logit)."""
    loss, right, counted = 0.0, 0, 0
    for start in range(0, len(batch.inputs), _SEQUENCES_AT_ONCE):
        rows = slice(start, start + _SEQUENCES_AT_ONCE)
        inputs, labels, documents = (
            None if array is None else torch.from_numpy(array[rows]).to(contender.device)
            for array in (batch.inputs, batch.labels, batch.documents)
        )
        is_label = labels != NOT_COUNTED
        logits, wanted = contender.logits(inputs, documents)[is_label].float(), labels[is_label]
        loss += F.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        counted += len(wanted)
    return loss / counted, right


def _most_frequent(tokens_folder: Path, vocabulary: MaskingVocabulary) -> tuple[int, np.ndarray]:
    """Returns (the most frequent token, after each token the most frequent next one, int64 [v]).

    Control tokens are never hidden, so neither is one; after a token that no other follows it is the most
    frequent one.
    """
    size = len(vocabulary.is_control)
    counts, pairs = np.zeros(size, np.int64), []
    for stream in _training_streams(tokens_folder):
        counts += np.bincount(stream, minlength=size)
        next_is_ordinary = ~vocabulary.is_control[stream[1:]]
        pairs.append((stream[:-1] * size + stream[1:])[next_is_ordinary])
    unigram = int(np.where(vocabulary.is_control, -1, counts).argmax())
    follower = np.full(size, unigram)
    pair, number = np.unique(np.concatenate(pairs), return_counts=True)
    rising = np.argsort(number, kind="stable")
    follower[pair[rising] // size] = pair[rising] % size  # the last one written is the most frequent
    return unigram, follower


def _training_streams(tokens_folder: Path) -> Iterator[np.ndarray]:
    for name in packed_manifest(tokens_folder).counts["sources"]:
        shard = open_shard(tokens_folder, name)
        yield np.asarray(shard.read(0, min(shard.num_tokens, _TRAINING_TOKENS)), dtype=np.int64)

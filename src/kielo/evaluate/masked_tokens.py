"""The scores of an encoder on hidden tokens of held-out text, beside baselines with the same training text.

Tokens are hidden as at the end of training, and the same tokens each time. Bits per byte are not defined for
an encoder: it predicts some tokens from all others, and not each token from the tokens before it.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from kielo.artifact.scores import Accuracy, MaskedScores
from kielo.dataset.batches import NOT_COUNTED, Batch, open_shard, packed_counts
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.masking import Masking, MaskingVocabulary, masking_vocabulary
from kielo.evaluate.contender import Contender, refuse_odd_loss
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity

MOST_SEQUENCES = 2048
_SEQUENCES_AT_ONCE = 16
_TRAINING_TOKENS = 20_000_000  # of each source, that the baselines count


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
    refuse_odd_loss(contender, loss)
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


class TokenBaselines:
    """Baselines of hidden tokens: predictions by counts of tokens, and of pairs, in the training text.

    Control tokens are never hidden, so none is predicted. As neighbours they count like any token. The
    baselines do not know a neighbour that is hidden itself.
    """

    def __init__(self, tokens_folder: Path, vocabulary: MaskingVocabulary):
        self._mask_id, self._size = vocabulary.mask_id, len(vocabulary.is_control)
        is_ordinary = ~vocabulary.is_control
        counts, keys = np.zeros(self._size, np.int64), []
        for name in packed_counts(tokens_folder).sources:
            shard = open_shard(tokens_folder, name)
            stream = np.asarray(shard.read(0, min(shard.num_tokens, _TRAINING_TOKENS)), dtype=np.int64)
            counts += np.bincount(stream, minlength=self._size)
            keys.append(stream[:-1] * self._size + stream[1:])
        self._counts = counts
        self._keys, self._numbers = np.unique(np.concatenate(keys), return_counts=True)
        first, second = np.divmod(self._keys, self._size)
        self.unigram = int(np.where(is_ordinary, counts, -1).argmax())
        self._following = self._most_frequent(first, second, is_ordinary[second])
        self._preceding = self._most_frequent(second, first, is_ordinary[first])
        self._is_ordinary = is_ordinary

    def bigram(self, before: np.ndarray) -> np.ndarray:
        """Return the most frequent token after each token [n], or of all after a hidden token."""
        return np.where(before == self._mask_id, self.unigram, self._following[before])

    def neighbours(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the likeliest token between two [n], by the first-order Markov chain of the counts.

        The token is the x of the largest count(before, x) · count(x, after) / count(x). If one neighbour is
        hidden, or no token was seen between them, the other neighbour decides, the token before first.
        """
        found = np.where(
            before != self._mask_id,
            self.bigram(before),
            np.where(after != self._mask_id, self._preceding[after], self.unigram),
        )
        is_between = (before != self._mask_id) & (after != self._mask_id)
        pairs, place = np.unique(np.stack([before, after])[:, is_between], axis=1, return_inverse=True)
        between = np.array([self._between(*pair) for pair in pairs.T.tolist()], np.int64)
        found[is_between] = between[place.reshape(-1)]
        return found

    def _between(self, before: int, after: int) -> int:
        first, last = np.searchsorted(self._keys, [before * self._size, (before + 1) * self._size])
        tokens = self._keys[first:last] - before * self._size
        wanted = tokens * self._size + after
        place = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        follows = np.where(self._keys[place] == wanted, self._numbers[place], 0)
        likelihood = self._numbers[first:last] * follows / np.maximum(self._counts[tokens], 1)
        likelihood *= self._is_ordinary[tokens]
        if not len(tokens) or not likelihood.any():
            return int(self._following[before])
        return int(tokens[likelihood.argmax()])

    def _most_frequent(self, given: np.ndarray, token: np.ndarray, may_be: np.ndarray) -> np.ndarray:
        """Return for each given token its most frequent partner, int64 [v], or else the unigram."""
        found = np.full(self._size, self.unigram)
        rising = np.argsort(self._numbers[may_be], kind="stable")
        found[given[may_be][rising]] = token[may_be][rising]  # the most frequent is written last
        return found

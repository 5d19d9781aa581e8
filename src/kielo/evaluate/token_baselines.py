"""Baselines of hidden tokens: predictions by counts of tokens, and of pairs of them, in the training text.

Control tokens are never hidden, so none is predicted. As neighbours they count like any token. The baselines
do not know a neighbour that is hidden itself.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kielo.dataset.batches import open_shard, packed_counts
from kielo.dataset.masking import MaskingVocabulary

_TRAINING_TOKENS = 20_000_000  # of each source, that the baselines count


class TokenBaselines:
    def __init__(self, tokens_folder: Path, vocabulary: MaskingVocabulary):
        self._mask_id, self._size = vocabulary.mask_id, len(vocabulary.is_control)
        is_ordinary = ~vocabulary.is_control
        counts, keys = np.zeros(self._size, np.int64), []
        for stream in _training_streams(tokens_folder):
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

        That is the x of the largest count(before, x) · count(x, after) / count(x). If one neighbour is
        hidden, or no token was seen between them, the other neighbour decides, the token before first.
        """
        found = np.where(
            before != self._mask_id, self.bigram(before),
            np.where(after != self._mask_id, self._preceding[after], self.unigram),
        )  # fmt: skip
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


def _training_streams(tokens_folder: Path) -> Iterator[np.ndarray]:
    for name in packed_counts(tokens_folder).sources:
        shard = open_shard(tokens_folder, name)
        yield np.asarray(shard.read(0, min(shard.num_tokens, _TRAINING_TOKENS)), dtype=np.int64)

"""Three baselines that a language model has to beat: the bits of held-out text, given the same training text.

`contender.py` has the same convention: a text is the UTF-8 bytes of its documents, and each document is
closed by one border. The border is the end-of-text token for the model and the token unigram, and for the two
byte baselines the byte 0xFF, which no UTF-8 text contains. The bits of borders count for every contender, and
are divided by the bytes of the documents plus one per border.
"""

import lzma
from collections.abc import Iterable

import numpy as np

from kielo.recipe.errors import KieloError

BORDER = b"\xff"
LONGEST_EXACT_ORDER = 8  # an n-gram is one uint64 key, so eight bytes at most; no hashing, no collisions
LARGEST_XZ_DICTIONARY_BYTES = 1 << 30


def byte_stream(texts: Iterable[str]) -> bytes:
    """Return the documents' UTF-8 bytes, a border byte after each."""
    return b"".join(text.encode("utf-8") + BORDER for text in texts)


def unigram_bits(training_counts: np.ndarray, heldout_tokens: np.ndarray) -> float:
    """Return the total bits of the held-out tokens [n] under the training counts of each token [vocab_size].

    Krichevsky–Trofimov smoothing: half a count for every token, so that unseen tokens have a probability.
    """
    smoothed = training_counts.astype(np.float64) + 0.5
    bits = -np.log2(smoothed / smoothed.sum())
    return float(bits[heldout_tokens].sum())


def xz_bits(training: bytes, heldout: bytes) -> float:
    """Return the bits that `xz -9e` adds for the held-out text when it follows the training text.

    The dictionary is as large as both texts together, so that it covers all training text.
    """
    dictionary_bytes = 1 << max(20, (len(training) + len(heldout) - 1).bit_length())
    preset, most = 9 | lzma.PRESET_EXTREME, LARGEST_XZ_DICTIONARY_BYTES
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": min(dictionary_bytes, most)}]

    def size(data: bytes) -> int:
        return len(lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=filters))

    return 8.0 * (size(training + heldout) - size(training))


class ByteNgram:
    """Interpolated byte n-gram with modified Kneser–Ney discounts, down to the uniform 1/256.

    Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998): the longest
    order counts occurrences, a shorter order counts the different bytes that precede its n-gram. Counts live
    in sorted arrays of uint64 keys, about 16 bytes for each different n-gram.
    """

    def __init__(self, training: bytes, order: int):
        if not 1 <= order <= LONGEST_EXACT_ORDER:
            raise KieloError(f"evaluate.ngram_order = {order}. Fix: 1 to {LONGEST_EXACT_ORDER}")
        self.order = order
        stream = np.frombuffer(BORDER + training, dtype=np.uint8)
        longest = min(order, len(stream))
        tables: list[_OrderTable] = []
        keys, counts = np.unique(_ngram_keys(stream, longest), return_counts=True)
        for length in range(longest, 0, -1):
            tables.append(_OrderTable(keys, counts))
            if length > 1:
                # Different bytes before each (length - 1)-gram: drop the first byte and count again.
                mask = np.uint64((1 << 8 * (length - 1)) - 1)
                keys, counts = np.unique(keys & mask, return_counts=True)
        self._tables = tables[::-1]  # by length: 1, 2, …

    def bits(self, heldout: bytes) -> float:
        """Return the total bits of a text that starts after a border."""
        stream = np.frombuffer(BORDER + heldout, dtype=np.uint8)
        probability = np.full(len(heldout), 1 / 256)
        for length, table in enumerate(self._tables, start=1):
            if len(stream) < length:
                break
            # The n-gram that ends at byte i starts at i - length + 1; the first border is never predicted.
            first = max(length - 1, 1)
            keys = _ngram_keys(stream, length)[first - length + 1 :]
            probability[first - 1 :] = table.interpolate(keys, probability[first - 1 :])
        return float(-np.log2(probability).sum())

    def probabilities(self, context: bytes) -> np.ndarray:
        """Return the probability of each next byte [256] after `context` (its last order - 1 bytes)."""
        context = context[-(self.order - 1) :] if self.order > 1 else b""
        probability = np.full(256, 1 / 256)
        for length, table in enumerate(self._tables, start=1):
            if length - 1 > len(context):
                break
            prefix = int.from_bytes(context[len(context) - length + 1 :], "big")
            keys = np.arange(256, dtype=np.uint64) + np.uint64(prefix << 8)
            probability = table.interpolate(keys, probability)
        return probability


class _OrderTable:
    def __init__(self, keys: np.ndarray, counts: np.ndarray):
        self.keys, self.counts = keys, counts.astype(np.int32 if counts.max() < 2**31 else np.int64)
        discounts = _discounts(counts)
        context_of_key = keys >> np.uint64(8)
        starts = np.flatnonzero(np.r_[True, context_of_key[1:] != context_of_key[:-1]])
        self.contexts = context_of_key[starts]
        self.context_counts = np.add.reduceat(counts.astype(np.float64), starts)
        self.discounts = discounts
        discount_of_key = discounts[np.minimum(counts, 3)]
        self.context_discounts = np.add.reduceat(discount_of_key, starts)

    def interpolate(self, keys: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """Return the probability of each n-gram's last byte [n], given the next shorter order's [n]."""
        context = keys >> np.uint64(8)
        row = np.minimum(np.searchsorted(self.contexts, context), len(self.contexts) - 1)
        known = self.contexts[row] == context
        column = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        count = np.where(self.keys[column] == keys, self.counts[column], 0)
        kept = np.maximum(count - self.discounts[np.minimum(count, 3)], 0.0)
        here = (kept + self.context_discounts[row] * shorter) / self.context_counts[row]
        return np.where(known, here, shorter)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts of 0, 1, 2, and 3 or more (Chen and Goodman 1998, equation 26).

    Texts too short for the estimate (a count-of-counts of zero) get half a count. Always within (0, count].
    """
    n1, n2, n3, n4 = (float(np.count_nonzero(counts == c)) for c in (1, 2, 3, 4))
    if min(n1, n2, n3) == 0:
        return np.array([0.0, 0.5, 0.5, 0.5])
    ratio = n1 / (n1 + 2 * n2)
    estimate = np.array([1 - 2 * ratio * n2 / n1, 2 - 3 * ratio * n3 / n2, 3 - 4 * ratio * n4 / n3])
    return np.r_[0.0, np.clip(estimate, 0.1, [1.0, 2.0, 3.0])]


def _ngram_keys(stream: np.ndarray, length: int) -> np.ndarray:
    """Return the uint64 key of the n-gram that starts at each byte [len(stream) - length + 1], big-endian."""
    num_ngrams = len(stream) - length + 1
    keys = np.zeros(num_ngrams, dtype=np.uint64)
    for position in range(length):
        keys = (keys << np.uint64(8)) | stream[position : position + num_ngrams]
    return keys

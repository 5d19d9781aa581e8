"""Promises of the three baselines: they are real probability models and real compressors of the same text."""

import lzma

import numpy as np
import pytest

from kielo.evaluate.baselines import BORDER, ByteNgram, byte_stream, unigram_bits, xz_bits
from kielo.recipe.errors import KieloError

SENTENCES = [
    "Vali käsk Fail - Ava.",
    "Avab dialoogi, kus saab valida faili.",
    "Fail on avatud; vali uus käsk.",
]
TRAINING = byte_stream(SENTENCES * 20)
HELDOUT = byte_stream(["Avab faili dialoogi.", "Žürii valis uue käsu."])


@pytest.mark.parametrize("order", [1, 2, 6, 8])
@pytest.mark.parametrize(
    "context", [b"", b"a", b"vali f", BORDER, b"Fail -", b"\x00\x01\x02", "Žüri".encode()]
)
def test_ngram_probabilities_sum_to_one(order: int, context: bytes) -> None:
    """Every context, seen or not, gets a distribution: positive everywhere, summing to 1."""
    probabilities = ByteNgram(TRAINING, order).probabilities(context)
    assert probabilities.shape == (256,)
    assert probabilities.min() > 0
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("order", [1, 3, 6])
def test_ngram_bits_are_those_of_its_probabilities(order: int) -> None:
    """The vectorised cost of a text is the sum over its bytes, one after another, after a border."""
    ngram = ByteNgram(TRAINING, order)
    stream = BORDER + HELDOUT
    expected = -sum(np.log2(ngram.probabilities(stream[:i])[stream[i]]) for i in range(1, len(stream)))
    assert ngram.bits(HELDOUT) == pytest.approx(expected, rel=1e-12)


def test_ngram_learns_and_knows_its_limits() -> None:
    """A longer context costs fewer bits on a text like the training text;
    a text of nothing costs 8 bits a byte.
    """
    text = byte_stream(SENTENCES)
    costs = [ByteNgram(TRAINING, order).bits(text) / len(text) for order in (1, 2, 4, 6)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.5
    for order in (0, 9):
        with pytest.raises(KieloError, match=r"evaluate\.ngram_order"):
            ByteNgram(TRAINING, order)


def test_xz_reaches_back_over_the_whole_training_text() -> None:
    """A copy of the far beginning of an incompressible training text costs next to nothing."""
    noise = np.random.default_rng(0).integers(0, 255, 3 << 20, dtype=np.uint8).tobytes()
    copy = noise[:40_000]
    assert xz_bits(noise, copy) / 8 < 2000 < 40_000 < len(lzma.compress(copy))


def test_unigram_counts_unseen_tokens() -> None:
    """Krichevsky–Trofimov: p = (count + 1/2) / (tokens + vocabulary / 2), written out by hand."""
    counts = np.array([3, 0, 1])
    expected = -np.log2(3.5 / 5.5) - 2 * np.log2(0.5 / 5.5)
    assert unigram_bits(counts, np.array([0, 1, 1])) == pytest.approx(expected)

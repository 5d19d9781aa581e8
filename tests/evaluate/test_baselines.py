"""Promises of the three baselines: they are real probability models and real compressors of the same text."""

import lzma
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kielo.evaluate import baselines
from kielo.evaluate.baselines import BORDER, ByteNgram, _discounts, byte_stream, unigram_bits, xz_bits
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


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # n1 … n4 = 4, 2, 1, 1: n1 / (n1 + 2 n2) = 1/2
        ([1, 1, 1, 1, 2, 2, 3, 4], [0, 0.5, 1.25, 1.0]),
        ([1, 1, 1, 1, 2, 2, 3, 5, 9], [0, 0.5, 1.25, 3.0]),
        ([1, 2, 2, 3, 3, 3], [0, 0.2, 1.1, 3.0]),  # 1/5; 1 - 4/5, 2 - 9/10, 3
        ([1, 2, 3, 4, 4, 4], [0, 1 / 3, 1.0, 0.1]),  # 3 - 4 is too little
        ([1, 1, 2], [0, 0.5, 0.5, 0.5]),  # none of 3
        ([1, 3, 3], [0, 0.5, 0.5, 0.5]),
        ([2, 3, 4], [0, 0.5, 0.5, 0.5]),
    ],
)
def test_discounts_are_those_of_the_paper(counts: list[int], expected: list[float]) -> None:
    """1 - 2Y n2/n1, 2 - 3Y n3/n2, 3 - 4Y n4/n3 with Y = n1 / (n1 + 2 n2), by hand."""
    assert _discounts(np.array(counts)).tolist() == pytest.approx(expected)


def plain_ngram(training: bytes, order: int, context: bytes, byte: int) -> float:
    """The probability of a byte by the paper's equations on dicts of strings, in place of sorted keys."""
    stream = BORDER + training
    counts = [Counter(stream[i : i + order] for i in range(len(stream) - order + 1))]
    for _ in range(order - 1):
        counts.insert(0, Counter(gram[1:] for gram in counts[0]))  # different bytes before it
    probability = 1 / 256
    for length in range(1, order + 1):
        table, prefix = counts[length - 1], context[len(context) - length + 1 :]
        followers = {gram: count for gram, count in table.items() if gram[:-1] == prefix}
        if length - 1 > len(context) or not followers:
            continue
        n1, n2, n3, n4 = (sum(count == number for count in table.values()) for number in (1, 2, 3, 4))
        discounts = [0.0, 0.5, 0.5, 0.5]
        if n1 and n2 and n3:
            y = n1 / (n1 + 2 * n2)
            most = ((1 - 2 * y * n2 / n1, 1.0), (2 - 3 * y * n3 / n2, 2.0), (3 - 4 * y * n4 / n3, 3.0))
            discounts = [0.0, *(min(max(value, 0.1), limit) for value, limit in most)]
        left = sum(discounts[min(count, 3)] for count in followers.values())
        count = followers.get(prefix + bytes([byte]), 0)
        kept = max(count - discounts[min(count, 3)], 0.0)
        probability = (kept + left * probability) / sum(followers.values())
    return probability


@pytest.mark.parametrize("order", [1, 2, 4])
def test_ngram_probabilities_are_those_of_plain_counts(order: int) -> None:
    """Of seen and unseen bytes after contexts that are long, short, unseen and none."""
    training = byte_stream(SENTENCES)
    ngram = ByteNgram(training, order)
    for context in (b"", b"a", b"ali", b"Fail", b"\x00\x01\x02", b"xyi"):
        found = ngram.probabilities(context)
        used = context[-(order - 1) :] if order > 1 else b""
        for byte in b"a li.\x00\xff":
            assert found[byte] == pytest.approx(plain_ngram(training, order, used, byte), rel=1e-12), context


def test_a_training_text_may_be_shorter_than_the_order() -> None:
    assert ByteNgram(b"a", 8).probabilities(BORDER)[ord("a")] > 0.25
    assert ByteNgram(b"", 8).bits(b"") == 0.0


def test_a_border_closes_each_document() -> None:
    assert byte_stream(["a", "õ"]) == b"a\xff\xc3\xb5\xff"


def test_xz_looks_back_over_both_texts_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dictionary is the power of two that holds both, 1 MiB at the least; the added bits count."""
    asked = []

    def compress(data: bytes, format: int, check: int, filters: list[dict]) -> bytes:
        asked.append((len(data), filters[0]["dict_size"], filters[0]["preset"]))
        return bytes(len(data) // 10)

    monkeypatch.setattr(baselines, "lzma", SimpleNamespace(
        compress=compress, FORMAT_XZ=1, CHECK_NONE=0, FILTER_LZMA2=33, PRESET_EXTREME=2**31,
    ))  # fmt: skip
    for more, size in ((0, 2**20), (1, 2**21)):
        assert xz_bits(bytes(2**20 - 100), bytes(100 + more)) == 8 * 10
        assert asked[-2:] == [(2**20 + more, size, 2**31 + 9), (2**20 - 100, size, 2**31 + 9)]
    monkeypatch.setattr(baselines, "LARGEST_XZ_DICTIONARY_BYTES", 2**20)
    xz_bits(bytes(2**20), bytes(1))
    assert asked[-1][1] == 2**20
    xz_bits(b"a", b"b")
    assert asked[-1][1] == 2**20

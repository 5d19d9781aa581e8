"""Log-likelihoods of continuations, whatever is computed together, by a model whose tables are known."""

from dataclasses import replace

import pytest
import torch

from kielo.evaluate import likelihoods as module
from kielo.evaluate.contender import Contender
from kielo.evaluate.likelihoods import sequence_log_likelihoods, shortened
from kielo.recipe.errors import KieloError
from tests.evaluate.test_bits_per_byte import VOCAB, bigram, contender

PAIRS = [([1, 2], [3]), ([1, 2], [4]), ([5], [6, 7, 8]), ([9] * 20, [1, 2]), ([1, 2, 3], [4]), ([2], [3])]


@pytest.mark.parametrize("most_tokens", [1, 7, 8192])
def test_a_likelihood_is_the_sum_over_its_tokens(most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand from the table of a model that looks one token back; in batches of any size."""
    monkeypatch.setattr(module, "MOST_TOKENS_PER_FORWARD", most_tokens)
    logs = bigram(torch.arange(VOCAB)[None], None)[0].log_softmax(-1)
    found = sequence_log_likelihoods(contender(bigram), PAIRS)
    for (context, rest), (nats, is_greedy) in zip(PAIRS, found, strict=True):
        before = [context[-1], *rest[:-1]]
        expected = sum(logs[one, token].item() for one, token in zip(before, rest))
        assert nats == pytest.approx(expected, rel=1e-6)
        assert is_greedy == all(logs[one].argmax() == token for one, token in zip(before, rest))


def test_the_likeliest_text_is_told() -> None:
    table = bigram(torch.arange(VOCAB)[None], None)[0]
    first = int(table[4].argmax())
    second = int(table[first].argmax())
    pairs = [([4], [first, second]), ([4], [first, (second + 1) % VOCAB])]
    assert [is_greedy for _, is_greedy in sequence_log_likelihoods(contender(bigram), pairs)] == [True, False]


def counting(calls: list[torch.Tensor]) -> Contender:
    """A model with documents that notes what it is asked."""

    def logits(tokens_bs: torch.Tensor, documents_bs: torch.Tensor | None) -> torch.Tensor:
        assert documents_bs is not None
        calls.append(tokens_bs)
        return bigram(tokens_bs, None)

    return replace(contender(logits, mask_documents=True), end_of_text_id=0)


def test_a_row_is_computed_once_and_keeps_the_end_of_its_context() -> None:
    """Answers of one token share their row: the five pairs are three rows. A row has at most 16 tokens."""
    calls: list[torch.Tensor] = []
    sequence_log_likelihoods(counting(calls), [*PAIRS[:2], PAIRS[3], PAIRS[3], PAIRS[4]])
    rows = [tuple(row.tolist()) for call in calls for row in call]
    assert sorted(tuple(token for token in row if token) for row in rows) == [
        (1, 2), (1, 2, 3), (*[9] * 15, 1),
    ]  # fmt: skip
    assert shortened(contender(bigram), PAIRS) == 1


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 17)])
def test_what_cannot_be_scored_is_refused(pair: tuple[list[int], list[int]]) -> None:
    with pytest.raises(KieloError, match="^test: .* tokens follow .* Fix: one token or more of context"):
        sequence_log_likelihoods(contender(bigram), [pair])

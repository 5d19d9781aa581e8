"""Each rank's share of held-out text, its scores, and when they are made: by hand, without a model."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.dataset.heldout_sets import HeldoutSet
from kielo.train import heldout
from kielo.train.heldout import HeldOut, HeldOutShare, HeldOutText, share_of
from kielo.train.state import State

CPU = torch.device("cpu")


def batch(sequences: int, has_documents: bool = True) -> Batch:
    """Sequences of four tokens; the first label of each does not count."""
    inputs = np.arange(1, 4 * sequences + 1).reshape(sequences, 4)
    labels = inputs + 100
    labels[:, 0] = NOT_COUNTED
    documents = inputs.astype(np.int32) + 200 if has_documents else None
    return Batch(inputs, labels, documents, np.arange(sequences) + 50)


@pytest.mark.parametrize(("rank", "own", "missing"), [(0, [0, 3], 0), (1, [1, 4], 0), (2, [2], 1)])
def test_a_rank_has_every_third_sequence_and_as_many_as_the_others(
    rank: int, own: list, missing: int
) -> None:
    """What is missing counts nothing; the number of tokens is that of all ranks."""
    whole = batch(5)
    share = share_of(whole, rank, 3, 1)
    assert share.counted_tokens == 15 and len(share.micro_batches) == 2
    for name, array, padding in (
        ("inputs_bs", whole.inputs, 0), ("labels_bs", whole.labels, NOT_COUNTED),
        ("documents_bs", whole.documents, 0),
    ):  # fmt: skip
        rows = torch.cat([getattr(piece, name) for piece in share.micro_batches])
        assert rows.tolist() == [*array[own].tolist(), *[[padding] * 4] * missing]
    assert [piece.counted for piece in share.micro_batches] == [3, 3 - 3 * missing]


def test_a_rank_of_a_context_axis_has_its_columns() -> None:
    share = share_of(batch(3, has_documents=False), 0, 1, 2, torch.tensor([1, 3]))
    assert [piece.inputs_bs.tolist() for piece in share.micro_batches] == [[[2, 4], [6, 8]], [[10, 12]]]
    assert share.micro_batches[0].documents_bs is None and share.counted_tokens == 9
    assert share.micro_batches[0].positions_s.tolist() == [1, 3]


def of_set(name: str, tokens: int = 30, text_bytes: int | None = 120) -> HeldoutSet:
    return HeldoutSet(name, Path(), f"{name}.bin", ("fi", "en"), tokens, text_bytes)


def test_bits_per_byte_are_those_of_a_token_by_the_tokens_of_a_byte() -> None:
    """A loss of 3 ln 2 is three bits a token, of which there are 30 in 120 bytes."""
    score = HeldOutText(of_set("news"), HeldOutShare([], 0)).score(3 * math.log(2))
    assert (score.loss, score.languages) == (3 * math.log(2), ["fi", "en"])
    assert score.bits_per_byte == pytest.approx(0.75)
    for text in (
        HeldOutText(of_set("news", text_bytes=None), HeldOutShare([], 0)),
        HeldOutText(of_set("news"), HeldOutShare([], 0), has_bits=False),
    ):
        assert text.score(2.0).bits_per_byte is None


class Scored:
    """Held-out text of one set or three, whose losses are those of `nats` a label, over two equal ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sequences: int):
        monkeypatch.setattr(heldout, "forward_only", nullcontext)
        self.calls: list[tuple[int, float]] = []
        self.nats = 1.5
        texts = [
            HeldOutText(of_set(name), share_of(batch(number), 0, 2, 1))
            for name, number in zip(("", "news", "books"), sequences)
        ]
        self.heldout = HeldOut(texts, torch.nn.Linear(1, 1), self, lambda loss: 2 * loss, CPU, 4, 10)

    def score(self, micro_batch: Any, divisor: torch.Tensor, z_loss: float) -> torch.Tensor:
        self.calls.append((micro_batch.counted, z_loss))
        return self.nats * micro_batch.counted / divisor


def test_text_is_scored_every_four_steps_and_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one = Scored(monkeypatch, 4).heldout
    assert [step for step in range(1, 11) if of_one.due(step)] == [4, 8, 10]


def test_a_row_has_the_whole_texts_loss_and_that_of_each_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss is a mean over the labels of all ranks, without z-loss; the whole text is scored once."""
    scored = Scored(monkeypatch, 4, 2, 8)
    row = scored.heldout.row(State(step=8, tokens=800))
    assert (row.step, row.tokens, row.heldout_loss) == (8, 800, pytest.approx(1.5))
    assert row.heldout_bits_per_byte == pytest.approx(1.5 / math.log(2) / 4)
    assert {name: score.loss for name, score in row.heldout_sets.items()} == pytest.approx(
        {"news": 1.5, "books": 1.5}
    )
    assert scored.calls == [(3, 0.0)] * (2 + 1 + 4)
    scored.nats = 2.5
    assert scored.heldout.loss_at(State(step=8)) == pytest.approx(1.5) and len(scored.calls) == 7
    assert scored.heldout.loss_at(State(step=9)) == pytest.approx(2.5) and len(scored.calls) == 9
    scored.nats = 3.5  # the run went back, and takes the step again
    assert scored.heldout.row(State(step=9)).heldout_loss == pytest.approx(3.5)


def test_a_text_alone_has_no_sets_and_one_without_labels_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Scored(monkeypatch, 4).heldout.row(State(step=1))
    assert row.heldout_sets is None and row.heldout_loss == pytest.approx(1.5)
    empty = HeldOutText(of_set(""), HeldOutShare([], 0))
    nothing = HeldOut([empty], torch.nn.Linear(1, 1), SimpleNamespace(), lambda loss: loss, CPU, 4, 10)
    assert nothing.loss_at(State(step=1)) is None
    one = SimpleNamespace(score=lambda piece, divisor, z_loss: 6 / divisor)
    share = share_of(batch(1), 0, 1, 1)
    for counted, loss in ((1, 6.0), (3, 2.0)):
        text = HeldOutText(of_set(""), HeldOutShare(share.micro_batches, counted))
        assert HeldOut([text], torch.nn.Linear(1, 1), one, lambda loss: loss, CPU, 4, 10).loss_at(
            State(step=1)
        ) == pytest.approx(loss)  # fmt: skip

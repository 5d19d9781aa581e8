"""Minimal pairs of decoders: files as they are read, likelihoods and shares by hand."""

import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.evaluate import minimal_pairs as module
from kielo.evaluate.contender import Contender
from kielo.evaluate.minimal_pairs import pair_likelihoods, score_pairs
from kielo.evaluate.pair_files import Pair, read_pairs
from kielo.recipe.errors import KieloError
from tests.evaluate.test_bits_per_byte import VOCAB, bigram, contender

PAIRS = [
    Pair("ta on", "ta olen", "number", "agreement"),
    Pair("ma olen siin", "ma on siin", "number", "agreement"),
    Pair("õed tulid", "õed tuli", "plural", "agreement"),
    Pair("tere", "reet", "order", "order"),
    Pair("nii", "nii", "order", "order"),
]


def nats(sentence: str, first: int, table: torch.Tensor) -> float:
    """By a loop over bytes: token n + 1 of the tokenizer is the n-th character of GPT-2's alphabet."""
    alphabet = {byte: number for number, byte in enumerate(gpt2_bytes(), start=1)}
    before, total = first, 0.0
    for byte in f" {sentence}".encode():
        row = table[before].double()
        total += float(row[alphabet[byte]] - torch.logsumexp(row, 0))
        before = alphabet[byte]
    return total


def gpt2_bytes() -> list[int]:
    """Return the bytes in the order of GPT-2's characters: first the printable bytes, then the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*printable, *(byte for byte in range(256) if byte not in printable)]


@pytest.mark.parametrize("length", [64, 5, 3])
@pytest.mark.parametrize("first_ids", [(), (9,), (9, 8)])
def test_a_sentence_has_the_sum_of_its_tokens(
    length: int, first_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that looks one token back: whatever the batches, and in windows if it is too long."""
    monkeypatch.setattr(module, "MOST_LOGITS_PER_FORWARD", 20 * VOCAB)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    model = replace(contender(bigram, length), first_ids=first_ids)
    start = first_ids[-1] if first_ids else 0
    found, tokens = pair_likelihoods(model, PAIRS)
    expected = [[nats(sentence, start, table) for sentence in pair[:2]] for pair in PAIRS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert tokens.tolist() == [[1 + len(one.encode()) for one in pair[:2]] for pair in PAIRS]


def test_shares_are_counted_by_group_and_term() -> None:
    """A tie is a miss. The error is that of a share; an equal number of tokens counts as a half."""

    def short(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(*tokens_bs.shape, VOCAB)

    scores = score_pairs(contender(short, 64), PAIRS, "own.jsonl")
    assert (scores.file, scores.all.pairs, scores.all.likelihood) == ("own.jsonl", 5, 0.2)  # the first alone
    assert scores.all.standard_error == pytest.approx(math.sqrt(0.2 * 0.8 / 5))
    assert scores.all.fewer_tokens == (1 + 0 + 0 + 0.5 + 0.5) / 5
    assert {name: (one.pairs, one.likelihood) for name, one in scores.groups.items()} == {
        "number": (2, 0.5), "plural": (1, 0.0), "order": (2, 0.0),
    }  # fmt: skip
    assert {name: one.pairs for name, one in scores.terms.items()} == {"agreement": 3, "order": 2}
    assert "terms" not in score_pairs(contender(short, 64), [Pair("a", "b", "")], "f").content()


def row(good: str, bad: str, **more: str) -> str:
    return json.dumps({"sentence_good": good, "sentence_bad": bad} | more)


def test_blimp_is_read_from_a_folder_or_a_zip(tmp_path: Path) -> None:
    """A paradigm a file, in the order of their names; what macOS adds, and other files, are no pairs."""
    named = row("a b", "b a", UID="order_1", linguistics_term="order")
    files = {
        "data/zwei.jsonl": f"{named}\n\n{row('c', 'd', UID='order_2')}\n",
        "data/ein.jsonl": row("e", "f"),
        "data/._ein.jsonl": "\x00",
        "data/README.md": "no pairs",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, text in (files | {"__MACOSX/data/ein.jsonl": "\x00"}).items():
            archive.writestr(name, text)
    expected = [Pair("e", "f", "ein"), Pair("a b", "b a", "order_1", "order"), Pair("c", "d", "order_2")]
    assert read_pairs(tmp_path / "data") == read_pairs(tmp_path / "all.zip") == expected


def test_files_without_pairs_are_refused_by_their_place(tmp_path: Path) -> None:
    folder, archive = tmp_path / "empty", tmp_path / "pairs.zip"
    folder.mkdir()
    (folder / "pairs.txt").write_text(row("a", "b"))
    with pytest.raises(KieloError, match=r"empty: has no minimal pair\. Fix: a folder or \.zip"):
        read_pairs(folder)
    archive.write_bytes(b"PK no archive")
    with pytest.raises(KieloError, match=r"pairs\.zip: not a readable \.zip"):
        read_pairs(archive)
    for content, message in {
        b"{}": r"pairs\.zip, x/a\.jsonl, line 2: not a minimal pair",
        b"[1, 2]": "line 2: not a minimal pair",
        b"{": "line 2: not JSON",
        b"\xff": "line 2: not UTF-8",
        row("a", " ").encode(): "line 2: not a minimal pair",
    }.items():
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("x/a.jsonl", row("a", "b").encode() + b"\n" + content)
        with pytest.raises(KieloError, match=message):
            read_pairs(archive)


def test_documents_are_numbered_if_the_model_was_trained_with_masks() -> None:
    """The start token ends a document, as the end of text before each document in training does."""
    seen: list[list[list[int]]] = []

    def noting(tokens_bs: torch.Tensor, documents_bs: torch.Tensor | None) -> torch.Tensor:
        assert documents_bs is not None
        seen.append(documents_bs.tolist())
        return torch.zeros(*tokens_bs.shape, VOCAB)

    masked: Contender = contender(noting, 64, mask_documents=True)
    pair_likelihoods(masked, [Pair("ab", "cd", "")])
    assert seen == [[[0, 1, 1], [0, 1, 1]]]

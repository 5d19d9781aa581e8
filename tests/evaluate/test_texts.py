"""Even samples of a run's texts: which documents and tokens are taken, and what is told of all of them."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kielo.artifact.manifest import write_stage
from kielo.evaluate import texts
from kielo.evaluate.texts import (
    documents_of_sets,
    evenly,
    heldout_documents,
    training_texts,
    training_token_counts,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from tests.evaluate.test_bits_per_byte import byte_tokenizer
from tests.written_documents import write_documents

MIB = 2**20


def heldout_texts(folder) -> tuple[list[str], dict[str, int]]:
    documents, coverage = heldout_documents(folder)
    return [document["text"] for document in documents], coverage


def document(text: str, source: str = "help", **metadata: Any) -> dict[str, Any]:
    return {"id": text[:9], "text": text, "source": source, "metadata": metadata}


def conversation(text: str) -> dict[str, Any]:
    return document(text, turns=[["user", len(text)]])


def tokens_folder(
    folder: Path, documents: Mapping[str, list[dict[str, Any]]], counts: Mapping[str, Any]
) -> Path:
    """A folder of a pack stage with files of documents."""
    with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
        for file, of_file in documents.items():
            write_documents(stage.folder / f"{file}.jsonl.zst", of_file)
        stage.counts |= counts
    return folder / "tokens"


@pytest.mark.parametrize(
    ("number", "share", "taken"),
    [
        (10, 0.3, [0, 3, 6, 9]),  # 1.2, 2.1 and 3.0 are beyond 1, 2 and 3
        (6, 0.5, [0, 1, 3, 5]),
        (5, 0.1, [0]),
        (5, 0.75, [0, 1, 2, 3]),  # 1.5, 2.25 and 3.0
        (5, 1.0, [0, 1, 2, 3, 4]),
        (4, 7.5, [0, 1, 2, 3]),
        (0, 0.5, []),
    ],
)
def test_a_share_is_taken_at_even_distances(number: int, share: float, taken: list[int]) -> None:
    """The first is among them."""
    assert list(evenly(range(number), share)) == taken


def test_heldout_text_beyond_four_mib_is_sampled(tmp_path: Path) -> None:
    """Of 6 MiB two of three documents, and the first; of just 4 MiB all. Conversations do not count."""
    part = [document(f"{number:02}" + (MIB // 16 - 2) * "o") for number in range(96)]
    folder = tokens_folder(tmp_path, {"heldout": [conversation("tere"), *part]}, {})
    found, in_all = heldout_texts(folder)
    numbers = [int(text[:2]) for text in found]
    # 2/3, 4/3, 6/3, 8/3, …: of each three the second and the third
    assert numbers == [0, *(number for number in range(96) if number % 3)]
    assert in_all == {"heldout_documents_in_all": 96, "heldout_bytes_in_all": 6 * MIB}
    folder = tokens_folder(tmp_path, {"heldout": part[:64]}, {})
    assert len(heldout_texts(folder)[0]) == 64


def test_conversations_are_taken_where_there_is_nothing_else(tmp_path: Path) -> None:
    """Bytes are those of UTF-8; no document at all is an error that names the file."""
    folder = tokens_folder(tmp_path, {"heldout": [conversation("öö"), conversation("tere")]}, {})
    assert heldout_texts(folder) == (
        ["öö", "tere"],
        {"heldout_documents_in_all": 2, "heldout_bytes_in_all": 8},
    )
    folder = tokens_folder(tmp_path, {"heldout": [document("öö"), conversation("tere"), document("a")]}, {})
    assert heldout_texts(folder) == (
        ["öö", "a"],
        {"heldout_documents_in_all": 2, "heldout_bytes_in_all": 5},
    )
    folder = tokens_folder(tmp_path, {"heldout": []}, {})
    with pytest.raises(KieloError) as caught:
        heldout_texts(folder)
    assert str(caught.value) == (
        f"{folder / 'heldout.jsonl.zst'}: no held-out documents. Fix: raise dataset.heldout_share or add text"
    )
    folder = tokens_folder(tmp_path, {"heldout": [document("")]}, {})
    assert heldout_texts(folder)[0] == [""]


def test_each_set_is_sampled_to_one_mib(tmp_path: Path) -> None:
    """By the bytes that the folder tells: of 2 MiB one half. An outside text has a file of its own."""
    mine = [document(str(number), "a" if number % 4 else "b") for number in range(16)]
    half = {"tokens": 9, "bytes": 2 * MIB - 12, "documents": 12}
    known = {"tokens": 9, "bytes": MIB - 4, "documents": 4}
    folder = tokens_folder(
        tmp_path,
        {"heldout": mine},
        {
            "sources": {},
            "heldout": {"tokens": 9},
            "heldout_sets": {"a": half, "b": known, "c": {"tokens": 0}},
        },
    )
    with write_stage(tmp_path / "evaluation_texts", "evaluation_texts", 1, {}, {}) as stage:
        write_documents(stage.folder / "court.jsonl.zst", [document(name, "x") for name in "pqrs"])
        write_documents(stage.folder / "a.jsonl.zst", [document("own", "b")])
        stage.counts["texts"] = {
            "court": {"tokens": 9, "bytes": 4 * MIB - 4, "documents": 4},
            "a": {"tokens": 9},
        }
    found = [(one.name, [document["text"] for document in taken]) for one, taken in documents_of_sets(folder)]
    assert found == [
        # the 1st, 2nd, 4th, 6th … of 1, 2, 3, 5, 6, 7, 9, …
        ("a", ["1", "2", "5", "7", "10", "13", "15"]),
        ("b", ["0", "4", "8", "12"]),
        ("c", []),
        ("court", ["p", "s"]),
        ("a", ["own"]),
    ]


class CountedShard:
    """A shard of which every part that is read has these few tokens; it notes what was read."""

    def __init__(self, num_tokens: int, tokens: list[int]) -> None:
        self.num_tokens, self._tokens, self.was_read = num_tokens, tokens, []

    def read(self, start: int, count: int) -> np.ndarray:
        self.was_read.append((start, count))
        return np.array(self._tokens)


def replaced_shards(monkeypatch: pytest.MonkeyPatch, **shards: CountedShard) -> None:
    counts = SimpleNamespace(sources={name: SimpleNamespace(bytes=16 * MIB) for name in reversed(shards)})
    monkeypatch.setattr(texts, "packed_counts", lambda folder: counts)
    monkeypatch.setattr(texts, "open_shard", lambda folder, name: shards[name])


def test_tokens_are_counted_in_even_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three times 2^28 tokens a third of each part of 2^22, and of a few tokens all."""
    large, larger = CountedShard(2**28, [3, 3, 1]), CountedShard(2**29, [4])
    replaced_shards(monkeypatch, a=large, b=larger)
    assert training_token_counts(Path("tokens"), 6).tolist() == [0, 64, 0, 128, 128, 0]
    third = round(2**22 / 3)
    assert large.was_read == [(part * 2**22, third) for part in range(64)]
    assert larger.was_read == [(part * 2**22, third) for part in range(128)]
    small, empty = CountedShard(2**22 + 5, [2]), CountedShard(0, [5])
    replaced_shards(monkeypatch, a=empty, b=small)
    assert training_token_counts(Path("tokens"), 6).tolist() == [0, 0, 2, 0, 0, 0]
    assert small.was_read == [(0, 2**22), (2**22, 5)] and empty.was_read == []
    replaced_shards(monkeypatch, a=empty)
    assert training_token_counts(Path("tokens"), 2).tolist() == [0, 0]
    assert empty.was_read == []


def recipe(*sources: dict[str, str]) -> Recipe:
    sections = {"corpus": {"sources": list(sources)}, "dataset": {"heldout_share": 0.2}}
    return Recipe.model_validate({"name": "tiny", "language": "et"} | sections)


READY = [{"name": name, "tokens": f"{name}.ds"} for name in ("a", "b")]


@pytest.fixture
def of_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run's folder whose corpus is four documents; those with an h are held out."""
    write_documents(
        tmp_path / "corpus" / "documents" / "00000.jsonl.zst",
        [document(text) for text in ("öö", "h", "tere", "hm", "no")],
    )
    monkeypatch.setattr(texts, "is_heldout", lambda text, share: "h" in text and share == 0.2)
    monkeypatch.setattr(texts, "load_tokenizer", lambda folder: byte_tokenizer())
    return tmp_path


def test_training_text_is_all_that_is_not_held_out(of_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the corpus, and after it ready tokens without the end-of-text, which is token 0."""
    replaced_shards(monkeypatch)
    raw = {"name": "help", "path": "help.txt"}
    told = {"training_bytes": 10, "training_bytes_of_byte_baselines": 10}
    assert training_texts(recipe(raw), of_run) == (["öö", "tere", "no"], told)
    ids = [byte_tokenizer().whole.token_to_id(letter) for letter in "abc"]
    ready = [CountedShard(2**20 + 7, [ids[0], ids[1], 0, 0, ids[2], 0]), CountedShard(5, [0, ids[1]])]
    replaced_shards(monkeypatch, a=ready[0], b=ready[1])
    found, told = training_texts(recipe(*READY), of_run)
    # two parts of the one, and the one of the other; the corpus is not read
    assert found == ["ab", "c", "ab", "c", "b"]
    assert told == {"training_bytes": 32 * MIB, "training_bytes_of_byte_baselines": 7}
    assert ready[0].was_read == [(0, 2**20), (2**20, 7)] and ready[1].was_read == [(0, 5)]


def test_training_text_beyond_32_mib_is_sampled(of_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three times as much as is taken a third, of the corpus and of each part of ready tokens."""
    ready = [CountedShard(2**20 + 3, [40]), CountedShard(1, [50])]
    replaced_shards(monkeypatch, a=ready[0], b=ready[1])
    monkeypatch.setattr(texts, "MOST_TRAINING_BYTES", (32 * MIB + 10) / 3)
    raw = {"name": "help", "path": "help.txt"}
    found, told = training_texts(recipe(raw, *READY), of_run)
    assert found[:2] == ["öö", "no"] and len(found) == 4
    assert told == {"training_bytes": 32 * MIB + 10, "training_bytes_of_byte_baselines": 6 + 2}
    assert ready[0].was_read == [(0, round(2**20 / 3)), (2**20, 1)] and ready[1].was_read == []
    monkeypatch.undo()
    assert texts.MOST_TRAINING_BYTES == 32 * MIB

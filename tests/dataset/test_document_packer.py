"""What a process makes of a batch of documents: rows, masks, counts and held-out lines."""

import json
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.documents import join_messages
from kielo.dataset import document_packer
from kielo.dataset.document_packer import (
    DocumentBatch,
    DocumentEncoder,
    DocumentPacker,
    EncodedDocument,
    checked_name,
    empty_counts,
    load_packer,
)
from kielo.dataset.heldout_sets import HeldoutLanguages
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import decode, encode, load_tokenizer
from kielo.tokenizer.stage_inputs import is_heldout
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents, write_corpus


def recipe(loss: str = "answers", **changes) -> Recipe:
    named = [
        {"name": "chats", "path": "chats.jsonl", "kind": "instructions", "loss": loss},
        {"name": "a", "path": "a.txt"},
    ]
    values = {
        "corpus": {"sources": named},
        "tokenizer": {"vocab_size": 400},
        "dataset": {"heldout_share": 0.3},
    }
    return Recipe(name="tiny", language="et", **values | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("a tokenizer")
    write_corpus(place / "corpus", [one | {"source": "a"} for one in make_documents(60)])
    train_tokenizer(recipe(), place / "corpus", place / "tokenizer")
    return place / "tokenizer"


def chat(number: int, *contents: str) -> dict:
    roles = ["user", "assistant"] * 3
    text, turns = join_messages([{"role": role, "content": one} for role, one in zip(roles, contents)])
    metadata = {"turns": turns, "file": "chats.jsonl", "number": number}
    return {"id": f"chats/{number}", "source": "chats", "text": text, "metadata": metadata}


def batch(documents: list[dict], first: int = 0, is_last: bool = False) -> DocumentBatch:
    return DocumentBatch(Path("x.jsonl"), first, [json.dumps(one).encode() for one in documents], is_last)


def texts(side: bool, number: int) -> list[str]:
    """So many texts of one side of the held-out split."""
    found = (f"{n}. õhtul tuli lumi" for n in range(1000))
    return [text for text in found if is_heldout(text, 0.3) is side][:number]


def test_a_batch_document_by_document(folder: Path) -> None:
    """Text and conversations of both sides of the split, an empty text, and an id of two lines."""
    tokenizer = load_tokenizer(folder)
    begins, ends = (tokenizer.whole.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    train, held = texts(False, 2), texts(True, 2)
    plain = [
        {"id": "a/0\r\nb", "source": "a", "text": train[0], "metadata": {"x": 1}},
        {"id": "a/1", "source": "a", "text": "", "metadata": {}},
        {"id": "a/2", "source": "a", "text": held[0], "metadata": {}},
        {"id": "a/3", "source": "a", "text": train[1], "metadata": {}},
    ]

    def first_of(side: bool, *contents: str) -> dict:
        found = (chat(n, f"Mis {n}?", *contents) for n in range(100))
        return next(one for one in found if is_heldout(one["text"], 0.3) is side)

    chats = [first_of(False, "Jõgi ja õu."), first_of(False, "Mina.", "Kus?", "Siin õues.")]
    held_chat = first_of(True, "Õu")
    packed = load_packer(recipe(), folder)(batch([*plain, *chats, held_chat], first=3, is_last=True))

    def of_text(document: dict) -> tuple[list[int], list[bool]]:
        ids = encode(tokenizer, [document["text"]])[0]
        return [*ids, 0], [True] * (len(ids) + 1)

    def of_chat(document: dict) -> tuple[list[int], list[bool]]:
        ids, flags, start = [], [], 0
        for role, characters in document["metadata"]["turns"]:
            head, content = encode(tokenizer, [f"{role}\n", document["text"][start : start + characters]])
            (line_end,) = encode(tokenizer, ["\n"])
            start, is_answer = start + characters + 1, role == "assistant"
            ids += [begins, *head, *content, ends, *line_end]
            flags += [False] * (1 + len(head)) + [is_answer] * (len(content) + 1) + [False] * len(line_end)
        return [*ids, 0], [*flags, False]

    expected = {
        "a": [of_text(plain[0]), of_text(plain[3])],
        "chats": [of_chat(one) for one in chats],
        "heldout": [of_text(plain[2]), of_chat(held_chat)],
        "heldout.a": [of_text(plain[2])],
        "heldout.chats": [of_chat(held_chat)],
    }
    ids = {
        "a": ["a/0 b", "a/3"], "chats": [one["id"] for one in chats], "heldout": ["a/2", held_chat["id"]],
        "heldout.a": ["a/2"], "heldout.chats": [held_chat["id"]],
    }  # fmt: skip
    assert packed.shards.keys() == expected.keys() and packed.is_last
    for file, rows in packed.shards.items():
        tokens = [token for row, _ in expected[file] for token in row]
        assert len(rows.tokens) == 1 and rows.tokens[0].tolist() == tokens and rows.file == file
        assert rows.lengths == [len(row) for row, _ in expected[file]] and rows.ids == ids[file]
        assert rows.name == file.removeprefix("heldout.")
        assert rows.group == (
            "heldout" if file == "heldout" else "heldout_sets" if "." in file else "sources"
        )
        flags = [flag for _, row in expected[file] for flag in row]
        if file.endswith("a"):
            assert rows.carries_loss is None and "tokens_with_loss" not in rows.counts
        else:
            assert len(rows.carries_loss) == 1 and rows.carries_loss[0].tolist() == flags
            assert rows.counts["tokens_with_loss"] == sum(flags)
        assert rows.counts["tokens"] == len(tokens) and rows.counts["documents"] == len(rows.ids)
    counts = {file: (rows.counts["bytes"], rows.counts["words"]) for file, rows in packed.shards.items()}
    sizes = [len(one["text"].encode()) for one in [*plain, *chats, held_chat]]
    assert counts["a"] == (sizes[0] + sizes[3], 8) and counts["chats"] == (sizes[4] + sizes[5], 5 + 6)
    assert counts["heldout"] == (sizes[2] + sizes[6], 4 + 3)
    with_loss = {file: rows.counts["bytes_with_loss"] for file, rows in packed.shards.items() if "a" in file}
    answers = [len("Jõgi ja õu.".encode()) + 1, len(b"Mina.") + 1 + len("Siin õues.".encode()) + 1]
    assert with_loss["chats"] == sum(answers) and with_loss["heldout.chats"] == len("Õu".encode()) + 1
    assert packed.shards["heldout"].counts["bytes_with_loss"] == sizes[2] + 1 + len("Õu".encode()) + 1
    assert packed.met == {"a": 4, "chats": 3}
    assert [json.loads(line) for line in packed.heldout] == [plain[2], held_chat]
    assert all(line.endswith(b"}\n") for line in packed.heldout)


@pytest.mark.parametrize("first, chosen", [(0, [0, 4, 8]), (1, [3, 7]), (3, [1, 5, 9]), (4, [0, 4, 8])])
def test_every_so_many_documents_are_decoded(
    folder: Path, monkeypatch, first: int, chosen: list[int]
) -> None:
    """Counted from the file's first document, so that batches do not matter. Those of a tokenizer of our own
    must come back; of a ready one they are counted.
    """
    monkeypatch.setattr(document_packer, "ROUND_TRIP_EVERY", 4)
    documents = [{"id": f"a/{n}", "source": "a", "text": text, "metadata": {}} for n, text in
                 enumerate(texts(False, 10))]  # fmt: skip
    packed = load_packer(recipe(), folder)(batch(documents, first))
    assert (packed.checked, packed.exact) == (len(chosen), len(chosen)) and not packed.is_last
    decoded = document_packer.decode
    for at in (chosen[0], chosen[-1]):
        bad = documents[at]["text"]
        monkeypatch.setattr(
            document_packer,
            "decode",
            lambda *given, bad=bad: ["?" if text == bad else text for text in decoded(*given)],
        )
        with pytest.raises(KieloError, match=f"document a/{at}: the tokenizer changes its text"):
            load_packer(recipe(), folder)(batch(documents, first))
        ready = recipe(tokenizer={"path": str(folder)})
        packed = load_packer(ready, folder)(batch(documents, first))
        assert (packed.checked, packed.exact) == (len(chosen), len(chosen) - 1)


def test_every_64th_document_is_decoded(folder: Path) -> None:
    documents = [{"id": f"a/{n}", "source": "a", "text": "lumi", "metadata": {}} for n in range(65)]
    packer = load_packer(recipe(), folder)
    assert [packer(batch(documents, first)).checked for first in (0, 1, 64, 65)] == [2, 1, 2, 1]


def test_documents_are_numbered_by_their_lines() -> None:
    lines = DocumentBatch(Path("x.jsonl"), 7, [b'{"id": 1}', b"no JSON"])
    with pytest.raises(KieloError, match="x.jsonl, line 9"):
        lines.documents()
    assert DocumentBatch(Path("x"), 0, [b'{"id": 1}']).documents() == [{"id": 1}]


def test_documents_that_are_held_out_anyway(folder: Path) -> None:
    """Of ready tokens: the rows that were given, whatever the split says of the text."""
    packer = DocumentPacker(recipe("all"), load_tokenizer(folder))
    (text,) = texts(False, 1)
    document = {"id": "web/1", "source": "a", "text": text, "metadata": {}}
    packed = packer.held_out(document, [5, 6, 7], None)
    rows = packed.shards["heldout"]
    assert [part.tolist() for part in rows.tokens] == [[5, 6, 7, 0]] and rows.carries_loss is None
    assert rows.counts == {"tokens": 4, "documents": 1, "bytes": len(text.encode()), "words": 4}
    assert packed.shards.keys() == {"heldout", "heldout.a"} and not packed.met and packed.checked == 0
    assert packed.is_last is False and packed.exact == 0
    masked = DocumentPacker(recipe("all"), load_tokenizer(folder), ["a"])
    flags = np.array([False, True, True, True])
    rows = masked.held_out(document, [5, 6, 7], flags).shards["heldout.a"]
    assert np.concatenate(rows.carries_loss).tolist() == flags.tolist()
    (part,) = decode(load_tokenizer(folder), [[6, 7]])
    assert rows.counts["tokens_with_loss"] == 3 and rows.counts["bytes_with_loss"] == len(part.encode()) + 1


def test_ends_that_a_template_has_written_are_not_doubled(folder: Path) -> None:
    """End-of-text after a conversation is there once; without a mask all tokens carry loss."""
    tokenizer = load_tokenizer(folder)
    end = tokenizer.whole.token_to_id("<|im_end|>")
    document = chat(1, "Mis?", "Õu.")
    (full,) = DocumentEncoder(recipe(), tokenizer, 0).encode([document])
    (one,) = DocumentEncoder(recipe(), tokenizer, full.ids[-1]).encode([document])
    assert one.ids.tolist() == full.ids[:-1].tolist() and end in one.ids
    assert one.carries_loss.tolist() == full.carries_loss[:-1].tolist() and full.ids.dtype == np.int32
    assert full.loss_mask is full.carries_loss and one.num_words == 2
    (every,) = DocumentEncoder(recipe("all"), tokenizer, 0).encode([document])
    assert every.carries_loss is every.bytes_with_loss is None and every.ids.tolist() == full.ids.tolist()
    assert every.loss_mask.tolist() == [True] * (len(every.ids) + 1)
    assert DocumentEncoder(recipe(), tokenizer, 0).encode([]) == []
    assert EncodedDocument("", np.array([], np.int32), 0).loss_mask.tolist() == [True]


def test_names_that_no_file_can_have() -> None:
    for name in ("", "heldout", ".a", "heldout.a", "a/b", "a\\b"):
        with pytest.raises(KieloError, match="cannot name a file here"):
            checked_name(name)
    for name in ("a", "heldout2", "a.heldout", "a@et", "a b"):
        assert checked_name(name) == name
    assert empty_counts(False) == {"tokens": 0, "documents": 0, "bytes": 0, "words": 0}
    assert empty_counts(True) == empty_counts(False) | {"tokens_with_loss": 0, "bytes_with_loss": 0}


def test_the_set_of_a_document(monkeypatch) -> None:
    """Of text in several languages by the identifier, between these alone; else the source's own."""
    sources = [
        {"name": "two", "path": "a.txt", "language": ["et", "nb"]}, {"name": "one", "path": "b.txt"},
        {"name": "pairs", "path": "c.tsv", "kind": "parallel", "language": ["et", "fi"]},
    ]  # fmt: skip
    sets = HeldoutLanguages(recipe(corpus={"sources": sources}))
    asked = []

    class Spoken:
        def probabilities(self, text):
            asked.append(text)
            return {"en": 0.9, "no": 0.05, "et": 0.04} if "Hei" in text else {"et": 0.3, "no": 0.2}

    monkeypatch.setattr("kielo.corpus.language_identification.load_identifier", lambda name: Spoken())
    assert sets.has_several_sets
    assert sets.set_of({"source": "two", "text": "Hei " + "a" * 5000}) == "two@nb"
    assert sets.set_of({"source": "two", "text": "Tere"}) == "two@et"
    assert [len(text) for text in asked] == [4000, 4]
    assert sets.set_of({"source": "one", "text": "Hei"}) == "one"
    assert sets.set_of({"source": "pairs", "text": "Hei"}) == "pairs" and len(asked) == 2
    assert sets.set_of({"source": "unknown", "text": "Hei"}) == "unknown"
    assert [sets.languages_of_set(name) for name in ("two@nb", "two", "one", "pairs", "x")] == [
        ("nb",), ("et", "nb"), ("et",), ("et", "fi"), ()
    ]  # fmt: skip
    for few, expected in ((sources[:1], True), (sources[1:2], False), (sources[2:], False)):
        assert HeldoutLanguages(recipe(corpus={"sources": few})).has_several_sets is expected

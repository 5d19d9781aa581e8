"""Texts from outside of the mixture: packed as they are, replaced when they change, refused by name."""

import json

import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import read_manifest
from kielo.artifact.token_shards import TokenShard
from kielo.dataset.evaluation_texts import pack_evaluation_texts
from kielo.dataset.heldout_sets import EVALUATION_TEXTS, heldout_sets
from kielo.dataset.pack import pack
from kielo.evaluate.texts import documents_of_sets
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.text import text_of_run
from kielo.tokenizer.load import decode, encode, load_tokenizer
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents, recipe, write_corpus
from tests.ready_tokens import rows_of


def with_texts(*texts: dict):
    return recipe().model_copy(
        update={"evaluate": type(recipe().evaluate).model_validate({"texts": list(texts)})}
    )


def test_texts_from_outside_are_sets_of_the_run(tmp_path):
    """Every document byte for byte, its bytes counted on the text; a changed file is packed again, the same
    one is not, and a text that is taken out of the recipe is no longer scored."""
    write_corpus(tmp_path / "corpus", make_documents(150))
    train_tokenizer(recipe(), tmp_path / "corpus", tmp_path / "tokenizer")
    pack(recipe(), tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "tokens")
    folder, path = tmp_path / EVALUATION_TEXTS, tmp_path / "court.jsonl"
    documents = ["Kohus  otsustas\t12. mail.", "lumi sulas"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    asked = with_texts({"name": "court", "path": str(path), "language": "fi"})
    pack_evaluation_texts(recipe(), tmp_path / "tokenizer", folder)
    assert not folder.exists()
    # Packing stopped after the tokens: a training would never score the text.
    with pytest.raises(KieloError, match=r"evaluate.texts, court: not packed yet. Fix: `kielo run"):
        text_of_run(asked, tmp_path)
    text_of_run(recipe(), tmp_path)
    pack_evaluation_texts(asked, tmp_path / "tokenizer", folder)
    *_, court = heldout_sets(tmp_path / "tokens")
    assert (court.name, court.languages) == ("court", ("fi",))
    text_of_run(asked, tmp_path)
    assert court.text_bytes == sum(len(text.encode()) + 1 for text in documents)
    shard = TokenShard(folder / "court")
    (text,) = decode(load_tokenizer(tmp_path / "tokenizer"), [shard.read(0, shard.num_tokens).tolist()])
    assert text.replace("<|endoftext|>", "") == "".join(documents)
    # as training scores it: every token but the first
    assert int((court.batch(16, 100).labels >= 0).sum()) == shard.num_tokens - 1
    found = {one.name: written for one, written in documents_of_sets(tmp_path / "tokens")}
    assert [document["text"] for document in found["court"]] == documents
    made = read_manifest(folder)
    assert (made.kind, made.version) == ("evaluation texts", 1)
    written = made.written_at, (folder / "court.bin").stat().st_ino
    pack_evaluation_texts(asked, tmp_path / "tokenizer", folder)
    assert (read_manifest(folder).written_at, (folder / "court.bin").stat().st_ino) == written
    path.write_text(json.dumps({"text": "kevad tuli"}) + "\n")
    pack_evaluation_texts(asked, tmp_path / "tokenizer", folder)
    assert heldout_sets(tmp_path / "tokens")[-1].text_bytes == 11
    pack_evaluation_texts(recipe(), tmp_path / "tokenizer", folder)
    assert [one.name for one in heldout_sets(tmp_path / "tokens")] == ["", "a", "b"]


def test_bad_texts_are_refused_by_name(tmp_path):
    """A path that is not there, a file without text, a damaged line, a name that a source has."""
    write_corpus(tmp_path / "corpus", make_documents(150))
    train_tokenizer(recipe(), tmp_path / "corpus", tmp_path / "tokenizer")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "hea"}\n{"tex')
    for name, words in (
        ("none.txt", "evaluate.texts, x: .*none.txt: no such file"),
        ("empty.txt", "empty.txt: has no text"),
        ("bad.jsonl", "bad.jsonl, line 2: not valid JSON"),
    ):
        with pytest.raises(KieloError, match=words):
            asked = with_texts({"name": "x", "path": str(tmp_path / name)})
            pack_evaluation_texts(asked, tmp_path / "tokenizer", tmp_path / EVALUATION_TEXTS)
    assert not (tmp_path / EVALUATION_TEXTS).exists()
    with pytest.raises(KieloError, match="evaluate.texts: 'a' also names another text or a source"):
        read_recipe("own_text", ["corpus.sources=a.txt", "evaluate.texts=[{name='a', path='b.txt'}]"])


def test_a_folder_of_texts_is_packed_file_by_file(tmp_path):
    """Files of known formats in their order, below folders too; empty documents are none; counts by hand."""
    write_corpus(tmp_path / "corpus", make_documents(40))
    train_tokenizer(recipe(), tmp_path / "corpus", tmp_path / "tokenizer")
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    for name, content in (
        ("b.txt", "jõgi voolas\n"), ("a.jsonl", '{"text": ""}\n{"text": "lumi sulas", "id": "x"}\n'),
        ("deep/c.txt", "kevad tuli\n"), ("notes.pdf", "no"), (".hidden.txt", "no\n"),
    ):  # fmt: skip
        (tmp_path / "texts" / name).write_text(content)
    folder = tmp_path / EVALUATION_TEXTS
    asked = with_texts({"name": "outside", "path": str(tmp_path / "texts")})
    pack_evaluation_texts(asked, tmp_path / "tokenizer", folder)
    texts = ["lumi sulas", "jõgi voolas", "kevad tuli"]
    rows = [[*row, 0] for row in encode(load_tokenizer(tmp_path / "tokenizer"), texts)]
    assert rows_of(TokenShard(folder / "outside")) == rows
    assert read_manifest(folder).counts["texts"] == {
        "outside": {
            "tokens": sum(map(len, rows)), "documents": 3, "bytes": 10 + 12 + 10, "languages": ["et"],
        }
    }  # fmt: skip
    written = list(read_documents(folder / "outside.jsonl.zst"))
    ids = ["x", "outside/b.txt:1", "outside/deep/c.txt:1"]
    assert [one["id"] for one in written] == ids and [one["text"] for one in written] == texts
    assert all(one["source"] == "outside" and one["metadata"] == {} for one in written)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "a.pdf").write_text("no")
    other = with_texts({"name": "x", "path": str(tmp_path / "others")})
    with pytest.raises(KieloError, match=r"x: .*others: no file of a known format. Fix: \.txt"):
        pack_evaluation_texts(other, tmp_path / "tokenizer", folder)

"""A run's documents begin with what the tokenizer puts before a text; runs that have trained keep theirs."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import read_manifest
from kielo.artifact.token_shards import TokenShard
from kielo.dataset import document_packer
from kielo.dataset import pack as pack_module
from kielo.dataset.evaluation_texts import pack_evaluation_texts
from kielo.dataset.pack import pack
from kielo.dataset.provenance import check_recipe
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe, Tokenizer
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents, recipe, write_corpus
from tests.tokenizer.test_text_frame import write_tokenizer


@pytest.fixture
def asked(tmp_path) -> Recipe:
    """A recipe with a tokenizer like Llama 3's; its corpus and tokenizer are made."""
    ready = write_tokenizer(tmp_path / "ready", "llama 3")
    asked = recipe().model_copy(update={"tokenizer": Tokenizer(path=str(ready))})
    write_corpus(tmp_path / "corpus", make_documents(60))
    train_tokenizer(asked, tmp_path / "corpus", tmp_path / "tokenizer")
    return asked


def packed(asked: Recipe, run: Path):
    return pack(asked, run / "corpus", run / "tokenizer", run / "tokens")


def documents_in(prefix: Path) -> list[list[int]]:
    """The documents of a shard, cut after each end-of-text."""
    shard = TokenShard(prefix)
    row = shard.read(0, shard.num_tokens)
    return [part.tolist() for part in np.split(row, np.flatnonzero(row == 0) + 1)[:-1]]


def test_all_shards_of_a_run(asked, tmp_path) -> None:
    """Training text, held-out text and texts from outside are transformers' ids, then end-of-text."""
    outside = tmp_path / "court.jsonl"
    outside.write_text(json.dumps({"text": "Kohus otsustas."}) + "\n")
    texts = {"texts": [{"name": "court", "path": str(outside)}]}
    asked = asked.model_copy(update={"evaluate": type(asked.evaluate).model_validate(texts)})
    made = packed(asked, tmp_path)
    assert made.section["begins_with"] == [1]
    check_recipe(asked, tmp_path)
    pack_evaluation_texts(asked, tmp_path / "tokenizer", tmp_path / "outside", made.section["begins_with"])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ready")
    written = {document["text"] for document in read_documents(tmp_path / "corpus" / "documents")}
    expected = sorted([*theirs(text).input_ids, 0] for text in written)
    shards = [documents_in(tmp_path / "tokens" / name) for name in ("a", "b", "heldout")]
    assert sorted(sum(shards, [])) == expected
    assert documents_in(tmp_path / "outside" / "court") == [[*theirs("Kohus otsustas.").input_ids, 0]]


@pytest.mark.parametrize("has_trained", [True, False])
def test_runs_of_earlier_versions(has_trained, asked, tmp_path, monkeypatch) -> None:
    """Their documents begin with nothing. With a checkpoint they stay; without, they are made anew."""
    with monkeypatch.context() as earlier:
        for module in (pack_module, document_packer):
            earlier.setattr(module, "begin_of_documents", lambda recipe, folder: ())
        before = packed(asked, tmp_path)
    bytes_before = (tmp_path / "tokens" / "a.bin").read_bytes()
    assert "begins_with" not in before.section and documents_in(tmp_path / "tokens" / "a")[0][0] != 1
    if has_trained:
        (tmp_path / "train" / "checkpoints" / "step_00000001").mkdir(parents=True)
        check_recipe(asked, tmp_path)
        assert packed(asked, tmp_path) == before == read_manifest(tmp_path / "tokens")
        assert (tmp_path / "tokens" / "a.bin").read_bytes() == bytes_before
    else:
        with pytest.raises(KieloError, match=r"tokenizer.bos: documents began with the ids \[\], and begin"):
            check_recipe(asked, tmp_path)
        assert packed(asked, tmp_path).section["begins_with"] == [1]
        assert documents_in(tmp_path / "tokens" / "a")[0][0] == 1

"""Packing by parts: the same bytes for any number of workers and machines, and after any kill."""

from functools import partial
from pathlib import Path

import pytest

from kielo.artifact.documents import write_documents
from kielo.artifact.manifest import read_manifest, write_stage
from kielo.dataset import token_parts
from kielo.dataset.document_packer import load_packer
from kielo.dataset.pack import pack, pack_share
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.killed_packer import killed_once
from tests.dataset.test_batches import make_documents, recipe

NUM_FILES = 4


def with_workers(workers: int, share: float = 0.2) -> Recipe:
    made = recipe(share)
    return made.model_copy(update={"corpus": made.corpus.model_copy(update={"workers": workers})})


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def refusing(refused: set[str], *arguments):
    """Loads a packer that is interrupted at documents of these files."""
    packer = load_packer(*arguments)

    def work(batch):
        if batch.path.name in refused:
            raise KeyboardInterrupt
        return packer(batch)

    return work


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Corpus in four files, the last of them empty, and tokens that one process packed; every batch is
    small."""
    folder, documents = tmp_path_factory.mktemp("run"), make_documents(300)
    with write_stage(folder / "corpus", "corpus", 1, {}, {}) as stage:
        for number, end in enumerate((120, 200, 300, 300)):
            file = stage.folder / "documents" / f"{number:05d}.jsonl.zst"
            write_documents(file, documents[[0, 120, 200, 300][number] : end])
        size = sum(len(document["text"].encode()) for document in documents)
        stage.counts.update(documents_kept=300, bytes_kept=size)
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_parts, "BATCH_BYTES", 4_000)
        pack(with_workers(1), folder / "corpus", folder / "tokenizer", folder / "tokens")
    return folder


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(token_parts, "BATCH_BYTES", 4_000)
    monkeypatch.setattr(token_parts, "LEAST_BYTES_FOR_WORKERS", 0)


def check_like(run, other):
    assert written(other) == written(run / "tokens")
    assert read_manifest(other).counts == read_manifest(run / "tokens").counts
    assert not token_parts.parts_folder(other).exists()


def test_documents_are_in_the_order_of_the_corpus(run):
    """Each source's, over the borders of files and batches."""
    for source in "ab":
        ids = (run / "tokens" / f"{source}.ids.txt").read_text().splitlines()
        heldout = (run / "tokens" / f"heldout.{source}.ids.txt").read_text().splitlines()
        own = [document["id"] for document in make_documents(300) if document["source"] == source]
        assert ids == [one for one in own if one not in heldout]
        assert heldout == [one for one in own if one in heldout] != []


def test_three_workers_of_which_one_is_killed(run, tmp_path, monkeypatch):
    """What it was packing is packed again: the bytes are those of one process."""
    mark = tmp_path / "was_killed"
    monkeypatch.setattr(token_parts, "load_packer", partial(killed_once, mark))
    pack(with_workers(3), run / "corpus", run / "tokenizer", tmp_path / "tokens")
    assert mark.exists()
    check_like(run, tmp_path / "tokens")


def test_a_killed_command_goes_on(run, tmp_path, monkeypatch):
    """Parts that are finished are not packed again, and that of which the half was packed is."""
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    monkeypatch.setattr(token_parts, "load_packer", partial(refusing, {"00002.jsonl.zst"}))
    with pytest.raises(KeyboardInterrupt):
        pack(with_workers(1), *folders)
    parts = token_parts.parts_folder(tmp_path / "tokens")
    assert [path.name for path in sorted(parts.iterdir())] == ["00000", "00001"]
    assert not (tmp_path / "tokens").exists()
    monkeypatch.setattr(token_parts, "load_packer", partial(refusing, {"00000.jsonl.zst", "00001.jsonl.zst"}))
    pack(with_workers(1), *folders)
    check_like(run, tmp_path / "tokens")


def test_machines_make_shares(run, tmp_path, monkeypatch):
    """Shares in any order, then `pack`, which only joins them."""
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    assert [pack_share(with_workers(1), *folders, (k, 3)) for k in (3, 1, 2)] == [1, 2, 1]
    every = {f"{number:05d}.jsonl.zst" for number in range(NUM_FILES)}
    monkeypatch.setattr(token_parts, "load_packer", partial(refusing, every))
    pack(with_workers(1), *folders)
    check_like(run, tmp_path / "tokens")
    assert pack_share(with_workers(1), *folders, (1, 3)) == 0


def test_parts_of_another_recipe_are_made_again(run, tmp_path):
    """Another held-out share: other parts. What is not a part stays where it is, and so does its folder."""
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    other = with_workers(1, 0.4)
    pack_share(other, *folders, (1, 1))
    notes = token_parts.parts_folder(tmp_path / "tokens") / "notes.txt"
    notes.write_text("mine")
    pack(with_workers(1), *folders)
    assert written(tmp_path / "tokens") == written(run / "tokens")
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_a_refused_packing_leaves_no_parts(run, tmp_path):
    nothing = with_workers(1, 1e-9)
    with pytest.raises(KieloError, match="holds out none of the 300 documents"):
        pack(nothing, run / "corpus", run / "tokenizer", tmp_path / "tokens")
    assert not list(tmp_path.iterdir())

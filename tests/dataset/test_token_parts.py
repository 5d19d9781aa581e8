"""Packing by parts: the same bytes for any number of workers and machines, and after any kill."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.text_files import read_lines
from kielo.artifact.token_shards import TokenShard
from kielo.dataset import token_parts
from kielo.dataset.document_packer import PackedDocuments, ShardRows, load_packer
from kielo.dataset.pack import pack, pack_progress, pack_share
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.killed_packer import killed_once
from tests.dataset.test_batches import make_documents, recipe
from tests.ready_tokens import rows_of
from tests.written_documents import write_documents

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
    part = read_manifest(parts / "00000")
    assert (part.kind, part.version, part.section["file"]) == ("token part", 1, "00000.jsonl.zst")
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


def test_a_command_that_is_ended_at_once_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.setattr(token_parts, "load_packer", partial(refusing, {"00000.jsonl.zst"}))
    with pytest.raises(KeyboardInterrupt):
        pack(with_workers(1), run / "corpus", run / "tokenizer", tmp_path / "tokens")
    assert not list(tmp_path.iterdir())


def test_parts_that_a_kill_left_are_removed(run, tmp_path):
    """Those whose files are half gone too; but none with a file of somebody else."""
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    pack_share(with_workers(1), *folders, (1, 1))
    parts = token_parts.parts_folder(tmp_path / "tokens")
    shutil.copytree(parts, tmp_path / "kept")
    pack(with_workers(1), *folders)
    assert not parts.exists()
    shutil.copytree(tmp_path / "kept", parts)
    (parts / "00000" / "a.bin").unlink()
    (parts / "00001" / "heldout.jsonl.zst").unlink()
    pack(with_workers(1), *folders)  # the shards are current
    assert not parts.exists()
    shutil.copytree(tmp_path / "kept", parts)
    (parts / "00002" / "notes.txt").write_text("mine")
    with pytest.raises(KieloError, match="00002: contains notes.txt, which Kielo's token part stage did not"):
        pack(with_workers(1), *folders)
    assert (parts / "00002" / "notes.txt").read_text() == "mine"


def test_progress_is_counted_by_parts(run, tmp_path):
    """None, those of a share, all, and the joined shards; a folder of something else is refused at once."""
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    asked = with_workers(1)
    assert pack_progress(asked, *folders) == (0, NUM_FILES, False)
    pack_share(asked, *folders, (2, 3))
    assert pack_progress(asked, *folders) == (1, NUM_FILES, False)
    pack_share(asked, *folders, (1, 1))
    assert pack_progress(asked, *folders) == (NUM_FILES, NUM_FILES, False)
    assert pack_progress(with_workers(1, 0.4), *folders) == (0, NUM_FILES, False)
    pack(asked, *folders)
    assert pack_progress(asked, *folders) == (NUM_FILES, NUM_FILES, True)
    assert (
        pack_share(asked, *folders, (1, 3)) == 0 and pack_share(with_workers(1, 0.4), *folders, (1, 3)) == 2
    )


@pytest.mark.parametrize("is_trained_on", [True, False])
def test_what_may_not_be_replaced_is_refused_before_packing(run, tmp_path, monkeypatch, is_trained_on):
    """Tokens that a checkpoint was trained on, and a folder of another stage: no part is made."""
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    if is_trained_on:
        pack(with_workers(1), *folders)
        (tmp_path / "train" / "checkpoints" / "step_0000000001").mkdir(parents=True)
    else:
        with write_stage(tmp_path / "tokens", "corpus", 1, {}, {}):
            pass
    monkeypatch.setattr(token_parts, "load_packer", partial(refusing, {"00000.jsonl.zst"}))
    other, told = with_workers(1, 0.4), "has step_" if is_trained_on else "tokens"
    for call in (partial(pack, other), partial(pack_progress, other)):
        with pytest.raises(KieloError, match=told):
            call(*folders)
    with pytest.raises(KieloError, match=told):
        pack_share(other, *folders, (1, 1))
    if is_trained_on:
        assert pack(with_workers(1), *folders) and pack_progress(with_workers(1), *folders).is_joined


def test_the_bar_counts_documents(run, tmp_path, monkeypatch):
    """Those of finished parts at once and others batch by batch; a share does not know how many it has."""
    bars = []

    class Bar:
        def __init__(self, **keys):
            self.keys, self.steps = keys, []
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            return None

        def update(self, number):
            self.steps.append(number)

    monkeypatch.setattr(token_parts, "tqdm", Bar)
    folders = run / "corpus", run / "tokenizer", tmp_path / "tokens"
    pack_share(with_workers(1), *folders, (2, 3))
    pack(with_workers(1), *folders)
    share, whole = bars
    assert (share.keys["total"], sum(share.steps)) == (None, 80) and len(share.steps) > 1
    assert (whole.keys["total"], sum(whole.steps)) == (300, 300) and whole.steps[0] == 80
    assert max(whole.steps[1:]) < 60
    kept = {"desc": "packing", "unit": " documents", "disable": None}
    assert share.keys.items() >= kept.items() and whole.keys.items() >= kept.items()


def test_batches_of_a_file(tmp_path, monkeypatch):
    """So many bytes and the document that reaches them, numbered from the file's first; one at least."""
    rows = [{"id": str(n), "text": "abc"} for n in range(5)]
    write_documents(tmp_path / "a.jsonl.zst", rows)
    lines = [line for _, line in read_lines(tmp_path / "a.jsonl.zst")]
    (size,) = {len(line) for line in lines}
    for limit, groups in (
        (5 * size + 1, [5]), (size, [1] * 5), (size + 1, [2, 2, 1]), (2 * size, [2, 2, 1]),
        (2 * size + 1, [3, 2]),
    ):  # fmt: skip
        monkeypatch.setattr(token_parts, "BATCH_BYTES", limit)
        batches = list(token_parts.document_batches(tmp_path / "a.jsonl.zst"))
        assert [len(batch.lines) for batch in batches] == groups
        assert [batch.first for batch in batches] == [sum(groups[:n]) for n in range(len(groups))]
        assert [batch.is_last for batch in batches] == [False] * (len(groups) - 1) + [True]
        assert [line for batch in batches for line in batch.lines] == lines
    write_documents(tmp_path / "b.jsonl.zst", [])
    (only,) = token_parts.document_batches(tmp_path / "b.jsonl.zst")
    assert (only.lines, only.first, only.is_last) == ([], 0, True)


def test_small_texts_are_packed_in_this_process(run, tmp_path, monkeypatch):
    """Below 8 MiB one worker, from there on those of the recipe; batches of a mebibyte, given out twice."""
    monkeypatch.undo()
    asked, given = with_workers(3), []

    def results(make, batches, *keys):
        given.append(keys)
        return (one for one in ())

    monkeypatch.setattr(token_parts, "results_in_order", results)
    for number, size in enumerate(((8 << 20) - 1, 8 << 20, None)):
        with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
            write_documents(stage.folder / "documents" / "00000.jsonl.zst", [])
            stage.counts.update({} if size is None else {"bytes_kept": size})
        folders = tmp_path / "corpus", run / "tokenizer", tmp_path / f"tokens{number}"
        token_parts.TokenParts(asked, *folders, {}).make()
    assert given == [(1, "pack", 2), (3, "pack", 2), (1, "pack", 2)]
    rows = [{"id": str(n), "text": "a" * (1 << 19)} for n in range(3)]
    write_documents(tmp_path / "a.jsonl.zst", rows)
    assert [len(batch.lines) for batch in token_parts.document_batches(tmp_path / "a.jsonl.zst")] == [2, 1]
    rows[1]["text"] = "a" * ((1 << 19) - 100)
    write_documents(tmp_path / "a.jsonl.zst", rows)
    assert [len(batch.lines) for batch in token_parts.document_batches(tmp_path / "a.jsonl.zst")] == [3]


def test_parts_are_joined_by_hand(tmp_path):
    """Shards, ids, held-out lines and counts of two parts, of which the second lacks a source."""
    counts = []
    for number, documents in enumerate(({"a": 1, "b": 2}, {"a": 3})):
        (tmp_path / str(number)).mkdir()
        with token_parts.TokenPartWriter(tmp_path / str(number), 300, has_loss_mask=False) as part:
            for name, token in documents.items():
                rows = ShardRows(
                    "sources", name, name, None, [np.array([token, 0])], [2], [f"{name}/{number}"]
                )
                rows.counts.update(tokens=2, documents=1, bytes=token, words=1)
                held = ShardRows("heldout", "heldout", "heldout", None, [np.array([9])], [1], [f"h/{token}"])
                held.counts.update(tokens=1, documents=1, bytes=7, words=0)
                packed = PackedDocuments(
                    shards={name: rows, "heldout": held}, heldout=[b'{"id": %d}\n' % token]
                )
                packed.met.update({name: 2, "c": 1})
                packed.checked, packed.exact = 3, 2
                part.add(packed)
            counts.append(part.counts())
    assert counts[1].content() == {
        "sources": {"a": {"file": "a", "tokens": 2, "documents": 1, "bytes": 3, "words": 1}},
        "heldout": {"heldout": {"file": "heldout", "tokens": 1, "documents": 1, "bytes": 7, "words": 0}},
        "heldout_sets": {}, "met": {"a": 2, "c": 1}, "round_trip": {"checked": 3, "exact": 2},
    }  # fmt: skip
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        token_parts.join_parts([tmp_path / "0", tmp_path / "1"], counts[:1], tmp_path / "none")
    (tmp_path / "joined").mkdir()
    joined = token_parts.join_parts([tmp_path / "0", tmp_path / "1"], counts, tmp_path / "joined")
    told = joined.content()
    assert told["sources"] == {
        "a": {"tokens": 4, "documents": 2, "bytes": 4, "words": 2},
        "b": {"tokens": 2, "documents": 1, "bytes": 2, "words": 1},
    }
    assert joined.heldout["heldout"].bytes == 21 and joined.met == {"a": 4, "b": 2, "c": 3}
    assert told["round_trip"] == {"checked": 9, "exact": 6} and told["heldout_sets"] == {}
    assert rows_of(TokenShard(tmp_path / "joined" / "a")) == [[1, 0], [3, 0]]
    assert rows_of(TokenShard(tmp_path / "joined" / "heldout")) == [[9], [9], [9]]
    assert (tmp_path / "joined" / "a.ids.txt").read_text() == "a/0\na/1\n"
    assert [one["id"] for one in read_documents(tmp_path / "joined" / "heldout.jsonl.zst")] == [1, 2, 3]

"""Odd but real folders of ready tokens: ids, loss and order are those that numpy and a plain loop read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kielo.artifact.documents import read_documents
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_shards import TokenShardWriter
from kielo.artifact.token_sources import find_token_files
from kielo.dataset.batches import NOT_COUNTED, Batches, open_shard
from kielo.dataset.pack import pack
from kielo.dataset.pack_token_files import check_token_files
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import Recipe
from kielo.resolve.rules import StepCase, complaints, mixture_has_text
from kielo.resolve.text import Text, blocks_as_they_are, mixture_of
from kielo.tokenizer.load import decode, encode, load_tokenizer
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents, phase, recipe, write_corpus
from tests.ready_tokens import write_ds, write_npy

Rows = list[list[int]]
LENGTH = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder / "corpus", make_documents(60))
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def rows(run: Path) -> Rows:
    """Sixty documents with end-of-text, which is 0."""
    texts = [document["text"] for document in make_documents(60)]
    return [[*row, 0] for row in encode(load_tokenizer(run / "tokenizer"), texts)]


def flags_of(rows: Rows) -> list[list[int]]:
    """The second half of each document carries loss, as an answer does."""
    return [[int(place >= len(row) // 2) for place in range(len(row))] for row in rows]


def as_datatrove(folder: Path, rows: Rows) -> None:
    """NAME.ds.loss by datatrove's own writer."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        str(folder), "a.ds", save_loss_metadata=True, save_final_metadata=True, token_size=2,
        tokenizer_name_or_path="theirs|2",
    )  # fmt: skip
    for row, flags in zip(rows, flags_of(rows), strict=True):
        file.write(row, np.array(flags))
    file.close()


def as_kielo(folder: Path, rows: Rows) -> None:
    with TokenShardWriter(folder / "a", 400, has_loss_mask=True) as writer:
        for row, flags in zip(rows, flags_of(rows), strict=True):
            writer.add(np.array(row), np.array(flags))


def as_open_instruct(folder: Path, rows: Rows) -> None:
    """token_ids_part_0000.npy and labels_mask_part_0000.npy, flat."""
    write_npy(folder / "token_ids_part_0000", rows)
    flags = np.concatenate([np.array(one, bool) for one in flags_of(rows)])
    flags.tofile(folder / "labels_mask_part_0000.npy")


MASKED: dict[str, Callable[[Path, Rows], None]] = {
    "datatrove": as_datatrove, "kielo": as_kielo, "open-instruct": as_open_instruct,
}  # fmt: skip


def packed(run: Path, folder: Path, share: float = 0.2, **dataset) -> Recipe:
    asked = Recipe.model_validate(
        {
            "name": "t",
            "language": "et",
            "corpus": {"sources": [{"name": "web", "tokens": str(folder / "data")}]},
            "tokenizer": {"path": str(run / "tokenizer")},
            "dataset": {"heldout_share": share, "sequence_length": LENGTH} | dataset,
            "train": {"tokens": 10 * LENGTH, "tokens_per_step": LENGTH},
        }  # fmt: skip
    )
    pack(asked, folder, run / "tokenizer", folder / "tokens")
    return asked


def batches(folder: Path, **changes) -> Batches:
    of = phase(mixture={"web": 1.0}, sequence_length=LENGTH, sequences_per_step=4, last_step=20, **changes)
    return Batches(folder / "tokens", 3, of, LENGTH, 0, False)


@pytest.mark.parametrize("writer", MASKED)
def test_loss_masks_beside_ready_tokens_are_honoured(
    writer: str, run: Path, rows: Rows, tmp_path: Path
) -> None:
    """In training and in held-out text; another size is refused by name."""
    (tmp_path / "data").mkdir()
    MASKED[writer](tmp_path / "data", rows)
    packed(run, tmp_path)
    ids, flags = (np.concatenate([np.array(one) for one in of]) for of in (rows, flags_of(rows)))
    feed = batches(tmp_path)
    for step in (1, 2, 3):
        batch = feed.step(step, 0, 1)
        for row, labels, place in zip(batch.inputs, batch.labels, feed.order.locate(batch.samples).sequence):
            start = place * LENGTH
            assert row.tolist() == ids[start : start + LENGTH].tolist()
            theirs = np.where(flags, ids, NOT_COUNTED)[start + 1 : start + LENGTH + 1]
            assert labels.tolist() == theirs.tolist()
    heldout = open_shard(tmp_path / "tokens", "heldout")
    assert heldout.loss_mask[:].tolist() == flags[-heldout.num_tokens :].tolist()
    (mask,) = (
        path for path in (tmp_path / "data").iterdir() if path.name.endswith((".loss", ".loss_mask"))
        or path.name.startswith("labels_mask")
    )  # fmt: skip
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(KieloError, match=rf"{mask.name}: .* bytes for the {len(ids):,} tokens"):
        find_token_files("web", str(tmp_path / "data"), 2)


def test_blocks_as_they_are_are_a_plain_loop(run: Path, rows: Rows, tmp_path: Path) -> None:
    """In the order of the file, no label in another block: the labels that transformers' loss sees."""
    (tmp_path / "data").mkdir()
    blocks = np.concatenate([np.array(row) for row in rows])
    blocks = blocks[: len(blocks) // LENGTH * LENGTH].reshape(-1, LENGTH)
    np.random.default_rng(3).shuffle(blocks)
    blocks.astype(np.uint16).tofile(tmp_path / "data" / "a.npy")
    asked = packed(run, tmp_path, packing="as_is")
    feed = batches(tmp_path, packing="as_is")
    number = 0
    for step in range(1, 6):
        for rank in range(2):
            batch = feed.step(step, rank, 2)
            for place, row, labels in zip(batch.samples - batch.samples[0], batch.inputs, batch.labels):
                block = blocks[4 * (step - 1) + rank + int(place)]
                assert row.tolist() == block.tolist()
                # As transformers: labels are the inputs, shifted inside of the loss.
                assert labels.tolist() == [*block[1:].tolist(), NOT_COUNTED]
                number += 1
    assert number == 20
    tokens = {"web": 3 * LENGTH + 5}
    assert blocks_as_they_are(asked, tokens) == {LENGTH: {"web": 3}}


def test_blocks_as_they_are_of_text_are_refused() -> None:
    asked = Recipe.model_validate(
        {"name": "t", "language": "et", "corpus": {"sources": [{"name": "web", "path": "a.txt"}]},
         "dataset": {"packing": "as_is"}, "train": {"tokens": 512}}
    )  # fmt: skip
    text = Text({"web": 10_000}, 0, "hash", 400, 0)
    case = StepCase(asked, full_phases(asked), text, Path("tokens"))
    (said,) = complaints(case, [mixture_has_text])
    assert "needs ready tokens, but web is text" in said


def test_weights_of_documents_are_those_of_interleaved_datasets() -> None:
    """0.75 and 0.25 of the documents, which have 40 and 80 tokens: 0.6 and 0.4 of the tokens."""
    asked = Recipe.model_validate(
        {"name": "t", "language": "et", "corpus": {"sources": [{"name": one, "path": one} for one in "ab"]},
         "dataset": {"mixture": {"a": 0.75, "b": 0.25}, "mixture_unit": "documents"},
         "train": {"tokens": 512}}
    )  # fmt: skip
    text = Text({"a": 4000, "b": 8000}, 0, "hash", 400, 0, tokens_per_document={"a": 40.0, "b": 80.0})
    (only,) = full_phases(asked)
    weights = mixture_of(only, text, asked.dataset)
    assert weights["a"] / sum(weights.values()) == pytest.approx(0.6)
    plain = asked.dataset.model_copy(update={"mixture_unit": "tokens"})
    assert mixture_of(only, text, plain) == {"a": 0.75, "b": 0.25}
    with pytest.raises(KieloError, match="the documents of a, b are not counted"):
        mixture_of(only, Text(text.tokens, 0, "hash", 400, 0), asked.dataset)


def test_held_out_ids_are_kept_as_they_are(run: Path, rows: Rows, tmp_path: Path) -> None:
    """Documents that begin with a control token: their text has none of it, and their ids have."""
    tokenizer = load_tokenizer(run / "tokenizer")
    mark = next(number for number in tokenizer.for_text.control_tokens if number != 0)
    (tmp_path / "data").mkdir()
    write_ds(tmp_path / "data" / "a", [[mark, *row] for row in rows])
    packed(run, tmp_path)
    documents = list(read_documents(tmp_path / "tokens" / "heldout.jsonl.zst"))
    held = rows[-len(documents) :]
    assert [one["metadata"]["ids"] for one in documents] == [[mark, *row[:-1]] for row in held]
    assert [one["text"] for one in documents] == decode(tokenizer, [row[:-1] for row in held])


@pytest.mark.parametrize("name", ["b.npz", "b.pt", "b.bin.gz", "b.npy.zst", "b.parquet", "b.mds", "c.tar"])
def test_tokens_that_cannot_be_read_are_named(name: str, rows: Rows, tmp_path: Path) -> None:
    write_npy(tmp_path / "a", rows)
    for beside in (name, "README.md", "a.ds.metadata"):
        (tmp_path / beside).write_bytes(b"x")
    with pytest.raises(KieloError, match=rf"1 files that look like tokens would not be read: {name}"):
        find_token_files("web", str(tmp_path), 2)
    found = find_token_files("web", str(tmp_path), 2, ["b.*", "c.*"])
    assert [file.name for file in found.files] == ["a.npy"]
    assert found.unread == tuple(sorted((name, "README.md", "a.ds.metadata")))


def test_documents_without_ends_are_not_joined(run: Path, rows: Rows, tmp_path: Path) -> None:
    """Flat ids in which one document in two begins where the one before has no end."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in (run / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(folder)
    mark = next(number for number in tokenizer.for_text.control_tokens if number != 0)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = tokenizer.for_text.control_tokens[mark]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    whole = [[mark, *row] for row in rows]
    half = [row[: -1 if number % 2 else None] for number, row in enumerate(whole)]
    for documents, is_refused in ((whole, False), (half, True)):
        write_npy(tmp_path / "a", documents)
        found = find_token_files("web", str(tmp_path / "a.npy"), 2)
        stream = TokenSet(found.folder, found.files, sum(map(len, documents)), 0)
        if is_refused:
            with pytest.raises(KieloError, match=r"documents looked at begin with .* \(bos_token\) after a"):
                check_token_files("web", found, stream, load_tokenizer(folder), "")
        else:
            assert check_token_files("web", found, stream, load_tokenizer(folder), "") > 0


def test_a_label_that_does_not_count_is_no_loss() -> None:
    """The value is the one that PyTorch passes over."""
    loss = torch.nn.functional.cross_entropy(torch.zeros(2, 4), torch.tensor([1, NOT_COUNTED]))
    assert loss.item() == pytest.approx(np.log(4))

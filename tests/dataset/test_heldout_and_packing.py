"""Held-out sets, packed sequences and the checks of packing, with numbers that are worked out by hand."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kielo.artifact.manifest import write_stage
from kielo.artifact.stage_counts import PartCounts, RoundTrip, TokenCounts
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.dataset import pack
from kielo.dataset.batches import NOT_COUNTED
from kielo.dataset.heldout_sets import HeldoutSet, heldout_sets, set_file
from kielo.dataset.pack_sequences import pack_source
from kielo.dataset.packed_sequences import PackingRow, packing_rows
from kielo.dataset.query import documents_of_step, read_ids
from kielo.recipe.errors import KieloError
from tests.dataset.test_batches import phase, recipe, write_tokens


def shard_of(folder: Path, sizes: list[int]) -> TokenShard:
    with TokenShardWriter(folder / "a", 300) as writer:
        for size in sizes:
            writer.add(np.arange(1, size + 1))
    return TokenShard(folder / "a")


def test_counts_of_packed_sequences_by_hand(tmp_path):
    """Of 92 tokens in sequences of 16: five whole pieces, and 8, 3 and 1 tokens in one more sequence."""
    counts = pack_source(shard_of(tmp_path, [0, 3, 16, 17, 40, 16]), 16, tmp_path, "a")
    assert counts.content() == {
        "sequences": 6, "documents": 5, "cut_documents": 2, "cut_in_one_stream": 4, "filling": 4
    }  # fmt: skip
    # By room: five sequences without any, then the last, with its shortest piece first.
    table = [[0, 16, 1, 0], [5, 1, 1, 0], [5, 3, 1, 0], [5, 8, 1, 0]]
    assert np.load(tmp_path / "a.16.table.npy").tolist() == table
    # 4 · first token + 2 · begins + ends, by length: 1, 3, 8 tokens, then five of 16.
    entries = [35 * 4 + 1, 0 + 3, 68 * 4 + 1, 3 * 4 + 3, 19 * 4 + 2, 36 * 4 + 2, 52 * 4, 76 * 4 + 3]
    assert np.load(tmp_path / "a.16.pieces.npy").tolist() == entries
    empty = pack_source(shard_of(tmp_path, [0]), 16, tmp_path, "b")
    assert set(empty.content().values()) == {0}
    rows = packing_rows(
        SimpleNamespace(counts={"sources": {"a": {"16": counts.content()}, "b": {"8": empty.content()}}})
    )
    assert rows == [PackingRow("a", 16, 6, 0.4, 0.8, 4 / 96), PackingRow("b", 8, 0, 0, 0, 0)]
    assert rows[0].sentence() == (
        "a: 6 sequences of 16 tokens, 40.00% of the documents cut (80.00% in one stream), 4.167% filling"
    )


def test_shares_of_one_document_in_one_token():
    """The smallest numbers that there are."""
    ones = dict.fromkeys(["sequences", "documents", "cut_documents", "cut_in_one_stream", "filling"], 1)
    made = SimpleNamespace(counts={"sources": {"a": {"1": ones}}})
    assert packing_rows(made) == [PackingRow("a", 1, 1, 1.0, 1.0, 1.0)]


def test_pieces_of_long_sequences_are_sorted_by_all_of_their_length(tmp_path):
    """In two bytes 65,600 would be 64, and stand before 100."""
    with TokenShardWriter(tmp_path / "a", 300) as writer:
        for size in (65_600, 100, 70_000, 66_000):
            writer.add(np.ones(size, np.int64))
    counts = pack_source(TokenShard(tmp_path / "a"), 70_000, tmp_path, "a")
    assert (counts.sequences, counts.cut_documents, counts.filling) == (3, 0, 8_300)
    firsts = [65_600, 0, 65_600 + 100 + 70_000, 65_600 + 100]  # by length: 100, 65,600, 66,000, 70,000
    assert np.load(tmp_path / "a.70000.pieces.npy").tolist() == [4 * first + 3 for first in firsts]


def test_a_heldout_batch_by_hand(tmp_path):
    """Evenly spaced sequences of the set, all of them where there are no more; one token alone is none."""
    rows = [[*range(1, 20), 0]]
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        for name, documents in (("heldout", rows), ("heldout.one", [[0]]), ("heldout.two", [[5, 0]])):
            with TokenShardWriter(stage.folder / name, 300) as writer:
                for row in documents:
                    writer.add(np.array(row))
        stage.counts["sources"] = {}
        stage.counts["heldout"] = {"tokens": 20, "bytes": 30, "documents": 2}
        stage.counts["heldout_sets"] = {
            "one": {"tokens": 1, "tokens_with_loss": 5, "bytes_with_loss": 20, "bytes": 9, "documents": 1},
            "two": {"tokens": 2, "languages": ["et", "fi"], "bytes": 9},
        }
    whole, one, two = heldout_sets(tmp_path / "tokens")
    assert (whole.text_bytes, whole.tokens_per_byte, whole.with_loss) == (32, 20 / 32, None)
    assert (one.with_loss, one.tokens_per_byte, one.languages) == ((5, 20), 0.25, ())
    assert (two.text_bytes, two.tokens_per_byte, two.languages, two.file) == (
        None,
        None,
        ("et", "fi"),
        set_file("two"),
    )
    for most, samples in (
        (9, [0, 1, 2, 3, 4]),
        (5, [0, 1, 2, 3, 4]),
        (4, [0, 1, 2, 3]),
        (3, [0, 1, 3]),
        (2, [0, 2]),
    ):
        batch = whole.batch(4, most)
        assert batch.samples.tolist() == samples and batch.documents is None
        assert batch.inputs[0].tolist() == [1, 2, 3, 4] and batch.labels[0].tolist() == [2, 3, 4, 5]
    last = whole.batch(4, 5, mask_documents=True)
    assert last.labels[4].tolist() == [18, 19, 0, NOT_COUNTED] and last.documents[4].tolist() == [0, 0, 0, 1]
    assert two.batch(4, 9).labels.tolist() == [[0, NOT_COUNTED, NOT_COUNTED, NOT_COUNTED]]
    with pytest.raises(KieloError, match="no held-out text. Fix: .* dataset.heldout_share"):
        one.batch(4, 9)
    assert HeldoutSet("a", tmp_path, "x", (), 1, None).holds({"source": "a", "metadata": {}})
    assert not HeldoutSet("a", tmp_path, "x", (), 1, None).holds(
        {"source": "a", "metadata": {"heldout_set": "b"}}
    )


def joined(met: dict, heldout: int, sources: tuple, sets: tuple = ()) -> PartCounts:
    some = TokenCounts(tokens=1)
    return PartCounts(
        met=met, sources=dict.fromkeys(sources, some), heldout_sets=dict.fromkeys(sets, some),
        heldout={"heldout": TokenCounts(tokens=heldout, documents=heldout)},
        round_trip=RoundTrip(checked=0, exact=0),
    )  # fmt: skip


def test_packing_without_text_is_refused_by_hand(caplog):
    """A source without training text, nothing held out; and a warning of sources without a set."""
    asked, place = recipe(0.01), Path("RUN/corpus")
    assert pack.check_joined(asked, joined({"a": 3, "b": 2}, 1, ("a", "b"), ("a", "b@et")), place) is None
    assert not caplog.records
    for found, words in (
        (joined({"a": 3, "b": 2}, 1, ("a",)), "source 'b' has no training text: RUN/corpus has 2 of its"),
        (joined({"a": 3}, 1, ("a",)), "source 'b' has no training text: RUN/corpus has 0 of"),
        (
            joined({"x": 1, "a": 1, "b": 1}, 1, ("a", "b")),
            "source 'x' has no training text: RUN/corpus has 1",
        ),
    ):
        with pytest.raises(KieloError, match=words):
            pack.check_joined(asked, found, place)
    for total, share, advised in (
        (100, 0.01, "0.05"),
        (1000, 0.01, "0.02"),
        (10, 0.01, "0.3"),
        (25, 0.12, "0.24"),
    ):
        told = f"heldout_share = {share:g} holds out none of the {total} documents .* = {advised}, or"
        with pytest.raises(KieloError, match=told):
            pack.check_joined(recipe(share), joined({"a": total - 1, "b": 1}, 0, ("a", "b")), place)
    with caplog.at_level(logging.WARNING):
        pack.check_joined(asked, joined({"a": 3, "b": 2}, 1, ("a", "b"), ("a",)), place)
    assert caplog.messages == [
        "RUN/corpus: dataset.heldout_share = 0.01 holds out no document of b, whose loss will not be shown"
    ]
    caplog.clear()
    pack.check_joined(recipe(0.01, ("a",)), joined({"a": 3}, 1, ("a",)), place)
    assert not caplog.records


def test_documents_of_a_step_by_hand(tmp_path):
    """Row by row: documents and tokens of each sequence, those with loss, and their ids."""
    documents = [[1, 2, 0], [3, 4, 5, 6, 0], [7, 0]]
    masks = {"a": [[0, 1, 1], [1, 1, 0, 0, 1], [1, 1]]}
    folder = write_tokens(tmp_path, {"a": documents}, masks)
    (folder / "a.ids.txt").write_text("x y\nb\nc\n")
    of = phase(mixture={"a": 1.0}, sequence_length=4, sequences_per_step=3)
    rows = documents_of_step(folder, 7, of, 4, 0, 1, lambda ids: ",".join(map(str, ids)))
    by_sequence = {
        0: [("x y", 3, 2, "1,2,0"), ("b", 1, 1, "3")], 1: [("b", 4, 2, "4,5,6,0")], 2: [("c", 1, 1, "7")]
    }  # fmt: skip
    found = [(row["sequence"], row["document"], row["tokens"], row["with_loss"], row["text"]) for row in rows]
    order = list(dict.fromkeys(row["sequence"] for row in rows))
    assert sorted(order) == [0, 1, 2]
    assert found == [(sequence, *row) for sequence in order for row in by_sequence[sequence]]
    assert [row["sample"] for row in rows] == [order.index(row["sequence"]) for row in rows]
    assert {(row["source"], row["epoch"]) for row in rows} == {("a", 0)}
    assert read_ids(folder, "a", {0, 2}) == {0: "x y", 2: "c"}
    with pytest.raises(KieloError, match="a.ids.txt: has 1 of 2 documents, so it is cut short"):
        read_ids(folder, "a", {1, 3})
    with pytest.raises(KieloError, match="b.ids.txt: no such file, the list of b's documents"):
        read_ids(folder, "b", {1})
    plain = write_tokens(tmp_path / "plain", {"a": documents})
    (plain / "a.ids.txt").write_text("x\nb\nc\n")
    assert all("with_loss" not in row for row in documents_of_step(plain, 7, of, 4, 0, 1, str))

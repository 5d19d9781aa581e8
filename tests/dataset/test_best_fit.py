"""Promises of best-fit packed documents, against packing them one by one."""

import io
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kielo.artifact.manifest import write_stage
from kielo.artifact.token_file_formats import describe
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.dataset.batches import NOT_COUNTED, Batches
from kielo.dataset.pack_sequences import pack_sequences, pack_source
from kielo.dataset.packed_sequences import (
    PackedSequences,
    best_fit_decreasing,
    file_names,
    one_a_sequence,
    packing_manifest,
    packing_rows,
)
from kielo.dataset.query import documents_of_step
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.text import packed_sequences
from tests.dataset.test_order import plain_key, plain_permute, plain_scramble

END, PER_STEP, LENGTHS = 0, 12, (16, 48)
SIZES = {"a": [0, 1, 2, 5, 9, 15, 16, 17, 31, 32, 40, 100], "b": [3, 4, 7]}  # of documents, drawn from


def one_by_one(lengths: list[int], sequence_length: int) -> list[tuple[int, ...]]:
    """Best-fit-decreasing as in the paper: returns the lengths in each sequence, all sorted.

    Of sequences with equal room that which has had it for longest is filled first.
    """
    sequences: list[dict] = []
    for time, length in enumerate(sorted(lengths, reverse=True)):
        fitting = [sequence for sequence in sequences if sequence["room"] >= length]
        best = min(fitting, key=lambda one: (one["room"], one["since"]), default=None)
        if best is None:
            sequences.append(best := {"room": sequence_length, "pieces": []})
        best["room"] -= length
        best["pieces"].append(length)
        best["since"] = time
    return sorted(tuple(sorted(sequence["pieces"])) for sequence in sequences)


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        (best_fit_decreasing, one_by_one),
        (one_a_sequence, lambda lengths, _: sorted((length,) for length in lengths)),
    ],
)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), sequence_length=st.integers(1, 40))
def test_packing_in_groups_is_packing_one_by_one(fit, expected, data, sequence_length):
    """The same lengths are together, and each piece of a length is in one place."""
    lengths = data.draw(st.lists(st.integers(1, sequence_length), max_size=60))
    counts = np.bincount(lengths, minlength=sequence_length + 1).astype(np.int64)
    table, number = fit(counts, sequence_length)
    firsts = [*np.unique(table[:, 0]).tolist(), number]
    sequences, pieces = [[] for _ in range(number)], set()
    for first, length, times, first_piece in table.tolist():
        for sequence in range(first, firsts[firsts.index(first) + 1]):
            sequences[sequence] += [length] * times
            begin = first_piece + (sequence - first) * times
            new = {(length, piece) for piece in range(begin, begin + times)}
            assert not new & pieces
            pieces |= new
    assert pieces == {(length, piece) for length in lengths for piece in range(counts[length])}
    assert sorted(tuple(sorted(sequence)) for sequence in sequences) == expected(lengths, sequence_length)


def test_another_packing_is_made_anew(tmp_path):
    """Sequences of one way are not taken for those of the other."""
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        with TokenShardWriter(stage.folder / "a", 70) as writer:
            for size in (3, 4, 8, 9):
                writer.add(np.arange(1, size + 1))
        stage.counts.update({"sources": {"a": {"tokens": 0}}, "heldout": {"tokens": 0}})
    counts = {}
    for packing in ("best_fit", "one_a_sequence", "best_fit"):
        recipe = Recipe(
            name="tiny", language="et", corpus={"sources": ["a.txt"]},
            dataset={"packing": packing, "sequence_length": 8}, train={"tokens": 10**4},
        )  # fmt: skip
        if counts:
            with pytest.raises(KieloError, match="was made with dataset.packing = .*makes it again"):
                packed_sequences(recipe, tmp_path / "tokens")
        counts[packing] = pack_sequences(recipe, tmp_path / "tokens").counts["sources"]["a"]["8"]
        assert pack_sequences(recipe, tmp_path / "tokens") is None
        assert packed_sequences(recipe, tmp_path / "tokens")
    # 3 + 4, 8, and 9 as 8 + 1, of which the 1 goes to the first; or each piece alone.
    assert [counts[packing]["sequences"] for packing in ("best_fit", "one_a_sequence")] == [3, 5]
    assert counts["one_a_sequence"]["filling"] == 5 * 8 - 24 and counts["best_fit"]["filling"] == 0


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Packed documents of two sources; a document's tokens say its number and their places in it."""
    folder, chance = tmp_path_factory.mktemp("a run"), np.random.default_rng(3)
    with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
        for name, sizes in SIZES.items():
            with TokenShardWriter(stage.folder / name, 70_000) as writer:
                documents = chance.choice(sizes, 150)
                for number, size in enumerate(documents):
                    row = number * 128 + np.arange(size) + 1
                    writer.add(np.append(row[:-1], END) if size else row)
            ids = "".join(f"{name}/{number}\n" for number in range(len(documents)))
            (stage.folder / f"{name}.ids.txt").write_text(ids)
        stage.counts.update({"sources": dict.fromkeys(SIZES, {"tokens": 0}), "heldout": {"tokens": 0}})
    recipe = Recipe(
        name="tiny", language="et", corpus={"sources": ["a.txt", "b.txt"]},
        dataset={"packing": "best_fit", "sequence_length": LENGTHS[0]},
        phases=[{"tokens": 10**4}, {"tokens": 10**4, "sequence_length": LENGTHS[1]}],
    )  # fmt: skip
    made = pack_sequences(recipe, folder / "tokens")
    assert (made.kind, made.version) == ("packing", 1) and pack_sequences(recipe, folder / "tokens") is None
    return folder / "tokens"


def batches(tokens: Path, length: int = LENGTHS[0], mixture: dict | None = None, seed: int = 7) -> Batches:
    phase = SimpleNamespace(
        number=1, first_step=1, last_step=10_000, first_sample=0, order_first_sample=0,
        sequence_length=length, sequences_per_step=PER_STEP, mixture=mixture or {"a": 3.0, "b": 1.0},
        packing="best_fit", offsets={},
    )  # fmt: skip
    return Batches(tokens, seed, phase, max(LENGTHS), END, True)


def epoch_of(source: Batches, number: int) -> list[list[tuple[int, int]]]:
    """Returns (first token, tokens) of the pieces of each sequence of an epoch of a source alone."""
    sequences = source.order.sources[0].num_tokens // source.phase.sequence_length
    located = source.order.locate(np.arange(number * sequences, (number + 1) * sequences))
    assert (located.epoch == number).all() and len(np.unique(located.sequence)) == sequences
    return source.ranges(located)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SIZES)
def test_an_epoch_has_each_document_once_and_whole_if_it_fits(tokens, name, length):
    """No token is lost or doubled, no document is cut that fits, others are cut at multiples of the length,
    and the sequences are as full as those of packing one by one. Another epoch puts other documents together.
    """
    source, shard = batches(tokens, length, {name: 1.0}), TokenShard(tokens / name)
    first, second = epoch_of(source, 0), epoch_of(source, 1)
    for epoch in (first, second):
        pieces = sorted(piece for sequence in epoch for piece in sequence)
        ends = np.cumsum([count for _, count in pieces])
        assert [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == shard.num_tokens
        found = dict(pieces)
        expected = []
        for start, end in zip(
            *(shard.document_offsets[part].tolist() for part in (slice(-1), slice(1, None)))
        ):
            cuts = [(at, min(length, end - at)) for at in range(start, end, length)]
            assert all(found[at] == count for at, count in cuts)
            expected += [count for _, count in cuts]
        filled = sorted(tuple(sorted(count for _, count in sequence)) for sequence in epoch)
        assert filled == one_by_one(expected, length)
    together = [{frozenset(sequence) for sequence in epoch if len(sequence) > 1} for epoch in (first, second)]
    assert len(together[0] & together[1]) < len(together[0]) / 2
    assert any(list(sequence) != sorted(sequence, key=lambda of: -of[1]) for sequence in first if sequence)


@pytest.mark.parametrize("length", LENGTHS)
def test_inputs_labels_and_documents_are_those_of_the_pieces(tokens, length):
    """Token by token: the next token is the label, also where a document is cut; at the end of a document it
    is the next document's first, unless nothing or the middle of a document follows. Filling counts nothing.
    """
    source = batches(tokens, length)
    for step in (1, 4):
        batch = source.step(step, 0, 1)
        located = source.order.locate(batch.samples)
        for row, pieces in enumerate(source.ranges(located)):
            shard = source.shards[located.source[row]]
            inputs, labels, documents = [], [], []
            for number, (start, count) in enumerate(pieces):
                is_first = start in shard.document_offsets
                if labels and is_first:
                    labels[-1] = int(shard.read(start, 1)[0])
                goes_on = start + count not in shard.document_offsets
                inputs += shard.read(start, count).tolist()
                labels += shard.read(start + 1, count - 1).tolist()
                labels.append(int(shard.read(start + count, 1)[0]) if goes_on else NOT_COUNTED)
                documents += [number] * count
            missing = length - len(inputs)
            assert batch.inputs[row].tolist() == inputs + [END] * missing
            assert batch.labels[row].tolist() == labels + [NOT_COUNTED] * missing
            assert batch.documents[row].tolist() == documents + [len(pieces)] * missing


def test_each_label_follows_the_mask_of_its_own_token(tmp_path):
    """Random flags, so that a token's and its neighbour's differ: at joins, inside pieces and at cuts."""
    chance = np.random.default_rng(4)
    rows = [[*range(number * 20 + 1, number * 20 + size), END] for number, size in
            enumerate(chance.integers(1, 20, 300).tolist())]  # fmt: skip
    flags = [chance.integers(0, 2, len(row)).tolist() for row in rows]
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        with TokenShardWriter(stage.folder / "a", 70_000, has_loss_mask=True) as writer:
            for row, own in zip(rows, flags):
                writer.add(np.array(row), np.array(own))
        stage.counts.update({"sources": {"a": {"tokens": 0}}, "heldout": {"tokens": 0}})
    recipe = Recipe(
        name="tiny", language="et", corpus={"sources": ["a.txt"]},
        dataset={"packing": "best_fit", "sequence_length": 8}, train={"tokens": 10**4},
    )  # fmt: skip
    pack_sequences(recipe, tmp_path / "tokens")
    source = batches(tmp_path / "tokens", 8, {"a": 1.0})
    stream, carries = [token for row in rows for token in row], [flag for own in flags for flag in own]
    begins = {sum(map(len, rows[:number])) for number in range(len(rows))}
    samples = np.arange(source.order.sources[0].num_tokens // 8)
    batch, joins = source.read(samples), Counter()
    for labels, pieces in zip(batch.labels.tolist(), source.ranges(source.order.locate(samples))):
        expected = []
        for (start, count), following in zip(pieces, [*pieces[1:], (None, 0)]):
            places = [*range(start + 1, start + count), start + count]
            if places[-1] in begins or places[-1] == len(stream):
                places[-1] = following[0] if following[0] in begins else None
                if places[-1] is not None:
                    joins[carries[places[-1]], carries[places[-1] + 1]] += 1
            expected += [stream[at] if at is not None and carries[at] else NOT_COUNTED for at in places]
        assert labels == expected + [NOT_COUNTED] * (8 - len(expected))
    assert min(joins[first, second] for first in (0, 1) for second in (0, 1)) > 3


def plain_pieces(tokens: Path, length: int, sequence: int, epoch: int) -> list[tuple[int, int, bool, bool]]:
    """(first token, tokens, begins, ends) of the pieces of one sequence, with plain integers and seed 7."""
    table, entries = (np.load(tokens.parent / "packing" / name).tolist() for name in file_names("a", length))
    sizes = np.diff(TokenShard(tokens / "a").document_offsets).tolist()
    of_length = Counter(size % length for size in sizes)
    of_length[length] = sum(size // length for size in sizes)
    begin = max(first for first, *_ in table if first <= sequence)

    def keyed(name: str, number: int) -> int:
        key = plain_key(name, 7, "a", length)
        for one in (number, epoch):
            key = plain_scramble((key + one * 0x9E3779B97F4A7C15) % 2**64)
        return key

    found = []
    for first, size, times, piece in table:
        for number in range(times) if first == begin else ():
            slot = piece + (sequence - begin) * times + number
            at = plain_permute(slot, of_length[size], keyed("pieces", size))
            entry = entries[sum(of_length[one] for one in range(1, size)) + at]
            found.append((entry // 4, size, bool(entry & 2), bool(entry & 1)))
    places = keyed("places", sequence)
    order = sorted(range(len(found)), key=lambda place: plain_scramble((places + place) % 2**64))
    return [found[place] for place in order]


@pytest.mark.parametrize("length", LENGTHS)
def test_pieces_are_where_a_run_will_look_for_them_again(tokens, length):
    """Sequences of three epochs, one by one: the shuffles are fixed for ever, as runs go on by them."""
    packed = PackedSequences(tokens, "a", length, 7)
    every = np.arange(0, packed.num_sequences, 5)
    sequences, epochs = np.repeat(every, 3), np.tile(np.array([0, 1, 5]), len(every))
    found = packed.pieces(sequences, epochs)
    for row, (sequence, epoch) in enumerate(zip(sequences.tolist(), epochs.tolist())):
        mine = found.row == row
        values = (found.start, found.count, found.begins, found.ends)
        shown = list(zip(*(value[mine].tolist() for value in values)))
        assert shown == plain_pieces(tokens, length, sequence, epoch)
        columns = np.cumsum([0, *found.count[mine]])[:-1]
        assert found.column[mine].tolist() == columns.tolist()


def test_an_epoch_counts_every_token_inside_a_document_once(tokens):
    """Every token but the first of each document is a label once; some of those are too, and none twice."""
    source, shard = batches(tokens, mixture={"a": 1.0}), TokenShard(tokens / "a")
    sequences = source.order.sources[0].num_tokens // LENGTHS[0]
    labels = np.concatenate(
        [source.step(step, 0, 1).labels for step in range(1, -(-sequences // PER_STEP) + 1)]
    )
    counted = labels[:sequences][labels[:sequences] > END]
    stream = shard.read(0, shard.num_tokens)
    sizes = np.diff(shard.document_offsets)
    firsts = stream[shard.document_offsets[:-1][sizes > 0]]
    assert len(np.unique(counted)) == len(counted)
    assert set(stream[stream > END]) - set(firsts) <= set(counted.tolist()) and set(counted) & set(firsts)


@pytest.mark.parametrize("data_ranks", [1, 3, 7])
def test_ranks_restarts_and_files_change_no_sample(tokens, tmp_path, data_ranks):
    """Ranks of a step hold together what one rank holds, a new object starts anywhere alike, and the same
    tokens in ready files are packed alike. Another seed chooses otherwise."""
    whole = batches(tokens)
    for step in (1, 5):
        one = whole.step(step, 0, 1)
        resumed = batches(tokens)
        for rank in range(data_ranks):
            part = resumed.step(step, rank, data_ranks)
            for key in ("samples", "inputs", "labels", "documents"):
                assert np.array_equal(getattr(part, key), getattr(one, key)[rank::data_ranks])
    assert not np.array_equal(batches(tokens, seed=8).step(1, 0, 1).inputs, whole.step(1, 0, 1).inputs)
    shard = TokenShard(tokens / "a")
    file = describe(tokens / "a.bin", 4)
    ready = TokenSet(tokens, [file], shard.num_tokens, END)
    counts = [pack_source(one, 16, tmp_path, name) for one, name in ((shard, "ours"), (ready, "theirs"))]
    assert counts[0] == counts[1]
    for ours, theirs in zip(file_names("ours", 16), file_names("theirs", 16)):
        assert (tmp_path / ours).read_bytes() == (tmp_path / theirs).read_bytes()


def test_shares_hold_and_the_query_names_the_documents(tokens):
    """Sources have their shares of the samples; rows are the parts of the inputs, each in its document."""
    source = batches(tokens)
    located = source.order.locate(np.arange(400))
    had = np.cumsum(located.source == 0)
    assert np.abs(had - 0.75 * np.arange(1, 401)).max() <= 1
    rows = documents_of_step(
        tokens, 7, source.phase, max(LENGTHS), END, 3, lambda ids: " ".join(map(str, ids))
    )
    batch = source.step(3, 0, 1)
    for sample, inputs in zip(batch.samples, batch.inputs):
        at = 0
        for row in (row for row in rows if row["sample"] == sample):
            piece = inputs[at : at + row["tokens"]]
            at += row["tokens"]
            assert row["text"] == " ".join(map(str, piece))
            number = int(row["document"].removeprefix(row["source"] + "/"))
            assert all(token // 128 == number for token in piece[piece > END])


def test_counts_are_of_the_documents(tokens):
    """Documents cut are the longer ones; in one stream those that cross a multiple of the length."""
    for row in packing_rows(packing_manifest(tokens)):
        shard = TokenShard(tokens / row.source)
        sizes = np.diff(shard.document_offsets)
        starts, documents = shard.document_offsets[:-1], (sizes > 0).sum()
        crossing = starts // row.sequence_length != (starts + sizes - 1) // row.sequence_length
        assert row.cut == (sizes > row.sequence_length).sum() / documents
        assert row.cut_in_one_stream == (crossing & (sizes > 0)).sum() / documents
        assert row.filling == pytest.approx(1 - shard.num_tokens / row.sequences / row.sequence_length)


def test_what_is_not_packed_is_named(tokens, tmp_path):
    """A length that was not packed, tokens without packed sequences, sequences of other tokens."""
    with pytest.raises(KieloError, match=r"no sequences of 32 tokens of a, .*run RECIPE --to pack"):
        batches(tokens, 32)
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        with TokenShardWriter(stage.folder / "a", 100) as writer:
            writer.add(np.arange(9))
        stage.counts.update({"sources": {"a": {"tokens": 0}}, "heldout": {"tokens": 0}})
    with pytest.raises(KieloError, match="has no packed sequences"):
        batches(tmp_path / "tokens", mixture={"a": 1.0})
    copied = shutil.copytree(tokens.parent, tmp_path / "a copy") / "packing" / f"a.{LENGTHS[0]}.table.npy"
    pickled, size = io.BytesIO(), copied.stat().st_size
    np.save(pickled, np.array([None]))
    copied.write_bytes(pickled.getvalue().ljust(size, b"\0"))
    assert copied.stat().st_size == size
    with pytest.raises(ValueError, match="Object arrays cannot be loaded when allow_pickle=False"):
        batches(tmp_path / "a copy" / "tokens")
    for part in ("table", "pieces"):
        copied.write_bytes((tokens.parent / "packing" / copied.name).read_bytes())
        changed = copied.with_name(copied.name.replace("table", part))
        changed.write_bytes(changed.read_bytes()[:-8])
        with pytest.raises(KieloError, match=rf"a\.16\.{part}\.npy: it has .* bytes, but the stage wrote"):
            batches(tmp_path / "a copy" / "tokens")
    (tmp_path / "packing").symlink_to(tokens.parent / "packing")
    with pytest.raises(KieloError, match="was packed from other tokens"):
        batches(tmp_path / "tokens", mixture={"a": 1.0})

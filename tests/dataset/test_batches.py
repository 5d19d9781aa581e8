"""Promises of pack, batches and the query, on a small corpus of two sources."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.dataset.batches import (
    NOT_COUNTED,
    Batch,
    Batches,
    causal_documents,
    document_numbers,
    filled_up,
    open_shard,
    shard_batch,
    with_dropout_keys,
)
from kielo.dataset.heldout_sets import heldout_sets
from kielo.dataset.pack import pack
from kielo.dataset.query import documents_of_step
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import decode, load_tokenizer
from kielo.tokenizer.stage_inputs import is_heldout
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_order import plain_key, plain_scramble
from tests.written_documents import write_documents

LENGTH, PER_STEP = 16, 24  # 24 sequences are shared by 1, 2, 3 and 8 ranks


def recipe(share=0.2, sources=("a", "b")):
    return Recipe(
        name="tiny",
        language="et",
        corpus={"sources": [{"name": name, "path": f"{name}.txt"} for name in sources]},
        tokenizer={"vocab_size": 400},
        dataset={"heldout_share": share, "sequence_length": LENGTH},
    )


def write_corpus(folder: Path, documents: list[dict]) -> None:
    with write_stage(folder, "corpus", 1, {}, {}) as stage:
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        num_bytes = sum(len(document["text"].encode()) for document in documents)
        stage.counts.update(documents_kept=len(documents), bytes_kept=num_bytes)


def make_documents(num_documents: int) -> list[dict]:
    words = ["kevad", "tuli", "täna", "õue", "ja", "lumi", "sulas", "jõgi", "voolas", "12", "öösel\n"]
    chance = random.Random(1)
    return [
        {
            "id": f"{'ab'[n % 3 == 0]}/{n}",
            "source": "ab"[n % 3 == 0],
            "text": f"{n}: " + " ".join(chance.choices(words, k=chance.randint(3, 30))),
            "metadata": {},
        }
        for n in range(num_documents)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a run")
    write_corpus(folder / "corpus", make_documents(150))
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    pack(recipe(), folder / "corpus", folder / "tokenizer", folder / "tokens")
    return folder


def phase(**changes):
    """The first steps of a run; `changes` are of a later phase."""
    values = {
        "number": 1,
        "first_step": 1,
        "last_step": 10_000,
        "first_sample": 0,
        "order_first_sample": 0,
        "sequence_length": LENGTH,
        "sequences_per_step": PER_STEP,
        "mixture": {"a": 3.0, "b": 1.0},
        "packing": "one_stream",
        "offsets": {},
    }
    return SimpleNamespace(**values | changes)


def batches(run, mixture=None, mask=False):
    of = phase(mixture=mixture or {"a": 3.0, "b": 1.0})
    return Batches(run / "tokens", 7, of, LENGTH, 0, mask)


def test_shards_hold_every_document_once(run):
    """Training shards and the held-out shard together are the corpus, text for text, each ended by
    end-of-text."""
    tokenizer, counts = load_tokenizer(run / "tokenizer"), read_manifest(run / "tokens").counts
    texts = {document["id"]: document["text"] for document in read_documents(run / "corpus" / "documents")}
    for name in ("a", "b", "heldout"):
        shard = TokenShard(run / "tokens" / name)
        ids = (run / "tokens" / f"{name}.ids.txt").read_text().splitlines()
        given = counts["heldout"] if name == "heldout" else counts["sources"][name]
        assert len(ids) == shard.num_documents == given["documents"] and given["tokens"] == shard.num_tokens
        assert given["bytes"] == sum(len(texts[identifier].encode()) for identifier in ids)
        for number, identifier in enumerate(ids):
            start, end = shard.document_offsets[number : number + 2]
            row = shard.read(start, end - start).tolist()
            assert row[-1] == 0 and decode(tokenizer, [row[:-1]]) == [texts[identifier]]
            assert is_heldout(texts.pop(identifier), 0.2) == (name == "heldout")
    assert not texts
    heldout = list(read_documents(run / "tokens" / "heldout.jsonl.zst"))
    assert sum(len(document["text"].encode()) for document in heldout) == counts["heldout"]["bytes"]
    assert 0.08 < counts["heldout"]["documents"] / 150 < 0.32


def test_nothing_is_done_twice(run):
    """The same corpus, tokenizer and recipe leave a finished folder as it is; another held-out share does
    not."""
    before = (run / "tokens" / "manifest.json").stat().st_mtime_ns
    made = read_manifest(run / "tokens")
    assert (made.kind, made.version) == ("tokens", 1)  # another number would pack all runs again
    pack(recipe(), run / "corpus", run / "tokenizer", run / "tokens")
    assert (run / "tokens" / "manifest.json").stat().st_mtime_ns == before
    pack(recipe(0.4), run / "corpus", run / "tokenizer", run / "other tokens")
    assert pack(recipe(), run / "corpus", run / "tokenizer", run / "other tokens").section == {
        "heldout_share": 0.2
    }


@pytest.mark.parametrize("data_ranks", [1, 2, 3, 7, 30])
def test_ranks_and_restarts_change_no_sample(run, data_ranks):
    """The ranks of a step together hold just the sequences that one rank holds; a new object starts anywhere
    alike."""
    whole = batches(run)
    for step in (1, 2, 5):
        one = whole.step(step, 0, 1)
        assert one.samples.tolist() == list(range((step - 1) * PER_STEP, step * PER_STEP))
        resumed = batches(run)  # knows of no earlier step
        for rank in range(data_ranks):
            part = resumed.step(step, rank, data_ranks)
            assert np.array_equal(part.samples, one.samples[rank::data_ranks])
            assert np.array_equal(part.inputs, one.inputs[rank::data_ranks])
            assert np.array_equal(part.labels, one.labels[rank::data_ranks])


def test_an_epoch_counts_every_token_as_a_label_once(run):
    """Each source's stream, from its second token on, is the multiset of all labels of one epoch."""
    source = batches(run, {"a": 1.0})
    shard = TokenShard(run / "tokens" / "a")
    sequences = -(-(shard.num_tokens - 1) // LENGTH)
    steps = -(-sequences // PER_STEP)
    labels = np.concatenate([source.step(step, 0, 1).labels for step in range(1, steps + 1)])[:sequences]
    inputs = np.concatenate([source.step(step, 0, 1).inputs for step in range(1, steps + 1)])[:sequences]
    stream = shard.read(0, shard.num_tokens).astype(np.int64)
    counted = labels != NOT_COUNTED
    assert np.array_equal(np.sort(labels[counted]), np.sort(stream[1:]))
    assert np.array_equal(np.bincount(inputs[counted]), np.bincount(stream[:-1], minlength=inputs.max() + 1))
    assert (inputs[~counted] == 0).all()
    both = counted[:, :-1] & counted[:, 1:]
    assert np.array_equal(inputs[:, 1:][both], labels[:, :-1][both])


def test_document_numbers_follow_the_borders(run):
    """Numbers inside a sequence start at 0 and rise by one just after each end-of-text."""
    batch = batches(run, mask=True).step(3, 0, 1)
    assert batch.documents.dtype == np.int32 and (batch.documents[:, 0] == 0).all()
    rises = np.diff(batch.documents, axis=1)
    counted = batch.labels[:, :-1] != NOT_COUNTED
    assert np.array_equal(rises[counted] == 1, batch.inputs[:, :-1][counted] == 0)
    assert batches(run).step(3, 0, 1).documents is None


def test_the_query_names_the_documents_of_a_step(run):
    """Each sequence's tokens are found in the documents that the query names for it, whole step covered."""
    rows = documents_of_step(run / "tokens", 7, phase(), LENGTH, 0, 2, lambda ids: " ".join(map(str, ids)))
    texts = {document["id"]: document["text"] for document in read_documents(run / "corpus" / "documents")}
    batch, tokenizer = batches(run).step(2, 0, 1), load_tokenizer(run / "tokenizer")
    assert sum(row["tokens"] for row in rows) == (batch.labels != NOT_COUNTED).sum()
    for sample, inputs in zip(batch.samples, batch.inputs):
        mine, start = [row for row in rows if row["sample"] == sample], 0
        for row in mine:
            piece = inputs[start : start + row["tokens"]]
            start += row["tokens"]
            text = decode(tokenizer, [piece[piece != 0]])[0].strip(
                "\ufffd"
            )  # a piece may cut a letter of two bytes
            assert row["text"] == " ".join(map(str, piece))
            assert text in texts[row["document"]] and row["document"].startswith(row["source"])


def test_heldout_batch_is_held_out_text(run):
    """The batch's labels are the held-out stream's; fewer sequences are taken at even distances."""
    whole = heldout_sets(run / "tokens")[0]
    everything, some = whole.batch(LENGTH, 10_000), whole.batch(LENGTH, 5)
    shard = TokenShard(run / "tokens" / "heldout")
    labels = everything.labels.ravel()
    assert np.array_equal(labels[labels != NOT_COUNTED], shard.read(1, shard.num_tokens - 1))
    assert np.array_equal(some.inputs, everything.inputs[some.samples]) and len(some.samples) == 5


def test_each_source_has_a_heldout_set(run, tmp_path):
    """It holds just its source's held-out documents; bytes are counted on their text, one for each border. A
    folder packed before there were such sets has one set, and so has a corpus of one source."""
    whole, a, b = heldout_sets(run / "tokens")
    assert (whole.name, a.name, b.name) == ("", "a", "b") and a.languages == b.languages == ("et",)
    held = list(read_documents(run / "tokens" / "heldout.jsonl.zst"))
    for one in (a, b):
        mine = [document for document in held if document["source"] == one.name]
        shard = TokenShard(run / "tokens" / one.file)
        assert shard.num_documents == len(mine) and one.tokens == shard.num_tokens
        assert one.text_bytes == sum(len(document["text"].encode()) + 1 for document in mine)
        ids = (run / "tokens" / f"{one.file}.ids.txt").read_text().splitlines()
        assert ids == [document["id"] for document in mine]
    assert whole.tokens == a.tokens + b.tokens and whole.text_bytes == a.text_bytes + b.text_bytes
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        stage.counts.update(sources={}, heldout={"tokens": 7, "documents": 1, "bytes": 20})
    assert [(one.name, one.text_bytes) for one in heldout_sets(tmp_path / "tokens")] == [("", 21)]
    with pytest.raises(ValueError, match="names of the held-out text"):
        recipe(sources=("heldout.a", "b"))


def test_languages_of_a_source_have_sets_of_their_own(run, tmp_path):
    """Each held-out document of a source in Finnish and Estonian is in the set of its language, and nothing
    else is; the sets add up.
    """
    finnish = ["Hallitus päätti eilen uusista tukitoimista, ja kunnat saavat lisää rahaa kouluihin.",
               "Talvella järvi jäätyy ja lapset luistelevat iltaisin lyhtyjen valossa."]  # fmt: skip
    documents = make_documents(60) + [
        {"id": f"fi/{n}", "source": "ab"[n % 3 == 0], "text": f"{n}: {finnish[n % 2]}", "metadata": {}}
        for n in range(60)
    ]
    write_corpus(tmp_path / "corpus", documents)
    two = recipe().model_dump(exclude_unset=True)
    two["corpus"]["sources"][0]["language"] = ["et", "fi"]
    pack(Recipe(**two), tmp_path / "corpus", run / "tokenizer", tmp_path / "tokens")
    whole, *sets = heldout_sets(tmp_path / "tokens")
    assert [(one.name, one.languages) for one in sets] == [
        ("a@et", ("et",)), ("a@fi", ("fi",)), ("b", ("et",))
    ]  # fmt: skip
    assert whole.tokens == sum(one.tokens for one in sets)
    assert whole.text_bytes == sum(one.text_bytes for one in sets)
    held = list(read_documents(tmp_path / "tokens" / "heldout.jsonl.zst"))
    for one in sets:
        ids = (tmp_path / "tokens" / f"{one.file}.ids.txt").read_text().splitlines()
        assert ids == [document["id"] for document in held if one.holds(document)] and ids
        if one.name != "b":
            assert {identifier.startswith("fi/") for identifier in ids} == {one.name == "a@fi"}


def test_a_longer_phase_goes_on_where_a_shorter_one_stopped(run):
    """Lengths 16 then 32, another batch and mixture: no token of an epoch is counted twice and none is lost,
    though the first phase stops in the middle of a block; samples go on from its last.
    """
    short = Batches(run / "tokens", 7, phase(last_step=3, mixture={"a": 1.0}), 32, 0, False)
    offsets = short.order.offsets_at(3 * PER_STEP - 1)
    assert offsets == {"a": (3 * PER_STEP - 1) * LENGTH} and offsets["a"] % 32, "the border is within a block"
    of = phase(
        number=2, first_step=4, first_sample=3 * PER_STEP - 1, order_first_sample=3 * PER_STEP - 1,
        sequence_length=32,
        sequences_per_step=6, mixture={"a": 1.0, "b": 2.0}, offsets=offsets,
    )  # fmt: skip
    long, shard = Batches(run / "tokens", 7, of, 32, 0, False), TokenShard(run / "tokens" / "a")
    samples = long.samples(5)
    assert samples.tolist() == list(range(3 * PER_STEP + 5, 3 * PER_STEP + 11))
    seen = [short.step(step, 0, 1).labels for step in (1, 2, 3)]
    labels = list(np.concatenate(seen)[:-1])
    step = 3
    while sum((row != NOT_COUNTED).sum() for row in labels) < shard.num_tokens - 1:
        step += 1
        batch = long.step(step, 0, 1)
        of_a = long.order.locate(batch.samples).source == long.names.index("a")
        for row in batch.labels[of_a]:
            if sum((row != NOT_COUNTED).sum() for row in labels) < shard.num_tokens - 1:
                labels.append(row)
    counted = np.concatenate(labels)
    stream = shard.read(0, shard.num_tokens).astype(np.int64)
    assert np.array_equal(np.sort(counted[counted != NOT_COUNTED]), np.sort(stream[1:]))


def by_rows(
    source: Batches, step: int, rank: int, ranks: int, end: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """Returns what a step must be, token by token: (inputs, labels, document numbers) of each sequence."""
    length, rows = source.phase.sequence_length, []
    located = source.order.locate(source.samples(step, rank, ranks))
    for which, sequence, seen in zip(located.source, located.sequence, located.seen_tokens):
        shard, start = source.shards[which], int(sequence) * length
        count = min(length, shard.num_tokens - 1 - start)
        stream = shard.read(start, count + 1).tolist()
        numbers = document_numbers(shard, start, count)
        numbers = (numbers - numbers[0]).tolist()
        labels = [NOT_COUNTED if place < seen else token for place, token in enumerate(stream[1:])]
        missing = length - count
        rows.append(
            (
                stream[:-1] + [end] * missing,
                labels + [NOT_COUNTED] * missing,
                numbers + [numbers[-1] + 1] * missing,
            )
        )
    return rows


@pytest.mark.parametrize(
    "vocabularies", [(300, 300, 300), (300, 70_000, 300)], ids=["two bytes", "two and four bytes"]
)
def test_steps_are_what_reading_row_by_row_gives(tmp_path, vocabularies):
    """Random shards, one shorter than a sequence, with empty documents and a phase that starts in the middle
    of a block: every token, label and document number of two epochs, on one rank and on three.
    """
    chance, end = np.random.default_rng(5), 299
    with write_stage(tmp_path / "tokens", "tokens", 1, {}, {}) as stage:
        for name, documents, vocabulary in zip("abc", (60, 25, 1), vocabularies):
            with TokenShardWriter(stage.folder / name, vocabulary) as writer:
                for length in chance.choice([0, 0, 1, 2, 5, 9, 40], documents) if documents > 1 else [7]:
                    writer.add(chance.integers(0, vocabulary, length))
        stage.counts.update({"sources": dict.fromkeys("abc", {"tokens": 0}), "heldout": {"tokens": 0}})
    of = phase(
        number=2, first_step=4, last_step=40, first_sample=30, order_first_sample=30, sequence_length=8,
        sequences_per_step=12,
        mixture={"a": 3.0, "b": 2.0, "c": 1.0}, offsets={"a": 8 * 7 + 3, "b": 21},
    )  # fmt: skip
    for mask in (True, False):
        source = Batches(tmp_path / "tokens", 7, of, 16, end, mask)
        for step in range(4, 41):
            for rank, ranks in ((0, 1), (1, 3)):
                batch = source.step(step, rank, ranks)
                inputs, labels, numbers = map(list, zip(*by_rows(source, step, rank, ranks, end)))
                assert batch.inputs.dtype == batch.labels.dtype == np.int64
                assert batch.inputs.tolist() == inputs and batch.labels.tolist() == labels
                assert batch.documents is None if not mask else batch.documents.tolist() == numbers
                assert batch.inputs.flags.c_contiguous and batch.labels.flags.c_contiguous
    drawn = source.order.offsets_at(30 + 37 * 12)
    assert max(drawn[name] / shard.num_tokens for name, shard in zip(source.names, source.shards)) > 2


def write_tokens(folder: Path, sources: dict[str, list[list[int]]], masks: dict | None = None) -> Path:
    """Writes a tokens folder with these documents of each source, and masks of those that have any."""
    masks = masks or {}
    with write_stage(folder / "tokens", "tokens", 1, {}, {}) as stage:
        for name, documents in sources.items():
            with TokenShardWriter(stage.folder / name, 300, name in masks) as writer:
                for number, row in enumerate(documents):
                    writer.add(np.array(row), np.array(masks[name][number]) if name in masks else None)
        stage.counts.update({"sources": dict.fromkeys(sources, {"tokens": 0}), "heldout": {"tokens": 0}})
    return folder / "tokens"


@pytest.mark.parametrize("tokens, sequences, last", [(32, 2, 15), (33, 2, 16), (34, 3, 1), (2, 1, 1)])
def test_an_epoch_has_no_sequence_without_a_label(tmp_path, tokens, sequences, last):
    """Of so many tokens all but the first are labels: one sequence less where they fill the last one."""
    folder = write_tokens(tmp_path, {"a": [list(range(1, tokens)), [0]]})
    source = Batches(folder, 7, phase(mixture={"a": 1.0}), LENGTH, 0, False)
    assert source.order.sources[0].num_tokens == tokens - 1
    located = source.order.locate(np.arange(sequences + 1))
    assert located.epoch.tolist() == [0] * sequences + [1]
    counted = (source.read(np.arange(sequences)).labels != NOT_COUNTED).sum(axis=1)
    assert sorted(counted) == sorted([16] * (sequences - 1) + [last])
    where = located.sequence[:sequences].tolist().index(sequences - 1)
    assert source.ranges(located)[where] == [((sequences - 1) * LENGTH, last)]


def test_a_batch_by_hand(tmp_path):
    """Five documents in sequences of 4: every token, label, document number and what the mask leaves out."""
    rows = [[5, 6, 0], [], [7, 0], [8, 9, 10, 0], [11, 0]]
    flags = [[1, 0, 1], [], [0, 1], [1, 1, 0, 1], [1, 1]]
    shard = TokenShard(write_tokens(tmp_path, {"a": rows}, {"a": flags}) / "a")
    batch = shard_batch(shard, np.array([0, 2, 1]), 4, mask_documents=True)
    none = NOT_COUNTED
    assert batch.samples.tolist() == [0, 2, 1] and batch.dropout_keys is None
    assert batch.inputs.tolist() == [[5, 6, 0, 7], [0, 11, 0, 0], [0, 8, 9, 10]]
    # Token 7 follows end-of-text and its flag is 0; so is that of 6 and 10.
    assert batch.labels.tolist() == [[none, 0, none, 0], [11, 0, none, none], [8, 9, none, 0]]
    # The document without tokens begins where 7 does, and what fills up is no part of the last document.
    assert batch.documents.tolist() == [[0, 0, 0, 2], [0, 1, 2, 2], [0, 1, 1, 1]]
    assert batch.documents.dtype == np.int32
    assert shard_batch(shard, np.array([1]), 4).documents is None
    assert document_numbers(shard, 0, 11).tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3, 4, 4]
    assert document_numbers(shard, 2, 2).tolist() == [0, 2] and document_numbers(shard, 9, 2).tolist() == [
        4,
        4,
    ]


def test_a_step_is_filled_up_and_gets_its_keys():
    """Rows of end-of-text without labels up to the number asked for; keys of samples, two numbers each."""
    rows, labels = np.array([[1, 2], [3, 4]]), np.array([[2, 3], [4, NOT_COUNTED]])
    batch = Batch(rows, labels, np.array([[0, 1], [0, 0]], np.int32), np.array([6, 2**40]))
    assert filled_up(batch, 2, 9) is batch and filled_up(batch, 1, 9) is batch
    filled = filled_up(with_dropout_keys(batch, 5), 4, 9)
    assert filled.inputs.tolist() == [[1, 2], [3, 4], [9, 9], [9, 9]]
    assert filled.labels.tolist() == [[2, 3], [4, -100], [-100, -100], [-100, -100]]
    assert filled.documents.tolist() == [[0, 1], [0, 0], [0, 0], [0, 0]]
    assert filled.samples.tolist() == [6, 2**40]
    keys = [plain_scramble((plain_key(5, "dropout") + n * 0x9E3779B97F4A7C15) % 2**64) for n in (6, 2**40)]
    halves = [[key % 2**32, key >> 32] for key in keys] + [[0, 0], [0, 0]]
    assert (filled.dropout_keys.astype(np.int64) % 2**32).tolist() == halves
    assert filled.dropout_keys.dtype == np.int32
    assert filled_up(Batch(rows, labels, None, np.arange(2)), 3, 9).documents is None
    assert causal_documents(np.array([0, 1, 5])).tolist() == [-1, -2, -6]


def test_samples_of_ranks_and_what_no_step_or_rank_is(run):
    """A phase of steps 3 and 4 from sample 50 on, 5 sequences each: those of ranks, and the borders."""
    of = phase(first_step=3, last_step=4, first_sample=50, order_first_sample=40, sequences_per_step=5)
    source = Batches(run / "tokens", 7, of, LENGTH, 0, False)
    assert source.samples(3).tolist() == [50, 51, 52, 53, 54]
    assert [source.samples(4, rank, 3).tolist() for rank in range(3)] == [[55, 58], [56, 59], [57]]
    assert source.samples(4, 6, 7).tolist() == [] and source.samples(4, 4, 7).tolist() == [59]
    assert source.step(4, 6, 7).inputs.shape == (0, LENGTH)
    for step, rank, ranks in ((2, 0, 1), (5, 0, 1), (3, -1, 2), (3, 2, 2)):
        with pytest.raises(ValueError, match=f"step {step} of rank {rank} of {ranks}: .* steps 3 to 4"):
            source.samples(step, rank, ranks)


def test_shards_of_another_size_are_refused(tmp_path):
    """Tokens, index and mask that are shorter or gone, and tokens that are longer."""
    rows, flags = [[1, 2, 3, 0]] * 30, [[1, 0, 1, 1]] * 30
    folder = write_tokens(tmp_path, {"a": rows}, {"a": flags})
    assert isinstance(open_shard(folder, "a"), TokenShard)
    of = phase(mixture={"a": 1.0})
    whole = {name: (folder / name).read_bytes() for name in ("a.bin", "a.idx", "a.loss_mask")}
    for name, content in whole.items():
        for left in (content[:-8], None):
            (folder / name).unlink() if left is None else (folder / name).write_bytes(left)
            wrote = f"but the stage wrote {len(content):,}"
            told = (
                f"{name}: it is missing, {wrote}" if left is None else f"it has {len(left):,} bytes, {wrote}"
            )
            with pytest.raises(KieloError, match=told):
                open_shard(folder, "a")
            with pytest.raises(KieloError, match=told):
                Batches(folder, 7, of, LENGTH, 0, False)
        (folder / name).write_bytes(content)
    (folder / "a.bin").write_bytes(whole["a.bin"] + b"\0\0")
    with pytest.raises(KieloError, match=r"a\.bin: it has 242 bytes, but the stage wrote 240"):
        open_shard(folder, "a")


def test_mistakes_are_named(run, tmp_path):
    """Unknown source, nothing held out, a source without text, an unpacked folder."""
    with pytest.raises(KieloError, match="the mixture's c: .* has the sources a, b"):
        batches(run, {"c": 1.0})
    with pytest.raises(KieloError, match="heldout_share = 1e-09 holds out none of the 150 documents"):
        pack(recipe(1e-9), run / "corpus", run / "tokenizer", tmp_path / "tokens")
    with pytest.raises(KieloError, match="source 'c' has no training text"):
        pack(recipe(sources=("a", "b", "c")), run / "corpus", run / "tokenizer", tmp_path / "tokens")
    assert not list(tmp_path.iterdir())
    with pytest.raises(KieloError, match="the pack stage is not finished"):
        heldout_sets(tmp_path)

"""Token files of others are read in place as one stream, equal to a shard of Kielo's with the same tokens."""

import numpy as np
import pytest

from kielo.artifact.token_set import MOST_OPEN_FILES, TokenSet
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.artifact.token_sources import find_token_files
from tests.ready_tokens import WRITERS

END = 0


def _documents(count: int) -> list[list[int]]:
    chance = np.random.default_rng(3)
    return [[*chance.integers(1, 300, chance.integers(0, 40)).tolist(), END] for _ in range(count)]


def _shard(prefix, documents) -> TokenShard:
    with TokenShardWriter(prefix, 300) as writer:
        for document in documents:
            writer.add(np.array(document))
    return TokenShard(prefix)


def _set(tmp_path, kind: str, documents, dtype=np.uint16) -> TokenSet:
    """The documents in three files, of which one is in a folder of its own."""
    (tmp_path / "data" / "more").mkdir(parents=True)
    third = len(documents) // 3
    parts = {"a": documents[:third], "b": documents[third : 2 * third], "more/c": documents[2 * third :]}
    for name, part in parts.items():
        WRITERS[kind](tmp_path / "data" / name, part, dtype)
    found = find_token_files("web", str(tmp_path / "data"), np.dtype(dtype).itemsize)
    assert [file.tokens for file in found.files] == [sum(map(len, part)) for part in parts.values()]
    return TokenSet(found.folder, found.files, sum(map(len, documents)), END)


@pytest.mark.parametrize(("kind", "dtype"), [(kind, np.uint16) for kind in WRITERS] + [("ds", np.uint32)])
def test_the_stream_is_that_of_one_shard(tmp_path, kind, dtype):
    """Tokens, sequences across files, and borders of documents, from files with and without an index."""
    documents = _documents(60)
    ours, theirs = _shard(tmp_path / "ours", documents), _set(tmp_path, kind, documents, dtype)
    assert theirs.num_tokens == ours.num_tokens and theirs.dtype == dtype
    assert theirs.read(0, theirs.num_tokens).tolist() == ours.read(0, ours.num_tokens).tolist()
    numbers = np.arange(ours.num_whole_sequences(16))
    assert theirs.num_whole_sequences(16) == len(numbers) > 30
    assert np.array_equal(theirs.sequences(numbers, 16), ours.sequences(numbers, 16))
    starts, counts = numbers * 16, np.full(len(numbers), 16)
    for found, expected in zip(theirs.borders(starts, counts), ours.borders(starts, counts)):
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_token_leads_back_to_its_file_and_document(tmp_path, kind):
    """The name has the file and, where the file has an index, the document's number in it."""
    documents = _documents(30)
    theirs = _set(tmp_path, kind, documents)
    start = sum(map(len, documents[:25]))
    named = {"npy": f"token {start - sum(map(len, documents[:20]))}"}.get(kind, "document 5")
    suffix = {"megatron": "bin"}.get(kind, kind)
    names = theirs.documents(start - 1, len(documents[25]) + 1)
    assert [size for _, size in names] == [1, len(documents[25])]
    assert names[1][0] == theirs.document_name(start) == f"c.{suffix}: {named}".replace("c.", "more/c.")
    assert theirs.first_document_from(start - len(documents[24]) + 1) == start
    assert theirs.first_document_from(theirs.num_tokens - 1) == theirs.num_tokens


def test_few_files_are_open_at_one_time(tmp_path, monkeypatch):
    """Reading many files keeps to the limit, and a file that was closed is opened again."""
    assert MOST_OPEN_FILES == 256
    monkeypatch.setattr("kielo.artifact.token_set.MOST_OPEN_FILES", 1)
    documents = _documents(30)
    theirs = _set(tmp_path, "ds", documents)
    once = theirs.read(0, theirs.num_tokens)
    assert np.array_equal(once, theirs.read(0, theirs.num_tokens)) and len(once) == sum(map(len, documents))


def test_numpys_own_file_is_read(tmp_path):
    """`numpy.save` writes a header with the type, which counts and not the vocabulary's."""
    np.save(tmp_path / "a.npy", np.array([5, 70_000, 0], np.int32))
    found = find_token_files("web", str(tmp_path / "*.npy"), 2)
    stream = TokenSet(found.folder, found.files, 3, END)
    assert stream.read(0, 3).tolist() == [5, 70_000, 0]

"""Token files of others are read in place as one stream, equal to a shard of Kielo's with the same tokens."""

import numpy as np
import pytest

from kielo.artifact.token_file_formats import open_file
from kielo.artifact.token_set import MOST_OPEN_FILES, TokenSet
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.artifact.token_sources import find_token_files
from kielo.recipe.errors import KieloError
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


@pytest.fixture
def by_hand(tmp_path) -> TokenSet:
    """Tokens 5 0 7 | nothing | 8 9 0 0 4 6, without the last; documents begin at 0, 2, 3, 6 and 7."""
    for name, ids in (("a", [5, 0, 7]), ("b", []), ("c", [8, 9, 0, 0, 4, 6])):
        np.array(ids, "<u2").tofile(tmp_path / f"{name}.npy")
    found = find_token_files("web", str(tmp_path), 2)
    return TokenSet(found.folder, found.files, 8, END)


def test_every_range_of_a_small_set(by_hand):
    tokens = [5, 0, 7, 8, 9, 0, 0, 4]
    for start in range(9):
        for count in range(9 - start):
            assert by_hand.read(start, count).tolist() == tokens[start : start + count]
            assert by_hand.read(start, count).dtype == np.uint16
            assert [size for _, size in by_hand.documents(start, count)] == [
                min(end, start + count) - max(begin, start)
                for begin, end in ((0, 2), (2, 3), (3, 6), (6, 7), (7, 8))
                if max(begin, start) < min(end, start + count)
            ] or not count
    for start, count in ((-1, 1), (0, 9), (8, 1), (3, -1)):
        with pytest.raises(IndexError, match=rf": tokens {start}\.\.{start + count} of 8$"):
            by_hand.read(start, count)
    assert [by_hand.num_whole_sequences(length) for length in (1, 2, 3, 4, 7, 8)] == [7, 3, 2, 1, 1, 0]
    rows = by_hand.sequences(np.array([1, 0]), 3)
    assert rows.tolist() == [[8, 9, 0, 0], [5, 0, 7, 8]] and rows.dtype == np.uint16


def test_documents_of_a_small_set(by_hand, monkeypatch):
    which, tokens = by_hand.borders(np.array([0, 2, 3, 6]), np.array([3, 2, 5, 1]))
    assert (which.tolist(), tokens.tolist()) == ([0, 1, 2, 2], [2, 3, 6, 7])
    assert [found.tolist() for found in by_hand.borders(np.zeros(0, int), np.zeros(0, int))] == [[], []]
    assert by_hand.documents(1, 6) == [
        ("a.npy: token 0", 1), ("a.npy: token 2", 1), ("c.npy: token 0", 3), ("c.npy: token 3", 1),
    ]  # fmt: skip
    whole = [(0, 2), (2, 3), (3, 6), (6, 7), (7, 8)]
    for first, left in ((0, whole), (1, whole[1:]), (2, whole[1:]), (4, whole[3:]), (7, whole[4:]), (8, [])):
        assert list(by_hand.document_ranges(first)) == left
    for block in (1, 2, 3, 5, 8, 100):
        monkeypatch.setattr("kielo.artifact.token_set.BLOCK_TOKENS", block)
        blocks = list(by_hand.document_blocks())
        found = [pair for first, last in blocks for pair in zip(first.tolist(), last.tolist())]
        assert found == whole and len(blocks) == -(-8 // block) + 1


def test_a_document_far_away_is_found(tmp_path):
    """Looked for by 4,096 tokens, then by twice as many."""
    ids = np.ones(40_000, np.uint16)
    ids[[15_000, 39_000]] = END
    ids.tofile(tmp_path / "a.npy")
    found = find_token_files("web", str(tmp_path), 2)
    stream = TokenSet(found.folder, found.files, 39_500, END)
    starts = [stream.first_document_from(token) for token in (0, 1, 4097, 15_001, 15_002, 39_001, 39_002)]
    assert starts == [0, 15_001, 15_001, 15_001, 39_001, 39_001, 39_500]


def test_an_index_that_goes_backwards_is_refused_when_it_is_used(tmp_path):
    np.arange(9, dtype="<u2").tofile(tmp_path / "a.ds")
    np.array([3, 8, 5, 9], "<u8").tofile(tmp_path / "a.ds.index")
    found = find_token_files("web", str(tmp_path), 2)
    stream = TokenSet(found.folder, found.files, 9, END)
    with pytest.raises(
        KieloError, match=r"a\.ds: its index has documents at tokens 0 to 8, looked for between 0 and"
    ):
        stream.borders(np.array([0]), np.array([9]))


def test_the_file_that_was_not_read_for_longest_is_closed(by_hand, tmp_path, monkeypatch):
    """Keep at most two files open."""
    opened = []

    def opening(folder, file, end):
        opened.append(file.name)
        return open_file(folder, file, end)

    np.array([3], "<u2").tofile(tmp_path / "d.npy")
    found = find_token_files("web", str(tmp_path), 2)
    stream = TokenSet(found.folder, found.files, 10, END)
    monkeypatch.setattr("kielo.artifact.token_set.MOST_OPEN_FILES", 2)
    monkeypatch.setattr("kielo.artifact.token_set.open_file", opening)
    assert [stream.read(token, 1).tolist() for token in (0, 3, 0, 9, 0, 3)] == [[5], [8], [5], [3], [5], [8]]
    assert opened == ["a.npy", "c.npy", "d.npy", "c.npy"]

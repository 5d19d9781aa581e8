"""Token shards are Megatron's: theirs read by us, ours by them, and a pair that does not match is refused."""

import struct

import numpy as np
import pytest

from kielo.artifact import token_shards
from kielo.artifact.token_shards import TokenShard, TokenShardWriter, join_token_shards
from kielo.recipe.errors import KieloError

DOCUMENTS = [[5, 1, 65_498, 0], [], [7], list(range(300))]


def _write(prefix, vocab_size=65_499, documents=DOCUMENTS):
    with TokenShardWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (131_072, np.int32)]
)
def test_round_trip(tmp_path, vocab_size, dtype):
    """Tokens, borders and the smallest sufficient type come back; a dot in the name is part of it."""
    documents = [[vocab_size - 1, 2], [], [3]]
    prefix = tmp_path / "wiki.et"
    _write(prefix, vocab_size, documents)
    shard = TokenShard(prefix)
    assert shard.dtype == dtype and (shard.num_tokens, shard.num_documents) == (3, 3)
    assert shard.document_offsets.tolist() == [0, 2, 2, 3] and shard.document_offsets.dtype == np.int64
    assert shard.read(1, 2).tolist() == [2, 3]
    with pytest.raises(IndexError):
        shard.read(1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wiki.et.bin", "wiki.et.idx"]


@pytest.mark.parametrize("has_loss_mask", [False, True])
def test_shards_are_joined(tmp_path, has_loss_mask):
    """Three shards, one of them empty, and documents added one by one or together: the files of one shard."""
    chance = np.random.default_rng(1)
    flags = [chance.random(len(document)) < 0.5 for document in DOCUMENTS]
    writers = [TokenShardWriter(tmp_path / name, 65_499, has_loss_mask) for name in ("0", "1", "2", "whole")]
    for number, document in enumerate(DOCUMENTS):
        for writer in (writers[2 * (number > 1)], writers[3]):
            writer.add(np.array(document, dtype=np.int64), flags[number])
    for writer in writers:
        writer.close()
    join_token_shards([tmp_path / name for name in "012"], tmp_path / "joined")
    with TokenShardWriter(tmp_path / "at once", 65_499, has_loss_mask) as writer:
        lengths = np.array([len(document) for document in DOCUMENTS])
        writer.add_documents(np.concatenate(DOCUMENTS).astype(np.int64), lengths, np.concatenate(flags))
        with pytest.raises(KieloError, match=r"document 5 has token ids 1\.\.65499"):
            writer.add_documents(np.array([3, 2, 1, 65_499]), np.array([2, 2]))
    for suffix in (".bin", ".idx", *([".loss_mask"] if has_loss_mask else [])):
        for name in ("joined", "at once"):
            assert (tmp_path / (name + suffix)).read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_megatron_reads_ours_and_we_read_theirs(tmp_path):
    """megatron-core's own reader and builder agree with ours, byte for byte."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    _write(tmp_path / "ours")
    dataset = theirs.IndexedDataset(str(tmp_path / "ours"), multimodal=False, mmap=True)
    assert [dataset[number].tolist() for number in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]

    dtype = theirs.DType.optimal_dtype(65_499)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(np.array(document, dtype=dtype), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()
    shard = TokenShard(tmp_path / "theirs")
    assert shard.read(0, shard.num_tokens).tolist() == sum(DOCUMENTS, [])


def test_documents_of_several_sequences_are_read(tmp_path):
    """Megatron can split a document into sentences; its borders are still the document's."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    builder.add_document(np.array([1, 2, 3], np.uint16), [1, 2])
    builder.add_document(np.array([4], np.uint16), [1])
    builder.finalize(str(tmp_path / "a.idx"))
    shard = TokenShard(tmp_path / "a")
    assert shard.document_offsets.tolist() == [0, 3, 4] and shard.num_documents == 2


def test_mismatched_pair_names_both_sizes(tmp_path):
    """An .idx that does not match its .bin is refused with the two sizes; so are a cut index and a foreign
    one."""
    _write(tmp_path / "a")
    data, index = tmp_path / "a.bin", tmp_path / "a.idx"
    whole_data, whole_index = data.read_bytes(), index.read_bytes()
    data.write_bytes(whole_data[:-2])
    size = len(whole_data)
    with pytest.raises(KieloError, match=rf"a\.idx does not match a\.bin.*{size:,} bytes.*{size - 2:,}"):
        TokenShard(tmp_path / "a")
    data.write_bytes(whole_data)
    index.write_bytes(whole_index[:-1])
    with pytest.raises(KieloError, match="cut short"):
        TokenShard(tmp_path / "a")
    index.write_bytes(b"something else entirely, but long enough")
    with pytest.raises(KieloError, match="not a Megatron index"):
        TokenShard(tmp_path / "a")
    index.unlink()
    with pytest.raises(KieloError, match="no such file"):
        TokenShard(tmp_path / "a")


def test_token_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path):
    """An id that the stored type would wrap round is a KieloError, and no file remains."""
    with pytest.raises(KieloError, match="outside the vocabulary of 100"):
        _write(tmp_path / "a", 100, [[1], [70_000]])
    assert not list(tmp_path.iterdir())


def test_the_bytes_of_a_shard(tmp_path, monkeypatch) -> None:
    """Megatron's index, version 1, by hand; documents in blocks; ids of two bytes below 65,500."""
    assert token_shards.UINT16_VOCAB_SIZES == 65_500
    monkeypatch.setattr(token_shards, "BLOCK_DOCUMENTS", 2)
    with TokenShardWriter(tmp_path / "s", 65_499, has_loss_mask=True) as shard:
        shard.add_documents(np.array([5, 6, 7, 65_498]), np.array([3, 0, 1]), np.array([1, 0, 1, 0], bool))
        shard.add(np.array([9]))
    assert (tmp_path / "s.bin").read_bytes() == struct.pack("<5H", 5, 6, 7, 65_498, 9)
    assert (tmp_path / "s.loss_mask").read_bytes() == bytes([1, 0, 1, 0, 1])
    assert (tmp_path / "s.idx").read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5) + struct.pack("<4i", 3, 0, 1, 1)
        + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    )  # fmt: skip
    found = TokenShard(tmp_path / "s")
    assert (found.num_tokens, found.num_documents, found.document_offsets.tolist()) == (5, 4, [0, 3, 3, 4, 5])
    assert [found.num_whole_sequences(length) for length in (1, 2, 3, 4, 5)] == [4, 2, 1, 1, 0]
    assert [[first.tolist(), last.tolist()] for first, last in found.document_blocks()] == [
        [[0, 3], [3, 3]], [[3, 4], [4, 5]],
    ]  # fmt: skip
    assert found.read(1, 4).tolist() == [6, 7, 65_498, 9] and found.loss_mask[1:3].tolist() == [0, 1]
    for start, count in ((-1, 1), (0, 6), (0, -1), (5, 1)):
        with pytest.raises(IndexError, match=f"tokens {start}..{start + count} of 5"):
            found.read(start, count)
    which, tokens = found.borders(np.array([0, 2, 3]), np.array([3, 3, 1]))
    assert (which.tolist(), tokens.tolist()) == ([1, 1, 1], [3, 3, 4])
    with TokenShardWriter(tmp_path / "t", 65_500) as shard:
        shard.add(np.array([65_499]))
        for wrong in ([1, 65_500], [-1, 2]):
            with pytest.raises(
                KieloError, match=rf"document 2 has token ids {min(wrong)}\.\.{max(wrong)}, outside"
            ):
                shard.add_documents(np.array([3, *wrong, 4]), np.array([1, 2, 1]))
        with pytest.raises(ValueError, match="one row of token ids"):
            shard.add(np.zeros((1, 2), int))
    assert TokenShard(tmp_path / "t").dtype == np.int32 and not (tmp_path / "t.loss_mask").exists()
    (tmp_path / "s.loss_mask").write_bytes(bytes(4))
    with pytest.raises(KieloError, match="s.loss_mask: 4 bytes for the 5 tokens of s.bin"):
        TokenShard(tmp_path / "s")
    (tmp_path / "s.bin").write_bytes(bytes(9))
    with pytest.raises(KieloError, match="describes 10 bytes .5 tokens of 2 bytes., but the data has 9"):
        TokenShard(tmp_path / "s")


def index_of(documents: list[int], lengths: tuple[int, ...] = (2, 1)) -> bytes:
    """An index of uint16 tokens whose documents begin at these sequences."""
    ends = np.cumsum(lengths) - np.array(lengths)
    return (
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(documents))
        + np.array(lengths, "<i4").tobytes() + (2 * ends).astype("<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )  # fmt: skip


@pytest.mark.parametrize("documents", [[], [1, 2], [0, 1], [0, 2, 1, 2], [0, 3]])
def test_documents_that_do_not_cover_the_sequences_are_refused(documents, tmp_path):
    """They begin at the first, end with the last and never go back; empty ones are documents too."""
    (tmp_path / "a.bin").write_bytes(bytes(6))
    (tmp_path / "a.idx").write_bytes(index_of([0, 1, 1, 2]))
    assert TokenShard(tmp_path / "a").document_offsets.tolist() == [0, 2, 2, 3]
    (tmp_path / "a.idx").write_bytes(index_of(documents))
    with pytest.raises(KieloError, match=r"a\.idx: damaged \(its documents do not cover its 2 sequences\)"):
        TokenShard(tmp_path / "a")


def test_rows_of_a_shard_share_a_token(tmp_path):
    _write(tmp_path / "a", documents=[[5, 6, 7], [8, 9], [4, 3, 2]])
    shard = TokenShard(tmp_path / "a")
    assert shard.sequences(np.array([1, 0]), 3).tolist() == [[8, 9, 4, 3], [5, 6, 7, 8]]
    assert shard.loss_mask is None and shard.num_whole_sequences(9) == 0
    assert [len(TokenShard(tmp_path / "a").read(start, 0)) for start in (0, 8)] == [0, 0]
    which, tokens = shard.borders(np.array([0, 1, 3, 2]), np.array([8, 2, 3, 4]))
    assert (which.tolist(), tokens.tolist()) == ([0, 0, 2, 3, 3], [3, 5, 5, 3, 5])


def test_files_that_a_shard_lacks_are_named(tmp_path):
    with TokenShardWriter(tmp_path / "a", 300, has_loss_mask=True) as writer:
        writer.add(np.array([1, 2, 3]), np.array([True, False, True]))
    shard = TokenShard(tmp_path / "a")
    assert shard.loss_mask[:1].tolist() == [1] and len(shard.loss_mask) == 3
    (tmp_path / "a.loss_mask").unlink()
    assert TokenShard(tmp_path / "a").loss_mask is None
    (tmp_path / "a.bin").unlink()
    with pytest.raises(KieloError, match=r"a\.bin: no such file; a token shard is a pair"):
        TokenShard(tmp_path / "a")
    (tmp_path / "a.idx").unlink()
    with pytest.raises(KieloError, match=r"a\.idx: no such file; a token shard is a pair"):
        TokenShard(tmp_path / "a")


def test_a_mask_of_another_length_is_refused_and_nothing_is_left(tmp_path):
    """No data, no mask and no index; without flags every token carries loss."""
    with (
        pytest.raises(ValueError, match=r"2 tokens and a loss mask of shape \(3,\)"),
        TokenShardWriter(tmp_path / "a", 300, has_loss_mask=True) as writer,
    ):
        writer.add(np.array([7, 8]), np.array([True, False, True]))
    assert not list(tmp_path.iterdir())
    with TokenShardWriter(tmp_path / "a", 300) as writer:
        writer.add(np.array([7, 8]), np.array([True, False, True]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]

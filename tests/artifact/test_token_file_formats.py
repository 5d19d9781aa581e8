"""Token files and their indexes are described, or refused with the file and the number."""

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kielo.artifact import token_file_formats
from kielo.artifact.token_file import TokenFile
from kielo.artifact.token_file_formats import check_index, describe, fingerprint, index_path, open_file
from kielo.artifact.token_shards import TokenShard
from kielo.recipe.errors import KieloError


def megatron(
    prefix: Path, data: bytes, lengths: list[int], pointers: list[int], documents: list[int]
) -> Path:
    """Writes a pair with int32 ids; returns the data's path."""
    content = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(lengths), len(documents))
    content += np.array(lengths, "<i4").tobytes() + np.array(pointers + documents, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(content)
    prefix.with_suffix(".bin").write_bytes(data)
    return prefix.with_suffix(".bin")


def ds(path: Path, num_tokens: int, ends: list[int], metadata: str | None = None, width: int = 2) -> Path:
    path.write_bytes(np.arange(num_tokens, dtype=f"<u{width}").tobytes())
    Path(f"{path}.index").write_bytes(np.array(ends, "<u8").tobytes())
    if metadata is not None:
        Path(f"{path}.metadata").write_text(metadata)
    return path


def digest(*files: bytes) -> str:
    """The fingerprint of files of at most 4,096 bytes, whose two ends are the whole."""
    return xxhash.xxh3_128_hexdigest(b"".join(struct.pack("<Q", len(file)) + file + file for file in files))


def test_a_fingerprint_is_of_both_ends(tmp_path) -> None:
    path, index = tmp_path / "a", tmp_path / "b"
    content = np.random.default_rng(1).bytes(10_000)
    index.write_bytes(b"index")
    for size in (1, 4095, 4096):
        path.write_bytes(content[:size])
        assert fingerprint(path, None) == digest(content[:size])
    assert fingerprint(path, index) == digest(content[:4096], b"index")
    for size in (4097, 10_000):
        path.write_bytes(content[:size])
        whole = struct.pack("<Q", size) + content[:4096] + content[size - 4096 : size]
        assert fingerprint(path, None) == xxhash.xxh3_128_hexdigest(whole)


def test_a_pair_of_megatrons_by_hand(tmp_path) -> None:
    """Three sequences, of which the first two are one document; then an empty document, and the third."""
    data = np.arange(6, dtype="<i4").tobytes()
    path = megatron(tmp_path / "s", data, [2, 1, 3], [0, 8, 12], [0, 2, 2, 3])
    found = describe(path, 2)
    assert found == TokenFile(
        name="s.bin", format="megatron", dtype="<i4", first_byte=0, tokens=6, documents=3, bytes=24,
        index_bytes=34 + 3 * 4 + 3 * 8 + 4 * 8, fingerprint=digest(data, (tmp_path / "s.idx").read_bytes()),
    )  # fmt: skip
    assert index_path(path, "megatron") == tmp_path / "s.idx"
    opened = open_file(tmp_path, found, 0)
    assert opened.index.starts(0, 3).tolist() == [0, 3, 3] and opened.tokens[:].tolist() == [0, 1, 2, 3, 4, 5]
    check_index(path, found)
    empty = describe(megatron(tmp_path / "e", b"", [], [], [0]), 2)
    assert (empty.tokens, empty.documents, empty.index_bytes) == (0, 0, 42)
    assert open_file(tmp_path, empty, 0).index.starts(0, 0).tolist() == []
    with pytest.raises(
        KieloError, match=r"e\.idx does not match e\.bin: its last sequence ends at byte 0, .* 4 bytes."
    ):
        describe(megatron(tmp_path / "e", b"1234", [], [], [0]), 2)


@pytest.mark.parametrize(
    ("documents", "told"),
    [([1, 2], "sequences 1 to 2 of 2"), ([0, 1], "sequences 0 to 1 of 2"), ([0, 3], "sequences 0 to 3 of 2")],
)
def test_documents_that_are_not_those_of_the_sequences(documents, told, tmp_path) -> None:
    path = megatron(tmp_path / "s", bytes(12), [2, 1], [0, 8], documents)
    with pytest.raises(
        KieloError, match=rf"s\.idx: damaged \(its documents cover {told}\). Fix: copy it again"
    ):
        describe(path, 2)


def test_an_index_without_the_end_of_its_documents(tmp_path) -> None:
    path = megatron(tmp_path / "s", b"", [], [], [])
    with pytest.raises(KieloError, match=r"s\.idx: damaged \(its documents do not cover its 0 sequences"):
        describe(path, 2)


def test_flat_ids_and_numpys_own_file(tmp_path) -> None:
    """Flat ids are as wide as the vocabulary wants; the header of numpy.save counts for itself."""
    path = tmp_path / "a.npy"
    path.write_bytes(bytes(range(12)))
    for width, tokens in ((2, 6), (4, 3)):
        assert describe(path, width) == TokenFile(
            name="a.npy", format="npy", dtype=f"<u{width}", first_byte=0, tokens=tokens, documents=None,
            bytes=12, index_bytes=0, fingerprint=digest(bytes(range(12))),
        )  # fmt: skip
    assert index_path(path, "npy") is None and open_file(tmp_path, describe(path, 2), 0).index is None
    check_index(path, describe(path, 2))
    for dtype in ("<i8", "<u2"):
        np.save(path, np.array([7, 1, 5], dtype))
        found = describe(path, 4)
        assert (found.dtype, found.tokens, found.bytes) == (dtype, 3, 128 + 3 * int(dtype[2]))
        assert found.first_byte == 128 and open_file(tmp_path, found, 0).tokens[:].tolist() == [7, 1, 5]
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(
        KieloError, match=r"a\.npy: 7 bytes of data are no whole number of ids of 2 bytes. Fix: copy the"
    ):
        describe(path, 4)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros(2, ">i4"), r">i4 of shape \(2,\), but a row of little-endian integers is expected"),
        (np.zeros(3, np.float32), r"float32 of shape \(3,\)"),
        (np.zeros((1, 2), np.int32), r"int32 of shape \(1, 2\)"),
        (np.array([None]), r"a NumPy file that cannot be mapped \("),
    ],
)
def test_arrays_that_are_no_row_of_ids(array, told, tmp_path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(KieloError, match=rf"a\.npy: {told}"):
        describe(tmp_path / "a.npy", 4)


@pytest.mark.parametrize(
    ("metadata", "width"),
    [(None, 2), ("name|4", 4), ("a|b|4\n12|2\n", 4), ("name|2\n12|4\n", 2), ("name|8", 2), ("", 2), ("4", 4)],
)
def test_the_width_in_the_metadata_of_a_ds(metadata, width, tmp_path) -> None:
    """The first line ends in it; anything else says nothing."""
    path = ds(tmp_path / "a.ds", 6, [2, 6], metadata, width)
    found = describe(path, 2)
    assert found == TokenFile(
        name="a.ds", format="ds", dtype=f"<u{width}", first_byte=0, tokens=6, documents=2, bytes=6 * width,
        index_bytes=16, fingerprint=digest(path.read_bytes(), Path(f"{path}.index").read_bytes()),
    )  # fmt: skip
    assert open_file(tmp_path, found, 0).index.starts(0, 2).tolist() == [0, 2]
    assert index_path(path, "ds") == tmp_path / "a.ds.index"


def test_a_ds_that_does_not_fit_its_index(tmp_path) -> None:
    path = ds(tmp_path / "a.ds", 9, [3, 8])
    with pytest.raises(
        KieloError, match="last document ends at token 8, but the data has 9 of 2 bytes. Fix: copy"
    ):
        describe(path, 2)
    index = Path(f"{path}.index")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(
        KieloError, match=r"a\.ds\.index: 15 bytes, which are no whole uint64s, but it has the ends"
    ):
        describe(path, 2)
    index.unlink()
    for make in (lambda: None, index.mkdir):
        make()
        with pytest.raises(
            KieloError, match=r"a\.ds\.index: missing, but it has the ends of the documents of a\.ds"
        ):
            describe(path, 2)
    index.rmdir()
    path.write_bytes(bytes(9))
    index.touch()
    with pytest.raises(KieloError, match=r"a\.ds: 9 bytes of data are no whole number of ids of 2 bytes"):
        describe(path, 2)
    for ends in ([], [0, 0]):
        found = describe(ds(tmp_path / "b.ds", 0, ends), 2)
        assert (found.tokens, found.documents, found.bytes, found.index_bytes) == (
            0,
            len(ends),
            0,
            8 * len(ends),
        )
        assert open_file(tmp_path, found, 0).index.num_documents == len(ends)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_a_whole_index_is_read(at_once, tmp_path, monkeypatch) -> None:
    """Documents that go backwards or past the data, however many entries are read at once."""
    monkeypatch.setattr(token_file_formats, "READ_AT_ONCE", at_once)
    for ends, number, begin, before in (([3, 8, 5, 9], 3, 5, 8), ([3, 10, 9, 9], 2, 10, 3)):
        path = ds(tmp_path / "a.ds", 9, ends)
        told = rf"a\.ds\.index: document {number} begins at token {begin}, after one at {before}, in a"
        with pytest.raises(KieloError, match=told):
            check_index(path, describe(path, 2))
    path = ds(tmp_path / "a.ds", 9, [3, 3, 9, 9])
    check_index(path, describe(path, 2))
    path = megatron(tmp_path / "s", bytes(28), [2, 4], [4, 12], [0, 1, 2])
    with pytest.raises(
        KieloError, match=r"s\.idx: document 0 begins at token 1, after one at 0, in s\.bin of 7"
    ):
        check_index(path, describe(path, 2))
    for lengths, starts in (
        ([2, 4], [0, 12]),
        ([4, 4], [0, 8]),
        ([-2, 6], [8, 0]),
        ([1, 1, 1, 3], [0, 4, 9, 12]),
    ):
        path = megatron(tmp_path / "s", bytes(24), lengths, starts, [0, 1, len(lengths)])
        with pytest.raises(KieloError, match=r"s\.idx.*(damaged \(sequence|does not match)"):
            check_index(path, describe(path, 2))


def test_indexes_of_others_that_cannot_be_read(tmp_path) -> None:
    """Another version, a type that is no whole number, half a header; each is named."""
    (tmp_path / "s.bin").write_bytes(bytes(4))

    def written(version: int, code: int, cut: int = 0) -> None:
        content = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, 1, 2)
        content += struct.pack("<iqqq", 2, 0, 0, 1)
        (tmp_path / "s.idx").write_bytes(content[: len(content) - cut])

    written(1, 8)
    assert describe(tmp_path / "s.bin", 2).tokens == 2 and TokenShard(tmp_path / "s").num_tokens == 2
    for version, code in ((2, 8), (0, 8), (1, 9), (1, 6), (1, 7)):
        written(version, code)
        for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
            with pytest.raises(
                KieloError, match=f"s.idx: version {version}, dtype code {code}, but only version 1 with"
            ):
                read()
    written(1, 8, cut=1)
    for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
        with pytest.raises(
            KieloError, match="s.idx: 61 bytes, but its header promises 62; the file is cut short"
        ):
            read()
    (tmp_path / "s.idx").write_bytes(b"MMIDIDX\0\0" + bytes(24))
    for read in (lambda: describe(tmp_path / "s.bin", 2), lambda: TokenShard(tmp_path / "s")):
        with pytest.raises(KieloError, match="not a Megatron index"):
            read()

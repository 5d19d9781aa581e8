"""Bad token files are refused by name, with the number that is wrong, before a token of them is read."""

import os
import struct

import numpy as np
import pytest

from kielo.artifact.token_file_formats import check_index
from kielo.artifact.token_sources import check_unchanged, find_token_files
from kielo.recipe.errors import KieloError
from tests.ready_tokens import write_ds, write_megatron, write_npy

DOCUMENTS = [[5, 6, 0], [7, 0], [8, 9, 10, 0]]


@pytest.fixture
def shard(tmp_path):
    write_megatron(tmp_path / "a", DOCUMENTS)
    return tmp_path / "a"


def _change(path, place: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[place : place + len(content)] = content
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("place", ["a", "a.bin", "a.idx", "a*", "."])
def test_every_way_to_name_a_pair(shard, place):
    """A prefix, either file, a pattern that fits both, and their folder find the pair once."""
    found = find_token_files("web", str(shard.parent / place), 2)
    assert [(file.name, file.tokens, file.documents) for file in found.files] == [("a.bin", 9, 3)]
    assert found.folder == shard.parent


def test_no_file_says_what_is_read(tmp_path):
    """An empty folder and a prefix of nothing are refused with the formats; so is a set without a token."""
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(KieloError, match=r"corpus.sources, web: tokens = .*no token file.*PREFIX.bin"):
            find_token_files("web", str(place), 2)
    write_megatron(tmp_path / "empty", [])
    with pytest.raises(KieloError, match="1 files, none of which has a token"):
        find_token_files("web", str(tmp_path), 2)


def test_a_damaged_pair_names_the_file_and_the_number(shard):
    """A missing or cut index, a foreign one, an odd or short data file: each has its sentence."""
    data, index = shard.with_name("a.bin"), shard.with_name("a.idx")
    whole, whole_data = index.read_bytes(), data.read_bytes()
    for damage, message in [
        (lambda: index.write_bytes(whole[:-1]), r"a\.idx: 101 bytes, but its header promises 102.*cut short"),
        (lambda: index.write_bytes(whole[:20]), r"a\.idx: not a Megatron index"),
        (index.unlink, r"a\.idx: no such file"),
        (lambda: data.write_bytes(whole_data + b"x"), r"a\.bin: 19 bytes of data are no whole number of ids"),
        (lambda: data.write_bytes(whole_data[:-2]), r"ends at byte 18, and the data has 16"),
    ]:
        damage()
        with pytest.raises(KieloError, match=message):
            find_token_files("web", str(shard), 2)
        index.write_bytes(whole)
        data.write_bytes(whole_data)


def test_documents_past_the_data_are_refused(shard):
    """The whole index is read before training: a sequence in the middle that begins past the data."""
    place = 34 + 4 * 3 + 8  # the second of three pointers
    _change(shard.with_name("a.idx"), place, struct.pack("<q", 4000))
    found = find_token_files("web", str(shard), 2)
    with pytest.raises(KieloError, match=r"a\.idx: document 1 begins at token 2,000.*of 9 tokens"):
        check_index(found.folder / found.files[0].name, found.files[0])


def test_flat_ids_and_ds_that_do_not_fit(tmp_path):
    """A .npy of another width, a .ds without its index, and one whose index is another's."""
    write_npy(tmp_path / "flat", DOCUMENTS)
    with pytest.raises(KieloError, match=r"flat\.npy: 18 bytes.* ids of 4 bytes.*tokens_dtype"):
        find_token_files("web", str(tmp_path / "flat.npy"), 4)
    np.save(tmp_path / "table.npy", np.zeros((2, 2), np.int32))
    with pytest.raises(KieloError, match=r"table\.npy: holds int32 of shape \(2, 2\)"):
        find_token_files("web", str(tmp_path / "table.npy"), 4)
    write_ds(tmp_path / "b", DOCUMENTS)
    (tmp_path / "b.ds.index").write_bytes(struct.pack("<2Q", 3, 8))
    with pytest.raises(KieloError, match=r"last document ends at token 8, and the data has 9"):
        find_token_files("web", str(tmp_path / "b.ds"), 2)
    (tmp_path / "b.ds.index").unlink()
    with pytest.raises(KieloError, match=r"b\.ds\.index: missing"):
        find_token_files("web", str(tmp_path / "b.ds"), 2)


def test_changed_files_are_refused_and_copies_are_not(shard):
    """Another size, other content with a newer time, or no file: refused; the same content, touched: not."""
    found = find_token_files("web", str(shard), 2)
    data = shard.with_name("a.bin")
    whole = data.read_bytes()
    os.utime(data, ns=(0, 0))
    check_unchanged("web", found.folder, found.files, found.mtimes_ns)
    for content in (whole[:-2], whole[:-2] + b"\x01\x00"):
        data.write_bytes(content)
        with pytest.raises(KieloError, match=r"a\.bin: changed since the pack stage"):
            check_unchanged("web", found.folder, found.files, found.mtimes_ns)
    data.unlink()
    with pytest.raises(KieloError, match=r"a\.bin: cannot be read \(No such file"):
        check_unchanged("web", found.folder, found.files, found.mtimes_ns)

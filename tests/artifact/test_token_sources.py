"""Bad token files are refused by name, with the number that is wrong, before a token of them is read."""

import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from kielo.artifact.token_file_formats import check_index
from kielo.artifact.token_sources import (
    TokenFileSet,
    check_unchanged,
    checksum,
    find_token_files,
    find_token_sources,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Source
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
        (lambda: data.write_bytes(whole_data[:-2]), r"ends at byte 18, but the data has 16"),
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
    with pytest.raises(KieloError, match=r"a\.idx: damaged \(sequence 0 has 3 tokens from byte 0, and"):
        check_index(found.folder / found.files[0].name, found.files[0])


def test_flat_ids_and_ds_that_do_not_fit(tmp_path):
    """A .npy of another width, a .ds without its index, and one whose index is another's."""
    write_npy(tmp_path / "flat", DOCUMENTS)
    with pytest.raises(KieloError, match=r"flat\.npy: 18 bytes.* ids of 4 bytes.*tokens_dtype"):
        find_token_files("web", str(tmp_path / "flat.npy"), 4)
    np.save(tmp_path / "table.npy", np.zeros((2, 2), np.int32))
    with pytest.raises(KieloError, match=r"table\.npy: int32 of shape \(2, 2\)"):
        find_token_files("web", str(tmp_path / "table.npy"), 4)
    write_ds(tmp_path / "b", DOCUMENTS)
    (tmp_path / "b.ds.index").write_bytes(struct.pack("<2Q", 3, 8))
    with pytest.raises(KieloError, match=r"last document ends at token 8, but the data has 9"):
        find_token_files("web", str(tmp_path / "b.ds"), 2)
    (tmp_path / "b.ds.index").unlink()
    with pytest.raises(KieloError, match=r"b\.ds\.index: missing"):
        find_token_files("web", str(tmp_path / "b.ds"), 2)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".loss_mask"])
def test_changed_files_are_refused(shard, suffix):
    """Another size or time of the data, its index or its mask, or no file."""
    shard.with_name("a.loss_mask").write_bytes(bytes(shard.with_name("a.bin").stat().st_size // 2))
    found = find_token_files("web", str(shard), 2)
    in_place = "web", found.folder, found.files, found.times_ns
    check_unchanged(*in_place)
    part = shard.with_name(f"a{suffix}")
    os.utime(part, ns=(0, 0))
    with pytest.raises(KieloError, match=r"a\.bin: changed since the pack stage .* was rewritten"):
        check_unchanged(*in_place)
    if suffix == ".bin":
        part.write_bytes(part.read_bytes()[:-2])
        with pytest.raises(KieloError, match=r"a\.bin: changed since .* bytes, described were"):
            check_unchanged(*in_place)
    part.unlink()
    with pytest.raises(KieloError, match=rf"a\{suffix}: cannot be read \(No such file"):
        check_unchanged(*in_place)


def test_a_checksum_is_of_all_bytes(shard):
    """A byte in the middle of the data, the index or the mask changes it; the time does not."""
    mask = shard.with_name("a.loss_mask")
    mask.write_bytes(bytes(shard.with_name("a.bin").stat().st_size // 2))
    found = find_token_files("web", str(shard), 2)
    first = checksum(found.folder, found.files[0])
    for suffix in (".bin", ".idx", ".loss_mask"):
        part = shard.with_name(f"a{suffix}")
        whole = bytearray(part.read_bytes())
        part.write_bytes(bytes(whole[: len(whole) // 2]) + b"\x07" + bytes(whole[len(whole) // 2 + 1 :]))
        assert checksum(found.folder, found.files[0]) != first
        part.write_bytes(whole)
        assert checksum(found.folder, found.files[0]) == first


def test_files_of_a_place(tmp_path, monkeypatch):
    """By pattern, through folders, from home; hidden files and others are left out; in the order of names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, ids in (("deep/b", [1]), ("a", [2, 3]), (".c", [4]), ("deep/er/d", [5, 6, 7])):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        np.array(ids, "<u2").tofile(tmp_path / f"{name}.npy")
    (tmp_path / "e.txt").touch()
    for place, names in (
        (str(tmp_path), ["a.npy", "deep/b.npy", "deep/er/d.npy"]), ("~/deep", ["b.npy", "er/d.npy"]),
        (f"{tmp_path}/**/*.npy", ["a.npy", "deep/b.npy", "deep/er/d.npy"]), ("~/deep/er/d.npy", ["d.npy"]),
        ("~/*", ["a.npy", "deep/b.npy", "deep/er/d.npy"]), ("~/.c.npy", [".c.npy"]),
    ):  # fmt: skip
        found = find_token_files("web", place, 2)
        assert [file.name for file in found.files] == names, place
        paths = [found.folder / name for name in names]
        assert found.times_ns == tuple((path.stat().st_mtime_ns,) for path in paths)
    for gone in ("~/e.txt", "~/gone.idx/x"):
        with pytest.raises(KieloError, match="no token file there. Fix: PREFIX.bin with PREFIX.idx"):
            find_token_files("web", gone, 2)
    with pytest.raises(
        KieloError, match=r"^corpus\.sources, web: .*gone\.npy: cannot be read \(No such file or"
    ):
        find_token_files("web", "~/gone.npy", 2)


def test_the_same_files_elsewhere_are_the_same_text(tmp_path):
    """Their names and content count, not the folder or the time; tokens are those of all files."""
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        for name, ids in (("a", [1, 2]), ("b", [3])):
            np.array(ids, "<u2").tofile(tmp_path / folder / f"{name}.npy")
    first, second = (find_token_files("web", str(tmp_path / folder), 2) for folder in ("x", "y"))
    assert first.identity == second.identity and first.folder != second.folder
    assert TokenFileSet(files=first.files, training_tokens=2).tokens == 3
    np.array([1, 4], "<u2").tofile(tmp_path / "y" / "a.npy")
    assert find_token_files("web", str(tmp_path / "y"), 2).identity != first.identity


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "width"),
    [("uint16", 99_999, 2), ("uint32", 5, 4), (None, 65_536, 2), (None, 65_537, 4), (None, 65_535, 2)],
)
def test_the_width_of_ids(dtype, vocab_size, width, tmp_path):
    """Take the width that the recipe says, else two bytes for up to 65,536 tokens."""
    (tmp_path / "a.npy").write_bytes(bytes(12))
    source = Source(name="web", tokens=str(tmp_path), tokens_dtype=dtype)
    recipe = SimpleNamespace(corpus=SimpleNamespace(token_sources=[source]))
    found = find_token_sources(recipe, vocab_size)
    assert list(found) == ["web"] and found["web"].files[0].tokens == 12 // width


def test_files_of_another_size_or_time_changed(shard):
    """Shorter and longer ones, one that is gone, and one that was rewritten with the same bytes."""
    found = find_token_files("web", str(shard), 2)
    data = shard.with_name("a.bin")
    whole = data.read_bytes()
    arguments = ("web", found.folder, found.files, found.times_ns)
    check_unchanged(*arguments)
    for content in (whole[:-2], whole + b"12"):
        data.write_bytes(content)
        sizes = rf"\({len(content)} bytes, described were 18\)"
        with pytest.raises(KieloError, match=rf"a\.bin: changed .* {sizes}; source web is read in"):
            check_unchanged(*arguments)
    data.unlink()
    with pytest.raises(KieloError, match=r"a\.bin: cannot be read \(No such file"):
        check_unchanged(*arguments)
    data.write_bytes(whole)
    with pytest.raises(KieloError, match=r"a\.bin: changed .* \(its data, index or loss mask was rewritten"):
        check_unchanged(*arguments)
    os.utime(data, ns=(found.times_ns[0][0],) * 2)
    check_unchanged(*arguments)

"""Documents read back as written, and damage is named by file and line."""

import codecs
import gzip
import lzma
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kielo.artifact.documents import COMPRESSION_LEVEL, DocumentWriter, document_files, read_documents
from kielo.artifact.text_files import (
    READ_BYTES,
    ZSTD_READ_BYTES,
    decode_text,
    other_encoding,
    read_lines,
    split_lines,
)
from kielo.recipe.errors import KieloError
from tests.written_documents import write_documents


def _document(number):
    return {
        "id": f"s/{number}",
        "text": f"rida {number}\nõhtul ☃ \u2028",
        "source": "s",
        "metadata": {"n": number},
    }


def test_round_trip_over_files_in_order(tmp_path):
    """A folder reads as its files in the order of their names."""
    documents = [_document(number) for number in range(50)]
    write_documents(tmp_path / "00001.jsonl.zst", documents[30:])
    assert write_documents(tmp_path / "00000.jsonl.zst", documents[:30]) == 30
    assert list(read_documents(tmp_path)) == documents


@given(
    st.lists(st.sampled_from([b"\n", b"a", b"\r"]), max_size=60).map(b"".join),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_lines_do_not_depend_on_block_borders(content, cuts):
    """The lines are those of the whole stream, however it is cut into blocks."""
    borders = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    blocks = [content[start:end] for start, end in zip(borders, borders[1:])]
    whole = content.split(b"\n")
    assert list(split_lines(blocks)) == (whole if whole[-1] else whole[:-1])


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_a_long_line_is_never_held(tmp_path, suffix, compress):
    """The limit and some blocks are all that is held of 100 MB without a line end; neighbours are read."""
    path = tmp_path / ("a.txt" + suffix)
    path.write_bytes(compress(b"before\n" + b"a" * 100_000_000 + b"\nafter"))
    tracemalloc.start()
    try:
        assert list(read_lines(path, 1_000_000)) == [(1, b"before"), (2, None), (3, b"after")]
        assert tracemalloc.get_traced_memory()[1] < 80_000_000
    finally:
        tracemalloc.stop()


def test_frames_one_after_another_are_one_file(tmp_path):
    """Concatenated zstd files, as `cat` and Hadoop make them, read whole."""
    path = tmp_path / "two.txt.zst"
    path.write_bytes(zstandard.compress(b"a\nb") + zstandard.compress(b"c\nd\n"))
    assert list(read_lines(path)) == [(1, b"a"), (2, b"bc"), (3, b"d")]


@pytest.mark.parametrize(("suffix", "compress"), [(".zst", zstandard.compress), (".gz", gzip.compress)])
def test_damage_is_named(tmp_path, suffix, compress):
    """A compressed file cut short or overwritten is a KieloError with its path, never a short text."""
    path = tmp_path / ("a.txt" + suffix)
    whole = compress(bytes(range(256)) * 50 + b"\n")
    for keep in (len(whole) - 1, len(whole) // 2, 5):
        path.write_bytes(whole[:keep])
        with pytest.raises(KieloError, match="a.txt.*cut short"):
            list(read_lines(path))
    path.write_bytes(b"not compressed at all")
    with pytest.raises(KieloError, match="a.txt.*damaged"):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xf5htul"}', "invalid UTF-8 .byte 0xf5 at position 10"),
        (b'{"text": ', "JSON.* Fix: one JSON object a line, or .* a name with .json in place of .jsonl"),
        (b"[1]", "object is expected, found list. Fix: {"),
    ],
)
def test_bad_line_is_named(tmp_path, line, message):
    """A line that is no JSON object in UTF-8 is named by file and number."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b"{}\n" + line + b"\n"))
    with pytest.raises(KieloError, match=r"a\.jsonl\.zst, line 2: .*" + message):
        list(read_documents(path))


def test_failed_writing_leaves_nothing(tmp_path):
    """An exception in the middle of writing leaves no file, whole or partial."""

    def documents():
        yield _document(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_documents(tmp_path / "a.jsonl.zst", documents())
    assert not list(tmp_path.iterdir())


def test_lines_up_to_a_limit(tmp_path) -> None:
    """A line of so many bytes is read, one more is None, in one block or in several; a mark is no text."""
    for blocks in (
        [b"abcd\nabcde\nabcd"],
        [b"ab", b"cd\nabc", b"de\na", b"bcd"],
        [b"abcd\nabcd", b"e\nabcd"],
    ):
        assert list(split_lines(blocks, 4)) == [b"abcd", None, b"abcd"]
    assert list(split_lines([b"a\n\nabcde"], 4)) == [b"a", b"", None] and list(split_lines([b""])) == []
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + b"one\r\n\ntwo")
    assert list(read_lines(path)) == [(1, b"one"), (2, b""), (3, b"two")]
    path.write_text("õne\ntwo", encoding="utf-16")
    assert list(read_lines(path)) == [(1, "õne".encode()), (2, b"two")]
    assert (READ_BYTES, ZSTD_READ_BYTES) == (262_144, 512)


SHORT = {
    "Russian": "Привет", "Greek": "Καλημέρα κόσμε", "Hebrew": "שלום", "Thai": "สวัสดี", "Tamil": "வணக்கம்",
    "Hindi": "नमस्ते दुनिया", "Armenian": "Բարեւ…, աշխարհ",
}  # fmt: skip


@pytest.mark.parametrize("script", SHORT)
@pytest.mark.parametrize("name", ["UTF-16LE", "UTF-16BE"])
def test_a_word_in_utf16_is_known_by_its_bytes(script: str, name: str) -> None:
    """Most of these bytes are valid UTF-8, and would become text of control characters."""
    assert other_encoding(SHORT[script].encode(name)) == name


@pytest.mark.parametrize(
    "text", ["a\tb\tc\td\te\tf\n", "1\n0\n1\n1\n0\n0\n", "\x01a\x02b", "Привет, мир", "日本語", ""]
)
def test_short_text_that_is_no_utf16(text: str) -> None:
    """Tables of single letters, dirt, and UTF-8 itself."""
    assert other_encoding(text.encode()) is None


@pytest.mark.parametrize("name", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_an_encoding_is_known_by_its_mark_and_by_its_zero_bytes(name) -> None:
    text = "Kord elas kuningas"
    mark = getattr(codecs, f"BOM_{name.replace('-', '').replace('LE', '_LE').replace('BE', '_BE')}")
    assert other_encoding(text.encode(name)) == name and other_encoding(mark + "õ".encode(name)) == name
    assert other_encoding(text.encode()) is None and other_encoding(b"\0\0") is None
    half = b"a\0a\0" * 2 + b"aaaa" * 2  # as many zeros as letters in their place say nothing
    assert other_encoding(half) is None and other_encoding(half + b"a\0a\0") == "UTF-16LE"


def test_a_compressed_file_that_is_empty_is_cut_short(tmp_path):
    """With its size; a plain one has no line."""
    for name in ("a.zst", "a.gz"):
        (tmp_path / name).touch()
        with pytest.raises(
            KieloError, match=rf"{name}: cut short \(the compressed stream ends in the middle, at 0 bytes\)"
        ):
            list(read_lines(tmp_path / name))
    (tmp_path / "a").touch()
    assert list(read_lines(tmp_path / "a")) == []
    (tmp_path / "A.GZ").write_bytes(gzip.compress(b"one\n\ntwo"))
    assert list(read_lines(tmp_path / "A.GZ", 2)) == [(1, None), (2, b""), (3, None)]


def test_files_of_documents(tmp_path):
    """By name, of one suffix; a file stands for itself, and nothing else will do."""
    for name in ("b.jsonl.zst", "a.jsonl.zst", "c.jsonl", "d.zst"):
        (tmp_path / name).touch()
    assert document_files(tmp_path) == [tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.zst"]
    assert document_files(tmp_path / "c.jsonl") == [tmp_path / "c.jsonl"]
    with pytest.raises(
        KieloError, match="gone: no such file or folder of documents. Fix: run the corpus stage first"
    ):
        document_files(tmp_path / "gone")


def test_the_bytes_of_a_file_of_documents(tmp_path):
    """One document a line, in a frame with a checksum; lines that are JSON already go in as they are."""
    with DocumentWriter(tmp_path / "a.jsonl.zst") as writer:
        writer.add({"id": "õ", "n": 1})
        writer.add_lines(b'{"id": "b"}\n')
    content = (tmp_path / "a.jsonl.zst").read_bytes()
    assert zstandard.get_frame_parameters(content).has_checksum and COMPRESSION_LEVEL == 6
    assert zstandard.ZstdDecompressor().decompressobj().decompress(content) == (
        '{"id":"õ","n":1}\n{"id": "b"}\n'.encode()
    )
    assert decode_text(tmp_path, 1, "õ".encode()) == "õ"
    with pytest.raises(
        KieloError,
        match=r", line 7: invalid UTF-8 \(byte 0xff at position 2 of the line\). Fix: the source's "
        ".encoding.: usually windows-1257 for Estonian",
    ):
        decode_text(tmp_path, 7, b"ab\xff")


@pytest.mark.parametrize(
    ("start", "fix"),
    [
        (b"PK\x03\x04\x14", "save it as plain text"),
        (b"\xd0\xcf\x11\xe0\xa1", "save it as plain text"),
        (b"%PDF-1.4", "save it as plain text"),
        (gzip.compress(b"a", mtime=0), "add .gz to its name"),
        (zstandard.compress(b"a"), "add .zst to its name"),
        (lzma.compress(b"a"), "add .xz to its name"),
    ],
    ids=["zip", "doc", "pdf", "gzip", "zstd", "xz"],
)
def test_a_file_of_another_format_is_known_by_its_first_bytes(tmp_path, start, fix):
    path = tmp_path / "a.txt"
    path.write_bytes(start + b"\nx\xf5" * 99)
    with pytest.raises(KieloError, match=f"a.txt: is no text, but .*Fix: .*{fix}"):
        list(read_lines(path))


def test_text_of_another_encoding_is_looked_for_at_the_beginning(tmp_path):
    """In the first 4,096 bytes that are there."""
    half = "Kord elas kuningas. " * 103
    text = half[:2048].encode("utf-16-le")  # 4,096 bytes
    for before, is_refused in ((b"", True), (b"x" * 4096, False)):
        (tmp_path / "a.txt").write_bytes(before + text)
        if is_refused:
            with pytest.raises(
                KieloError, match='encoding = "utf-16le" in its source.* -f UTF-16LE -t UTF-8'
            ):
                list(read_lines(tmp_path / "a.txt"))
        else:
            assert len(list(read_lines(tmp_path / "a.txt"))) == 1

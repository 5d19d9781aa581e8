"""Sources of ready tokens: what is described, held out and checked; changed files are packed again."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.stage_json import read_stage_json
from kielo.artifact.token_file_formats import FINGERPRINT_BYTES, describe
from kielo.artifact.token_set import TokenSet
from kielo.artifact.token_shards import TokenShard, TokenShardWriter
from kielo.artifact.token_sources import FoundFiles, TokenFiles
from kielo.dataset import pack_token_files
from kielo.dataset.batches import open_shard
from kielo.dataset.pack import pack
from kielo.dataset.pack_token_files import MOST_HELDOUT_TOKENS, check_token_files, training_tokens
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import decode, encode, load_tokenizer
from kielo.tokenizer.train import train_tokenizer
from tests.dataset.test_batches import make_documents, recipe, write_corpus
from tests.ready_tokens import rows_of, write_npy

Rows = list[list[int]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ready tokens")
    write_corpus(folder / "corpus", make_documents(60))
    train_tokenizer(recipe(), folder / "corpus", folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def rows(run: Path) -> Rows:
    """Sixty documents with end-of-text, which is 0."""
    texts = [document["text"] for document in make_documents(60)]
    return [[*row, 0] for row in encode(load_tokenizer(run / "tokenizer"), texts)]


def change_in_the_middle(path: Path) -> None:
    """Another valid id, further from both ends than what a description looks at."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 4 * 2
    assert middle > FINGERPRINT_BYTES
    content[middle : middle + 2] = b"\x09\0" if content[middle] != 9 else b"\x08\0"
    path.write_bytes(content)


def write_shard(prefix: Path, documents: Rows) -> None:
    prefix.parent.mkdir(exist_ok=True)
    with TokenShardWriter(prefix, 400) as writer:
        for row in documents:
            writer.add(np.array(row))


def of_tokens(run: Path, share: float, **sources: str) -> Recipe:
    return Recipe(
        name="tiny", language="et",
        corpus={"sources": [{"name": name, "tokens": place} for name, place in sources.items()]},
        tokenizer={"path": str(run / "tokenizer")}, dataset={"heldout_share": share, "sequence_length": 16},
    )  # fmt: skip


def test_the_last_documents_are_held_out(run: Path, rows: Rows, tmp_path: Path) -> None:
    """By the share of tokens: those that begin in it; counts and texts are those of the documents."""
    write_shard(tmp_path / "data" / "a", rows[:40])
    write_shard(tmp_path / "data" / "b", [*rows[40:58], [0], rows[58], rows[59][:-1]])
    total = sum(map(len, rows))  # a document of end-of-text alone is added, and an end taken away
    # A third of the fourth from the end is in the share too, so the one after it is the first held out.
    share = (sum(map(len, rows[57:])) - 1 + len(rows[56]) // 3) / total
    made = pack(
        of_tokens(run, share, web=str(tmp_path / "data")), tmp_path, run / "tokenizer", tmp_path / "tokens"
    )
    heldout, tokenizer = rows[57:], load_tokenizer(run / "tokenizer")
    texts = decode(tokenizer, [row[:-1] for row in heldout])
    first = sum(map(len, rows[:57]))
    counts = made.counts["sources"]["web"]
    assert (
        counts["tokens"] == first == open_shard(tmp_path / "tokens", "web").num_tokens
        and counts["documents"] == 57
    )
    assert counts["words"] is None and counts["folder"] == str(tmp_path / "data")
    assert counts["times_ns"] == [
        [(tmp_path / "data" / f"{name}{suffix}").stat().st_mtime_ns for suffix in (".bin", ".idx")]
        for name in "ab"
    ]
    bytes_per_token = (
        sum(len(text.encode()) for text in decode(tokenizer, [row[:-1] for row in rows])) / total
    )
    assert counts["bytes"] == pytest.approx(first * bytes_per_token, rel=0.02)
    shard = TokenShard(tmp_path / "tokens" / "heldout")
    assert rows_of(shard) == heldout
    found = list(read_documents(tmp_path / "tokens" / "heldout.jsonl.zst"))
    names = [f"web/b.bin: document {number}" for number in (17, 19, 20)]
    assert [one["id"] for one in found] == names and [one["text"] for one in found] == texts
    assert all(one["source"] == "web" for one in found)
    assert [one["metadata"]["ids"] for one in found] == [row[:-1] for row in heldout]
    assert made.counts["heldout"]["words"] == sum(len(text.replace(":", "").split()) for text in texts)
    described = read_stage_json(tmp_path / "tokens", TokenFiles)
    assert described.end_of_text_id == 0 and described.sources["web"].training_tokens == first
    assert [file.name for file in described.sources["web"].files] == ["a.bin", "b.bin"]


def test_changed_tokens_are_packed_again(run: Path, rows: Rows, tmp_path: Path) -> None:
    """The same files are not, nor are files that moved; files of other content are, and a second source."""
    write_shard(tmp_path / "data" / "a", 4 * rows)

    def packed(**sources: str):
        asked = of_tokens(run, 0.2, **sources)
        return pack(asked, tmp_path, run / "tokenizer", tmp_path / "tokens")

    first = packed(web=str(tmp_path / "data"))
    assert packed(web=str(tmp_path / "data")) == first
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = packed(web=str(tmp_path / "moved"))
    assert moved.written_at == first.written_at and moved.inputs == first.inputs
    assert moved.counts["sources"]["web"]["folder"] == str(tmp_path / "moved")
    os.utime(tmp_path / "moved" / "a.bin", ns=(0, 0))
    touched = packed(web=str(tmp_path / "moved"))
    assert touched.written_at == first.written_at
    assert touched.counts["sources"]["web"]["times_ns"][0][0] == 0
    change_in_the_middle(tmp_path / "moved" / "a.bin")
    before = (tmp_path / "tokens" / "heldout.bin").stat().st_ino
    again = packed(web=str(tmp_path / "moved"))
    assert again.inputs == first.inputs  # a description does not tell
    assert again.counts["sources"]["web"]["xxh3_128"] != touched.counts["sources"]["web"]["xxh3_128"]
    assert (tmp_path / "tokens" / "heldout.bin").stat().st_ino != before
    write_shard(tmp_path / "moved" / "a", [*rows[:30], *rows[31:], rows[30]])
    changed = packed(web=str(tmp_path / "moved"))
    assert changed.inputs != first.inputs and changed.inputs["tokenizer"] == first.inputs["tokenizer"]
    shard = rows_of(TokenShard(tmp_path / "tokens" / "heldout"))
    assert shard[-1] == rows[30]
    write_shard(tmp_path / "more" / "b", rows[:30])
    both = packed(web=str(tmp_path / "moved"), more=str(tmp_path / "more"))
    assert list(both.counts["sources"]) == ["more", "web"] and len(both.inputs) == 3
    assert not list(tmp_path.rglob("of_token_files*"))


def test_training_tokens_by_hand() -> None:
    """All but the share, rounded up, and all but 2^20 of a large source."""
    assert [training_tokens(100, share) for share in (0.2, 0.201, 0.209, 1e-9)] == [80, 80, 80, 100]
    assert training_tokens(101, 0.5) == 51 and MOST_HELDOUT_TOKENS == 2**20
    assert training_tokens(2**21, 0.5) == 2**20 and training_tokens(2**21 + 2, 0.5) == 2**20 + 2
    assert training_tokens(10**12, 0.3) == 10**12 - 2**20


def test_a_source_must_have_documents_on_both_sides(run: Path, rows: Rows, tmp_path: Path) -> None:
    """One document alone, and a share in which none begins, are refused with the numbers."""
    place, tokens = str(tmp_path / "data"), sum(map(len, rows))
    write_shard(tmp_path / "data" / "a", rows)
    share = (len(rows[-1]) - 0.5) / tokens
    with pytest.raises(KieloError, match=rf"in its last {len(rows[-1]) - 1:,} of {tokens:,} tokens, after"):
        pack(of_tokens(run, share, web=place), tmp_path, run / "tokenizer", tmp_path / "tokens")
    share = (len(rows[-1]) + 0.5) / tokens
    assert pack(of_tokens(run, share, web=place), tmp_path, run / "tokenizer", tmp_path / "tokens")
    for few in (rows[:1], [[0], rows[0]]):
        write_shard(tmp_path / "data" / "a", few)
        with pytest.raises(KieloError, match="the source web has no document that begins"):
            pack(of_tokens(run, 0.49, web=place), tmp_path, run / "tokenizer", tmp_path / "tokens")


# --- The checks, at their borders ---


def check(run: Path, folder: Path, documents: Rows, writer: Callable = write_shard) -> float:
    """Checks documents as files in a folder, as the pack stage does."""
    folder.mkdir(exist_ok=True)
    writer(folder / "a", documents)
    file = describe(folder / ("a.npy" if writer is write_npy else "a.bin"), 2)
    found = FoundFiles(folder, (file,), (0,))
    stream = TokenSet(folder, [file], file.tokens, 0)
    return check_token_files("web", found, stream, load_tokenizer(run / "tokenizer"), "own hash")


def test_bytes_of_a_token_by_hand(run: Path, rows: Rows, tmp_path: Path) -> None:
    """Of all documents where they are few: their text's bytes by their tokens, end-of-text included."""
    texts = decode(load_tokenizer(run / "tokenizer"), [row[:-1] for row in rows[:3]])
    expected = sum(len(text.encode()) for text in texts) / sum(map(len, rows[:3]))
    assert check(run, tmp_path / "data", rows[:3]) == pytest.approx(expected, rel=1e-12)
    assert check(run, tmp_path / "flat", rows[:3], write_npy) == pytest.approx(expected, rel=1e-12)


def test_ids_at_the_borders_of_the_vocabulary(run: Path, rows: Rows, tmp_path: Path, monkeypatch) -> None:
    """The largest id passes, one more is named with its place, in whichever block it is."""
    monkeypatch.setattr(pack_token_files, "BLOCK_TOKENS", 16)
    size = max(load_tokenizer(run / "tokenizer").whole.get_vocab().values()) + 1
    flat = sum(map(len, rows))
    at = sum(map(len, rows[:20])) + 1
    for wrong in (size - 1, size):
        changed = [list(row) for row in rows]
        changed[20][1] = wrong
        if wrong < size:
            assert check(run, tmp_path / "data", changed) > 1
        else:
            told = rf"a\.bin: token {at:,} is {size}, and the tokenizer has ids 0 to {size - 1} \(uint16\)"
            with pytest.raises(KieloError, match=told):
                check(run, tmp_path / "data", changed)
    assert at < flat


def test_blocks_that_are_looked_at() -> None:
    """Small files, and those of small sets up to a size, whole; of others 64 blocks from end to end."""

    def starts(tokens: int, is_whole: bool) -> list[int]:
        return list(pack_token_files.block_starts(tokens, is_whole))

    assert (pack_token_files.WHOLE_FILE_TOKENS, pack_token_files.WHOLE_SET_TOKENS) == (2**26, 2**34)
    assert starts(2**16 * 64, False) == starts(2**22, True) == list(range(0, 2**22, 2**16))
    assert starts(2**26, True) == list(range(0, 2**26, 2**16)) and starts(1, True) == [0]
    for tokens, is_whole in ((2**22 + 1, False), (2**26 + 1, True), (2**26, False)):
        found = starts(tokens, is_whole)
        assert len(found) == 64 and found[0] == 0 and found[-1] == tokens - 2**16
        assert found == [(tokens - 2**16) * number // 63 for number in range(64)]


def test_files_of_a_set_are_read_whole_up_to_a_size(
    run: Path, rows: Rows, tmp_path: Path, monkeypatch
) -> None:
    """Of more tokens than that blocks alone are looked at, and what is between them is not seen."""
    for name, value in (("BLOCK_TOKENS", 16), ("BLOCKS", 2), ("WHOLE_SET_TOKENS", sum(map(len, rows)))):
        monkeypatch.setattr(pack_token_files, name, value)
    changed = [list(row) for row in rows]
    changed[30][1] = 399
    with pytest.raises(KieloError, match="is 399, and the tokenizer has ids 0 to"):
        check(run, tmp_path / "data", changed)
    seen = []
    monkeypatch.setattr(
        pack_token_files, "block_starts", lambda tokens, is_whole: seen.append(is_whole) or []
    )
    check(run, tmp_path / "more", rows)
    check(run, tmp_path / "more", [*rows, [0]])
    assert seen == [True, False]


def test_shares_of_ends_at_their_borders(run: Path, rows: Rows, tmp_path: Path) -> None:
    """Nine of ten documents end with end-of-text; fewer are refused with what the others end with. Of flat
    tokens a quarter may be end-of-text, and one must be.
    """
    ten = rows[:10]
    for without in (1, 2):
        cut = [row[:-1] if number < without else row for number, row in enumerate(ten)]
        if without == 1:
            assert check(run, tmp_path / "data", cut) > 1
        else:
            with pytest.raises(KieloError, match="8 of 10 documents looked at end with 0, .* and 1 with"):
                check(run, tmp_path / "data", cut)
    words = rows[0][:3]
    quarter = [[*words, 0]] * 12
    with pytest.raises(KieloError, match=r"13 of 49 tokens looked at are 0, .* as wide as <u2\?"):
        check(run, tmp_path / "flat", [*quarter, [0]], write_npy)
    assert check(run, tmp_path / "flat", quarter, write_npy) > 0
    with pytest.raises(KieloError, match="none of 36 tokens looked at in 1 files is 0"):
        check(run, tmp_path / "flat", [words] * 12, write_npy)


def test_one_file_without_an_index_needs_an_end(run: Path, rows: Rows, tmp_path: Path) -> None:
    """Its documents are only where end-of-text is. Files with an index alone are not looked through."""
    words, folder = [row[:-1] for row in rows[:3]], tmp_path / "data"
    folder.mkdir()
    write_shard(folder / "a", words)
    write_npy(folder / "b", words)
    files = tuple(describe(folder / name, 2) for name in ("a.bin", "b.npy"))
    tokens = [file.tokens for file in files]
    found = FoundFiles(folder, files, (0, 0))
    stream = TokenSet(folder, list(files), sum(tokens), 0)
    with pytest.raises(KieloError, match=rf"none of {sum(tokens)} tokens looked at in 2 files is 0"):
        check_token_files("web", found, stream, load_tokenizer(run / "tokenizer"), "own hash")
    with pytest.raises(KieloError, match="0 of 3 documents looked at end with 0"):
        check(run, tmp_path / "indexed", words)


def test_a_share_of_the_tokens_comes_back(run: Path, tmp_path: Path) -> None:
    """Nine of ten tokens are those that the tokenizer writes for their text; fewer are refused."""
    tokenizer = load_tokenizer(run / "tokenizer")
    vocabulary = tokenizer.whole.get_vocab()
    (whole,) = encode(tokenizer, [" kevad"])
    assert len(whole) == 1
    letter = next(letter for letter in "abcdefghijklmnoprstuv" if f"Ġ{letter}" in vocabulary)
    spelled = [vocabulary["Ġ"], vocabulary[letter]]  # which the tokenizer joins
    assert encode(tokenizer, [f" {letter}"]) == [[vocabulary[f"Ġ{letter}"]]]
    for good, is_taken in ((18, True), (17, False)):
        rows = [[*whole * good, *spelled, 0]]
        if is_taken:
            assert check(run, tmp_path / "data", rows) > 3
        else:
            with pytest.raises(KieloError, match=f"89% of {good + 2} tokens looked at .* 90% are expected"):
                check(run, tmp_path / "data", rows)


def test_documents_that_are_looked_at(tmp_path: Path) -> None:
    """Of more than 64 documents 64 at even distances, each with its first 2,047 tokens and its last one."""
    rows = [[number, *[1] * (number % 7), 0] for number in range(2, 300)]
    write_shard(tmp_path / "data" / "a", rows)
    file = describe(tmp_path / "data" / "a.bin", 2)
    stream = TokenSet(tmp_path / "data", [file], file.tokens, 0)
    found = [row.tolist() for row in pack_token_files.sampled_documents(stream)]
    starts = np.cumsum([0, *map(len, rows)]).tolist()
    expected = [next(n for n, at in enumerate(starts) if at >= file.tokens * of // 64) for of in range(64)]
    assert found == [rows[number] for number in expected]
    write_shard(tmp_path / "data" / "a", [[7] * 200 + [0]])  # where no other document begins
    file = describe(tmp_path / "data" / "a.bin", 2)
    stream = TokenSet(tmp_path / "data", [file], file.tokens, 0)
    assert [row.tolist() for row in pack_token_files.sampled_documents(stream)] == [[7] * 200 + [0]]
    long = [5] * 2047 + [6] + [7] * 900 + [0]
    for row, shown in ((long, [5] * 2047 + [0]), ([5] * 2047 + [0], [5] * 2047 + [0])):
        write_shard(tmp_path / "data" / "a", [row, [8, 0]])
        file = describe(tmp_path / "data" / "a.bin", 2)
        stream = TokenSet(tmp_path / "data", [file], file.tokens, 0)
        assert [one.tolist() for one in pack_token_files.sampled_documents(stream)] == [shown, [8, 0]]


def test_a_manifest_beside_the_files_tells_their_tokenizer(run: Path, rows: Rows, tmp_path: Path) -> None:
    """Another hash is refused; the same one, or none, is taken."""
    for made_with in ("own hash", "another tokenizer", None):
        with write_stage(tmp_path / "data", "tokens", 1, {}, {}) as stage:
            if made_with:
                stage.counts["tokenizer_hash"] = made_with
            write_shard(stage.folder / "a", rows[:9])
        file = describe(tmp_path / "data" / "a.bin", 2)
        found, stream = (
            FoundFiles(tmp_path / "data", (file,), (0,)),
            TokenSet(tmp_path / "data", [file], file.tokens, 0),
        )
        asked = "web", found, stream, load_tokenizer(run / "tokenizer"), "own hash"
        if made_with == "another tokenizer":
            with pytest.raises(
                KieloError, match="made with tokenizer another toke, tokenizer.path is own hash"
            ):
                check_token_files(*asked)
        else:
            assert check_token_files(*asked) > 1
    assert read_manifest(tmp_path / "data").counts == {}

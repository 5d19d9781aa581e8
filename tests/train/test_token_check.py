"""Token files are compared with their checksums once; what is damaged is refused, or left out as asked."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import xxhash

from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Resolved
from kielo.train import token_check
from kielo.train.token_check import TokenCheck, hash_unless_stopped
from tests.train.tiny_run import resolve, write_tokens

ROWS = 70  # of the embedding: 67 words, padded to tens
FILES = {f"{name}.{ending}" for name in ("books", "news", "heldout") for ending in ("bin", "idx")}


class Ranks:
    """Rank `rank` of two; the other one says of each question what `others` says, or the same."""

    def __init__(self, rank: int = 0, **others: Any):
        self.rank, self.size, self.others, self.asked = rank, 2, others, []

    def gather(self, value: Any) -> list[Any]:
        kind = type(value).__name__
        self.asked.append(kind)
        answers = self.others.get(kind, [])
        return [value, answers.pop(0) if answers else value]

    def on_first(self, action: Callable[[], Any]) -> Any:
        return action()

    def refuse_together(self, refusal: str | None) -> None:
        if refusal:
            raise KieloError(refusal)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens")
    return tmp_path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, in their order."""
    names: list[str] = []
    whole = token_check.hash_unless_stopped
    monkeypatch.setattr(
        token_check, "hash_unless_stopped", lambda path, stop: (names.append(path.name), whole(path, stop))[1]
    )
    return names


def trained(folder: Path, **changes: Any) -> Resolved:
    """A run that has a checkpoint, and may leave five sequences out."""
    (folder / "train" / "checkpoints" / "step_00000004").mkdir(parents=True)
    return resolve(folder, **{"max_left_out_sequences": 5} | changes)


def checked(resolved: Resolved, ranks: Ranks | None = None) -> list[str]:
    with TokenCheck(resolved, ranks or Ranks()) as tokens:
        return tokens.finish()


class Alone(Ranks):
    """The one rank of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_files_are_read_once_the_largest_first(folder: Path, read: list[str]) -> None:
    """The record has the checksum and the state of each; a file whose time or text of record is odd is read
    again.
    """
    resolved, tokens = resolve(folder), folder / "tokens"
    assert checked(resolved, Alone()) == []
    sizes = [(tokens / name).stat().st_size for name in read]
    assert set(read) == FILES and sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    record = folder / "train" / "tokens_verified.json"
    states = json.loads(record.read_text())
    found = (tokens / "news.bin").stat()
    checksum = xxhash.xxh3_128_hexdigest((tokens / "news.bin").read_bytes())
    state = [checksum, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    assert states["news.bin"] == state and set(states) == FILES
    read.clear()
    assert checked(resolved, Alone()) == [] and read == []
    os.utime(tokens / "news.bin", ns=(5, 5))
    assert checked(resolved, Alone()) == [] and read == ["news.bin"]
    for text in ("[]", "{"):
        read.clear()
        record.write_text(text)
        assert checked(resolved, Alone()) == [] and set(read) == FILES


def test_ranks_share_the_files_and_wait_for_each_other(folder: Path, read: list[str]) -> None:
    """Each reads every second file; all go on when both have read theirs, with what either has found."""
    resolved = resolve(folder)
    assert checked(resolved, Alone()) == []
    in_order = list(read)
    for rank in (0, 1):
        (folder / "train" / "tokens_verified.json").unlink()
        read.clear()
        ranks = Ranks(rank, bool=[False, True], dict=[{"news.bin": "is cut"}])
        damage = "; it was damaged since the run began. Sequences that need what is lost are left out "
        assert checked(resolved, ranks) == [
            f"{folder / 'tokens' / 'news.bin'}: is cut{damage}(train.max_left_out_sequences)"
        ]
        assert read == in_order[rank::2] and ranks.asked == ["bool", "bool", "dict"]
        states = json.loads((folder / "train" / "tokens_verified.json").read_text())
        assert set(states) == FILES - {"news.bin"}


def spoil(file: Path, place: int, token: int) -> None:
    with open(file, "r+b") as content:
        content.seek(2 * place)
        content.write(np.array([token], "<u2").tobytes())


@pytest.mark.parametrize("changes", [{}, {"max_left_out_sequences": 0}])
def test_a_file_that_was_altered_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    """By name and with what would work, also where sequences may be left out: nobody knows which."""
    resolved = trained(folder, **changes)
    file, tokens = folder / "tokens" / "books.bin", folder / "tokens"
    spoil(file, 3, ROWS - 1)
    with pytest.raises(KieloError) as caught:
        checked(resolved)
    assert str(caught.value) == (
        f"{file}: is not what the pack stage wrote, its checksum differs from {tokens / 'manifest.json'}: it "
        "was altered or damaged since. No step was taken. What would work: a whole copy of the file in its "
        f"place; or move {tokens} away, and `kielo run RECIPE --to pack` packs the same corpus again"
    )
    assert not (folder / "train" / "tokens_verified.json").exists()


@pytest.mark.parametrize(("place", "token"), [(0, ROWS), (1, 60_000), (100, ROWS), (-1, 2**16 - 1)])
def test_ids_outside_of_the_vocabulary_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: int, token: int
) -> None:
    """Wherever in the file, which is read in parts; a run that has not trained, or with 0, is refused."""
    monkeypatch.setattr(token_check, "READ_BYTES", 64)
    file = folder / "tokens" / "books.bin"
    spoil(file, place % (file.stat().st_size // 2), token)
    with pytest.raises(KieloError, match=r"books\.bin: is not what the pack stage wrote, its checksum"):
        checked(resolve(folder, max_left_out_sequences=5))
    (told,) = checked(trained(folder))
    reason = f"has another checksum, and ids up to {token:,}, but the vocabulary has 70 rows"
    assert told.startswith(f"{file}: {reason}; it was damaged since the run began.")
    assert "books.bin" not in json.loads((folder / "train" / "tokens_verified.json").read_text())
    with pytest.raises(KieloError, match=r"books\.bin: is not what the pack stage wrote, its checksum"):
        checked(resolve(folder))


def test_files_that_are_cut_or_gone_are_left_out(folder: Path, read: list[str]) -> None:
    """In the order of their names, unread. Indexes and held-out text are never left out."""
    resolved, tokens = trained(folder, max_left_out_sequences=1), folder / "tokens"
    size = (tokens / "news.bin").stat().st_size
    os.truncate(tokens / "news.bin", size - 2)
    (tokens / "books.bin").unlink()
    first, second = checked(resolved, Alone())
    assert first.startswith(f"{tokens / 'books.bin'}: cannot be read (No such file or directory); it was")
    assert second.startswith(f"{tokens / 'news.bin'}: has {size - 2:,} bytes of {size:,}; it was damaged")
    assert set(read) == FILES - {"books.bin", "news.bin"}
    with pytest.raises(KieloError, match=r"books\.bin: it is missing, and the stage wrote"):
        checked(resolve(folder))
    os.truncate(tokens / "heldout.bin", 10)
    with pytest.raises(KieloError, match=r"heldout\.bin: it has 10 bytes, and the stage wrote"):
        checked(resolved)


@pytest.mark.parametrize(("name", "is_left_out"), [("news.bin", True), ("news.idx", False)])
def test_a_file_that_cannot_be_read(folder: Path, monkeypatch, name: str, is_left_out: bool) -> None:
    whole, asked = token_check.hash_unless_stopped, []

    def refuse(path: Path, stopped: Event) -> str | None:
        asked.append(path.name)
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return whole(path, stopped)

    resolved, file = trained(folder), folder / "tokens" / name
    monkeypatch.setattr(token_check, "hash_unless_stopped", refuse)
    if is_left_out:
        (told,) = checked(resolved, Alone())
        assert told.startswith(f"{file}: cannot be read (Input/output error); it was damaged")
        assert set(asked) == FILES  # those after it too
    else:
        with pytest.raises(KieloError) as caught:
            checked(resolved, Alone())
        assert str(caught.value) == f"{file}: cannot be read (Input/output error)"


def test_tokens_that_were_replaced_are_refused(folder: Path) -> None:
    resolved = resolve(folder)
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    (folder / "tokens" / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(KieloError, match=r"tokens: was replaced while this job started; start it again$"):
        checked(resolved)


def test_a_checksum_is_that_of_the_whole_file_unless_it_is_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(token_check, "READ_BYTES", 3)
    content, stopped = bytes(range(8)), Event()
    (tmp_path / "file").write_bytes(content)
    assert hash_unless_stopped(tmp_path / "file", stopped) == xxhash.xxh3_128_hexdigest(content)
    stopped.set()
    assert hash_unless_stopped(tmp_path / "file", stopped) is None


def test_leaving_early_stops_the_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends with the check, whatever is left to read."""
    stopped: list[Event] = []
    monkeypatch.setattr(token_check, "hash_unless_stopped", lambda path, stop: stopped.append(stop))
    with TokenCheck(resolve(folder), Alone()) as tokens:
        assert tokens.finish() == [] and not stopped[0].is_set()
    assert stopped[0].is_set()


def test_sources_that_are_read_in_place_are_compared_before_the_first_step(folder: Path, monkeypatch) -> None:
    """Where damage may be left out later; a run that has trained goes on."""
    opened: list[str] = []
    file = folder / "tokens" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["counts"]["sources"]["news"]["folder"] = "elsewhere"
    file.write_text(json.dumps(manifest))
    monkeypatch.setattr(token_check, "open_shard", lambda where, name: opened.append(name))
    for most, expected in ((0, []), (5, ["news"])):
        opened.clear()
        assert checked(resolve(folder, max_left_out_sequences=most), Alone()) == [] and opened == expected
    opened.clear()
    assert checked(trained(folder), Alone()) == [] and opened == []

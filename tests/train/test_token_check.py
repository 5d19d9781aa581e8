"""Token files are compared with their checksums once; what is damaged is refused by name."""

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
from kielo.train import start_checks
from kielo.train.start_checks import TokenCheck, hash_unless_stopped
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
    whole = start_checks.hash_unless_stopped

    def noted(path: Path, stop: Event) -> str | None:
        names.append(path.name)
        return whole(path, stop)

    monkeypatch.setattr(start_checks, "hash_unless_stopped", noted)
    return names


def checked(resolved: Resolved, ranks: Ranks | None = None) -> None:
    with TokenCheck(resolved, ranks or Ranks()) as tokens:
        tokens.finish()


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
    checked(resolved, Alone())
    sizes = [(tokens / name).stat().st_size for name in read]
    assert set(read) == FILES and sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    record = folder / "train" / "tokens_verified.json"
    states = json.loads(record.read_text())
    found = (tokens / "news.bin").stat()
    checksum = xxhash.xxh3_128_hexdigest((tokens / "news.bin").read_bytes())
    state = [checksum, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    assert states["news.bin"] == state and set(states) == FILES
    read.clear()
    checked(resolved, Alone())
    assert read == []
    os.utime(tokens / "news.bin", ns=(5, 5))
    checked(resolved, Alone())
    assert read == ["news.bin"]
    for text in ("[]", "{"):
        read.clear()
        record.write_text(text)
        checked(resolved, Alone())
        assert set(read) == FILES


def test_ranks_share_the_files_and_wait_for_each_other(folder: Path, read: list[str]) -> None:
    """Each reads every second file; all go on when both have read theirs."""
    resolved = resolve(folder)
    checked(resolved, Alone())
    in_order = list(read)
    for rank in (0, 1):
        (folder / "train" / "tokens_verified.json").unlink()
        read.clear()
        ranks = Ranks(rank, bool=[False, True])
        checked(resolved, ranks)
        assert read == in_order[rank::2] and ranks.asked == ["bool", "bool"]
        states = json.loads((folder / "train" / "tokens_verified.json").read_text())
        assert set(states) == FILES


def spoil(file: Path, place: int, token: int) -> None:
    with open(file, "r+b") as content:
        content.seek(2 * place)
        content.write(np.array([token], "<u2").tobytes())


def trained(folder: Path) -> Resolved:
    """A run that has a checkpoint."""
    (folder / "train" / "checkpoints" / "step_00000004").mkdir(parents=True)
    return resolve(folder)


@pytest.mark.parametrize(("place", "token"), [(3, ROWS - 1), (0, ROWS), (100, 60_000), (-1, 2**16 - 1)])
@pytest.mark.parametrize("run", [resolve, trained])
def test_a_file_that_was_altered_is_refused(
    folder: Path, run: Callable[[Path], Resolved], place: int, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and with the fix, wherever in the file, which is read in parts."""
    monkeypatch.setattr(start_checks, "READ_BYTES", 64)
    resolved, file, tokens = run(folder), folder / "tokens" / "books.bin", folder / "tokens"
    spoil(file, place % (file.stat().st_size // 2), token)
    with pytest.raises(KieloError) as caught:
        checked(resolved)
    assert str(caught.value) == (
        f"{file}: is not what the pack stage wrote. Its checksum differs from {tokens / 'manifest.json'}, so "
        "it was altered or damaged. No step was taken. Fix: put a complete copy in its place. Or move "
        f"{tokens} away, and `kielo run RECIPE --to pack` packs the same corpus again"
    )
    assert not (folder / "train" / "tokens_verified.json").exists()


@pytest.mark.parametrize("run", [resolve, trained])
def test_files_that_are_cut_or_gone_are_refused(folder: Path, run: Callable[[Path], Resolved]) -> None:
    resolved, tokens = run(folder), folder / "tokens"
    size = (tokens / "books.bin").stat().st_size
    os.truncate(tokens / "books.bin", size - 2)
    with pytest.raises(KieloError, match=rf"books\.bin: it has {size - 2:,} bytes, but the stage wrote"):
        checked(resolved)
    (tokens / "books.bin").unlink()
    with pytest.raises(KieloError, match=r"books\.bin: it is missing, but the stage wrote"):
        checked(resolved)


def test_a_file_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = start_checks.hash_unless_stopped

    def refuse(path: Path, stopped: Event) -> str | None:
        if path.name == "news.bin":
            raise OSError(errno.EIO, "Input/output error")
        return whole(path, stopped)

    monkeypatch.setattr(start_checks, "hash_unless_stopped", refuse)
    with pytest.raises(KieloError) as caught:
        checked(trained(folder), Alone())
    assert str(caught.value) == f"{folder / 'tokens' / 'news.bin'}: cannot be read (Input/output error)"


def test_tokens_that_were_replaced_are_refused(folder: Path) -> None:
    resolved = resolve(folder)
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    (folder / "tokens" / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(
        KieloError, match=r"tokens: was replaced while this job started\. Fix: start it again$"
    ):
        checked(resolved)


def test_a_checksum_is_that_of_the_whole_file_unless_it_is_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(start_checks, "READ_BYTES", 3)
    content, stopped = bytes(range(8)), Event()
    (tmp_path / "file").write_bytes(content)
    assert hash_unless_stopped(tmp_path / "file", stopped) == xxhash.xxh3_128_hexdigest(content)
    stopped.set()
    assert hash_unless_stopped(tmp_path / "file", stopped) is None


def test_leaving_early_stops_the_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends with the check, whatever is left to read."""
    stopped: list[Event] = []
    monkeypatch.setattr(start_checks, "hash_unless_stopped", lambda path, stop: stopped.append(stop))
    with TokenCheck(resolve(folder), Alone()) as tokens:
        tokens.finish()
        assert not stopped[0].is_set()
    assert stopped[0].is_set()

"""Files go from rank to rank by pieces, and one that fails keeps no other rank waiting."""

from pathlib import Path
from typing import Any

import pytest

from kielo.checkpoint import memory_copies as module
from kielo.checkpoint.memory_copies import exchange_files
from tests.checkpoint.threads import Group, run_threads

# Of each rank, which sends them to the next one.
FILES = ({"a": b"0123456789", "b": b"xyz", "none": b""}, {"c": b"abcdefgh"}, {})


def exchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str = ""
) -> tuple[list[Any], list[tuple]]:
    """Returns what each rank got back, and (rank, to, bytes) of each piece that was sent."""
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    sent: list[tuple] = []
    for rank, files in enumerate(FILES):
        for part in ("own", "got"):
            (tmp_path / f"{rank}" / part).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / f"{rank}" / "own" / name).write_bytes(content)
    (tmp_path / "1" / "got" / "b").write_bytes(b"of an earlier attempt")
    if missing:
        (tmp_path / missing).unlink()

    def action(group: Group) -> Any:
        rank, to, source = group.rank, (group.rank + 1) % 3, (group.rank - 1) % 3
        outgoing = [(tmp_path / f"{rank}" / "own" / name, len(data)) for name, data in FILES[rank].items()]
        incoming = [(tmp_path / f"{rank}" / "got" / name, len(data)) for name, data in FILES[source].items()]
        try:
            return exchange_files(outgoing, to, incoming, source, group)
        finally:
            sent.extend(one for one in group.world.sent if one[0] == rank)

    return run_threads(monkeypatch, [module], 3, action), sent


def test_files_arrive_whole(monkeypatch, tmp_path) -> None:
    """By pieces of four bytes, in their order; told is the first piece, of a rank that receives any."""
    assert module.PIECE_BYTES == 64 * 1024 * 1024
    found, sent = exchanged(monkeypatch, tmp_path)
    for rank in range(3):
        for name, content in FILES[(rank - 1) % 3].items():
            path = tmp_path / f"{rank}" / "got" / name
            assert (path.read_bytes() if path.exists() else b"") == content
    assert [one for one in sent if one[0] == 0] == [(0, 1, size) for size in (4, 4, 2, 3)]
    assert [one for one in sent if one[0] == 1] == [(1, 2, 4)] * 2
    assert found[0] is None and found[1].num_bytes == found[2].num_bytes == 4
    assert 0 <= found[1].seconds < 60


def test_a_file_that_cannot_be_read_fails_only_its_rank(monkeypatch, tmp_path) -> None:
    """All pieces are exchanged all the same."""
    found, sent = exchanged(monkeypatch, tmp_path, missing="0/own/a")
    assert isinstance(found[0], FileNotFoundError) and found[0].filename == str(tmp_path / "0" / "own" / "a")
    assert [one[2] for one in sent if one[0] == 0] == [4, 4, 2, 3] and found[2].num_bytes == 4
    assert (tmp_path / "1" / "got" / "b").read_bytes() == b"xyz"


def test_a_file_that_is_shorter_than_it_was(monkeypatch, tmp_path) -> None:
    """Neither it nor what came in is gone on with; one as long as it was is sound."""
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    path, got = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"12345")

    def action(num_bytes: int) -> Any:
        sent, received = [(path, num_bytes)], [(got, num_bytes)]
        return run_threads(
            monkeypatch, [module], 1, lambda group: exchange_files(sent, 0, received, 0, group)
        )[0]

    assert action(5).num_bytes == 4 and got.read_bytes() == b"12345"
    assert str(action(6)) == f"{path} is shorter than it was when it was written"
    assert got.read_bytes() == b"1234"


def test_a_file_that_cannot_be_written_fails_after_the_last_piece(monkeypatch, tmp_path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    gone, sent = tmp_path / "gone" / "b", []

    def action(group: Group) -> Any:
        try:
            return exchange_files([(path, 5)], 0, [(gone, 5)], 0, group)
        finally:
            sent.extend(group.world.sent)

    monkeypatch.setattr(module, "PIECE_BYTES", 2)
    (found,) = run_threads(monkeypatch, [module], 1, action)
    assert isinstance(found, FileNotFoundError) and sent == [(0, 0, 2), (0, 0, 2), (0, 0, 1)]

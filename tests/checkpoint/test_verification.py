"""Each rank reads its share of a checkpoint's files, and all get one answer; ranks are threads here."""

import socket
from pathlib import Path
from typing import Any

import pytest

from kielo.artifact.checkpoint_folder import Fault
from kielo.checkpoint import agreement, read_checkpoint
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.read_checkpoint import Verification
from tests.checkpoint.threads import run_threads

NAMES = ["manifest-less", "index.json", *(f"rank_0000{rank}.safetensors" for rank in range(5))]


@pytest.fixture
def found(monkeypatch) -> dict[str, Fault]:
    """File → its fault; what is read is noted under "read"."""
    faults: dict[str, Any] = {"read": []}

    def find_fault(path: Path, names: list[str], files: dict[str, Any]) -> Fault | None:
        faults["read"].append(list(names))
        return next((faults[name] for name in names if name in faults), None)

    monkeypatch.setattr(read_checkpoint, "listed_files", lambda path: dict.fromkeys(NAMES))
    monkeypatch.setattr(read_checkpoint, "find_fault", find_fault)
    return faults


def answers(monkeypatch: pytest.MonkeyPatch, size: int) -> list[Fault | None]:
    return run_threads(
        monkeypatch, [agreement], size, lambda group: Verification(Agreement(group)).find_fault(Path("c"))
    )


def test_files_are_shared_out(found, monkeypatch) -> None:
    """By the rank that wrote them, its own file first; those of no rank are the first one's."""
    rank = "rank_0000{}.safetensors".format
    assert answers(monkeypatch, 2) == [None, None]
    assert sorted(found["read"]) == [
        [rank(0), "index.json", "manifest-less", rank(2), rank(4)], [rank(1), rank(3)],
    ]  # fmt: skip
    found["read"].clear()
    assert answers(monkeypatch, 3) == [None] * 3
    assert sorted(found["read"]) == [
        [rank(0), "index.json", "manifest-less", rank(3)], [rank(1), rank(4)], [rank(2)],
    ]  # fmt: skip


def test_what_cannot_be_read_outweighs_damage(found, monkeypatch) -> None:
    """The same on all ranks, with the rank that saw it; a process alone has no number."""
    host = socket.gethostname()
    found["index.json"] = Fault("damaged", "index")
    found["rank_00003.safetensors"] = Fault("damaged", "three")
    assert answers(monkeypatch, 2) == [Fault("damaged", f"index (rank 0 on {host})")] * 2
    found["rank_00001.safetensors"] = Fault("unreadable", "one")
    assert answers(monkeypatch, 2) == [Fault("unreadable", f"one (rank 1 on {host})")] * 2
    assert Verification(Agreement()).find_fault(Path("c")) == Fault("damaged", "index")


def test_a_whole_checkpoint_is_read_once(found) -> None:
    """Until it is written again."""
    one = Verification(Agreement())
    for times in (1, 1):
        one.require(Path("c"))
        assert len(found["read"]) == times
    one.forget(Path("c"))
    one.forget(Path("other"))
    one.require(Path("c"))
    assert len(found["read"]) == 2

"""A run keeps its own chronicle: each attempt, on which hosts, how it ended, and what was changed between."""

import socket
from pathlib import Path

from kielo.artifact.attempt_files import End, read_attempts
from kielo.artifact.chronicle import CHRONICLE_NAME, attempts_of
from kielo.train.run import train
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens


def test_a_run_writes_its_chronicle(tmp_path: Path) -> None:
    """Stopped at step 8, and gone on with on two ranks and another interval of saves."""
    write_tokens(tmp_path / "tokens")
    run_ranks(train, 1, resolve(tmp_path, total_steps=12), 8)
    page = tmp_path / CHRONICLE_NAME
    assert "| 1 | " in page.read_text(encoding="utf-8") and "requeue" in page.read_text(encoding="utf-8")
    run_ranks(train, 2, resolve(tmp_path, total_steps=12, shard=2, every_steps=4))
    first, second = attempts_of(tmp_path / "train")
    host = socket.gethostname()
    assert (first.begin.from_step, first.begin.hosts, first.begin.changes) == (0, [host], [])
    assert first.end is not None and (first.end.outcome, first.last_step, first.lost_steps) == (
        "requeue",
        8,
        0,
    )
    assert (second.begin.from_step, second.begin.hosts, second.begin.seen_step) == (8, [host, host], 8)
    changes = {change.key: (change.before, change.after) for change in second.begin.changes}
    assert changes["world_size"] == ("1", "2") and changes["checkpoint.every_steps"] == ("100", "4")
    assert second.end is not None and second.end.outcome == "finished"
    text = page.read_text(encoding="utf-8")
    assert "finished" in text and "| 2 | world\\_size | 1 | 2 |" in text
    # a run that is asked for again has no further attempt
    run_ranks(train, 2, resolve(tmp_path, total_steps=12, shard=2, every_steps=4))
    lines = read_attempts(tmp_path / "train")
    assert len(lines) == 4 and isinstance(lines[-1], End)


def test_a_chronicle_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    """A folder has the name of the list, and a person's text that of the page: it stays."""
    write_tokens(tmp_path / "tokens")
    (tmp_path / CHRONICLE_NAME).write_text("mine")
    run_ranks(train, 1, resolve(tmp_path, total_steps=4), 2)
    assert len(read_attempts(tmp_path / "train")) == 2
    (tmp_path / "train" / "attempts.jsonl").unlink()
    (tmp_path / "train" / "attempts.jsonl").mkdir()
    (outcome,) = run_ranks(train, 1, resolve(tmp_path, total_steps=4))
    assert outcome.outcome == "finished" and (tmp_path / CHRONICLE_NAME).read_text() == "mine"

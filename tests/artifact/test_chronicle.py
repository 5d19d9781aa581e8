"""The chronicle of a run: attempts with causes and nodes, time lost and effective, text that stays text."""

import json
from pathlib import Path

import pytest

from kielo.artifact.alerts import ALERTS_NAME
from kielo.artifact.attempts import ATTEMPTS_NAME, Beginning, Change, End, append, read_attempts
from kielo.artifact.chronicle import CHRONICLE_NAME, Table, attempts_of, chronicle, write_chronicle
from kielo.artifact.metrics import METRICS_NAME
from kielo.recipe.errors import KieloError


def at(minute: int) -> str:
    return f"2026-11-23T10:{minute:02d}:00+00:00"


def beginning(minute: int, from_step: int, **changes: object) -> Beginning:
    values = {
        "began_at": at(minute), "from_step": from_step, "ranks": 2, "hosts": ["nid1", "nid2"],
        "versions": {"torch": "2.10.0"}, "seen_step": None, "seen_at": None, "changes": [],
    }  # fmt: skip
    return Beginning.model_validate(values | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three attempts: one was killed at step 14, one stopped at step 20, one finished at step 30."""
    folder = tmp_path / "train"
    folder.mkdir()
    append(folder, beginning(0, 0))
    append(folder, beginning(
        20, 10, seen_step=14, seen_at=at(14), versions={"torch": "2.11.0"}, hosts=["nid1", "nid3"],
        changes=[Change(key="train.skip_steps", before="[]", after="[[12, 13]]")],
    ))  # fmt: skip
    append(folder, End(ended_at=at(30), outcome="requeue", step=20, message="stopped | by <b>SIGTERM</b>"))
    append(folder, beginning(40, 20, seen_step=20, seen_at=at(30)))
    append(folder, End(ended_at=at(50), outcome="finished", step=30, message=""))
    rows = [{"step": step, "tokens": 100 * step, "loss": 1.0, "tokens_per_second": 10.0 / 6, "seconds": 60.0}
            for step in (5, 10, 11, 15, 20, 25, 30)]  # fmt: skip
    rows[3:3] = [{"step": 13, "tokens": 1300, "passed_over_from": 12, "passed_over_for": "skip_steps"}]
    (folder / METRICS_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    alert = {"time": at(19), "step": 14, "message": "rank 1 was killed (SIGKILL)"}
    (folder / ALERTS_NAME).write_text(json.dumps(alert) + "\n" + '{"time": ')
    return folder


def table(tables: list[Table], title: str) -> list[tuple[str, ...]]:
    return next(table.rows for table in tables if table.title == title)


def test_what_a_consortium_would_note(folder: Path) -> None:
    tables = chronicle(folder)
    first, second, third = table(tables, "Attempts")
    assert first[1:4] == ("2026-11-23 10:00:00", "last seen 2026-11-23 10:14:00", "1 – 14")
    assert first[4] == "4" and first[6] == "nid1, nid2"  # steps 11 to 14 are taken again
    assert "without a word" in first[7] and "rank 1 was killed (SIGKILL)" in first[7]
    assert second[3:7] == ("11 – 20", "0", "2", "nid1, nid3") and second[7].startswith("requeue: stopped")
    assert third[3] == "21 – 30" and third[7] == "finished"
    assert table(tables, "Changes") == [
        ("2", "train.skip_steps", "[]", "[[12, 13]]"),
        ("2", "version of torch", "2.10.0", "2.11.0"),
        ("3", "version of torch", "2.11.0", "2.10.0"),
    ]
    assert table(tables, "Spikes, and what was passed over or left out") == [
        ("13", "steps 12 to 13 passed over: skip_steps")
    ]
    assert table(tables, "Alerts") == [("2026-11-23 10:19:00", "14", "rank 1 was killed (SIGKILL)")]


def test_lost_and_effective_time(folder: Path) -> None:
    """Attempts of 14, 10 and 10 minutes in 50; 28 steps of a minute each were kept."""
    values = dict(table(chronicle(folder), "Time"))
    assert values == {
        "attempts": "3", "steps taken again": "4", "on steps that were kept": "28 min",
        "in attempts": "34 min (82.4% of them effective)", "between attempts": "16 min",
    }  # fmt: skip


def test_the_page_is_whole_and_text_stays_text(folder: Path) -> None:
    write_chronicle(folder, "a_run")
    page = folder.parent / CHRONICLE_NAME
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Chronicle of a\\_run\n") and "stopped \\| by &lt;b>SIGTERM" in text
    for line in text.splitlines():
        assert not line.startswith("| 2 |") or line.replace("\\|", "").count("|") in (5, 9)
    page.write_text("mine")
    with pytest.raises(KieloError, match="Kielo did not write it"):
        write_chronicle(folder, "a_run")
    assert page.read_text() == "mine"
    assert sorted(path.name for path in folder.parent.iterdir()) == [CHRONICLE_NAME, "train"]


def test_half_a_line_of_a_killed_attempt_costs_no_other(folder: Path) -> None:
    path = folder / ATTEMPTS_NAME
    path.write_text(path.read_text() + '{"began_at": "2026')
    append(folder, beginning(55, 30))
    assert len(read_attempts(folder)) == 6 and len(attempts_of(folder)) == 4
    assert attempts_of(folder)[-1].begin.from_step == 30
    assert chronicle(folder.parent / "nowhere") == []

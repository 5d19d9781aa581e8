"""The chronicle of a run: attempts with causes and nodes, time lost and effective, text that stays text."""

import json
from pathlib import Path

import pytest

from kielo.artifact.attempt_files import (
    ALERTS_NAME,
    ATTEMPTS_NAME,
    Beginning,
    Change,
    End,
    append,
    read_attempts,
)
from kielo.artifact.chronicle import (
    CHRONICLE_NAME,
    Table,
    as_markdown,
    attempts_of,
    chronicle,
    effective_seconds,
    write_chronicle,
)
from kielo.artifact.metrics import (
    METRICS_NAME,
    PassedOver,
    PrecisionChange,
    PrecisionVerdict,
    Spike,
    TrainingStep,
    write_row,
)
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
    assert "without a message" in first[7] and "rank 1 was killed (SIGKILL)" in first[7]
    assert second[3:7] == ("11 – 20", "0", "2", "nid1, nid3") and second[7].startswith("requeue: stopped")
    assert third[3] == "21 – 30" and third[7] == "finished"
    assert table(tables, "Changes") == [
        ("2", "train.skip_steps", "[]", "[[12, 13]]"),
        ("2", "version of torch", "2.10.0", "2.11.0"),
        ("3", "version of torch", "2.11.0", "2.10.0"),
    ]
    assert table(tables, "Spikes and skipped steps") == [("13", "steps 12 to 13 skipped: skip_steps")]
    assert table(tables, "Alerts") == [("2026-11-23 10:19:00", "14", "rank 1 was killed (SIGKILL)")]


def test_lost_and_effective_time(folder: Path) -> None:
    """Attempts of 14, 10 and 10 minutes in 50; 28 steps of a minute each were kept."""
    values = dict(table(chronicle(folder), "Time"))
    assert values == {
        "attempts": "3", "repeated steps": "4", "kept steps": "28 min 00 s",
        "in attempts": "34 min 00 s (82.4% of them effective)", "between attempts": "16 min 00 s",
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


def begun(minute: int, **more) -> Beginning:
    values = {
        "began_at": f"2026-11-23T10:{minute:02d}:00+00:00", "from_step": 0, "ranks": 1200, "hosts": ["a"],
        "versions": {}, "seen_step": None, "seen_at": None, "changes": [],
    }  # fmt: skip
    return Beginning.model_validate(values | more)


def test_a_whole_chronicle(tmp_path) -> None:
    """One attempt that runs: nine hosts, each kind of event, text cut at 400 characters, the last alerts."""
    hosts = [f"n{number}" for number in range(9)]
    append(tmp_path, begun(0, from_step=1000, hosts=[*hosts, "n0"]))
    rows = [
        PassedOver(step=1010, passed_over_from=1005, passed_over_for="spike", tokens=100),
        Spike(step=1011, spike_from=1008, spike_to=1009, outcome="told", highest_loss=3.14159, usual_loss=2.0,
              highest_loss_step=1008),
        Spike(step=1012, spike_from=1, spike_to=2, outcome="passed", highest_loss=None, usual_loss=2.0,
              highest_loss_step=1),
        PrecisionVerdict(step=1015, precision="fp8", precision_from=1001, outcome="kept", loss_rise=None,
                         gradient_norm_rise=None),
        PrecisionChange(step=1016, precision="bf16"),
        TrainingStep(step=1017, tokens=400, loss=1.0, tokens_per_second=2.0, seconds=1.0),
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(map(write_row, rows)))
    times = ["2026-11-23T10:00:01+00:00"] * 201
    alerts = [{"time": time, "step": number, "message": f"m{number}"} for number, time in enumerate(times)]
    (tmp_path / ALERTS_NAME).write_text("".join(json.dumps(alert) + "\n" for alert in alerts))
    tables = chronicle(tmp_path)
    assert [table.title for table in tables] == [
        "Time", "Attempts", "Spikes and skipped steps", "Alerts, the last 200 of 201",
    ]  # fmt: skip
    lines = [("attempts", "1"), ("repeated steps", "0"), ("kept steps", "2 min 30 s")]
    assert tables[0].rows == lines
    assert tables[1].rows == [(
        "1", "2026-11-23 10:00:00", "", "1,001 –", "0", "1,200", "n0, n1, n2, n3, n4, n5, n6, n7 and 1 more",
        "it runs, or ended without a message",
    )]  # fmt: skip
    assert tables[2].rows == [
        ("1,010", "steps 1,005 to 1,010 skipped: spike"),
        ("1,011", "spike in steps 1,008 to 1,009: told (loss 3.142, usual 2)"),
        ("1,012", "spike in steps 1 to 2: passed"),
        ("1,015", "change to fp8 after step 1,000: kept"), ("1,016", "bf16 from the next step on"),
    ]  # fmt: skip
    assert len(tables[3].rows) == 200 and tables[3].rows[0] == ("2026-11-23 10:00:01", "1", "m1")
    page = as_markdown([Table("a|b", ("h", "v"), [("x" * 400, "y" * 401), ("a\nb", "<&[1]#")])], "r")
    assert page == (
        f"# Chronicle of r\n\n## a\\|b\n\n| h | v |\n| --- | --- |\n| {'x' * 400} | {'y' * 399}… |\n"
        "| a b | &lt;&amp;\\[1\\]\\# |\n"
    )


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(119, "1 min 59 s"), (9000, "2 h 30 min")],
)
def test_seconds_of_an_attempt(seconds, told, tmp_path) -> None:
    """Until its end, or until it was last seen; between attempts is what is left."""
    append(tmp_path, begun(0))
    hours, rest = divmod(seconds, 3600)
    ended = f"2026-11-23T{10 + hours}:{rest // 60:02d}:{rest % 60:02d}+00:00"
    append(tmp_path, End(ended_at=ended, outcome="requeue", step=9, message=""))
    values = dict(chronicle(tmp_path)[0].rows)
    assert (
        values["in attempts"] == f"{told} (0.0% of them effective)" and values["between attempts"] == "0.0 s"
    )
    (attempt,) = attempts_of(tmp_path)
    assert (attempt.seconds, attempt.last_step, attempt.lost_steps) == (seconds, 9, 0)


def test_times_and_steps_of_three_attempts(tmp_path) -> None:
    """One without a word, one that took no step, one that ends; steps passed over take no time."""
    append(tmp_path, begun(0, from_step=4, ranks=3, versions={"a": "1", "b": "2"}))
    append(tmp_path, begun(9, from_step=6, ranks=3, seen_step=9, seen_at="2026-11-23T10:05:00+00:00",
                           versions={"b": "3", "c": "4"}))  # fmt: skip
    append(tmp_path, End(ended_at="2026-11-23T10:10:00+00:00", outcome="hung", step=6, message="rank 2"))
    append(tmp_path, End(ended_at="2026-11-23T10:12:00+00:00", outcome="failed", step=5, message=""))
    append(tmp_path, begun(20, from_step=2000, ranks=3, versions={"b": "3", "c": "4"}))
    append(tmp_path, End(ended_at="2026-11-23T10:21:30+00:00", outcome="finished", step=None, message="all"))
    rows = [
        TrainingStep(step=5, tokens=500, loss=1.0, tokens_per_second=10.0, seconds=1.0),
        TrainingStep(step=6, tokens=600, loss=1.0, tokens_per_second=0.0, seconds=1.0),
        PassedOver(step=7, tokens=900, passed_over_from=7),
        TrainingStep(step=8, tokens=1000, loss=1.0, tokens_per_second=4.0, seconds=1.0),
        TrainingStep(step=9, loss=1.0, tokens_per_second=4.0, seconds=1.0),
        TrainingStep(step=9, tokens=990, loss=1.0, tokens_per_second=4.0, seconds=1.0),
    ]
    assert effective_seconds(rows) == 500 / 10 + 100 / 4
    (tmp_path / "metrics.jsonl").write_text("".join(map(write_row, rows)))
    for time in ("10:00:00", "10:09:00", "10:09:01"):
        text = {"time": f"2026-11-23T{time}+00:00", "step": 3, "message": f"alert of {time}"}
        with open(tmp_path / ALERTS_NAME, "a") as file:
            file.write(json.dumps(text) + "\n")
    tables = {table.title: table for table in chronicle(tmp_path)}
    assert tables["Time"].rows == [
        ("attempts", "3"), ("repeated steps", "3"), ("kept steps", "1 min 15 s"),
        ("in attempts", "9 min 30 s (13.2% of them effective)"), ("between attempts", "12 min 00 s"),
    ]  # fmt: skip
    assert tables["Attempts"].rows == [
        ("1", "2026-11-23 10:00:00", "last seen 2026-11-23 10:05:00", "5 – 9", "3", "3", "a",
         "without a message: killed, or its node was lost; the last alert: alert of 10:09:00"),
        ("2", "2026-11-23 10:09:00", "2026-11-23 10:12:00", "none", "0", "3", "a", "failed"),
        ("3", "2026-11-23 10:20:00", "2026-11-23 10:21:30", "2,001 –", "0", "3", "a", "finished: all"),
    ]  # fmt: skip
    assert tables["Changes"].rows == [
        ("2", "version of a", "1", ""), ("2", "version of b", "2", "3"), ("2", "version of c", "", "4"),
    ]  # fmt: skip
    assert len(tables["Alerts"].rows) == 3 and tables["Alerts"].header == ("time (UTC)", "step", "message")
    assert tables["Attempts"].header == (
        "attempt", "began (UTC)", "ended", "steps", "repeated", "ranks", "hosts", "how it ended",
    )  # fmt: skip

"""Lines of attempts and of alerts: a half line costs no other, a person's is passed over."""

import json
import re

from kielo.artifact.attempt_files import (
    ALERTS_NAME,
    Beginning,
    End,
    append,
    append_alert,
    now,
    read_attempts,
    read_lines,
)


def test_lines_of_attempts_and_alerts(tmp_path) -> None:
    """After half a line a new one begins; a person's lines are passed over."""
    begin = Beginning(
        began_at="2026-11-23T10:00:00+00:00", from_step=0, ranks=1, hosts=["a"], versions={}, seen_step=None,
        seen_at=None, changes=[],
    )  # fmt: skip
    end = End(ended_at="2026-11-23T11:00:00+00:00", outcome="failed", step=None, message="õ")
    append(tmp_path, begin)
    with open(tmp_path / "attempts.jsonl", "a") as file:
        file.write('mine\n[1]\n{"ended_at": 5}\n{"began')
    append(tmp_path, end)
    assert read_attempts(tmp_path) == [begin, end]
    assert (
        (tmp_path / "attempts.jsonl")
        .read_text()
        .endswith('{"began\n' + json.dumps(end.content(), ensure_ascii=False) + "\n")
    )
    append_alert(tmp_path / ALERTS_NAME, 7, "õ")
    (line,) = read_lines(tmp_path / ALERTS_NAME)
    assert (line["step"], line["message"]) == (7, "õ") and read_lines(tmp_path / "gone") == []


def test_lines_are_whole_and_times_are_to_the_second(tmp_path) -> None:
    """An empty file and a whole last line get no empty line; bytes that are no text cost only their line."""
    begin = Beginning(
        began_at="2026-11-23T10:00:00+00:00", from_step=2, ranks=3, hosts=[], versions={}, seen_step=None,
        seen_at=None, changes=[],
    )  # fmt: skip
    line = json.dumps(begin.content()) + "\n"
    (tmp_path / "attempts.jsonl").touch()
    for number in (1, 2):
        append(tmp_path, begin)
        assert (tmp_path / "attempts.jsonl").read_text() == line * number
    (tmp_path / "attempts.jsonl").write_bytes(b"\xff\n" + line.encode() + b"5\n")
    assert read_attempts(tmp_path) == [begin]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", now())
    append_alert(tmp_path / "alerts.jsonl", 8, "ä\n")
    text = (tmp_path / "alerts.jsonl").read_text()
    assert re.fullmatch(r'{"time": "[-\dT:]{19}\+00:00", "step": 8, "message": "ä\\n"}\n', text)

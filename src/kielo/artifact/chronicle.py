"""`chronicle.md` of a run: attempts, nodes, causes, changes, spikes and lost time, in tables. Torch-free.

It is made from `attempts.jsonl`, `metrics.jsonl` and `alerts.jsonl`.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from kielo.artifact import metrics
from kielo.artifact.attempt_files import ALERTS_NAME, Alert, Beginning, End, read_attempts, read_lines
from kielo.artifact.durable import write_own_text
from kielo.artifact.metrics import Row
from kielo.recipe.amounts import format_seconds

CHRONICLE_NAME = "chronicle.md"
_MOST_ALERTS, _MOST_HOSTS, _MOST_CHARACTERS = 200, 8, 400


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Attempt:
    """An attempt: its beginning, its end if it wrote one, and the next attempt's beginning, if any."""

    begin: Beginning
    end: End | None
    after: Beginning | None

    @property
    def last_step(self) -> int | None:
        if self.end is not None and self.end.step is not None:
            return self.end.step
        return self.after.seen_step if self.after else None

    @property
    def ended_at(self) -> str | None:
        if self.end is not None:
            return self.end.ended_at
        return self.after.seen_at if self.after else None

    @property
    def lost_steps(self) -> int:
        """Return the number of its steps that the next attempt repeats."""
        if self.after is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.after.from_step)

    @property
    def seconds(self) -> float:
        return _between(self.begin.began_at, self.ended_at) if self.ended_at else 0.0


def chronicle(train_folder: Path) -> list[Table]:
    if not (attempts := attempts_of(train_folder)):
        return []
    rows = [row for row, _ in metrics.split_metrics(train_folder / metrics.METRICS_NAME)[0]]
    alerts = []
    for content in read_lines(train_folder / ALERTS_NAME):
        with suppress(ValidationError):
            alerts.append(Alert.model_validate(content))
    tables = [
        Table("Time", ("", "value"), _time_rows(attempts, rows)),
        Table(
            "Attempts",
            ("attempt", "began (UTC)", "ended", "steps", "repeated", "ranks", "hosts", "how it ended"),
            [_attempt_row(number, attempt, alerts) for number, attempt in enumerate(attempts, start=1)],
        ),
        Table("Changes", ("attempt", "key", "before", "after"), _change_rows(attempts)),
        Table("Spikes and skipped steps", ("step", "event"), _event_rows(rows)),
        Table(
            f"Alerts{f', the last {_MOST_ALERTS} of {len(alerts)}' if len(alerts) > _MOST_ALERTS else ''}",
            ("time (UTC)", "step", "message"),
            [(_short(alert.time), str(alert.step), alert.message) for alert in alerts[-_MOST_ALERTS:]],
        ),
    ]
    return [table for table in tables if table.rows]


def write_chronicle(train_folder: Path, name: str) -> None:
    """Write `chronicle.md` beside the train folder, if it has attempts. KieloError for a person's file."""
    if tables := chronicle(train_folder):
        write_own_text(train_folder.parent / CHRONICLE_NAME, as_markdown(tables, name))


def attempts_of(train_folder: Path) -> list[Attempt]:
    lines = read_attempts(train_folder)
    begins = [(at, line) for at, line in enumerate(lines) if isinstance(line, Beginning)]
    found = []
    for (at, begin), (until, after) in zip(begins, [*begins[1:], (len(lines), None)], strict=False):
        ends = [line for line in lines[at + 1 : until] if isinstance(line, End)]
        found.append(Attempt(begin, ends[-1] if ends else None, after))
    return found


def as_markdown(tables: Sequence[Table], name: str) -> str:
    parts = [f"# Chronicle of {_plain(name)}\n"]
    for table in tables:
        parts.append(f"## {_plain(table.title)}\n")
        lines = [table.header, tuple("---" for _ in table.header), *table.rows]
        cells = [[cell if line[0] == "---" else _plain(cell) for cell in line] for line in lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n")
    return "\n".join(parts)


def effective_seconds(rows: Sequence[Row]) -> float:
    """Return the seconds of these rows' steps, each the last of its step, without saves and held-out text."""
    seconds, tokens_before = 0.0, 0
    for row in rows:
        tokens = getattr(row, "tokens", None)
        if isinstance(row, metrics.TrainingStep) and tokens is not None and row.tokens_per_second > 0:
            seconds += max(0, tokens - tokens_before) / row.tokens_per_second
        if isinstance(row, metrics.TrainingStep | metrics.PassedOver) and tokens is not None:
            tokens_before = tokens
    return seconds


def _time_rows(attempts: Sequence[Attempt], rows: Sequence[Row]) -> list[tuple[str, ...]]:
    in_attempts, effective = sum(attempt.seconds for attempt in attempts), effective_seconds(rows)
    last = next((attempt.ended_at for attempt in reversed(attempts) if attempt.ended_at), None)
    since = _between(attempts[0].begin.began_at, last) if last else 0.0
    found: list[tuple[str, ...]] = [
        ("attempts", str(len(attempts))),
        ("repeated steps", f"{sum(attempt.lost_steps for attempt in attempts):,}"),
        ("kept steps", format_seconds(effective)),
    ]
    if in_attempts:
        share = f" ({min(1.0, effective / in_attempts):.1%} of them effective)"
        found += [
            ("in attempts", format_seconds(in_attempts) + share),
            ("between attempts", format_seconds(max(0.0, since - in_attempts))),
        ]
    return found


def _attempt_row(number: int, attempt: Attempt, alerts: Sequence[Alert]) -> tuple[str, ...]:
    begin, last = attempt.begin, attempt.last_step
    first = begin.from_step + 1
    steps = f"{first:,} –" if last is None else f"{first:,} – {last:,}" if last >= first else "none"
    hosts = list(dict.fromkeys(begin.hosts))
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return (
        str(number),
        _short(begin.began_at),
        f"{'last seen ' if attempt.end is None and attempt.ended_at else ''}{_short(attempt.ended_at or '')}",
        steps,
        f"{attempt.lost_steps:,}",
        f"{begin.ranks:,}",
        ", ".join(hosts[:_MOST_HOSTS]) + more,
        _cause(attempt, alerts),
    )


def _cause(attempt: Attempt, alerts: Sequence[Alert]) -> str:
    """Return the end of an attempt; if it wrote none, the last alert before the next attempt began."""
    if attempt.end is not None:
        return ": ".join(filter(None, (attempt.end.outcome, attempt.end.message)))
    if attempt.after is None:
        return "it runs, or ended without a message"
    within = [alert for alert in alerts if attempt.begin.began_at <= alert.time <= attempt.after.began_at]
    said = f"; the last alert: {within[-1].message}" if within else ""
    return f"without a message: killed, or its node was lost{said}"


def _change_rows(attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, attempt in enumerate(attempts[1:], start=2):
        for change in attempt.begin.changes:
            rows.append((str(number), change.key, change.before, change.after))
        before, versions = attempts[number - 2].begin.versions, attempt.begin.versions
        for package in sorted(before.keys() | versions.keys()):
            old, new = before.get(package, ""), versions.get(package, "")
            if old != new:
                rows.append((str(number), f"version of {package}", old, new))
    return rows


def _event_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for row in rows:
        match row:
            case metrics.Spike():
                what = f"spike in steps {row.spike_from:,} to {row.spike_to:,}: {row.outcome}"
                if row.highest_loss is not None and row.usual_loss is not None:
                    what += f" (loss {row.highest_loss:.4g}, usual {row.usual_loss:.4g})"
            case metrics.PassedOver():
                what = f"steps {row.passed_over_from:,} to {row.step:,} skipped: {row.passed_over_for}"
            case metrics.PrecisionVerdict():
                what = f"change to {row.precision} after step {row.precision_from - 1:,}: {row.outcome}"
            case metrics.PrecisionChange():
                what = f"{row.precision} from the next step on"
            case _:
                continue
        found.append((f"{row.step:,}", what))
    return found


def _plain(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > _MOST_CHARACTERS:
        line = line[: _MOST_CHARACTERS - 1] + "…"
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def _short(time: str) -> str:
    return time.partition("+")[0].replace("T", " ")


def _between(begin: str, end: str) -> float:
    try:
        return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds())
    except (ValueError, TypeError):  # a line that a person wrote
        return 0.0

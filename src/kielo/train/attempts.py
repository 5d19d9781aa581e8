"""Notes when an attempt begins and ends, and what is resolved differently, for the run's chronicle.

Torch-free. A note that cannot be written is a warning: it never ends the training.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from kielo.artifact.attempts import Beginning, Change, End, append, now, read_attempts
from kielo.artifact.chronicle import write_chronicle
from kielo.artifact.manifest import installed_versions
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, of_kind, split_metrics
from kielo.artifact.outcome import Outcome
from kielo.recipe.errors import KieloError
from kielo.resolve.precision import RESOLVED_NAME
from kielo.resolve.resolve import flat
from kielo.resolve.resolved import Resolved
from kielo.resolve.resolved import read as read_resolved

logger = logging.getLogger(__name__)
_MOST_CHANGES = 40


def note_beginning(resolved: Resolved, from_step: int, hosts: Sequence[str]) -> None:
    """Notes that an attempt begins, before its `resolved.toml` is written. One rank calls it.

    hosts: names of the ranks' hosts.
    """
    folder = Path(resolved.placement.train_folder)
    with _only_warns(folder):
        is_first = not read_attempts(folder)
        seen_step, seen_at = _last_seen(folder / METRICS_NAME)
        append(
            folder,
            Beginning(
                began_at=now(),
                from_step=from_step,
                ranks=len(hosts),
                hosts=list(hosts),
                versions=installed_versions(),
                seen_step=seen_step,
                seen_at=seen_at,
                changes=[] if is_first else _changes(folder.parent / RESOLVED_NAME, resolved),
            ),
        )
        write_chronicle(folder, resolved.identity.name)


def note_end(resolved: Resolved, outcome: Outcome) -> None:
    """Notes how the attempt that has begun ended; nothing where none has. One rank calls it."""
    folder = Path(resolved.placement.train_folder)
    with _only_warns(folder):
        lines = read_attempts(folder)
        if not lines or isinstance(lines[-1], End):
            return
        append(
            folder,
            End(ended_at=now(), outcome=outcome.outcome, step=outcome.step, message=outcome.message),
        )
        write_chronicle(folder, resolved.identity.name)


@contextmanager
def _only_warns(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KieloError) as error:
        logger.warning("%s: the chronicle is not up to date: %s", folder.parent, error)


def _last_seen(metrics: Path) -> tuple[int | None, str | None]:
    """Returns the last logged step of the attempt before this one, and when it was logged."""
    steps = of_kind([row for row, _ in split_metrics(metrics)[0]], TrainingStep)
    if not steps:
        return None, None
    seen = datetime.fromtimestamp(metrics.stat().st_mtime, UTC)
    return max(row.step for row in steps), seen.isoformat(timespec="seconds")


def _changes(path: Path, resolved: Resolved) -> list[Change]:
    """Returns what differs from the `resolved.toml` of the attempt before; none where it cannot be read."""
    with suppress(KieloError, OSError):
        before, after = _flat(read_resolved(path)), _flat(resolved)
        keys = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
        found = [Change(key=key, before=before.get(key, ""), after=after.get(key, "")) for key in keys]
        left = len(found) - _MOST_CHANGES
        more = [Change(key=f"and {left} keys more", before="", after="")] if left > 0 else []
        return found[:_MOST_CHANGES] + more
    return []


def _flat(resolved: Resolved) -> dict[str, str]:
    parts = (resolved.identity, resolved.placement)  # a section may have keys in both
    values = [flat(part.model_dump(mode="json", exclude_none=True)).items() for part in parts]
    return {key: json.dumps(value, ensure_ascii=False) for items in values for key, value in items}
